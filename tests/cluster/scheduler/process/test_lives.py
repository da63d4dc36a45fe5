"""Random lives with nodes, plain pods and gangs."""

from __future__ import annotations

from hypothesis import settings

from tests.cluster.scheduler.beds.lives import Lives

Lives.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestLives = Lives.TestCase
