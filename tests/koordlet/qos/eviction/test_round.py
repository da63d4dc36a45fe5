"""One round of evictions: order, budget, refusals and what counts as released."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koordlet.qos.eviction.round import Key, key_of
from koordlet.qos.strategy import Shortage, Victim
from tests.koordlet.qos.eviction.rounds import a_round, all_taken
from tests.koordlet.qos.eviction_making import a_pod

MEMORY: Key = ("memory", False)


def victim(name: str, releases: int) -> Victim:
    return Victim(a_pod(name), releases)


def short(
    needed: int,
    *victims: tuple[str, int],
    gate: str = "BEMemoryEvict",
    key: Key = MEMORY,
    others: Sequence[tuple[str, int]] = (),
) -> Shortage:
    return Shortage(
        gate=gate,
        resource=key[0],
        of_requests=key[1],
        needed=needed,
        numbers="numbers",
        victims=tuple(victim(*each) for each in victims),
        cool_down_s=4.0,
        others=tuple(victim(*each) for each in others),
    )


GIB = 1 << 30
ABC = (("b", 20 * GIB), ("a", 10 * GIB), ("c", 40 * GIB))


@pytest.mark.parametrize(
    ("needed", "victims", "gone"),
    [
        (30236569763, ABC, ["b", "a"]),  # upstream's worked example, default lower limit
        (38482906972, ABC, ["b", "a", "c"]),  # and with a lower limit of 65 %
        (16000, (("p1", 4000), ("p2", 8000), ("p3", 28000)), ["p1", "p2", "p3"]),
        (1, ABC, ["b"]),
        (20 * GIB, ABC, ["b"]),
        (0, ABC, []),
        (-5, ABC, []),
        (10, (("nothing", 0), ("some", 10)), ["some"]),
        (10, (), []),
    ],
)
def test_victims_go_in_order_until_the_shortage_is_covered(
    needed: int, victims: tuple[tuple[str, int], ...], gone: list[str]
) -> None:
    assert all_taken(a_round(short(needed, *victims))) == gone


def test_a_refused_victim_makes_room_for_the_next() -> None:
    round_ = a_round(short(15, ("a", 10), ("b", 10), ("c", 10)))
    assert all_taken(round_, refusing=("a",)) == ["b", "c"]
    assert round_.uncovered() == ()


def test_a_shortage_that_cannot_be_covered_says_why() -> None:
    round_ = a_round(short(100, ("a", 10), ("b", 10)))
    assert all_taken(round_, refusing=("b",)) == ["a"]
    (left,) = round_.uncovered()
    assert (left.missing, left.why) == (90, "Pod default/b: refused by a budget")
    round_ = a_round(short(100, ("a", 10), ("b", 10)))
    assert all_taken(round_, refusing=("a", "b")) == []
    assert round_.uncovered()[0].why == "Pod default/a: refused by a budget, and 1 more"
    (left,) = a_round(short(5)).uncovered()
    assert left.why == "no pod is left that may be evicted and would release any"


def test_what_one_victim_releases_counts_for_every_shortage_of_the_resource() -> None:
    first = short(10, ("a", 10))
    second = short(15, ("a", 10), ("b", 10), gate="MemoryEvict")
    of_requests = short(5, ("c", 5), gate="MemoryAllocatableEvict", key=("memory", True))
    round_ = a_round(first, of_requests, second)
    assert all_taken(round_) == ["a", "c", "b"]
    assert round_.gates_served() == {"BEMemoryEvict", "MemoryEvict", "MemoryAllocatableEvict"}


def test_a_pod_that_only_the_other_strategy_names_counts_too() -> None:
    first = short(10, ("a", 10))
    second = short(10, ("b", 10), gate="MemoryEvict")
    assert all_taken(a_round(first, second)) == ["a"]


def test_a_victim_counts_for_shortages_that_it_may_not_go_for() -> None:
    batch: Key = ("kubernetes.io/batch-cpu", True)
    best_effort = short(10, ("hog", 10), gate="BECPUEvict", key=batch)
    use = short(
        8, ("agreed", 8), gate="CPUEvict", key=("cpu", False), others=[("hog", 6), ("rest", 9)]
    )
    round_ = a_round(best_effort, use)
    assert all_taken(round_) == ["hog", "agreed"]
    assert [each.missing for each in round_.uncovered()] == []
    enough = short(6, ("agreed", 8), gate="CPUEvict", key=("cpu", False), others=[("hog", 6)])
    round_ = a_round(best_effort, enough)
    assert all_taken(round_) == ["hog"]
    assert round_.gates_served() == {"BECPUEvict", "CPUEvict"}


def test_pods_that_leave_or_were_evicted_are_counted_and_no_victims() -> None:
    round_ = a_round(
        short(25, ("old", 10), ("a", 10), ("b", 10)),
        expected={"old": {MEMORY: 10}, "leaving": {MEMORY: 5}},
    )
    assert all_taken(round_) == ["a"]


def test_a_gate_that_cools_down_evicts_nothing_and_does_not_stop_others() -> None:
    one, other = short(10, ("a", 10)), short(10, ("b", 10), gate="CPUEvict", key=("cpu", False))
    round_ = a_round(one, other, cooling={"BEMemoryEvict": 7.0})
    assert all_taken(round_) == ["b"]
    assert round_.gates_served() == {"CPUEvict"}
    assert [each.why for each in round_.uncovered()] == ["within 7 s of the last evictions"]


def test_the_most_of_a_round() -> None:
    round_ = a_round(short(100, ("a", 1), ("b", 1), ("c", 1)), most=2)
    assert all_taken(round_) == ["a", "b"]
    assert round_.uncovered()[0].why == "the limit of evictions in one round is reached"


def test_a_barred_pod_is_no_victim() -> None:
    round_ = a_round(short(10, ("a", 10)), barred={"a": "Pod default/a: a budget; tried again"})
    assert all_taken(round_) == []
    assert round_.uncovered()[0].why == "Pod default/a: a budget; tried again"


_NAMES = st.sampled_from("abcdefgh")
_VICTIMS = st.lists(
    st.tuples(_NAMES, st.integers(0, 50)), max_size=8, unique_by=lambda each: each[0]
)
_SHORT = st.builds(
    lambda needed, victims, key, gate: short(needed, *victims, key=key, gate=gate),
    st.integers(-10, 200),
    _VICTIMS,
    st.sampled_from([("memory", False), ("cpu", False), ("kubernetes.io/batch-cpu", True)]),
    st.sampled_from(["BEMemoryEvict", "CPUEvict", "BECPUEvict"]),
)


@given(
    st.lists(_SHORT, max_size=4),
    st.dictionaries(_NAMES, st.dictionaries(st.just(MEMORY), st.integers(0, 50)), max_size=3),
    st.sets(_NAMES, max_size=3),
    st.sets(_NAMES, max_size=3),
    st.integers(0, 8),
)
@settings(max_examples=400, deadline=None)
def test_what_holds_for_every_round(
    shortages: list[Shortage],
    expected: dict[str, dict[Key, int]],
    barred: set[str],
    refusing: set[str],
    most: int,
) -> None:
    barred -= set(expected)
    round_ = a_round(
        *shortages, expected=expected, barred=dict.fromkeys(barred, "barred"), most=most
    )
    while (choice := round_.next()) is not None:
        name = choice.victim.pod.name
        # Nothing is evicted for a shortage that is covered: it takes its last victim at most.
        assert round_.missing(choice.shortage) > 0
        assert choice.victim.releases > 0
        assert name not in expected and name not in barred
        assert name not in {each.victim.pod.name for each in round_.taken}
        before = [
            each.pod.name
            for each in choice.shortage.victims[: choice.shortage.victims.index(choice.victim)]
            if each.releases > 0
        ]
        settled = {each.victim.pod.name for each in round_.taken} | barred | set(expected)
        assert set(before) <= settled | refusing, "the order is respected"
        if name in refusing:
            round_.refused(choice, "refused")
        else:
            round_.evicted(choice)
    assert len(round_.taken) <= most
    assert {key_of(each.shortage) for each in round_.uncovered()} <= {
        key_of(each) for each in shortages
    }
