"""How long the pauses between the tries of a request are."""

from __future__ import annotations

import asyncio

import pytest

from cluster.scheduler.binding.pauses import Pauses
from tests.cluster.fake_api import in_virtual_time


def _rested(pauses: Pauses, *at_least_s: float) -> list[float]:
    """Return the lengths of the next pauses. at_least_s: what the server asks for, for each."""
    lengths = []

    async def run() -> None:
        clock = asyncio.get_running_loop().time
        for asked in at_least_s:
            began = clock()
            await pauses.rest(at_least_s=asked)
            lengths.append(round(clock() - began, 6))

    in_virtual_time(run)
    return lengths


@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_pauses_double_up_to_a_bound_and_begin_again(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    monkeypatch.setattr("random.uniform", lambda least, most: {0.5: least, 1.5: most}[factor])
    pauses = Pauses(1.0, 5.0)
    assert _rested(pauses, 0, 0, 0, 0, 0) == [each * factor for each in (1, 2, 4, 5, 5)]
    pauses.begin_again()
    assert _rested(pauses, 0, 0) == [1 * factor, 2 * factor]


def test_the_server_may_ask_for_longer_pauses_up_to_the_bound() -> None:
    assert _rested(Pauses(0.001, 5.0), 3, 4, 60) == [3, 4, 5]


def test_a_binding_is_tried_for_about_six_seconds_until_a_failing_server_refuses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("random.uniform", lambda least, most: (least + most) / 2)
    assert _rested(Pauses(), *[0] * 7) == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10]
