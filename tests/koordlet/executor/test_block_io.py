"""Block I/O: each disk's line is written and restored by itself, on cgroup v1 and v2."""

from __future__ import annotations

import errno

import pytest

from hooks.state import State
from koordlet.executor.slots import Want
from linux.block_io import cost_model, cost_qos
from linux.resources import Resource, Value
from tests.koordlet.executor.bed import BOTH, Bed, claim_of
from tests.simulated import ANOLIS_8, DEBIAN_12_V1, DEBIAN_12_V2, Profile

_THROTTLES = (
    Resource.BLKIO_READ_BPS,
    Resource.BLKIO_WRITE_BPS,
    Resource.BLKIO_READ_IOPS,
    Resource.BLKIO_WRITE_IOPS,
)
_QOS = cost_qos(rpct=95, rlat=3000, wpct=95, wlat=3000)
_MODEL = cost_model(
    {"rbps": 1, "rseqiops": 2, "rrandiops": 3, "wbps": 4, "wseqiops": 5, "wrandiops": 6}
)

Lines = dict[tuple[Resource, str], Value]


def _bed(profile: Profile, journal_path: str | None = None) -> Bed:
    bed = Bed(profile, journal_path=journal_path)
    bed.kernel.disks |= {"8:0", "8:16"}
    return bed


def _want(bed: Bed, lines: Lines, *, place: str | None = None, subject: str = "be") -> None:
    directory = bed.kubelet.qos_dir("BestEffort") if place is None else place
    bed.executor.want(
        subject,
        [
            Want(subject, directory, resource, key, value, claim_of(resource, value, key=key))
            for (resource, key), value in lines.items()
        ],
    )


def _text(bed: Bed, file: str, *, place: str | None = None) -> str:
    directory = bed.kubelet.qos_dir("BestEffort") if place is None else place
    controller = "blkio" if bed.kernel.profile.cgroup == 1 else ""
    return bed.kernel.text(f"{bed.layout.directory(controller, directory)}/{file}")


def _all_throttles(bed: Bed) -> dict[str, str]:
    if bed.kernel.profile.cgroup == 2:
        return {"io.max": _text(bed, "io.max")}
    return {resource: _text(bed, resource) for resource in _THROTTLES}


@BOTH
def test_disks_that_share_a_file_are_written_and_restored_one_by_one(profile: Profile) -> None:
    bed = _bed(profile)
    before = _all_throttles(bed)
    lines: Lines = {
        (resource, disk): 1000 + index
        for index, resource in enumerate(_THROTTLES)
        for disk in ("8:0", "8:16")
    }
    _want(bed, lines)
    assert bed.run().written == 8
    assert bed.run().written == 0
    if profile.cgroup == 2:
        assert _text(bed, "io.max") == (
            "8:0 rbps=1000 wbps=1001 riops=1002 wiops=1003\n"
            "8:16 rbps=1000 wbps=1001 riops=1002 wiops=1003"
        )
    else:
        assert _text(bed, Resource.BLKIO_WRITE_IOPS) == "8:0 1003\n8:16 1003"
    one = {key: value for key, value in lines.items() if key[1] == "8:0"}
    _want(bed, one)
    bed.run()
    assert not any("8:16" in text for text in _all_throttles(bed).values())
    assert all("8:0" in text for text in _all_throttles(bed).values())
    _want(bed, {})
    bed.run()
    assert _all_throttles(bed) == before
    bed.run()
    assert not len(bed.journal)


