"""A gang makes room for all of its pods at once, or evicts nobody."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.binding.placement import Refused, Why
from cluster.scheduler.cycle.futile_searches import FutileSearches
from cluster.scheduler.cycle.post_filter import NotFound
from cluster.scheduler.cycle.timings import POST_FILTER, SUCCESS, UNSCHEDULABLE
from tests.cluster.scheduler.beds.core import GANG_PREEMPTION, Bed


def _bed(*, nodes: int = 3, low: int = 1) -> Bed:
    """Return nodes n0, n1, ... of 4 CPUs, each with pods of 2 CPUs and the priority `low`."""
    bed = Bed(GANG_PREEMPTION)
    for node in range(nodes):
        bed.node(f"n{node}", 4)
        for number in range(2):
            bed.pod(f"low-{node}-{number}", 2, low, node=f"n{node}")
    return bed


def _gang(bed: Bed, count: int, cpu: int, *, priority: int = 10, least: int = 0) -> list[str]:
    names = [f"g{number}" for number in range(count)]
    for name in names:
        bed.pod(name, cpu, priority, gang=least or count)
    return names


def test_victims_are_evicted_for_all_members_at_once_and_each_gets_its_node() -> None:
    bed = _bed()
    names = _gang(bed, 3, 3)
    bed.run()
    # Each member needs a node of its own, and both pods of that node.
    assert len(bed.evicted()) == 6
    assert sorted(bed.nominated[name] for name in names) == ["n0", "n1", "n2"]
    assert not any(bed.node_of(name) for name in names)
    # While victims end, nothing more is evicted, and no less important pod gets the room.
    for victim in bed.evicted()[:3]:
        bed.gone(victim)
    bed.pod("small", 2, 1)
    bed.run(30.0)
    assert len(bed.victims) == 6
    assert bed.node_of("small") == ""
    assert "not eligible due to terminating pods on the nominated nodes" in bed.messages["g0"]
    nominated = dict(bed.nominated)
    for victim in bed.evicted()[3:]:
        bed.gone(victim)
    bed.run(30.0)
    assert {name: bed.node_of(name) for name in names} == {name: nominated[name] for name in names}
    assert len(bed.core.scheduling.nominator) == 0


def test_a_gang_that_does_not_fit_even_then_evicts_no_pod() -> None:
    bed = _bed()
    names = _gang(bed, 4, 3)
    bed.run()
    assert bed.victims == []
    assert bed.nominated == {}
    assert (
        "preemption: gang default/g needs room for 4 pods, and without less important pods there"
        " is room for 3." in bed.messages[names[0]]
    )
    assert len(bed.core.tables.bookings) == 6


class _Slow:
    """Has each search for room take a while, and counts them."""

    def __init__(self, bed: Bed, monkeypatch: pytest.MonkeyPatch, *, took_s: float) -> None:
        self.searches = 0
        real = bed.core.scheduling.seats

        def seats(*arguments: Any) -> Any:
            self.searches += 1
            bed.now += took_s
            return real(*arguments)

        monkeypatch.setattr(bed.core.scheduling, "seats", seats)


def test_a_long_search_in_vain_rests_before_it_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = _bed()
    slow = _Slow(bed, monkeypatch, took_s=3.0)
    names = _gang(bed, 4, 3)
    bed.run(1.0)
    assert slow.searches == 1
    message = bed.messages[names[0]]
    # Each node may help the gang, and is too small. The gang is tried, and not searched for.
    for number in range(5):
        bed.node(f"small-{number}", 1)
        bed.run(4.0)
    assert slow.searches == 1 and bed.victims == []
    assert (
        bed.messages[names[0]].partition("preemption: ")[2] == message.partition("preemption: ")[2]
    )
    # What came during the rest is not forgotten: no event follows, and the search is repeated.
    bed.node("n3", 4)
    bed.pod("low-3", 2, 1, node="n3")
    bed.run(1.0)
    assert slow.searches == 1 and bed.victims == []
    bed.run(30.0)
    assert slow.searches == 2
    assert len(bed.evicted()) == 7
    assert len({bed.nominated[name] for name in names}) == 4


def test_what_a_resting_search_says_holds_for_each_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gang has its minimum; for two more there is no room, whichever of them asked."""
    bed = Bed(GANG_PREEMPTION)
    for name in ("n0", "n1"):
        bed.node(name, 4)
    slow = _Slow(bed, monkeypatch, took_s=3.0)
    names = ["g0", "g1", "g2", "g3"]
    for name in names:
        bed.pod(name, 4, 10, gang=2, mode="NonStrict")
    bed.run(1.0)
    assert slow.searches == 1
    waiting = [name for name in names if not bed.node_of(name)]
    assert len(waiting) == 2
    for name in waiting:
        assert (
            "preemption: the gang needs no evictions for its minimum, and none makes room for more"
            " of its pods." in bed.messages[name]
        )


