"""Leases: claims stand until their time is over, unless they are renewed, replaced or dropped."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from apis.cpuset import CpuSet
from apis.qos import KubeQoS
from hooks.claim import Claim, Rank
from hooks.standing import NOTHING_STANDS, Standing, merged
from hooks.subject import Level
from koordlet.qos.board import Board, checked
from linux.resources import Resource, Value

NAMES = ("first", "second", "third")


def claim(policy: str, value: Value, resource: Resource = Resource.CPU_SHARES) -> Claim:
    return Claim(
        resource=resource,
        value=value,
        policy=policy,
        reason=f"{policy} wants {value}",
        source="a test",
        rank=Rank.EMERGENCY,
    )


def standing(policy: str, value: int) -> Standing:
    """Claims on one pod, and on the containers of a class; the value 0 is not a claim at all."""
    if not value:
        return Standing()
    claims = (claim(policy, value),)
    return Standing({"pod/u1": claims}, {(Level.CONTAINER, KubeQoS.BESTEFFORT): claims})


class Leases(RuleBasedStateMachine):
    """Beside a model: for each name what it wanted last, and until when."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.seen = [NOTHING_STANDS]
        self.board = Board(NAMES, self.seen.append)
        self.model: dict[str, tuple[Standing, float]] = {}

    @rule(
        name=st.sampled_from(NAMES),
        value=st.integers(0, 3),
        ttl=st.floats(0.5, 20, allow_nan=False),
    )
    def a_strategy_steps(self, name: str, value: int, ttl: float) -> None:
        wanted = standing(name, value)
        self.board.publish(name, wanted, until=self.now + ttl)
        self.model.pop(name, None)
        if value:
            self.model[name] = (wanted, self.now + ttl)

    @rule(name=st.sampled_from(NAMES), ttl=st.floats(0.5, 20, allow_nan=False))
    def its_input_is_bad(self, name: str, ttl: float) -> None:
        self.board.renew(name, until=self.now + ttl)
        if name in self.model:
            self.model[name] = (self.model[name][0], self.now + ttl)

    @rule(name=st.sampled_from(NAMES))
    def its_gate_is_switched_off(self, name: str) -> None:
        self.board.drop(name)
        self.model.pop(name, None)

    @rule(by=st.floats(0, 10, allow_nan=False))
    def time_passes(self, by: float) -> None:
        self.now += by
        ended = self.board.expire(self.now)
        assert set(ended) == {name for name, (_, until) in self.model.items() if until <= self.now}
        for name in ended:
            del self.model[name]

    @invariant()
    def exactly_the_live_claims_stand(self) -> None:
        expected = merged([self.model[name][0] for name in NAMES if name in self.model])
        assert self.board.standing == expected
        assert self.seen[-1] == expected
        assert (self.board.standing is NOTHING_STANDS) is (not self.model)
        next_end = min((until for _, until in self.model.values()), default=None)
        assert self.board.next_expiry() == next_end

    @invariant()
    def nothing_is_published_twice(self) -> None:
        assert all(a != b for a, b in zip(self.seen, self.seen[1:], strict=False))


TestLeases = Leases.TestCase


def test_what_is_published_last_is_what_stands_whichever_thread_published() -> None:
    seen: list[Standing] = []
    board = Board(NAMES, seen.append)

    def work(name: str) -> None:
        for number in range(1, 300):
            board.publish(name, standing(name, number), until=number + 1.0)
            board.expire(number + 0.5)

    threads = [threading.Thread(target=work, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen[-1] is board.standing


@given(st.permutations(NAMES))
def test_the_order_of_claims_does_not_depend_on_who_came_first(order: list[str]) -> None:
    board = Board(NAMES, lambda _: None)
    for name in order:
        board.publish(name, standing(name, 7), until=1.0)
    assert [each.policy for each in board.standing.by_subject["pod/u1"]] == list(NAMES)


def test_a_claim_that_cannot_be_carried_out_is_dropped_alone() -> None:
    good = claim("first", 7)
    found, problems = checked(
        Standing(
            {
                "pod/u1": (good, claim("first", "seven")),
                "kubeqos/BestEffort": (claim("first", CpuSet({0}), Resource.CPUSET_CPUS),),
            },
            {(Level.POD, KubeQoS.BESTEFFORT): (claim("first", 1, Resource.OOM_SCORE_ADJ), good)},
        )
    )
    assert found.by_subject["pod/u1"] == (good,)
    assert len(found.by_subject["kubeqos/BestEffort"]) == 1
    assert found.by_class == {(Level.POD, KubeQoS.BESTEFFORT): (good,)}
    assert len(problems) == 2
    assert any("cannot be claimed for a pod" in problem for problem in problems)


def test_good_claims_stay_the_same_object() -> None:
    wanted = standing("first", 7)
    assert checked(wanted) == (wanted, ())
    assert checked(wanted)[0] is wanted
