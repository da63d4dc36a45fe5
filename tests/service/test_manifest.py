"""YAML text within bounds: hostile shapes end in an error that says where, and quickly."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from service.manifest import NotYaml, document, documents


def read(text: str, *, most_values: int = 1000) -> list[Any]:
    return documents(text, most_values=most_values)


def layers(line: str, first: str, count: int = 60) -> str:
    """Return lines of which each names the one before it several times."""
    lines = [f"m0: &m0 {first}"]
    lines += [line.format(new=f"m{i}: &m{i}", old=f"*m{i - 1}") for i in range(1, count)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "nested deeper than 64 levels at line 1, column 65"),
        ('{"a":' * 100_000, "nested deeper than 64 levels"),
        ("- " * 100_000, "nested deeper than 64 levels"),
        (layers("{new} [{old}, {old}, {old}]", "[x]"), "more than 1000 values at line"),
        (layers("{new} {{<<: [{old}, {old}, {old}]}}", "{k: v}"), "more than 1000 values"),
        ("[" + "1," * 2000 + "1]", "more than 1000 values"),
        ("a: &a [*a]", "'a' contains itself at line 1, column 8"),
        ("a: &a {<<: *a}", "'a' contains itself"),
        ("a: *b", "nothing is called 'b' at line 1, column 4"),
        ("a: &a 1\n---\nb: *a", "undefined|nothing is called 'a'"),
        ("a: 1\na: 2", "the key 'a' stands twice at line 2, column 1"),
        ("<<: 1", "<< takes mappings"),
        ("[1]: 2", "a key has to be text"),
        ("? *x", "nothing is called 'x'"),
        ("k: &k [1]\n*k : 2", "a key has to be text"),
        ("1" * 5000, "a number of 5000 characters"),
        ("0x" + "f" * 5000, "a number of 5002 characters"),
        ("!!python/object:os.system {}", "'python/object:os.system' is not read here"),
        ("!!binary aGk=", "is no 'binary'"),
        ("!!int many", "'many' is no 'int'"),
        ("a: [1", "line 2, column 1|line 1, column 6"),
        ("a:\tb: c", "line 1"),
        ("\0", "control characters are not allowed"),
    ],
)
def test_what_is_not_read_is_refused_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(NotYaml, match=problem):
        read(text)


def test_aliases_count_for_depth_too() -> None:
    with pytest.raises(NotYaml, match="nested deeper than 64 levels at line 63"):
        read(layers("{new} [{old}]", "[x]", 70), most_values=10_000)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2020-01-01", "2020-01-01"),
        ("9:30", "9:30"),
        ("0000:00:08.0", "0000:00:08.0"),
        ("1" * 64 + "x", "1" * 64 + "x"),
        ("0x_", "0x_"),
        ("=", "="),
        ("'1'", "1"),
        ("!!str 1", "1"),
        ("!!int 1", 1),
        ("010", 8),
        ("-0x1F", -31),
        ("", None),
    ],
)
def test_scalars_are_read_as_kubernetes_reads_them(text: str, value: Any) -> None:
    assert read(f"- {text}") == [[value]]


def test_merged_keys_stand_behind_those_written_out() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {y: 3, <<: [*a, {x: 8, z: 9}]}"
    assert document(text, most_values=100)["b"] == {"x": 1, "y": 3, "z": 9}


def test_anchors_end_with_their_document_and_empty_documents_are_kept() -> None:
    assert read("a: &a 1\nb: *a\n---\n---\nc: 1") == [{"a": 1, "b": 1}, None, {"c": 1}]
    assert read("") == []


def test_one_document_is_one_document() -> None:
    assert document("", most_values=9) is None
    with pytest.raises(NotYaml, match="more than one document"):
        document("a: 1\n---\nb: 2", most_values=9)


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
)
_TREES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(_TREES, st.booleans())
def test_what_is_dumped_is_read_again(tree: Any, flow: bool) -> None:
    text = yaml.safe_dump(tree, default_flow_style=flow)
    assert document(text, most_values=10_000) == tree


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab:-[]{}&*<!|>'\"# \n,?~1.", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(NotYaml):
        read(text)
