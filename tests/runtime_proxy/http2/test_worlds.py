"""Whatever legal peers do, the relay is a legal peer to both, loses nothing and keeps nothing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime_proxy.http2.worlds import World


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_nothing_is_lost_and_nobody_waits_in_any_world(seed: int) -> None:
    World(seed).run(steps=120)
