"""Composition: one value of several claims, by rank, then divided, bounded above and below."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.cpuset import CpuSet
from hooks.claim import Claim, Op, Rank
from hooks.compose import compose, resolve_conflicts
from hooks.decision import Outcome
from linux.resources import UNLIMITED, Resource, Value

QUOTA, SHARES, CPUS = Resource.CPU_CFS_QUOTA, Resource.CPU_SHARES, Resource.CPUSET_CPUS
LIMIT = Resource.MEMORY_LIMIT


def _claim(
    value: Value,
    op: Op = Op.SET,
    rank: int = Rank.DEFAULT,
    *,
    policy: str = "P",
    factor: float = 1.0,
    resource: Resource = QUOTA,
) -> Claim:
    return Claim(
        resource=resource,
        value=value,
        policy=policy,
        reason="a reason",
        source="a source",
        op=op,
        rank=rank,
        factor=factor,
    )


def _divide(factor: float) -> Claim:
    return _claim(0, Op.DIVIDE, factor=factor)


def _multiply(factor: float) -> Claim:
    return _claim(0, Op.MULTIPLY, factor=factor)


def _cpus(text: str, op: Op = Op.SET) -> Claim:
    return _claim(CpuSet.parse(text), op, resource=CPUS)


def _schemata(text: str, op: Op = Op.SET) -> Claim:
    return _claim(text, op, resource=Resource.RESCTRL_SCHEMATA)


def _within(value: int, resource: Resource = QUOTA) -> Claim:
    return _claim(value, Op.WITHIN, resource=resource)


def _at_least(value: int, resource: Resource = QUOTA) -> Claim:
    return _claim(value, Op.AT_LEAST, resource=resource)


@pytest.mark.parametrize(
    ("claims", "requested", "value"),
    [
        ([_claim(5)], None, 5),
        ([_claim(5)], 9, 5),
        ([_claim(5), _claim(6, rank=Rank.POD)], None, 6),
        ([_claim(6, rank=Rank.POD), _claim(5)], None, 6),
        ([_claim(5), _claim(6)], None, 5),  # among equals the first policy's
        ([_claim(5, rank=Rank.SITE), _claim(6, rank=Rank.EMERGENCY)], None, 6),
        # modifiers of a claim, or of what kubelet requested
        ([_divide(2.0)], 400000, 200000),
        ([_divide(2.0)], None, None),
        ([_divide(1.14)], 400000, 350878),
        ([_claim(400000), _divide(2.0)], 7, 200000),
        ([_divide(2.0), _claim(400000)], 7, 200000),
        ([_divide(2.0), _divide(2.0)], 400000, 100000),
        ([_divide(2.0)], UNLIMITED, UNLIMITED),
        ([_claim(UNLIMITED), _divide(2.0)], 400000, UNLIMITED),
        ([_divide(0.5)], 400000, 400000),
        ([_divide(1000.0)], 2000, 1000),
        ([_multiply(1.2)], 200000, 240000),
        ([_multiply(597196 / 200000)], 200000, 597196),  # rounded to the nearest
        ([_multiply(1.2)], None, None),
        ([_multiply(3.0)], UNLIMITED, UNLIMITED),
        ([_multiply(0.5)], 200000, 200000),
        ([_multiply(3.0), _divide(1.14)], 400000, 1052634),  # of the divided quota
        ([_claim(UNLIMITED), _multiply(3.0)], 200000, UNLIMITED),
        ([_within(300000), _multiply(3.0)], 200000, 300000),
        ([_within(300)], 400, 300),
        ([_within(300)], 200, 200),
        ([_within(300)], UNLIMITED, 300),
        ([_within(UNLIMITED)], 200, 200),
        ([_at_least(300)], 200, 300),
        ([_at_least(300)], UNLIMITED, UNLIMITED),
        ([_at_least(UNLIMITED)], 200, UNLIMITED),
        # divide, then within, then at least, whatever the order of claims
        ([_at_least(5000), _within(3000), _divide(2.0)], 40000, 5000),
        ([_within(30000), _divide(2.0)], 40000, 20000),
        ([_claim(UNLIMITED, resource=LIMIT), _within(5, LIMIT)], None, 5),
        # -1 is an ordinary number where it is not "no limit"
        ([_claim(-1, resource=Resource.CPU_BVT), _within(2, Resource.CPU_BVT)], None, -1),
        # CPU sets
        ([_cpus("0-3"), _cpus("2-5", Op.WITHIN)], None, CpuSet.parse("2-3")),
        ([_cpus("0-3"), _cpus("6-7", Op.WITHIN)], None, CpuSet.parse("0-3")),
        ([_cpus("0-3"), _cpus("6", Op.AT_LEAST)], None, CpuSet.parse("0-3,6")),
        ([_cpus("2-5", Op.WITHIN)], CpuSet.parse("0-7"), CpuSet.parse("2-5")),
        # without a base the bounds of CPU sets are the value: all CPUs, within the bound
        ([_cpus("2-5", Op.WITHIN)], None, CpuSet.parse("2-5")),
        ([_cpus("2-5", Op.WITHIN), _cpus("4-7", Op.WITHIN)], None, CpuSet.parse("4-5")),
        ([_cpus("2-5", Op.WITHIN), _cpus("8", Op.AT_LEAST)], None, CpuSet.parse("2-5,8")),
        ([_cpus("8", Op.AT_LEAST)], None, None),
        ([_cpus("0-3"), _claim(3, Op.WITHIN, resource=CPUS)], None, CpuSet.parse("0-3")),
        # bandwidth of a schemata; masks stay
        (
            [_schemata("L3:0=f\nMB:0=80\n"), _schemata("MB:0=40\n", Op.WITHIN)],
            None,
            "L3:0=f\nMB:0=40\n",
        ),
        ([_schemata("MB:0=40\n"), _schemata("MB:0=80\n", Op.WITHIN)], None, "MB:0=40\n"),
        ([_schemata("MB:0=40\n", Op.WITHIN)], None, None),
    ],
)
def test_claims_become_one_value(claims: list[Claim], requested: Any, value: Any) -> None:
    outcome = compose(claims, requested)
    assert (None if outcome is None else outcome.value) == value


def test_an_outcome_separates_winner_modifiers_and_losers() -> None:
    low, high = _claim(400000, policy="low"), _claim(800000, rank=Rank.POD, policy="high")
    half, idle = _divide(2.0), _within(900000)
    outcome = compose([low, half, high, idle], None)
    assert outcome is not None
    assert (outcome.value, outcome.winner) == (400000, high)
    assert outcome.modifiers == (half,)
    assert set(outcome.losers) == {low, idle}


def test_modifiers_alone_have_a_winner_even_when_they_change_nothing() -> None:
    outcome = compose([_within(900), _at_least(100)], 500)
    assert outcome is not None
    assert outcome.value == 500 and outcome.winner == _within(900)
    assert outcome.losers == (_at_least(100),)


_NUMBERS = st.one_of(st.just(UNLIMITED), st.integers(1000, 10**7))
_CLAIMS = st.lists(
    st.builds(
        _claim,
        _NUMBERS,
        st.sampled_from(Op),
        st.sampled_from(Rank),
        policy=st.sampled_from("ABC"),
        factor=st.floats(1.0, 5.0),
    ),
    min_size=1,
    max_size=6,
)


@given(_CLAIMS, st.one_of(st.none(), _NUMBERS))
@settings(max_examples=200, deadline=None)
def test_every_claim_is_accounted_for_and_composing_twice_is_equal(
    claims: list[Claim], requested: int | None
) -> None:
    outcome = compose(claims, requested)
    assert outcome == compose(claims, requested)
    setters = [claim for claim in claims if claim.op is Op.SET]
    if not setters and requested is None:
        assert outcome is None
        return
    assert outcome is not None
    told = [outcome.winner, *outcome.modifiers, *outcome.losers]
    assert sorted(map(repr, told)) == sorted(map(repr, claims))
    if setters:
        assert outcome.winner.rank == max(claim.rank for claim in setters)


@given(_CLAIMS, _NUMBERS)
@settings(max_examples=200, deadline=None)
def test_the_bounds_hold_in_the_end(claims: list[Claim], requested: int) -> None:
    """The largest floor holds always, the smallest ceiling wherever no floor stands above it."""
    outcome = compose(claims, requested)
    assert outcome is not None and isinstance(outcome.value, int)

    def amount(value: Value) -> float:
        assert isinstance(value, int)
        return float("inf") if value == UNLIMITED else value

    floors = [amount(claim.value) for claim in claims if claim.op is Op.AT_LEAST]
    ceilings = [amount(claim.value) for claim in claims if claim.op is Op.WITHIN]
    value = amount(outcome.value)
    assert value >= max(floors, default=0)
    if ceilings:
        assert value <= max(min(ceilings), max(floors, default=0))


@given(st.permutations([_claim(1), _claim(2, rank=Rank.POD), _divide(2.0), _within(5)]))
def test_the_order_of_claims_does_not_matter_among_different_ranks(claims: list[Claim]) -> None:
    outcome = compose(claims, None)
    assert outcome is not None and outcome.value == compose(sorted(claims, key=repr), None).value  # type: ignore[union-attr]


# --- what the kernel does not let stand side by side -------------------------------------------


def _outcome(resource: Resource, value: int, rank: int = Rank.DEFAULT) -> Outcome:
    return Outcome(value=value, winner=_claim(value, rank=rank, resource=resource))


@pytest.mark.parametrize(
    ("idle", "idle_rank", "shares_rank", "left"),
    [
        (1, Rank.DEFAULT, Rank.DEFAULT, {Resource.CPU_IDLE}),
        (1, Rank.POD, Rank.DEFAULT, {Resource.CPU_IDLE}),
        (1, Rank.DEFAULT, Rank.POD, {SHARES}),
        (0, Rank.POD, Rank.DEFAULT, {Resource.CPU_IDLE, SHARES}),
    ],
)
def test_cpu_idle_and_cpu_shares(
    idle: int, idle_rank: int, shares_rank: int, left: set[Any]
) -> None:
    outcomes = {
        (Resource.CPU_IDLE, ""): _outcome(Resource.CPU_IDLE, idle, idle_rank),
        (SHARES, ""): _outcome(SHARES, 1024, shares_rank),
    }
    settled = resolve_conflicts(outcomes)
    assert {resource for resource, _ in settled} == left
    told = [
        claim.resource
        for outcome in settled.values()
        for claim in (outcome.winner, *outcome.losers)
    ]
    assert sorted(told) == sorted([Resource.CPU_IDLE, SHARES])


def test_settling_leaves_everything_else_alone() -> None:
    outcomes = {(SHARES, ""): _outcome(SHARES, 2), (QUOTA, ""): _outcome(QUOTA, 1000)}
    assert resolve_conflicts(outcomes) == outcomes
