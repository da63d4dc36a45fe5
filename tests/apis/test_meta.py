"""Shapes that kinds share: times, durations and label selectors, as Kubernetes writes and reads."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.meta import (
    LabelSelector,
    LabelSelectorRequirement,
    format_duration,
    format_micro_time,
    format_time,
    label_key_problem,
    label_value_problem,
    matches,
    parse_duration,
    parse_time,
    selector_problem,
)

_SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-01-31T12:00:00Z", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ("2026-01-31T12:00:00.25Z", datetime(2026, 1, 31, 12, 0, 0, 250_000, tzinfo=UTC)),
        ("2026-01-31T12:00:00.123456789Z", datetime(2026, 1, 31, 12, 0, 0, 123_456, tzinfo=UTC)),
        ("2026-01-31T12:00:00+05:30", datetime(2026, 1, 31, 6, 30, tzinfo=UTC)),
        ("2026-01-31T22:00:00-02:30", datetime(2026, 2, 1, 0, 30, tzinfo=UTC)),
        ("2016-12-31T23:59:60Z", datetime(2016, 12, 31, 23, 59, 59, tzinfo=UTC)),
    ],
)
def test_a_time_is_read_in_utc(text: str, moment: datetime) -> None:
    assert parse_time(text) == moment


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2026-01-31",
        "2026-01-31 12:00:00Z",
        "2026-W05-6T12:00:00Z",
        "2026-01-31T120000+0Z",
        "2026-13-01T00:00:00Z",
        "9999-12-31T23:59:00-01:00",
    ],
)
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"RFC 3339|month|years 1 to 9999"):
        parse_time(text)


@given(st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)))
def test_times_read_back(moment: datetime) -> None:
    assert parse_time(format_micro_time(moment)) == moment
    assert parse_time(format_time(moment)) == moment.replace(microsecond=0)


@pytest.mark.parametrize(
    ("text", "nanoseconds", "written"),
    [
        ("0", 0, "0s"),
        ("1ns", 1, "1ns"),
        ("1.5us", 1500, "1.5µs"),
        ("1µs", 1000, "1µs"),
        ("1μs", 1000, "1µs"),
        ("999.999ms", 999_999_000, "999.999ms"),
        ("1.5s", 3 * _SECOND // 2, "1.5s"),
        ("60s", 60 * _SECOND, "1m0s"),
        ("1h30m", 5400 * _SECOND, "1h30m0s"),
        ("24h", 86400 * _SECOND, "24h0m0s"),
        ("-2m", -120 * _SECOND, "-2m0s"),
        ("-1ns", -1, "-1ns"),
        ("+.5s", _SECOND // 2, "500ms"),
    ],
)
def test_durations_are_read_and_written_as_go_does(
    text: str, nanoseconds: int, written: str
) -> None:
    assert parse_duration(text) == nanoseconds
    assert format_duration(nanoseconds) == written


@pytest.mark.parametrize(
    "text", ["", "1", "-", "s", ".s", "1d", "1h 2m", "9999999h", "1" * 70 + "s"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)


@given(st.integers(-(2**63) + 1, 2**63 - 1))
def test_durations_read_back(nanoseconds: int) -> None:
    assert parse_duration(format_duration(nanoseconds)) == nanoseconds


def requirement(operator: str, *values: str, key: str = "zone") -> LabelSelector:
    return LabelSelector(match_expressions=(LabelSelectorRequirement(key, operator, values),))


@pytest.mark.parametrize(
    ("selector", "with_a", "with_b", "without"),
    [
        (None, False, False, False),
        (LabelSelector(), True, True, True),
        (LabelSelector(match_labels={"zone": "a"}), True, False, False),
        (requirement("In", "a", "c"), True, False, False),
        (requirement("NotIn", "a", "c"), False, True, True),
        (requirement("Exists"), True, True, False),
        (requirement("DoesNotExist"), False, False, True),
        (requirement("Within", "a"), False, False, False),
    ],
)
def test_which_labels_a_selector_matches(
    selector: LabelSelector | None, with_a: bool, with_b: bool, without: bool
) -> None:
    assert matches(selector, {"zone": "a", "other": "x"}) is with_a
    assert matches(selector, {"zone": "b"}) is with_b
    assert matches(selector, {}) is without


@pytest.mark.parametrize(
    ("selector", "problem"),
    [
        (LabelSelector(match_labels={"example.com/zone": "a"}), None),
        (LabelSelector(match_labels={"zone": ""}), None),
        (LabelSelector(match_labels={"-zone": "a"}), "the name of a label key"),
        (LabelSelector(match_labels={"Example.com/zone": "a"}), "the prefix of a label key"),
        (LabelSelector(match_labels={"zone": "a b"}), "a label value"),
        (requirement("In"), "In needs values"),
        (requirement("NotIn"), "NotIn needs values"),
        (requirement("Exists", "a"), "Exists takes no values"),
        (requirement("DoesNotExist", "a"), "DoesNotExist takes no values"),
        (requirement("Within", "a"), "is not an operator"),
        (requirement("In", "a", "b/c"), "a label value"),
        (requirement("In", "a", key=""), "the name of a label key"),
    ],
)
def test_a_selector_that_the_api_server_refuses_is_named(
    selector: LabelSelector, problem: str | None
) -> None:
    found = selector_problem(selector)
    assert found is None if problem is None else problem in (found or "")


def test_lengths_of_labels() -> None:
    assert label_key_problem("a" * 63) is None
    assert label_key_problem("a" * 64) is not None
    assert label_key_problem("a" * 253 + "/b") is None
    assert label_key_problem("a" * 254 + "/b") is not None
    assert label_value_problem("a" * 63) is None
    assert label_value_problem("a" * 64) is not None
