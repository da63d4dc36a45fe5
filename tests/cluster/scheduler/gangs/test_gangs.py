"""The table of gangs by itself: groups, and what its version says."""

from __future__ import annotations

from cluster.scheduler.configuration.koordinator_arguments import GangMatchPolicy
from cluster.scheduler.tables.gang_definitions import GangDefinition, GangMode
from cluster.scheduler.tables.gangs import Gangs, Step


def _definition(name: str, *group: str, minimum: int = 1) -> GangDefinition:
    return GangDefinition(
        id=name,
        min_member=minimum,
        total=minimum,
        mode=GangMode.STRICT,
        wait_s=1.0,
        group=tuple(sorted({name, *group})),
        match_policy=GangMatchPolicy.ONCE_SATISFIED,
    )


def test_a_gang_that_comes_to_a_group_that_had_enough_once_does_not_wait() -> None:
    gangs = Gangs()
    one = gangs.define(_definition("one", "two"))
    two = gangs.define(_definition("two", "one"))
    assert not gangs.may_skip_group(one)
    assert gangs.satisfied_once(one)
    assert not gangs.satisfied_once(two)
    gangs.undefine("two")
    assert gangs.get("two") is None
    again = gangs.define(_definition("two", "one", minimum=3))
    assert gangs.may_skip_group(again) and gangs.missing(again) == 0
    # Known for all peers from the next binding on.
    assert gangs.satisfied_once(one) and not gangs.satisfied_once(again)


def test_the_version_grows_with_definitions_members_and_nodes() -> None:
    gangs = Gangs()
    versions = [gangs.version]

    def grown() -> bool:
        versions.append(gangs.version)
        return versions[-1] > versions[-2]

    gangs.define(_definition("one"))
    assert grown()
    gangs.join("a", "one", Step.PENDING)
    assert grown()
    gangs.move("a", Step.TRIED)
    assert not grown()
    gangs.move("a", Step.WAITING)
    assert grown()
    gangs.move("a", Step.WAITING)
    assert not grown()
    gangs.move("a", Step.PENDING)
    assert grown()
    gangs.satisfied_once(gangs.define(_definition("one")))
    assert grown()
    gangs.leave("a")
    assert grown()
    gangs.leave("a")
    assert not grown()
    gangs.undefine("one")
    assert grown()
    gangs.undefine("one")
    assert not grown()
    assert gangs.of("a") is None and gangs.step("a") is None and list(gangs) == []


def test_a_pod_that_joins_another_gang_leaves_its_former_one() -> None:
    gangs = Gangs()
    gangs.join("a", "one", Step.WAITING, _definition("one", "other"))
    gangs.join("b", "one", Step.PENDING, _definition("one", minimum=9))
    one = gangs.get("one")
    assert one is not None and one.definition == _definition("one", "other")
    assert [each.id for each in gangs.naming(one)] == ["one"]
    gangs.join("a", "two", Step.BOUND)
    two = gangs.get("two")
    assert two is not None and gangs.of("a") is two and gangs.step("a") is Step.BOUND
    assert gangs.members([one, two], Step.PENDING, Step.WAITING) == ("b",)
    assert gangs.members([one, two], Step.BOUND) == ("a",)
    gangs.leave("b")
    assert gangs.get("one") is None and list(gangs) == [two]


def test_only_gangs_that_name_each_other_share_what_happened_once() -> None:
    gangs = Gangs()
    one = gangs.define(_definition("one", "two"))
    two = gangs.define(_definition("two"))
    assert [each.id for each in gangs.group(one)] == ["one", "two"]
    assert list(gangs.peers(one)) == [one] and list(gangs.peers(two)) == [two]
    assert [each.id for each in gangs.naming(two)] == ["one", "two"]
    gangs.join("a", "one", Step.WAITING)
    # The other gang has no pod with a node, and is waited for.
    assert not gangs.satisfied(one) and not gangs.satisfied(two)
    gangs.join("b", "two", Step.WAITING)
    assert gangs.satisfied(one) and gangs.satisfied(two)
    gangs.undefine("two")
    gangs.leave("b")
    assert not gangs.satisfied(one)
    assert gangs.satisfied_once(one) and not two.once_satisfied
    assert gangs.missing(one) == 0


def test_members_that_are_missing_are_counted_until_there_are_enough() -> None:
    gangs = Gangs()
    gang = gangs.define(_definition("one", minimum=2))
    assert gangs.missing(gang) == 2
    for uid, missing in (("a", 1), ("b", 0), ("c", 0)):
        gangs.join(uid, "one", Step.WAITING)
        assert gangs.missing(gang) == missing
    gangs.move("a", Step.PENDING)
    gangs.move("b", Step.TRIED)
    assert gangs.missing(gang) == 1 and not gangs.satisfied(gang)
    assert gang.count(Step.PENDING, Step.TRIED) == 2 and len(gang) == 3
    gangs.undefine("one")
    assert gangs.missing(gang) == 0 and not gang.complete
