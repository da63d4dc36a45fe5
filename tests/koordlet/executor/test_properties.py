"""What holds for every wish: no child above its parent, a crash anywhere heals, undo is exact."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from apis.cpuset import CpuSet
from hooks.state import State
from koordlet.executor.order import TOP, Lattice, Node, Order, ancestors, order
from linux.cgroup_paths import parent_of
from linux.resources import UNLIMITED, Resource, Value
from tests.koordlet.executor.bed import Bed
from tests.simulated import ANOLIS_8, DEBIAN_12_V1, DEBIAN_12_V2, Crash, Profile
from tests.simulated.kubelet import Limits as PodLimits

GROUPS = ("", "a", "a/b", "a/c", "a/b/d", "a/b/e", "a/c/f")


def _bounded(groups: Mapping[str, int], lattice: Lattice) -> bool:
    """Tell whether no group stands above its parent, by the kernel's reading of 'unlimited'."""
    for group, value in groups.items():
        if not group or (lattice is Lattice.NUMBERS and value == TOP):
            continue
        for above in ancestors(group):
            bound = groups[above]
            if lattice is Lattice.NUMBERS and bound == TOP:
                continue
            if not lattice.le(value, bound):
                return False
            break
    return True


@st.composite
def trees(draw: st.DrawFn) -> tuple[Lattice, dict[str, Node]]:
    lattice = draw(st.sampled_from(Lattice))
    if lattice is Lattice.SETS:
        values = st.integers(1, 15)
    else:
        values = st.one_of(st.just(TOP), st.integers(1, 6))
    found: dict[str, int] = {}
    for group in GROUPS:
        value = draw(values)
        if not group:
            found[group] = TOP if lattice is Lattice.NUMBERS else 15
            continue
        # Bring it under its parent, as the kernel would have.
        bound = found[parent_of(group)]
        if lattice is Lattice.SETS:
            value = value & bound or bound
        elif value != TOP:
            for above in ancestors(group):
                if found[above] != TOP:
                    value = min(value, found[above])
                    break
        found[group] = value
    managed = draw(st.sets(st.sampled_from(GROUPS[1:])))
    return lattice, {
        group: Node(found[group], draw(values) if group in managed else None) for group in GROUPS
    }


@settings(max_examples=300, deadline=None)
@given(trees())
def test_no_step_puts_a_child_above_its_parent(tree: tuple[Lattice, dict[str, Node]]) -> None:
    lattice, nodes = tree
    result = order(nodes, lattice, enforced=True)
    now = {group: node.found for group, node in nodes.items()}
    assert _bounded(now, lattice)
    for step in result.steps:
        assert nodes[step.cgroup].wanted is not None
        now[step.cgroup] = step.value
        assert _bounded(now, lattice), step
    for group, final in result.finals.items():
        assert now[group] == final
        if final != nodes[group].wanted:
            assert result.notes[group]
    _settled(nodes, now, lattice, result)


def _settled(
    nodes: Mapping[str, Node], now: Mapping[str, int], lattice: Lattice, first: Order
) -> None:
    """Ordering again from where the steps led gives no steps: it does not oscillate."""
    again = order(
        {group: Node(now[group], node.wanted) for group, node in nodes.items()},
        lattice,
        enforced=True,
    )
    assert not again.steps
    assert again.finals == first.finals


# -- on a kernel ---------------------------------------------------------------------------------

Wishes = Mapping[tuple[str, Resource], Value]
QUOTAS = st.sampled_from([UNLIMITED, 20_000, 50_000, 100_000, 150_000, 300_000])
CPU_SETS = st.integers(1, 15).map(CpuSet.of_mask)
NAMES = ("pod", "one", "two")


@st.composite
def wishes(draw: st.DrawFn) -> Wishes:
    made: dict[tuple[str, Resource], Value] = {}
    for name in NAMES:
        if draw(st.booleans()):
            made[name, Resource.CPU_CFS_QUOTA] = draw(QUOTAS)
        if draw(st.booleans()):
            made[name, Resource.CPU_CFS_BURST] = draw(st.integers(0, 400_000))
        if draw(st.booleans()):
            made[name, Resource.CPUSET_CPUS] = draw(CPU_SETS)
        if draw(st.booleans()):
            made[name, Resource.CPU_SHARES] = draw(st.integers(2, 4096))
        if draw(st.booleans()):
            made[name, Resource.CPU_IDLE] = draw(st.integers(0, 1))
        if draw(st.booleans()):
            made[name, Resource.MEMORY_LIMIT] = draw(
                st.sampled_from([UNLIMITED, 1 << 28, 1 << 29, (1 << 30) + 77])
            )
    return made


FILES = {
    1: ("cpu.cfs_quota_us", "cpu.cfs_burst_us", "cpuset.cpus", "cpu.shares", "cpu.idle",
        "memory.limit_in_bytes"),
    2: ("cpu.max", "cpu.max.burst", "cpuset.cpus", "cpu.weight", "cpu.idle", "memory.max"),
}  # fmt: skip


