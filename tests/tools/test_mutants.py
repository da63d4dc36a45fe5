"""Which faults are planted in a source, and where none is."""

from __future__ import annotations

import textwrap

import pytest

from tools.mutants import diff, is_a_change, sites


def mutants(source: str) -> list[str]:
    """Return every mutant of a source, as text."""
    original = textwrap.dedent(source).strip().encode()
    return [
        edit.apply(original).decode()
        for site in sites(original)
        for edit in site.edits
        if is_a_change(original, edit)
    ]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", ["(a <= b)", "(a >= b)"]),
        ("a is None", ["(a is not None)"]),
        ("1 <= a < b", ["(1 < a < b)", "(1 > a < b)", "(1 <= a <= b)", "(1 <= a >= b)"]),
        ("a and b", ["(a or b)", "b", "a"]),
        ("not a", ["a"]),
        ("-a", ["a"]),
        ("a if b else c", ["a if (not b) else c"]),
        ("[a for a in b if a > c]", ["[a for a in b if True]", "[a for a in b if (a >= c)]"]),
        ("a + b", ["(a - b)"]),
        ("max(a, b)", ["min(a, b)"]),
        ("f(a, b)", ["f(b, a)"]),
        ("a.items()", ["a.values()"]),
        ("f(a, key=b)", ["f(a)"]),
        ("f(a, help='text')", []),
        ("zip(a, b, strict=True)", ["zip(b, a, strict=True)"]),
        ("np.maximum(a, b)", []),
        ("True", ["False"]),
        ("a[5]", ["a[6]", "a[4]"]),
        ("a['key']", ["a['keyX']"]),
        ("'a text for people'", []),
        ("f'{a < b} tasks'", []),
        ("'two words' + a", []),
    ],
)
def test_an_expression_can_be_wrong_in_these_ways(source: str, expected: list[str]) -> None:
    found = mutants(f"def function():\n    x = {source}")
    assert set(expected) <= {text.removeprefix("def function():\n    x = ") for text in found}
    assert expected or not found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("self.a = b", ["pass"]),
        ("a = b", []),
        ("a += b", ["a -= b", "pass"]),
        ("run()", ["pass"]),
        ("raise error", ["pass"]),
        ("return a", ["return None"]),
        ("return None", []),
        ("return", ["pass"]),
        ("assert isinstance(a, str) and a > 1", []),
        ("_log.warning('%d', a + 1)", []),
        ("_LOG.warning('%d', a + 1)", []),
        ('"""A docstring."""', []),
    ],
)
def test_a_statement_can_be_wrong_in_these_ways(source: str, expected: list[str]) -> None:
    found = mutants(f"def function(self, a, b):\n    {source}")
    head = "def function(self, a, b):\n    "
    assert {text.removeprefix(head) for text in found} == set(expected)


def test_loops_and_handlers_are_left_too_early_and_too_late() -> None:
    found = mutants(
        """
        def function():
            for a in b:
                try:
                    continue
                except KeyError:
                    c.d = 1
                    break
        """
    )
    assert any("            break\n        except" in text for text in found)
    assert any(text.endswith("continue") for text in found)
    assert any(text.endswith("except KeyError:\n            raise") for text in found)


def test_what_serves_readers_and_the_type_checker_stays() -> None:
    assert not mutants(
        '''
        """A module."""
        from typing import TYPE_CHECKING, Protocol, cast
        if TYPE_CHECKING:
            a = 1
        __all__ = ["b"]
        class Host(Protocol, metaclass=meta(1)):
            def read(self, size: int = 4) -> bytes: ...
        @decorated("name", 1)
        def function(one: Literal["key"], two: int | None) -> dict[str, 1]:
            two = cast("Other", one)
        if __name__ == "__main__":
            main()
        '''
    )


def test_places_behind_wide_characters_and_over_lines_are_met() -> None:
    found = mutants('def function():\n    ä = "µs µs"; run(ä, ö == (\n        1\n    ))')
    assert any("run(ä, (ö != 1))" in text for text in found)


def test_a_mutant_that_does_not_compile_or_differ_is_none() -> None:
    source = b"def function():\n    return ({'a': b} | c)\n"
    changes = [edit for site in sites(source) for edit in site.edits]
    assert all(is_a_change(source, edit) for edit in changes)
    same = changes[0].__class__(0, 3, "def", "none")
    broken = changes[0].__class__(0, 3, "deaf", "broken")
    assert not is_a_change(source, same)
    assert not is_a_change(source, broken)


def test_a_diff_names_the_module_and_the_kind() -> None:
    source = b"def function(a):\n    return a < 1\n"
    (edit,) = [e for site in sites(source) for e in site.edits if e.text == "(a <= 1)"]
    shown = diff("hooks/amounts.py", source, edit)
    assert "+++ hooks/amounts.py (comparison)" in shown
    assert "-    return a < 1\n+    return (a <= 1)\n" in shown