@pytest.mark.parametrize("took_s", [0.0, 0.05])
def test_a_short_search_is_repeated_at_each_attempt(
    monkeypatch: pytest.MonkeyPatch, took_s: float
) -> None:
    bed = _bed()
    slow = _Slow(bed, monkeypatch, took_s=took_s)
    _gang(bed, 4, 3)
    bed.run(1.0)
    for number in range(3):
        bed.node(f"small-{number}", 1)
        bed.run(30.0)
        assert slow.searches == number + 2


def test_what_futile_searches_keep_ends_with_their_rest() -> None:
    futile, none = FutileSearches(), NotFound("none")

    def searched(gang: str, began: float, now: float, found: NotFound = none) -> None:
        futile.searched(gang, found, by="m", as_of=1, began=began, now=now)

    searched("a", 0.0, 1.0)
    searched("b", 1.0, 2.0)
    resting = futile.resting("a", "m", 10.9)
    assert resting is not None and resting.found is none
    assert futile.resting("a", "m", 11.0) is None
    assert futile.resting("c", "m", 2.0) is None
    searched("c", 11.4, 11.5)
    assert len(futile) == 2
    # A search that waits for victims, or a short one, takes the place of a long one.
    searched("b", 11.5, 12.5, NotFound("none", waits=True))
    searched("c", 12.5, 12.54)
    assert futile.resting("c", "m", 12.55) is None
    assert futile.resting("c", "other", 12.93) is not None
    assert futile.resting("c", "other", 12.95) is None


@pytest.mark.parametrize("took_s", [0.04, 3.0])
def test_one_search_is_enough_for_all_members_of_a_gang_that_is_not_strict(
    monkeypatch: pytest.MonkeyPatch, took_s: float
) -> None:
    bed = _bed()
    slow = _Slow(bed, monkeypatch, took_s=took_s)
    names = [f"g{number}" for number in range(20)]
    for name in names:
        bed.pod(name, 3, 10, gang=10, mode="NonStrict")
    for _ in range(6):
        bed.run(30.0)
    # Nothing changed since, so no member has room looked for again.
    assert slow.searches == 1
    assert all("there is room for 3." in bed.messages[name] for name in names)
    # The last node that is needed may be missed during the rest, and is not forgotten.
    for number in range(7):
        bed.node(f"more-{number}", 4)
        bed.pod(f"low-more-{number}", 2, 1, node=f"more-{number}")
        bed.run(0.1)
    for _ in range(10):
        bed.run(10.0)
    assert len(bed.evicted()) == 13
    assert len({node for node in bed.nominated.values() if node}) == 10


@pytest.mark.parametrize(("members", "status"), [(3, SUCCESS), (4, UNSCHEDULABLE)])
def test_the_search_for_a_gang_is_timed_and_counted(members: int, status: str) -> None:
    bed = _bed()
    _gang(bed, members, 3)
    bed.run()
    steps = bed.core.scheduling.timings("koord-scheduler").points
    attempts = bed.core.metrics.preemptions.labels().value
    assert {key for key in steps if key[0] == POST_FILTER} == {(POST_FILTER, status)}
    assert steps[POST_FILTER, status].count == attempts == 1


def test_members_use_free_room_first() -> None:
    bed = _bed(nodes=2)
    bed.node("free", 4)
    names = _gang(bed, 2, 4)
    bed.run()
    assert len(bed.victims) == 2
    assert "free" in {bed.nominated[name] for name in names}
    # The member that waits for the free node is promised it.
    bed.pod("small", 1, 1)
    bed.run(1.0)
    assert bed.node_of("small") == ""


