"""What an annotation means is worked out once, for good texts and for bad ones."""

from __future__ import annotations

import pytest

from apis.decode import Decoded, remembered
from apis.errors import InputError


@pytest.mark.parametrize("length", [10, 100_000])
def test_a_bad_text_is_judged_once_and_named_for_each_pod(length: int) -> None:
    judged: list[str] = []

    def judge(text: str) -> Decoded[int]:
        judged.append(text)
        raise InputError(obj="", field="metadata.annotations", value=text, problem="is bad")

    parse = remembered(judge, int, field="x")
    text = "x" * length
    for obj in ("Pod default/a", "Pod default/b", "Pod default/a"):
        with pytest.raises(InputError, match="is bad") as caught:
            parse(text, obj)
        assert caught.value.obj == obj
    assert judged == [text]


@pytest.mark.parametrize("length", [10, 100_000])
def test_a_good_text_is_parsed_once(length: int) -> None:
    parsed: list[str] = []

    def measure(text: str) -> Decoded[int]:
        parsed.append(text)
        return Decoded(len(text))

    parse = remembered(measure, int, field="x")
    assert [parse("x" * length, "Pod default/a") for _ in range(3)] == [length] * 3
    assert len(parsed) == 1
