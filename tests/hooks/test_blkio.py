"""BlkIO: the lines that a block of settings becomes, for which disks, and what a bad one costs."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.keys import ANNOTATION_BLKIO_QOS
from apis.nodeslo import NodeSLOSpec
from apis.qos import KubeQoS
from hooks.check import claim_problem
from hooks.engine import Engine
from hooks.facts import Disk, KernelFacts, NodeInputs
from hooks.policies.blkio import POLICY
from hooks.subject import NodeSubject, Pod
from tests.hooks.making import (
    a_directory,
    a_pod,
    a_pod_subject,
    claims_of,
    decide,
    engine,
    node,
    only_fault,
    slo,
    values,
)

_SDA, _SDB, _NVME = Disk("8:0"), Disk("8:16", bfq=True), Disk("259:0")
_BY_PATH = {
    "/dev/sda": (_SDA,),
    "/dev/sda1": (_SDA,),
    "/dev/sdb": (_SDB,),
    "/dev/nvme0n1p17": (_NVME,),
    "/dev/mapper/striped": (_SDA, _NVME),
}
_GROUPS = {"data": (_SDA, _SDB)}


def _kernel(version: int = 2) -> KernelFacts:
    return KernelFacts(cgroup_version=version, disks=_BY_PATH, volume_groups=_GROUPS)


def _block(name: str, kind: str | None = "device", **config: Any) -> dict[str, Any]:
    return {"name": name, "ioCfg": config} | ({"type": kind} if kind else {})


def _slo(target: str, *blocks: dict[str, Any], enable: bool = True) -> NodeSLOSpec:
    return slo(
        {"resourceQOSStrategy": {target: {"blkioQOS": {"enable": enable, "blocks": list(blocks)}}}}
    )


def _inputs(target: str, *blocks: dict[str, Any], version: int = 2) -> NodeInputs:
    return node(slo=_slo(target, *blocks), kernel=_kernel(version))


_BE = a_directory(KubeQoS.BESTEFFORT)
_QOS_95 = "enable=1 ctrl=user rpct=95.00 rlat=3000 wpct=95.00 wlat=3000"
_MODEL = {
    "enableUserModel": True,
    "modelReadBPS": 1,
    "modelReadSeqIOPS": 2,
    "modelReadRandIOPS": 3,
    "modelWriteBPS": 4,
    "modelWriteSeqIOPS": 5,
    "modelWriteRandIOPS": 6,
}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (
            _block("/dev/sda", readBPS=10, writeBPS=20, readIOPS=30, writeIOPS=40),
            {
                "blkio.throttle.read_bps_device:8:0": 10,
                "blkio.throttle.write_bps_device:8:0": 20,
                "blkio.throttle.read_iops_device:8:0": 30,
                "blkio.throttle.write_iops_device:8:0": 40,
            },
        ),
        # 0 means no limit
        (_block("/dev/sda", readBPS=0, writeIOPS=0), {}),
        # a partition counts for its disk, whatever their numbers are
        (
            _block("/dev/nvme0n1p17", readBPS=10),
            {"blkio.throttle.read_bps_device:259:0": 10},
        ),
        # the weight goes where the disk's scheduler looks
        (_block("/dev/sda", ioWeightPercent=60), {"blkio.cost.weight:8:0": 60}),
        (_block("/dev/sdb", ioWeightPercent=60), {"blkio.bfq.weight_device:8:16": 60}),
        # every disk of a volume group, and below a device of the mapper
        (
            _block("data", "volumegroup", readIOPS=7),
            {
                "blkio.throttle.read_iops_device:8:0": 7,
                "blkio.throttle.read_iops_device:8:16": 7,
            },
        ),
        (
            _block("/dev/mapper/striped", readIOPS=7),
            {
                "blkio.throttle.read_iops_device:8:0": 7,
                "blkio.throttle.read_iops_device:259:0": 7,
            },
        ),
        # the tighter of both targets
        (_block("/dev/sda", readLatency=900, writeLatency=500), {"io.latency:8:0": 500}),
        (_block("/dev/sda", readLatency=900), {"io.latency:8:0": 900}),
    ],
)
def test_a_block_becomes_lines_of_the_besteffort_directory(
    block: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert values(decide(_BE, _inputs("beClass", block), POLICY)) == expected


def test_classes_have_places_of_their_own() -> None:
    block = _block("/dev/sda", readBPS=10)
    line = {"blkio.throttle.read_bps_device:8:0": 10}
    burstable = a_directory(KubeQoS.BURSTABLE)
    root = a_directory(KubeQoS.GUARANTEED)
    lsr, ls = a_pod_subject(a_pod("LSR")), a_pod_subject(a_pod("LS"))
    for target, with_it in (("beClass", [_BE]), ("lsClass", [burstable]), ("lsrClass", [lsr])):
        inputs = _inputs(target, block)
        for subject in (_BE, burstable, root, lsr, ls, NodeSubject()):
            expected = line if subject in with_it else {}
            assert values(decide(subject, inputs, POLICY)) == expected, (target, subject)
    assert values(decide(a_pod_subject(a_pod("LSE")), _inputs("lsrClass", block), POLICY)) == line


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"blkio.cost.qos:8:0": _QOS_95}),
        (
            {"readLatency": 100, "writeLatencyPercent": 50},
            {"blkio.cost.qos:8:0": ("enable=1 ctrl=user rpct=95.00 rlat=100 wpct=50.00 wlat=3000")},
        ),
        (
            _MODEL,
            {
                "blkio.cost.qos:8:0": _QOS_95,
                "blkio.cost.model:8:0": (
                    "ctrl=user rbps=1 rseqiops=2 rrandiops=3 wbps=4 wseqiops=5 wrandiops=6"
                ),
            },
        ),
        # numbers of a model that is not switched on
        (_MODEL | {"enableUserModel": False}, {"blkio.cost.qos:8:0": _QOS_95}),
    ],
)
def test_the_root_sets_up_iocost(config: dict[str, Any], expected: dict[str, Any]) -> None:
    inputs = _inputs("cgroupRoot", _block("/dev/sda", **config))
    assert values(decide(NodeSubject(), inputs, POLICY)) == expected


def test_a_disabled_class_claims_nothing() -> None:
    inputs = node(
        slo=_slo("beClass", _block("/dev/sda", readBPS=1), enable=False), kernel=_kernel()
    )
    assert values(decide(_BE, inputs, POLICY)) == {}


@pytest.mark.parametrize(
    ("target", "block", "where"),
    [
        ("beClass", _block("/dev/sdz", readBPS=1), "blocks[0].name"),
        ("beClass", _block("sda", readBPS=1), "blocks[0].name"),
        ("beClass", _block("/dev/sda", "volumegroup", readBPS=1), "blocks[0].name"),
        ("beClass", _block("data", "podvolume", readBPS=1), "blocks[0].type"),
        ("beClass", _block("/dev/sda", None, readBPS=1), "blocks[0].type"),
        ("beClass", _block("/dev/sda", readLatency=-5), "blocks[0].ioCfg"),
        ("cgroupRoot", _block("/dev/sda", readLatency=-5), "blocks[0].ioCfg"),
        ("cgroupRoot", _block("/dev/sda", enableUserModel=True, modelReadBPS=5), "blocks[0].ioCfg"),
    ],
)
def test_a_bad_block_is_named_and_costs_itself_only(
    target: str, block: dict[str, Any], where: str
) -> None:
    made = engine(_inputs(target, block, _block("/dev/sdb", readBPS=3)), POLICY)
    state = made.state("BlkIO")
    assert state is not None
    assert f"spec.resourceQOSStrategy.{target}.blkioQOS.{where}" in state.problem
    subject = NodeSubject() if target == "cgroupRoot" else _BE
    keys = {key for _, key in made.decide(subject).outcomes}
    assert keys == {"8:16"}


def test_a_bad_block_keeps_its_last_good_claims() -> None:
    before = engine(_inputs("beClass", _block("/dev/sda", readBPS=3)), POLICY)
    after = engine(
        _inputs("beClass", _block("/dev/gone", readBPS=4), _block("/dev/sdb", readBPS=5)),
        POLICY,
        previous=before,
    )
    assert values(after.decide(_BE)) == {
        "blkio.throttle.read_bps_device:8:0": 3,
        "blkio.throttle.read_bps_device:8:16": 5,
    }


def _annotated(qos: str, *blocks: dict[str, Any]) -> Pod:
    text = json.dumps({"blocks": list(blocks)})
    return a_pod(qos, annotations={ANNOTATION_BLKIO_QOS: text})


def test_a_pods_annotation_counts_before_its_class() -> None:
    inputs = _inputs("lsrClass", _block("/dev/sda", readBPS=3, writeBPS=4))
    subject = a_pod_subject(_annotated("LSR", _block("/dev/sda", readBPS=9)))
    assert values(decide(subject, inputs, POLICY)) == {
        "blkio.throttle.read_bps_device:8:0": 9,
        "blkio.throttle.write_bps_device:8:0": 4,
    }


def test_a_bad_block_of_an_annotation_leaves_the_others() -> None:
    pod = _annotated("BE", _block("/dev/none", readBPS=1), _block("/dev/sdb", readBPS=2))
    decision = decide(a_pod_subject(pod), node(kernel=_kernel()), POLICY)
    assert values(decision) == {"blkio.throttle.read_bps_device:8:16": 2}
    message = only_fault(decision)
    assert pod.obj in message and f'"{ANNOTATION_BLKIO_QOS}"].blocks[0].name' in message


def _with_volumes(*blocks: dict[str, Any], volumes: Any) -> Any:
    pod = _annotated("BE", *blocks)
    kernel = msgspec.structs.replace(
        _kernel(), pod_volumes={} if volumes is None else {pod.uid: volumes}
    )
    return decide(a_pod_subject(pod), node(kernel=kernel), POLICY)


@pytest.mark.parametrize(
    ("volumes", "expected", "fault"),
    [
        ({"data": (_SDB,)}, ["8:16"], ""),
        ({"data": (_SDA, _NVME), "other": (_SDB,)}, ["259:0", "8:0"], ""),
        # the pod's mounts were not looked at yet: neither a claim nor an error
        (None, [], ""),
        ({}, [], "no CSI volume of this pod on a block device of that name"),
        ({"data": ()}, [], "no CSI volume of this pod on a block device of that name"),
    ],
)
def test_a_volume_of_a_pod_counts_for_the_disks_below_it(
    volumes: Any, expected: list[str], fault: str
) -> None:
    decision = _with_volumes(_block("data", "podvolume", readBPS=7), volumes=volumes)
    assert sorted(key for _, key in decision.outcomes) == expected
    assert not fault or fault in only_fault(decision)
    assert bool(decision.faults) is bool(fault)


def test_a_volume_of_another_pod_counts_for_nothing() -> None:
    pod = _annotated("BE", _block("data", "podvolume", readBPS=7))
    kernel = msgspec.structs.replace(
        _kernel(), pod_volumes={pod.uid: {}, "another": {"data": (_SDB,)}}
    )
    decision = decide(a_pod_subject(pod), node(kernel=kernel), POLICY)
    assert not decision.outcomes
    assert "blocks[0].name" in only_fault(decision)


def test_on_v1_throttles_are_degraded_and_latencies_are_not_claimed() -> None:
    inputs = _inputs("beClass", _block("/dev/sda", readBPS=3, readLatency=5), version=1)
    decision = decide(_BE, inputs, POLICY)
    assert values(decision) == {"blkio.throttle.read_bps_device:8:0": 3}
    assert all("cgroup v1" in claim.degraded for claim in claims_of(decision))
    assert "cgroup v1" in POLICY.degraded(engine(inputs, POLICY).states[0].rule)


_NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1) | st.sampled_from([0, 1, 100])


@settings(max_examples=60)
@given(
    st.lists(
        st.builds(
            lambda name, kind, config: {"name": name, "type": kind, "ioCfg": config},
            st.sampled_from(["/dev/sda", "/dev/sdb", "data", "", "/dev/../sda"])
            | st.text(max_size=9),
            st.sampled_from(["device", "volumegroup", "podvolume", "x"]),
            st.dictionaries(
                st.sampled_from(
                    [
                        "readBPS",
                        "writeIOPS",
                        "ioWeightPercent",
                        "readLatency",
                        "writeLatencyPercent",
                    ]
                ),
                _NUMBERS,
            ),
        ),
        max_size=4,
    )
)
def test_no_annotation_makes_a_claim_that_a_file_would_not_take(blocks: list[Any]) -> None:
    pod = a_pod("BE", annotations={ANNOTATION_BLKIO_QOS: json.dumps({"blocks": blocks})})
    subject = a_pod_subject(pod)
    made: Engine = engine(node(kernel=_kernel()), POLICY)
    decision = made.decide(subject)
    assert all(fault.input_error for fault in decision.faults)
    for claim in claims_of(decision):
        assert claim_problem(claim, subject.level) == ""