def test_a_strict_gang_needs_room_for_all_members_another_one_for_its_minimum() -> None:
    bed = _bed(nodes=2)
    _gang(bed, 3, 4, least=2)
    bed.run()
    # The third would have the others give their nodes back.
    assert bed.victims == []
    bed = _bed(nodes=2)
    names = ["g0", "g1", "g2"]
    for name in names:
        bed.pod(name, 4, 10, gang=2, mode="NonStrict")
    bed.run()
    assert len(bed.evicted()) == 4
    assert sorted(node for node in bed.nominated.values() if node) == ["n0", "n1"]
    for victim in bed.evicted():
        bed.gone(victim)
    for _ in range(4):
        bed.run(30.0)
    assert sorted(bed.node_of(name) for name in names) == ["", "n0", "n1"]


def test_members_on_one_node_do_not_count_its_room_twice() -> None:
    bed = _bed(nodes=1)
    _gang(bed, 2, 3)
    bed.run()
    # One member would fit without the two pods; the second would not.
    assert bed.victims == []


def test_budgets_are_used_up_by_the_members_before() -> None:
    bed = _bed(nodes=3)
    for node in range(3):
        for number in range(2):
            name = f"low-{node}-{number}"
            bed.pods[name]["metadata"]["labels"] = {"app": f"app{min(node, 1)}"}
            bed.change(name)
    bed.budget("app0", "app0", 0)
    bed.budget("app1", "app1", 4)
    _gang(bed, 2, 4)
    bed.run()
    assert bed.evicted() == ["low-1-0", "low-1-1", "low-2-0", "low-2-1"]


@pytest.mark.parametrize(
    ("spec", "remark"),
    [
        ({"preemptionPolicy": "Never"}, "preemption: not eligible due to preemptionPolicy=Never."),
        ({}, "without less important pods there is room for 0."),
    ],
)
def test_a_gang_that_may_not_preempt_says_so(spec: dict[str, str], remark: str) -> None:
    bed = _bed(low=10 if not spec else 1)
    for name in ("g0", "g1"):
        bed.pod(name, 3, 10, gang=2, **spec)
    bed.run()
    assert bed.victims == []
    assert remark in bed.messages["g0"]


def test_a_refused_eviction_ends_the_nomination_and_the_gang_is_tried_again() -> None:
    bed = _bed(nodes=2)
    _gang(bed, 2, 3)
    bed.run()
    for victim in tuple(bed.victims):
        bed.core.attempts.preemptions.evicted(victim, Refused(Why.FORBIDDEN, "no right"))
    assert len(bed.core.scheduling.nominator) == 0
    bed.run(0.0)
    assert len(bed.victims) == 4
    bed.run(30.0)
    assert len(bed.victims) == 8


@pytest.mark.parametrize(("in_a", "members"), [(0, 8), (2, 4)])
def test_members_that_are_spread_over_zones_get_room_in_each(in_a: int, members: int) -> None:
    bed = Bed(GANG_PREEMPTION)
    for zone in "ab":
        for number in range(4):
            bed.node(f"{zone}{number}", 4, zone=zone)
            bed.pod(f"low-{zone}{number}", 4, 1, node=f"{zone}{number}")
    bed.node("own", 2, zone="a")
    for number in range(2):
        bed.pod(f"own-{number}", 1, 10, node="own", app="x" if in_a else "y")
    spread = {
        "maxSkew": 1,
        "topologyKey": "zone",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"app": "x"}},
    }
    names = [f"g{number}" for number in range(members)]
    for name in names:
        bed.pod(name, 4, 10, gang=members, app="x", topologySpreadConstraints=[spread])
    bed.run()
    zones = Counter(bed.nominated[name][0] for name in names)
    assert zones["a"] + in_a == zones["b"]
    assert len(bed.evicted()) == members
    for victim in bed.evicted():
        bed.gone(victim)
    bed.run(30.0)
    assert all(bed.node_of(name) for name in names)


def test_a_pod_without_a_gang_preempts_by_itself() -> None:
    bed = _bed(nodes=1)
    bed.pod("new", 2, 10)
    bed.run()
    assert len(bed.victims) == 1
    assert bed.nominated == {"new": "n0"}


