"""Quantities: exact amounts with one canonical text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.quantity import Notation, Quantity, add_resources, max_resources, parse_quantity


@pytest.mark.parametrize(
    ("text", "canonical", "value", "milli"),
    [
        ("4000", "4k", 4000, 4_000_000),
        ("4200", "4200", 4200, 4_200_000),
        ("17179869184", "17179869184", 17179869184, 17179869184000),
        ("16Gi", "16Gi", 16 * 1024**3, 16 * 1024**3 * 1000),
        ("1024Mi", "1Gi", 1024**3, 1024**3 * 1000),
        ("1025Ki", "1025Ki", 1025 * 1024, 1025 * 1024 * 1000),
        ("1048577", "1048577", 1048577, 1048577000),
        ("1.5Gi", "1536Mi", 1536 * 1024**2, 1536 * 1024**2 * 1000),
        ("0.1Ki", "102400m", 103, 102400),
        ("1100", "1100", 1100, 1_100_000),
        ("1000m", "1", 1, 1000),
        ("0.5m", "500u", 1, 1),
        ("100n", "100n", 1, 1),
        ("0.1n", "1n", 1, 1),
        ("-1.5", "-1500m", -2, -1500),
        ("1e3", "1e3", 1000, 1_000_000),
        ("12E6", "12e6", 12_000_000, 12_000_000_000),
        ("1E", "1E", 10**18, 10**21),
        ("0Gi", "0", 0, 0),
        ("+5k", "5k", 5000, 5_000_000),
        (".5", "500m", 1, 500),
        ("1.", "1", 1, 1000),
        ("9999999999E", "9223372036854775807", 2**63 - 1, (2**63 - 1) * 1000),
        ("1e999999", "9223372036854775807e0", 2**63 - 1, (2**63 - 1) * 1000),
    ],
)
def test_a_text_prints_canonically_and_rounds_up(
    text: str, canonical: str, value: int, milli: int
) -> None:
    got = parse_quantity(text)
    assert str(got) == canonical.removesuffix("e0")
    assert (got.value(), got.milli_value()) == (value, milli)


@pytest.mark.parametrize(
    "text", ["", ".", " 1", "1 ", "1ki", "1mm", "e3", "1e", "1Gi2", "١", "0x10", "1" * 65, "--1"]
)
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="quantity"):
        parse_quantity(text)


def test_json_numbers_are_quantities_and_booleans_are_not() -> None:
    assert str(parse_quantity(1.5)) == "1500m"
    assert str(parse_quantity(3000)) == "3k"
    with pytest.raises(ValueError, match="boolean"):
        parse_quantity(True)


def test_equality_is_numeric_and_a_sum_keeps_the_notation_of_what_it_sums() -> None:
    assert parse_quantity("1Gi") == parse_quantity(str(1024**3))
    total = add_resources({"memory": parse_quantity("0")}, {"memory": parse_quantity("1Gi")})
    assert str(total["memory"]) == "1Gi"
    largest = max_resources([{"cpu": parse_quantity("1")}, {"cpu": parse_quantity("1500m")}])
    assert str(largest["cpu"]) == "1500m"


def test_a_quantity_does_not_change() -> None:
    with pytest.raises(AttributeError):
        parse_quantity("1")._nano = 3


@settings(max_examples=200)
@given(
    st.integers(-(2**62), 2**62),
    st.sampled_from(list(Notation)),
)
def test_canonical_text_reads_back_as_the_same_amount(nano: int, notation: Notation) -> None:
    quantity = Quantity(nano, notation)
    again = parse_quantity(str(quantity))
    assert again == quantity
    assert str(again) == str(quantity)


@settings(max_examples=100)
@given(st.text(max_size=20))
def test_any_text_parses_or_raises_value_error(text: str) -> None:
    try:
        parse_quantity(text)
    except ValueError:
        return
