"""These tests are made of refusals and lost connections: the daemon need not tell of each."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet_daemon() -> Iterator[None]:
    logger = logging.getLogger("koordlet")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