def test_members_of_several_priorities_evict_no_member_of_their_gang() -> None:
    # One pod of the gang is bound already, and one is seated last although its name comes first.
    bed = Bed(GANG_PREEMPTION)
    for name in ("n0", "n1", "n2"):
        bed.node(name, 4)
    bed.pod("low", 4, 5, node="n1")
    bed.pod("lower", 4, 4, node="n2")
    bed.pod("bound", 4, 0, gang=3, node="n0")
    bed.pod("a-worker", 4, 6, gang=3)
    bed.pod("launcher", 4, 100, gang=3)
    bed.run()
    assert bed.evicted() == ["low", "lower"]
    assert (bed.nominated["launcher"], bed.nominated["a-worker"]) == ("n2", "n1")
    for name in bed.evicted():
        bed.gone(name)
    bed.run(30.0)
    assert [bed.node_of(name) for name in ("bound", "a-worker", "launcher")] == ["n0", "n1", "n2"]


def test_a_member_that_is_deleted_gives_up_its_nomination() -> None:
    bed = _bed(nodes=3)
    _gang(bed, 3, 4, least=2)
    bed.run()
    nominated = [name for name, node in bed.nominated.items() if node]
    bed.gone(nominated[0])
    assert len(bed.core.scheduling.nominator) == len(nominated) - 1
    for victim in bed.evicted():
        bed.gone(victim)
    bed.run(30.0)
    bed.run(30.0)
    assert all(bed.node_of(name) for name in bed.pods)


_NODES = st.lists(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=3), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(
    nodes=_NODES,
    members=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    priority=st.integers(0, 4),
)
def test_once_the_victims_are_gone_the_whole_gang_is_bound(
    nodes: list[list[tuple[int, int]]], members: list[int], priority: int
) -> None:
    bed = Bed(GANG_PREEMPTION)
    for number, pods in enumerate(nodes):
        bed.node(f"n{number}", 6)
        left = 6
        for index, (cpu, low) in enumerate(pods):
            if cpu <= left:
                left -= cpu
                bed.pod(f"low-{number}-{index}", cpu, low, node=f"n{number}")
    names = [f"g{number}" for number in range(len(members))]
    for name, cpu in zip(names, members, strict=True):
        bed.pod(name, cpu, priority, gang=len(members))
    before = dict.fromkeys(bed.pods)
    bed.run()
    victims = bed.evicted()
    assert all(bed.pods[name]["spec"]["priority"] < priority for name in victims)
    if not victims:
        assert len({bool(bed.node_of(name)) for name in names}) == 1
        return
    assert not any(bed.node_of(name) for name in names)
    for name in victims:
        bed.gone(name)
    bed.run(30.0)
    assert all(bed.node_of(name) for name in names)
    assert set(bed.pods) == set(before) - set(victims)
    used = Counter[str]()
    for pod in bed.pods.values():
        cpu = pod["spec"]["containers"][0]["resources"]["requests"]["cpu"]
        used[pod["spec"]["nodeName"]] += int(cpu)
    assert all(amount <= 6 for amount in used.values())


def test_a_gang_that_needs_a_member_with_scheduling_gates_evicts_no_pod_until_they_open() -> None:
    bed = _bed()
    for name in ("g0", "g1"):
        bed.pod(name, 4, 10, gang=3)
    bed.pod("g2", 4, 10, gang=3, schedulingGates=[{"name": "wait"}])
    bed.run()
    assert bed.victims == []
    assert (
        "preemption: gang default/g needs 3 pods, and only 2 without scheduling gates exist."
        in bed.messages["g0"]
    )
    bed.pods["g2"]["spec"]["schedulingGates"] = []
    bed.change("g2")
    bed.run(30.0)
    assert len(bed.evicted()) == 6


def test_no_room_is_made_for_members_with_scheduling_gates_that_the_gang_does_not_need() -> None:
    bed = _bed()
    for name in ("g0", "g1"):
        bed.pod(name, 4, 10, gang=2)
    bed.pod("g2", 4, 10, gang=2, schedulingGates=[{"name": "wait"}])
    bed.run()
    assert len(bed.evicted()) == 4
    assert sorted(name for name, node in bed.nominated.items() if node) == ["g0", "g1"]
    for victim in bed.evicted():
        bed.gone(victim)
    bed.run(30.0)
    assert bed.node_of("g0")
    assert bed.node_of("g1")
    assert not bed.node_of("g2")