@BOTH
def test_a_limit_of_another_program_returns_after_a_restart(
    profile: Profile, tmp_path: object
) -> None:
    bed = _bed(profile, f"{tmp_path}/journal")
    directory = bed.kubelet.qos_dir("BestEffort")
    if profile.cgroup == 2:
        path, line = f"/sys/fs/cgroup/{directory}/io.max", "8:0 rbps=77"
    else:
        path = f"/sys/fs/cgroup/blkio/{directory}/blkio.throttle.read_bps_device"
        line = "8:0 77"
    bed.kernel.write_as("operator", path, line)
    before = _all_throttles(bed)
    _want(bed, {(Resource.BLKIO_READ_BPS, "8:0"): 5000})
    bed.run()
    assert _all_throttles(bed) != before
    bed.restart()
    bed.run()
    assert _all_throttles(bed) == before
    bed.run()
    assert not len(bed.journal)


@BOTH
def test_a_disk_that_is_refused_costs_itself_only(profile: Profile) -> None:
    bed = _bed(profile)
    _want(bed, {(Resource.BLKIO_READ_BPS, "8:1"): 5, (Resource.BLKIO_READ_BPS, "8:16"): 6})
    report = bed.run()
    assert report.written == 1
    states = {view.key: (view.state, view.detail) for view in bed.executor.views("be")}
    assert states["8:16"][0] is State.APPLIED
    assert states["8:1"][0] is State.FAILED
    assert "ENODEV" in states["8:1"][1]


@BOTH
def test_bfq_weights_need_bfq_on_the_disk(profile: Profile) -> None:
    bed = _bed(profile)
    bed.kernel.bfq_disks = {"8:0"}
    _want(bed, {(Resource.BLKIO_BFQ_WEIGHT, disk): 20 for disk in ("8:0", "8:16")})
    bed.run()
    file = "blkio.bfq.weight_device" if profile.cgroup == 1 else "io.bfq.weight"
    assert _text(bed, file) == "default 100\n8:0 20"
    states = {view.key: view.state for view in bed.executor.views("be")}
    assert states == {"8:0": State.APPLIED, "8:16": State.UNSUPPORTED}
    _want(bed, {})
    bed.run()
    assert _text(bed, file) == "default 100"


@pytest.mark.parametrize("profile", [ANOLIS_8, DEBIAN_12_V2], ids=lambda p: p.name)
def test_iocost_is_set_up_before_weights_and_returns_to_off(profile: Profile) -> None:
    bed = _bed(profile)
    prefix = "blkio" if profile.cgroup == 1 else "io"
    _want(
        bed,
        {(Resource.BLKIO_COST_QOS, "8:0"): _QOS, (Resource.BLKIO_COST_MODEL, "8:0"): _MODEL},
        place="",
        subject="node",
    )
    _want(bed, {(Resource.BLKIO_COST_WEIGHT, "8:0"): 30})
    bed.run()
    weight = "blkio.cost.weight" if profile.cgroup == 1 else "io.weight"
    assert _text(bed, weight) == "default 100\n8:0 30"
    qos = _text(bed, f"{prefix}.cost.qos", place="")
    assert qos.startswith(f"8:0 {_QOS} min=")
    assert " rseqiops=2 " in _text(bed, f"{prefix}.cost.model", place="")
    assert bed.run().written == 0
    _want(bed, {}, subject="node")
    _want(bed, {})
    bed.run()
    assert _text(bed, weight) == "default 100"
    assert _text(bed, f"{prefix}.cost.qos", place="").startswith("8:0 enable=0 ctrl=auto")
    assert _text(bed, f"{prefix}.cost.model", place="").startswith("8:0 ctrl=auto")
    bed.run()
    assert bed.run().written == 0
    assert not len(bed.journal)


def test_a_disk_that_iocost_was_never_set_for_needs_no_second_restore() -> None:
    """iocost keeps a line for the disk; what it shows then equals what was wanted."""
    bed = _bed(DEBIAN_12_V2)
    _want(bed, {(Resource.BLKIO_COST_MODEL, "8:0"): "ctrl=auto"}, place="", subject="node")
    assert bed.run().written == 1
    _want(bed, {}, subject="node")
    bed.run()
    assert bed.run().written == 0
    assert not len(bed.journal)


