"""The groups of a bed go, whatever their processes are doing."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds import groups
from tests.beds.errors import BedError
from tests.beds.groups import CGROUP_MOUNT, Kubepods, kubepods

pytestmark = pytest.mark.cgroups
_FREEZER = CGROUP_MOUNT / "freezer"


@pytest.fixture
def tree() -> Iterator[Kubepods]:
    with kubepods() as made:
        yield made


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as running:
        yield running
        running.kill()


def frozen(group: Path) -> None:
    (group / "freezer.state").write_text("FROZEN")


def test_a_pod_that_a_runtime_left_frozen_goes(
    tree: Kubepods, process: subprocess.Popen[bytes]
) -> None:
    pod = tree.make_pod("u1", "burstable", cpu_shares=2)
    tree.make(f"{pod}/c1")
    for hierarchy in tree.hierarchies:
        (hierarchy / pod.lstrip("/") / "c1/cgroup.procs").write_text(str(process.pid))
    frozen(_FREEZER / pod.lstrip("/") / "c1")
    tree.remove_pod("u1", "burstable")
    assert process.wait(10) == -9
    assert not any((hierarchy / pod.lstrip("/")).exists() for hierarchy in tree.hierarchies)


def test_a_process_that_ends_late_is_waited_for_and_named(
    tree: Kubepods, process: subprocess.Popen[bytes]
) -> None:
    """While the group above is frozen, the killed process stays, as one that waits for a disk."""
    pod = _FREEZER / tree.make_pod("u1", "burstable", cpu_shares=2).lstrip("/")
    (pod / "cgroup.procs").write_text(str(process.pid))
    frozen(pod.parent)
    try:
        with pytest.raises(BedError, match=rf"{pod} \({process.pid} \(sleep\) [A-Z]\)"):
            groups._remove_trees([pod], patience_s=0)
        going_on = threading.Timer(1.0, groups._thaw, [pod.parent])
        going_on.start()
        groups._remove_trees([pod], patience_s=60)
        going_on.join()
    finally:
        groups._thaw(pod.parent)
    assert not pod.exists()
    assert process.wait(10) == -9
