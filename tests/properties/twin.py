"""What differs between a node and its twin that never had a daemon.

The whole kernel is compared: every file of every cgroup, the control groups of resctrl with what
they give and whom they hold. Whoever is missing on one side is a difference too.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.properties.node import OperatedNode
from tests.simulated.kernel import SimulatedKernel
from tests.simulated.tree import Hierarchy, Task

# On v2 a list that was set cannot be cleared while there are processes: what counts, the effective
# list, is compared in its place.
# Identity is handed down at birth, also to pods that the daemon had not heard of before the policy
# went off; test_scripts.py shows the restore of those that it knows.
NOT_COMPARED = frozenset(
    {
        "cpuset.cpus", "cpuset.mems", "cgroup.procs", "tasks", "cgroup.threads",
        "cpu.bvt_warp_ns",
    }
)  # fmt: skip


def differences(node: OperatedNode) -> list[str]:
    """Every difference, as a person would want to read it; the twin's is the right one."""
    return [*_cgroups(node.kernel, node.twin), *_control_groups(node)]


def _cgroups(kernel: SimulatedKernel, twin: SimulatedKernel) -> Iterator[str]:
    for ours, theirs in zip(kernel.hierarchies, twin.hierarchies, strict=True):
        here, there = _files(ours), _files(theirs)
        for path in sorted(here.keys() ^ there.keys()):
            yield f"{path}: only {'here' if path in here else 'on the twin'}"
        for path in sorted(here.keys() & there.keys()):
            if here[path] != there[path]:
                yield f"{path}: {here[path]!r} not {there[path]!r}"


def _files(hierarchy: Hierarchy) -> dict[str, str]:
    found: dict[str, str] = {}
    for group in hierarchy.root.walk():
        for file in group.files().values():
            if file.read is not None and file.name not in NOT_COMPARED:
                found[f"{group.path}/{file.name}"] = file.read(group)
    return found


def _control_groups(node: OperatedNode) -> Iterator[str]:
    here, there = node.kernel.resctrl, node.twin.resctrl
    if here is None or there is None:
        return
    for name in sorted(here.groups.keys() ^ there.groups.keys()):
        yield f"resctrl {name}: only {'here' if name in here.groups else 'on the twin'}"
    for name in sorted(here.groups.keys() & there.groups.keys()):
        ours, theirs = here.groups[name].schemata, there.groups[name].schemata
        if ours != theirs:
            yield f"resctrl {name}: {ours} not {theirs}"
    for ours_task, theirs_task in tasks(node):
        if ours_task.closid != theirs_task.closid:
            yield f"{ours_task.comm} {ours_task.pid} is in {ours_task.closid!r} of resctrl"


def tasks(node: OperatedNode) -> Iterator[tuple[Task, Task]]:
    """Every task with the twin's: they came into being in the same order in the same groups."""
    here, there = node.kernel.hierarchies[0], node.twin.hierarchies[0]
    for group in there.root.walk():
        same = here.find(tuple(part for part in group.path.split("/") if part))
        if same is not None:
            ours, theirs = (sorted(of.tasks.values(), key=_pid) for of in (same, group))
            yield from zip(ours, theirs, strict=True)


def _pid(task: Task) -> int:
    return task.pid
