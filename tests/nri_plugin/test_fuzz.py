"""A short run of the fuzzer; `python -m tests.nri_plugin.fuzz --seconds 600` is the long one."""

from __future__ import annotations

from tests.nri_plugin.fuzz import run_seeds


def test_a_few_hundred_seeds_find_nothing() -> None:
    assert run_seeds(1, lambda played: played < 400) == 400
