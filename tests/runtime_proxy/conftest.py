"""A hook server beside the proxy that a module's own fixture `running` starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime_proxy.processes import STAGES, HookService, Proxy, hook_service


@pytest.fixture
def service(running: Proxy) -> Iterator[HookService]:
    with hook_service(running.folder / "hook.sock") as started:
        running.register(started.socket, STAGES)
        yield started
