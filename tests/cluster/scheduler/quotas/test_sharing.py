"""How a parent's amount is divided: the worked examples, and properties against an oracle."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.tables.quotas.sharing import Claim, Columns, divide, scaled_minimums
from tests.cluster.scheduler.quotas.oracle import Plain, limited_requests, runtimes


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        (
            [Claim("a", 80, 40, 60), Claim("b", 20, 30, 40), Claim("c", 60, 10, 40)],
            [58, 20, 22],
        ),
        (
            [Claim("a", 100, 10, 3), Claim("b", 100, 10, 3), Claim("c", 15, 10, 1)],
            [43, 42, 15],
        ),
        ([Claim("a", 20, 40, 1, lends=False), Claim("b", 100, 0, 1)], [40, 60]),
        ([Claim("a", 100, 10, 0), Claim("b", 100, 10, 1)], [10, 90]),
        ([Claim("a", 100, 10, 0), Claim("b", 20, 10, 0)], [10, 10]),
        ([Claim("a", 100, 10, 1, guaranteed=70), Claim("b", 100, 10, 1)], [80, 20]),
        # What c requests is its minimum, so c takes part in nothing else, not even in rounding.
        ([Claim("a", 99, 10, 1), Claim("b", 99, 10, 1), Claim("c", 76, 76, 1)], [12, 12, 76]),
        ([Claim("a", 99, 0, 2), Claim("b", 99, 0, 1), Claim("c", 10, 0, 1)], [60, 30, 10]),
    ],
)
def test_a_total_of_100_is_divided_by_minimum_then_weight(
    claims: list[Claim], expected: list[int]
) -> None:
    assert divide(100, claims, scale=True) == expected
    columns = Columns.of(claims)
    guarantees = any(claim.guaranteed for claim in claims)
    assert (columns is None) is guarantees
    if columns is not None:
        shares = columns.divide(100, scale=True)
        assert shares is not None
        assert shares.tolist() == expected


def test_what_exceeds_the_bounds_of_columns_is_divided_by_exact_integers() -> None:
    huge = 2**61
    claims = [Claim("a", huge, 0, huge), Claim("b", huge, 0, huge)]
    assert Columns.of(claims) is None
    assert divide(2**40 + 1, claims, scale=True) == [2**39 + 1, 2**39]
    small = Columns.of([Claim("a", 10, 0, 1)])
    assert small is not None
    assert small.divide(2**52, scale=True) is None
    assert small.divide(2**52 - 1, scale=True) is not None
    assert not small.set_request("a", 2**60)
    assert small.set_request("a", 2**60 - 1)


@pytest.mark.parametrize(
    ("claim", "bounded"),
    [
        (Claim("a", 2**60, 0, 1), False),
        (Claim("a", 2**60 - 1, 0, 1), True),
        (Claim("a", 1, 2**60, 1), False),
        (Claim("a", 1, 0, 2**60), False),
        (Claim("a", 1, 2**60 - 1, 2**60 - 1), True),
    ],
)
def test_columns_hold_amounts_and_weights_below_2_to_the_60(claim: Claim, bounded: bool) -> None:
    assert (Columns.of([claim]) is not None) is bounded


def test_the_last_unit_goes_to_the_largest_remainder_where_floating_point_is_off_by_one() -> None:
    claims = [
        Claim(name, 2**59, 0, weight) for name, weight in zip("abc", (403, 493, 378), strict=True)
    ]
    columns = Columns.of(claims)
    assert columns is not None
    shares = columns.divide(99645, scale=True)
    assert shares is not None
    assert shares.tolist() == [31520, 38560, 29565] == divide(99645, claims, scale=True)


def test_minimums_are_reduced_in_proportion_where_the_total_is_short() -> None:
    assert scaled_minimums(60, [40, 30, 10]) == [30, 22, 7]
    assert scaled_minimums(80, [40, 30, 10]) == [40, 30, 10]
    assert scaled_minimums(-5, [40, 30, 10]) == [0, 0, 0]


def test_without_scaling_minimums_count_in_full() -> None:
    claims = [Claim("a", 80, 40, 1), Claim("b", 80, 30, 1)]
    assert divide(60, claims, scale=False) == [40, 30]


def test_the_last_unit_of_reduced_minimums_goes_to_those_that_request_more() -> None:
    claims = [Claim(name, 100, least, 1) for name, least in (("a", 40), ("b", 30), ("c", 10))]
    assert sum(divide(60, claims, scale=True)) == 60


_AMOUNT = st.one_of(st.integers(0, 60), st.integers(0, 2**52), st.integers(0, 2**62))


@settings(max_examples=60)
@given(
    total=_AMOUNT,
    claims=st.lists(
        st.tuples(_AMOUNT, _AMOUNT, _AMOUNT, st.one_of(st.integers(0, 5), _AMOUNT), st.booleans()),
        max_size=7,
    ),
    scale=st.booleans(),
)
def test_shares_are_those_of_the_oracle(
    total: int, claims: list[tuple[int, int, int, int, bool]], scale: bool
) -> None:
    quotas = {
        f"q{at}": Plain(f"q{at}", "", least, least + more, weight, lends, wanted)
        for at, (wanted, least, more, weight, lends) in enumerate(claims)
    }
    requests = limited_requests(quotas)
    plain = [
        Claim(each.name, requests[each.name], each.least, each.weight, each.lends)
        for each in quotas.values()
    ]
    shares = divide(total, plain, scale=scale)
    columns = Columns.of(plain)
    fast = None if columns is None else columns.divide(total, scale=scale)
    if fast is not None:
        assert fast.tolist() == shares
    assert dict(zip(quotas, shares, strict=True)) == runtimes(quotas, total, scale=scale)
    if scale:
        assert sum(shares) <= total
    if sum(shares) < total:
        hungry = [
            q
            for q, share in zip(quotas.values(), shares, strict=True)
            if q.weight and share < requests[q.name]
        ]
        assert not hungry


@pytest.mark.parametrize("total", [-5, 0])
@pytest.mark.parametrize("least", [0, 30])
def test_where_nothing_is_left_only_what_is_not_lent_in_full_is_given(
    total: int, least: int
) -> None:
    claims = [Claim("a", 50, least, 1), Claim("b", 20, 40, 1, lends=False)]
    columns = Columns.of(claims)
    assert columns is not None
    for scale, expected in ((True, [0, 0]), (False, [least, 40])):
        assert divide(total, claims, scale=scale) == expected
        found = columns.divide(total, scale=scale)
        assert found is not None and found.tolist() == expected
    idle = [Claim("a", 50, 0, 1), Claim("b", 0, 0, 1)]
    none = Columns.of(idle)
    assert none is not None
    found = none.divide(total, scale=True)
    assert found is not None and found.tolist() == divide(total, idle, scale=True) == [0, 0]
