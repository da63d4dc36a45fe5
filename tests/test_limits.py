"""Every test has a time limit."""

from __future__ import annotations

import pytest

from tests.conftest import LIMIT_S, LONG_LIMIT_S


def limit_s(request: pytest.FixtureRequest) -> float:
    marker = request.node.get_closest_marker("timeout")
    assert marker is not None
    return float(marker.args[0])


def test_a_test_ends_within_the_limit(request: pytest.FixtureRequest) -> None:
    assert limit_s(request) == LIMIT_S


@pytest.mark.long
def test_a_long_test_has_a_longer_one(request: pytest.FixtureRequest) -> None:
    assert limit_s(request) == LONG_LIMIT_S


@pytest.mark.timeout(7)
def test_a_test_may_have_its_own(request: pytest.FixtureRequest) -> None:
    assert limit_s(request) == 7
