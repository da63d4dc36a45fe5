"""Who has each CPU: pods, kubelet, the node's reservation and the system class."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from apis.cpuset import CpuSet
from apis.keys import (
    ANNOTATION_CPU_MANAGER_POLICY,
    ANNOTATION_NODE_RESERVATION,
    ANNOTATION_POD_CPU_ALLOCS,
    ANNOTATION_RESOURCE_STATUS,
    ANNOTATION_SYSTEM_QOS_RESOURCE,
    LABEL_QOS_CLASS,
)
from apis.qos import KubeQoS
from hooks.facts import NodeInputs
from hooks.subject import Pod, make_pod
from koordlet.exposition.cpu_owners import topology
from tests.hooks.making import node
from tests.hooks.making import topology as cpu_facts
from tests.koordlet.qos.situations import cpus

_STATUS = f"annotation {ANNOTATION_RESOURCE_STATUS}"
_RESERVATION = f"annotation {ANNOTATION_NODE_RESERVATION} of the Node"
_SYSTEM = f"annotation {ANNOTATION_SYSTEM_QOS_RESOURCE} of the Node"


def _pod(name: str, allocated: str = "", *, qos: str = "LSR", phase: str = "Running") -> Pod:
    status = {ANNOTATION_RESOURCE_STATUS: json.dumps({"cpuset": allocated})} if allocated else {}
    return make_pod(
        namespace="default",
        name=name,
        uid=f"u-{name}",
        labels={LABEL_QOS_CLASS: qos} if qos else {},
        annotations=status,
        kube_qos=KubeQoS.GUARANTEED,
        phase=phase,
    )


def _owners(inputs: NodeInputs, pods: Iterable[Pod] = ()) -> list[tuple[str, str, str, str, str]]:
    """Return (CPUs, name, class, uid, why) of each owner, by name."""
    found: dict[tuple[str, str, str, str], list[int]] = {}
    for numa in topology(cpus(), pods, inputs)["nodes"]:
        for cpu in numa["cpus"]:
            for each in cpu["owners"]:
                key = (each["name"], each["class"], each["uid"], each["why"])
                found.setdefault(key, []).append(cpu["id"])
    return sorted((str(CpuSet(ids)), *key) for key, ids in found.items())


def _reserving(**annotations: Any) -> NodeInputs:
    keys = {"reservation": ANNOTATION_NODE_RESERVATION, "system": ANNOTATION_SYSTEM_QOS_RESOURCE}
    return node(annotations={keys[key]: json.dumps(value) for key, value in annotations.items()})


def test_every_cpu_of_the_machine_is_shown_by_numa_node() -> None:
    shown = topology(cpus(4), (), node())
    assert shown == {
        "nodes": [
            {
                "id": 0,
                "cpus": [
                    {"id": 0, "core": 0, "owners": []},
                    {"id": 2, "core": 0, "owners": []},
                ],
            },
            {
                "id": 1,
                "cpus": [
                    {"id": 1, "core": 1, "owners": []},
                    {"id": 3, "core": 1, "owners": []},
                ],
            },
        ]
    }


def test_pods_own_what_the_scheduler_allocated_until_they_end() -> None:
    pods = (
        _pod("one", "0-1"),
        _pod("two", "1-2", qos="LSE"),
        _pod("over", "5", phase="Succeeded"),
        _pod("bad", "five"),
        _pod("none"),
    )
    assert _owners(node(), pods) == [
        ("0-1", "default/one", "LSR", "u-one", _STATUS),
        ("1-2", "default/two", "LSE", "u-two", _STATUS),
    ]


def test_a_reserved_list_is_shown_with_its_annotation() -> None:
    reserving = _reserving(reservation={"reservedCPUs": "0,8"})
    assert _owners(reserving) == [("0,8", "node reservation", "reserved", "", _RESERVATION)]


def test_an_amount_is_shown_as_the_cpus_that_suppression_leaves_out() -> None:
    reserving = _reserving(reservation={"resources": {"cpu": "1500m"}})
    why = f"{_RESERVATION}: its amount of cpu, chosen as kubelet packs CPUs"
    assert _owners(reserving) == [("0,8", "node reservation", "reserved", "", why)]


def test_the_system_class_says_whether_its_cpus_are_its_own() -> None:
    for exclusive, said in ((True, "exclusive"), (False, "shared with pods")):
        system = _reserving(system={"cpuset": "7,15", "cpusetExclusive": exclusive})
        assert _owners(system) == [("7,15", "system class", "SYSTEM", "", f"{_SYSTEM}: {said}")]


def test_kubelets_static_policy_owns_cpus_too() -> None:
    facts = cpu_facts(
        {
            ANNOTATION_CPU_MANAGER_POLICY: {"policy": "static", "reservedCPUs": "0"},
            ANNOTATION_POD_CPU_ALLOCS: [
                {"namespace": "default", "name": "db", "uid": "u-db", "cpuset": "2-3"},
                {"uid": "u-unknown", "cpuset": "4"},
                {"namespace": "default", "name": "over", "uid": "u-over", "cpuset": "5"},
            ],
        }
    )
    kept = "kubelet's configuration: no container gets them alone, and share pools keep them"
    manager = "kubelet's static CPU manager"
    assert _owners(node(topology=facts), (_pod("db"), _pod("over", phase="Failed"))) == [
        ("0", "kubelet's reserved CPUs", "reserved", "", kept),
        ("2-3", "default/db", "LSR", "u-db", manager),
        ("4", "uid u-unknown", "", "u-unknown", manager),
    ]


def test_bad_annotations_own_nothing_and_hide_nothing() -> None:
    inputs = node(
        annotations={
            ANNOTATION_NODE_RESERVATION: '{"reservedCPUs":"x"}',
            ANNOTATION_SYSTEM_QOS_RESOURCE: '{"cpuset":"7"}',
        }
    )
    assert _owners(inputs) == [("7", "system class", "SYSTEM", "", f"{_SYSTEM}: exclusive")]


def test_a_cpu_with_contradicting_owners_shows_both() -> None:
    reserving = _reserving(reservation={"reservedCPUs": "0"})
    assert _owners(reserving, (_pod("db", "0-1"),)) == [
        ("0", "node reservation", "reserved", "", _RESERVATION),
        ("0-1", "default/db", "LSR", "u-db", _STATUS),
    ]
