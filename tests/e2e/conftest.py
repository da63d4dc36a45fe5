"""One containerd of each generation for each module, and shorthands for reading it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.beds.containerd import GENERATIONS, Containerd, Generation, containerd


@pytest.fixture(scope="module", params=GENERATIONS)
def bed(request: pytest.FixtureRequest) -> Iterator[Containerd]:
    generation: Generation = request.param
    with containerd(generation) as running:
        yield running
