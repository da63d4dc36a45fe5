"""An NRI plugin with our transport and nothing behind it: the least that Python can take.

    python -m benchmarks.nri_hook_latency --load --other 'python -m benchmarks.bare_plugin {socket}'

It receives every event, parses it and answers without values. It has one thread, scheduled as
koordlet's event loop, and no garbage collections. What koordlet takes beyond it is koordlet's own:
state, decisions, replies, and the threads that measure and reconcile.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence

import uvloop

from benchmarks.running import run_main
from hooks.decision import Decision, ResourceKey
from hooks.observed import Container, Sandbox
from nri_plugin.capabilities import RuntimeProfile
from nri_plugin.options import Options
from nri_plugin.supervisor import Supervisor
from service.scheduling import schedule_event_loop


class Silent:
    """A handler that wants nothing."""

    def resctrl_groups(self) -> Collection[str]:
        return ()

    def configured(self, runtime: RuntimeProfile) -> None: ...

    def list_overdue(self, reason: str) -> None: ...

    def now(self) -> int:
        return 0

    def synchronize(
        self,
        sandboxes: Sequence[Sandbox],
        containers: Sequence[Container],
        *,
        taken_at: int | None = None,
    ) -> Iterable[tuple[str, Decision]]:
        return ()

    def unrepairable(self, container: Container, lacks: Sequence[ResourceKey]) -> None: ...

    def run_sandbox(self, sandbox: Sandbox) -> None: ...

    def update_sandbox(self, sandbox: Sandbox) -> None: ...

    def stop_sandbox(self, sandbox: Sandbox) -> None: ...

    def remove_sandbox(self, sandbox: Sandbox) -> None: ...

    def create_container(self, container: Container) -> Decision | None:
        return None

    def start_container(self, container: Container) -> None: ...

    def update_container(self, container: Container) -> Decision | None:
        return None

    def reply_written(self) -> None: ...

    def container_updated(self, container: Container) -> None: ...

    def stop_container(self, container: Container) -> None: ...

    def remove_container(self, container: Container) -> None: ...

    def disconnected(self, reason: str) -> None: ...


async def serve(socket: str) -> None:
    """Answer a runtime's events on this socket until the process is ended."""
    schedule_event_loop()
    gc.freeze()
    gc.disable()
    with tempfile.TemporaryDirectory() as run_dir:
        options = Options(run_dir=run_dir, socket=socket, name="bare", index="11")
        await Supervisor(options, Silent()).run()


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: {sys.argv[0]} SOCKET")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.argv[1]))


if __name__ == "__main__":
    run_main(main)