def test_nodes_without_pods_in_rows_beyond_those_with_pods_keep_no_search_from_its_end() -> None:
    # Columns of pods have 64 rows at first; the last ten of 70 nodes have no pods.
    bed = Bed(GANG_PREEMPTION)
    for number in range(70):
        bed.node(f"n{number}", 4 if number < 60 else 1)
    for number in range(60):
        bed.pod(f"low-{number}", 4, 1, node=f"n{number}")
    names = _gang(bed, 2, 4)
    bed.run()
    assert len(bed.victims) == 2
    assert all(bed.nominated[name] for name in names)
    bed.pod("single", 4, 10)
    bed.run()
    assert len(bed.victims) == 3
    assert bed.nominated["single"]


def test_a_member_that_found_no_node_holds_off_none_like_it_once_others_have_nodes() -> None:
    # Workers have to be with the leader. The first by name comes before it, the other one after it.
    bed = _bed(nodes=2)
    term = {"topologyKey": "kubernetes.io/hostname"}
    near = {
        "podAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                term | {"labelSelector": {"matchLabels": {"app": "leader"}}}
            ]
        }
    }
    bed.pod("a-worker", 2, 10, gang=2, mode="NonStrict", affinity=near)
    bed.pod("b-leader", 2, 10, gang=2, mode="NonStrict", app="leader")
    bed.pod("c-worker", 2, 10, gang=2, mode="NonStrict", affinity=near)
    bed.run()
    assert len(bed.evicted()) == 2
    assert bed.nominated["b-leader"] == bed.nominated["c-worker"] != ""
    for victim in bed.evicted():
        bed.gone(victim)
    bed.run(30.0)
    assert bed.node_of("b-leader") == bed.node_of("c-worker") != ""


def test_nodes_that_are_promised_to_others_keep_no_gang_from_the_next_ones() -> None:
    # More nodes than are tried for one member are promised to a gang whose victims still end. They
    # cost the least, if only what is on them counts.
    bed = Bed(GANG_PREEMPTION)
    for number in range(24):
        bed.node(f"n{number}", 4)
        bed.pod(f"low-{number}", 4, 1 if number < 20 else 2, node=f"n{number}")
    _gang(bed, 20, 4)
    bed.run()
    assert len(bed.victims) == 20
    for name in ("h0", "h1"):
        bed.pod(name, 4, 10, gang=2, of="h")
    bed.run()
    assert {bed.nominated["h0"], bed.nominated["h1"]} <= {"n20", "n21", "n22", "n23"}
    assert len(bed.victims) == 22


def test_members_that_are_not_refused_with_the_first_show_their_nomination_and_its_end() -> None:
    bed = Bed(GANG_PREEMPTION)
    for node in ("n0", "n1"):
        bed.node(node, 4)
        bed.pod(f"old-{node}", 4, 0, node=node)
    for name in ("w0", "w1"):
        bed.pod(name, 4, 9, gang=2, mode="NonStrict")
    assert bed.core.attempts.next(bed.now)
    short = (
        "0/2 nodes are available: gang default/g needs room for 2 pods together, and there is room"
        " for 0 at most."
    )
    assert bed.messages == {"w0": short, "w1": short}
    assert bed.nominated == {"w0": "n0", "w1": "n1"}
    assert bed.evicted() == ["old-n0", "old-n1"]
    for name in ("w0", "w1"):
        why = bed.core.why(f"default/{name}")
        assert why is not None
        assert why["message"] == short
    while bed.core.attempts.next(bed.now):
        pass
    # A more important pod takes one node, and the other one goes.
    bed.pod("important", 4, 50, node="n0")
    for node in ("n0", "n1"):
        bed.gone(f"old-{node}")
    bed.core.nodes.take(b'{"type":"DELETED","object":{"metadata":{"name":"n1"}}}')
    bed.now += 60
    bed.core.schedule_for(1.0)
    assert bed.nominated == {"w0": "", "w1": ""}
