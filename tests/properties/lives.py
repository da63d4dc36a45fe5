"""How random lives of a node begin and end: machine, NodeSLO, gates, pods, host applications."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from tests.properties.cpus import PLANS
from tests.properties.daemon import BE_CPU_MANAGER
from tests.properties.host_apps import APPS
from tests.properties.pods import KINDS
from tests.simulated import (
    AMD_CCD_SMBA,
    ANOLIS_8,
    DEBIAN_12_V1,
    DEBIAN_12_V2,
    INTEL_RDT,
    RHEL_9,
    UBUNTU_24_04,
    Topology,
)

QOS_ON: dict[str, Any] = {
    "resourceQOSStrategy": {
        "lsrClass": {"cpuQOS": {"enable": True, "groupIdentity": 2}},
        "lsClass": {
            "cpuQOS": {"enable": True, "groupIdentity": 2},
            "memoryQOS": {"enable": True, "minLimitPercent": 40, "lowLimitPercent": 60},
        },
        "beClass": {
            "cpuQOS": {"enable": True, "groupIdentity": -1},
            "memoryQOS": {"enable": True, "throttlingPercent": 80},
            "resctrlQOS": {"enable": True, "catRangeEndPercent": 30, "mbaPercent": 50},
        },
    }
}
# By name, so that a failing script reads well.
SLOS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "everything": QOS_ON,
    "cache of all": {
        "resourceQOSStrategy": {
            "lsrClass": {"resctrlQOS": {"enable": True, "catRangeStartPercent": 50}},
            "lsClass": {"resctrlQOS": {"enable": True, "catRangeEndPercent": 80}},
            "beClass": {"resctrlQOS": {"enable": True, "catRangeEndPercent": 20, "mbaPercent": 30}},
        }
    },
    "identity of BE": {
        "resourceQOSStrategy": {"beClass": {"cpuQOS": {"enable": True, "groupIdentity": -1}}}
    },
    "core scheduling": {
        "resourceQOSStrategy": {
            "policies": {"cpuPolicy": "coreSched"},
            "lsrClass": {"cpuQOS": {"enable": True}},
            "lsClass": {"cpuQOS": {"enable": True}},
            "beClass": {"cpuQOS": {"enable": True, "schedIdle": 1}},
        }
    },
    "memory of LS": {
        "resourceQOSStrategy": {"lsClass": {"memoryQOS": {"enable": True, "minLimitPercent": 100}}}
    },
}
# Small machines: what is random here does not depend on the number of CPUs, but on how many
# sockets, NUMA nodes and threads share them out.
_TWO_SOCKETS = Topology(sockets=2, cores_per_node=2, threads=2)
_TWO_BY_TWO = Topology(sockets=2, nodes_per_socket=2, cores_per_node=1, threads=2)
_FOUR_NODES = Topology(nodes_per_socket=4, cores_per_node=1, threads=2, cores_per_l3=1)
# Few CLOSIDs, so that they run out.
assert INTEL_RDT.rdt is not None and AMD_CCD_SMBA.rdt is not None
_INTEL, _AMD = INTEL_RDT.rdt, AMD_CCD_SMBA.rdt
PROFILES = {
    profile.name: profile
    for profile in (
        DEBIAN_12_V1,
        DEBIAN_12_V2,
        # An idle group's weight reads 1 there, and 0 before.
        replace(UBUNTU_24_04, name="linux-6.12", kernel=(6, 12)),
        UBUNTU_24_04,
        replace(RHEL_9, topology=_TWO_BY_TWO),
        replace(ANOLIS_8, topology=_TWO_SOCKETS),
        replace(INTEL_RDT, topology=_TWO_SOCKETS, rdt=replace(_INTEL, mb_closids=4)),
        replace(AMD_CCD_SMBA, topology=_FOUR_NODES, rdt=replace(_AMD, l3_closids=6)),
    )
}
# Differences to all policies being on.
GATES: dict[str, dict[str, bool]] = {
    "all on": {},
    "no batch": {"BatchResource": False},
    "no cpusets": {"CPUSetAllocator": False},
    "no identity, no memory": {"GroupIdentity": False, "CgroupReconcile": False},
    "CPUs for BE": {BE_CPU_MANAGER: True},
    "no cache of pods": {"Resctrl": False},
    "no cache of classes": {"RdtResctrl": False},
}
POD_KINDS = {kind.name: kind for kind in KINDS}
ENDS = ("switched off", "uninstalled")
TIMES = st.sampled_from([1, 1, 1, 0, 2])


@dataclass(frozen=True, slots=True)
class Life:
    """How a life begins and ends. older: pods from before the daemon; younger: its first ones."""

    plan: str
    slo: str
    gates: str
    older: list[str]
    younger: list[str]
    apps: frozenset[str]
    declared: frozenset[str]
    end: str


_SOME_PODS = st.lists(st.sampled_from(sorted(POD_KINDS)), max_size=4)
_SOME_APPS = st.frozensets(st.sampled_from(sorted(APPS)))
LIVES = st.builds(
    Life,
    plan=st.sampled_from(sorted(PLANS)),
    slo=st.sampled_from(sorted(SLOS)),
    gates=st.sampled_from(sorted(GATES)),
    older=_SOME_PODS,
    younger=_SOME_PODS,
    apps=_SOME_APPS,
    declared=_SOME_APPS,
    end=st.sampled_from(ENDS),
)
