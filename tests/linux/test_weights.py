"""Shares and weights: both formulas, and finding out which one siblings use."""

from __future__ import annotations

import pytest

from linux.weights import Formula, detect, weight_of_shares


@pytest.mark.parametrize(
    ("shares", "linear", "quadratic"),
    [(2, 1, 1), (5, 1, 2), (102, 4, 17), (512, 20, 59), (1024, 39, 100), (2048, 79, 174),
     (4096, 157, 303), (16384, 625, 942), (262144, 10000, 10000)],
)  # fmt: skip
def test_both_formulas_on_known_values(shares: int, linear: int, quadratic: int) -> None:
    assert weight_of_shares(shares, Formula.LINEAR) == linear
    assert weight_of_shares(shares, Formula.QUADRATIC) == quadratic


@pytest.mark.parametrize(("shares", "weight"), [(-1, 1), (0, 1), (1 << 30, 10000)])
def test_shares_out_of_range_are_clamped(shares: int, weight: int) -> None:
    assert {weight_of_shares(shares, formula) for formula in Formula} == {weight}


@pytest.mark.parametrize(
    ("samples", "formula"),
    [
        ([], None),
        ([(2, 1), (262144, 10000)], None),  # fits both
        ([(1024, 77)], None),  # fits neither: somebody set it
        ([(1024, 39)], Formula.LINEAR),
        ([(1024, 100), (2048, 174), (512, 20)], Formula.QUADRATIC),
        ([(1024, 100), (512, 20)], None),
    ],
)
def test_the_majority_of_conclusive_samples_decides(
    samples: list[tuple[int, int]], formula: Formula | None
) -> None:
    assert detect(samples) is formula