class Scene:
    """One pod with two containers and an unmanaged sandbox."""

    def __init__(self, profile: Profile, journal_path: str | None = None) -> None:
        self.bed = bed = Bed(profile, journal_path=journal_path)
        asked = PodLimits(cpu_request_milli=500, cpu_limit_milli=2000, memory_limit_bytes=1 << 30)
        pod = bed.kubelet.add_pod(asked, asked)
        one, two = pod.start(asked), pod.start(asked)
        self.place = {"pod": pod.cgroup, "one": one.cgroup, "two": two.cgroup}
        assert pod.sandbox is not None
        self.everything = [*self.place.values(), pod.sandbox.cgroup, pod.cgroup]

    def want(self, made: Wishes) -> None:
        for name in NAMES:
            of = [
                (self.place[name], resource, value)
                for (whose, resource), value in made.items()
                if whose == name
            ]
            self.bed.want(name, *of)

    def values(self) -> dict[tuple[str, str], str]:
        version = self.bed.kernel.profile.cgroup
        found = {
            (cgroup, file): self.bed.text(cgroup, file)
            for cgroup in self.everything
            for file in FILES[version]
        }
        everything = str(CpuSet(range(self.bed.kernel.possible_cpus)))
        for (cgroup, file), text in found.items():
            # A v2 group with tasks cannot get its empty set back; all CPUs mean the same.
            if version == 2 and file == "cpuset.cpus" and text == everything:
                found[cgroup, file] = ""
        return found

    def settle(self) -> None:
        for _ in range(6):
            self.bed.executor.look_again()
            self.bed.run()

    def quiet(self) -> bool:
        self.bed.executor.look_again()
        report = self.bed.run()
        return report.written == report.failed == 0


PROFILES = st.sampled_from([DEBIAN_12_V1, DEBIAN_12_V2, ANOLIS_8])


@settings(max_examples=60, deadline=None)
@given(PROFILES, st.lists(wishes(), min_size=1, max_size=3))
def test_the_kernel_refuses_nothing_and_undo_is_exact(
    profile: Profile, rounds: list[Wishes]
) -> None:
    scene = Scene(profile)
    before = scene.values()
    for made in rounds:
        scene.want(made)
        assert scene.bed.run().failed == 0
        scene.settle()
        assert scene.quiet()
    scene.want({})
    scene.settle()
    assert all(not write.error for write in scene.bed.kernel.writes if write.writer == "daemon")
    assert scene.values() == before
    assert not len(scene.bed.journal)


@settings(max_examples=60, deadline=None)
@given(PROFILES, st.lists(wishes(), min_size=2, max_size=2), st.integers(1, 12))
def test_a_crash_at_any_write_heals(profile: Profile, rounds: list[Wishes], nth: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(profile, f"{folder}/journal")
        before = scene.values()
        first, second = rounds
        scene.want(first)
        scene.settle()
        scene.bed.kernel.faults.crash("write", nth=nth)
        scene.want(second)
        try:
            scene.bed.run()
            scene.bed.kernel.faults.clear()
        except Crash:
            scene.bed.restart()
            scene.want(second)
        scene.settle()
        assert scene.quiet()
        smooth = Scene(profile)
        smooth.want(first)
        smooth.settle()
        smooth.want(second)
        smooth.settle()
        if not _blocked(scene) and not _blocked(smooth):
            assert list(scene.values().values()) == list(smooth.values().values())
        scene.want({})
        scene.settle()
        assert scene.values() == before
        assert not len(scene.bed.journal)


def _blocked(scene: Scene) -> bool:
    """A group that cannot get any part of its wish stays where it happened to be."""
    return any(
        view.state is State.BLOCKED for name in NAMES for view in scene.bed.executor.views(name)
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(wishes(), min_size=1, max_size=2))
def test_on_v2_too_no_child_passes_its_parent_between_two_writes(rounds: list[Wishes]) -> None:
    scene = Scene(DEBIAN_12_V2)
    pod = scene.place["pod"]
    quotas: list[Wishes] = [
        {("pod", Resource.CPU_CFS_QUOTA): 300_000, ("one", Resource.CPU_CFS_QUOTA): 300_000,
         ("two", Resource.CPU_CFS_QUOTA): 200_000},
        {("pod", Resource.CPU_CFS_QUOTA): 100_000, ("one", Resource.CPU_CFS_QUOTA): 100_000,
         ("two", Resource.CPU_CFS_QUOTA): 50_000},
    ]  # fmt: skip
    broken: list[str] = []

    def check(write: object) -> None:
        def quota(cgroup: str) -> float:
            text = scene.bed.text(cgroup, "cpu.max").split()[0]
            return float("inf") if text == "max" else float(text)

        for name in ("one", "two"):
            if quota(scene.place[name]) > quota(pod) and quota(pod) != float("inf"):
                broken.append(f"{name} after {write}")

    scene.want(quotas[0])
    scene.settle()
    scene.bed.kernel.on_write(check)
    for old, new in pairwise([quotas[0], *[quotas[len(made) % 2] for made in rounds], quotas[0]]):
        del old
        scene.want(new)
        scene.settle()
    assert not broken
