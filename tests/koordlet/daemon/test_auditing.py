"""Kernel writes in the audit log: what each is about, and upstream's reasons."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hooks.observed import ContainerState
from koordlet.daemon.auditing import Auditing
from koordlet.executor.slots import Act, PlannedWrite
from koordlet.state import NodeState
from koordlet.state.merging import PodView
from linux.resources import Resource
from tests.koordlet.builders import LAYOUT, container, runtime_pod, sandbox
from tests.koordlet.configured import configured

_POD = "kubepods/burstable/podu1"


def write(place: str, resource: Resource, key: str = "", *, act: Act = Act.WRITE) -> PlannedWrite:
    return PlannedWrite(act, "/a/file", (place, resource, key), "", "1", "2", "P: because")


class Log:
    """The log of a daemon whose pods a test publishes."""

    def __init__(self, folder: Path, workers: ThreadPoolExecutor, *, verbosity: int = 0) -> None:
        self._file = folder / "audit.log"
        self.views: Sequence[PodView] = ()
        gates = {"AuditEvents": True}
        config = configured(
            featureGates=gates, audit={"directory": str(folder), "verbosity": verbosity}
        )
        self.auditing = Auditing(config, workers, views=lambda: self.views)

    def entries(self) -> list[dict[str, Any]]:
        """What is on the disk, without the times."""
        self.auditing.close()
        lines = self._file.read_bytes().splitlines() if self._file.exists() else ()
        found = [msgspec.json.decode(line) for line in lines]
        for each in found:
            del each["createdAt"]
        return found


@pytest.fixture
def workers() -> Any:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def published() -> tuple[PodView, ...]:
    """One pod, default/pod-u1, with the container "main", c1."""
    state = NodeState(layout=LAYOUT)
    pod = runtime_pod("u1")
    state.run_sandbox(sandbox(pod, "s1"))
    running = container(pod, "c1", "s1", state=ContainerState.RUNNING)
    state.runtime_list([sandbox(pod, "s1")], [running])
    return tuple(state.pod_views())


_OF_POD = {"type": "pod", "namespace": "default", "name": "pod-u1"}


@pytest.mark.parametrize(
    ("made", "policy", "about", "reason"),
    [
        (write(_POD, Resource.CPU_SHARES), "BatchResource", _OF_POD, "runtime-hooks"),
        (
            write(f"{_POD}/c1", Resource.MEMORY_MIN),
            "MemoryQOS",
            {**_OF_POD, "container": "main"},
            "cgroup reconcile",
        ),
        (
            write("kubepods/besteffort", Resource.CPUSET_CPUS),
            "BECPUSuppress",
            {"type": "group", "name": "kubepods/besteffort"},
            "UpdateCgroups",
        ),
        (
            write("kubepods/besteffort", Resource.BLKIO_COST_WEIGHT, "8:0"),
            "BlkIO",
            {"type": "group", "name": "kubepods/besteffort"},
            "UpdateBlkIO",
        ),
        (
            write("", Resource.KERNEL_SETTING, "vm.min_free_kbytes"),
            "SystemConfig",
            {"type": "node"},
            "systemConfig reconcile",
        ),
        (
            write("", Resource.SYSCTL, "kernel.sched_group_identity_enabled"),
            "GroupIdentity",
            {"type": "node"},
            "runtime-hooks",
        ),
        (
            write("", Resource.SYSCTL, "kernel.sched_core"),
            "operators-policy",
            {"type": "node"},
            "operators-policy",
        ),
        (
            write("", Resource.RESCTRL_SCHEMATA, "BE", act=Act.MKDIR),
            "RdtResctrl",
            {"type": "group", "name": "BE"},
            "CreateCATGroup",
        ),
        (
            write("", Resource.RESCTRL_SCHEMATA, "BE"),
            "RdtResctrl",
            {"type": "group", "name": "BE"},
            "UpdateResctrl",
        ),
        (
            write(f"{_POD}/c1", Resource.RESCTRL_GROUP, act=Act.MOVE_TASKS),
            "RdtResctrl",
            {**_OF_POD, "container": "main"},
            "ApplyCatL3GroupTasks",
        ),
        (
            write("kubepods/podu2/c9", Resource.CPU_CFS_QUOTA),
            "",
            {"type": "pod", "name": "u2", "container": "c9"},
            "UpdateCgroups",
        ),
    ],
)
def test_what_a_write_is_about(
    tmp_path: Path,
    workers: ThreadPoolExecutor,
    made: PlannedWrite,
    policy: str,
    about: dict[str, str],
    reason: str,
) -> None:
    log = Log(tmp_path, workers)
    log.views = published()
    log.auditing.wrote(made, policy)
    message = "/a/file: 1 -> 2: P: because"
    assert log.entries() == [{**about, "reason": reason, "message": message}]


def test_a_pod_that_is_published_after_the_write_or_has_ended_has_its_name(
    tmp_path: Path, workers: ThreadPoolExecutor
) -> None:
    log = Log(tmp_path, workers)
    log.auditing.wrote(write(_POD, Resource.CPU_SHARES), "")
    log.views = published()
    log.entries()
    log.auditing.wrote(write(f"{_POD}/c1", Resource.CPU_SHARES), "")
    log.views = ()
    assert [(each["name"], each.get("container")) for each in log.entries()] == [
        ("pod-u1", None),
        ("pod-u1", "main"),
    ]


def test_moved_tasks_are_left_out_by_default(tmp_path: Path, workers: ThreadPoolExecutor) -> None:
    log = Log(tmp_path, workers, verbosity=3)
    log.auditing.wrote(write(_POD, Resource.RESCTRL_GROUP, act=Act.MOVE_TASKS), "Resctrl")
    log.auditing.wrote(write(_POD, Resource.CPU_SHARES), "BatchResource")
    assert [each["reason"] for each in log.entries()] == ["runtime-hooks"]


def test_writes_that_wait_for_a_disk_are_bounded_and_the_loss_is_counted(
    tmp_path: Path, workers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koordlet.daemon.auditing._MOST_WRITES", 2)
    log = Log(tmp_path, workers)
    for number in range(5):
        log.auditing.wrote(write(f"kubepods/podu{number}", Resource.CPU_SHARES), "")
    assert [each["name"] for each in log.entries()] == ["u3", "u4"]
    assert log.auditing.log is not None and log.auditing.log.lost == 3
