"""Converting plain data leniently: every mistake is named where it stands, and costs itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.fields import dotted, parse_dotted
from apis.lenient import MAX_ERRORS, convert_leniently


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    size: int = 1


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    numbers: list[int] = []
    inners: dict[str, Inner] = {}
    keyed: dict[int, str] = {}
    deep: list[dict[str, list[int]]] = []
    inner: Inner | None = None


@pytest.mark.parametrize(
    ("tree", "named", "value"),
    [
        pytest.param({}, [], Outer(), id="nothing wrong"),
        pytest.param(
            {"numbers": ["a", 1, "b", 2, "c"]},
            ["numbers[0]", "numbers[2]", "numbers[4]"],
            Outer(numbers=[1, 2]),
            id="elements keep the places that the file gives them",
        ),
        pytest.param(
            {"inners": {"good": {"name": "g"}, "bad one": {"name": "b", "size": "x"}}},
            ['inners["bad one"].size'],
            Outer(inners={"good": Inner("g"), "bad one": Inner("b")}),
            id="the member of a map that is at fault",
        ),
        pytest.param(
            {"deep": [{"a": [1]}, {"b": [1, 2], "c": [3, "x"]}]},
            ["deep[1].c[1]"],
            Outer(deep=[{"a": [1]}, {"b": [1, 2], "c": [3]}]),
            id="lists in maps in lists",
        ),
        pytest.param(
            {"keyed": {"x": "a"}, "numbers": [1]},
            ["keyed"],
            Outer(numbers=[1]),
            id="a bad key costs its map",
        ),
        pytest.param(
            {"inner": {"name": "n", "siez": 3}, "numers": [1]},
            ["numers", "inner.siez"],
            Outer(inner=Inner("n")),
            id="unknown fields",
        ),
        pytest.param(
            {"inner": {"size": 3}, "numbers": [1]},
            ["inner"],
            Outer(numbers=[1]),
            id="an object without what it must have",
        ),
    ],
)
def test_each_bad_field_is_named_and_left_out(
    tree: dict[str, Any], named: list[str], value: Outer
) -> None:
    before = repr(tree)
    result, errors = convert_leniently(tree, Outer, obj="file")
    assert sorted(each.field for each in errors) == sorted(named)
    assert result == value
    assert repr(tree) == before


def test_the_error_for_an_unknown_field_suggests_a_similar_one() -> None:
    _, [near] = convert_leniently({"numbrs": [1]}, Outer, obj="file")
    assert (near.problem, near.hint) == ("unknown field", "did you mean numbers?")
    _, [far] = convert_leniently({"inner": {"name": "n", "zzz": 1}}, Outer, obj="file")
    assert (far.field, far.hint) == ("inner.zzz", "known fields: name, size")


def test_nothing_is_saved_where_what_must_be_there_is_missing() -> None:
    result, [error] = convert_leniently({"size": 2}, Inner, obj="file")
    assert result is None
    assert (error.field, error.problem) == ("(whole object)", "name is missing")


def test_after_many_errors_the_object_as_a_whole_is_bad() -> None:
    result, errors = convert_leniently({"numbers": ["x"] * 1000}, Outer, obj="file")
    assert result is None
    assert len(errors) == MAX_ERRORS


def test_the_members_of_a_very_large_map_are_not_tried_one_by_one() -> None:
    tree: dict[str, Any] = {"inners": {str(n): {"name": "n"} for n in range(2000)}, "numbers": [1]}
    tree["inners"]["1999"] = 7
    result, [error] = convert_leniently(tree, Outer, obj="file")
    assert error.field == "inners"
    assert result == Outer(numbers=[1])


@given(st.lists(st.integers(0, 99) | st.text(st.characters(exclude_characters='"'), min_size=1)))
def test_a_path_reads_back_as_it_is_written(path: list[str | int]) -> None:
    assert parse_dotted(dotted(path)) == tuple(path)