def test_iocost_of_an_operator_returns_with_all_its_numbers() -> None:
    bed = _bed(DEBIAN_12_V2)
    path = "/sys/fs/cgroup/io.cost.qos"
    bed.kernel.write_as(
        "operator", path, "8:0 enable=1 rpct=90.50 rlat=100 wpct=0 wlat=7 min=10 max=300"
    )
    before = bed.kernel.text(path)
    _want(bed, {(Resource.BLKIO_COST_QOS, "8:0"): _QOS}, place="", subject="node")
    bed.run()
    assert bed.kernel.text(path) != before
    _want(bed, {}, subject="node")
    bed.run()
    assert bed.kernel.text(path) == before


def test_a_latency_target_is_set_on_v2_and_unsupported_on_v1() -> None:
    bed = _bed(DEBIAN_12_V2)
    _want(bed, {(Resource.BLKIO_LATENCY, "8:0"): 500})
    bed.run()
    assert _text(bed, "io.latency") == "8:0 target=500"
    _want(bed, {})
    bed.run()
    assert _text(bed, "io.latency") == ""
    bed = _bed(DEBIAN_12_V1)
    _want(bed, {(Resource.BLKIO_LATENCY, "8:0"): 500})
    assert bed.run().written == 0
    assert [view.state for view in bed.executor.views("be")] == [State.UNSUPPORTED]


def test_a_group_that_is_gone_leaves_no_record() -> None:
    bed = _bed(DEBIAN_12_V2)
    place = f"{bed.kubelet.root}/podx.slice"
    bed.kernel.make(f"/sys/fs/cgroup/{place}")
    bed.kernel.write_as(
        "kubelet", f"/sys/fs/cgroup/{bed.kubelet.root}/cgroup.subtree_control", "+io"
    )
    _want(bed, {(Resource.BLKIO_READ_BPS, "8:0"): 5}, place=place, subject="pod/x")
    bed.run()
    assert len(bed.journal) == 1
    bed.kernel.remove_group(place)
    assert bed.run().failed == 0
    _want(bed, {}, subject="pod/x")
    bed.run()
    assert not len(bed.journal)


def test_an_unknown_cgroup_never_means_the_root() -> None:
    bed = _bed(DEBIAN_12_V1)
    with bed.kernel.recording() as writes:
        _want(bed, {(Resource.BLKIO_READ_BPS, "8:0"): 5}, place="")
        bed.run()
    assert not writes
    assert [view.state for view in bed.executor.views("be")] == [State.BLOCKED]


def test_an_unreadable_file_is_tried_again_later() -> None:
    bed = _bed(DEBIAN_12_V2)
    bed.kernel.faults.fail("read", errno.EIO, path="*/io.max", nth=1)
    _want(bed, {(Resource.BLKIO_READ_BPS, "8:0"): 5})
    bed.run()
    assert [view.state for view in bed.executor.views("be")] == [State.FAILED]
    bed.kernel.clock.advance(10)
    bed.run()
    assert [view.state for view in bed.executor.views("be")] == [State.APPLIED]


def test_the_io_controller_is_enabled_where_a_pods_group_lacks_it() -> None:
    bed = _bed(DEBIAN_12_V2)
    root = f"/sys/fs/cgroup/{bed.kubelet.root}"
    place = f"{bed.kubelet.root}/podx.slice"
    bed.kernel.make(f"/sys/fs/cgroup/{place}")
    if "io" in bed.kernel.text(f"{root}/cgroup.subtree_control").split():
        bed.kernel.write_as("kubelet", f"{root}/cgroup.subtree_control", "-io")
    _want(bed, {(Resource.BLKIO_READ_BPS, "8:0"): 5}, place=place, subject="pod/x")
    bed.run()
    assert "io" in bed.kernel.text(f"{root}/cgroup.subtree_control").split()
    bed.run()
    assert _text(bed, "io.max", place=place) == "8:0 rbps=5 wbps=max riops=max wiops=max"
