"""Beds of koordctl: a daemon in memory with one pod, and bytes that answer in a daemon's place."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from koordctl.main import main
from tests.koordlet.daemon.bed import SLO, Node, node, node_object, until
from tests.simulated.kubelet import Limits

POD_UID = "aaaa-1111-2222"
ONE_CPU = Limits(cpu_request_milli=1000, cpu_limit_milli=1000)
Ask = Callable[..., Awaitable[int]]


def with_daemon(test: Callable[[Node, Ask], Awaitable[None]]) -> None:
    """Run `test` beside a daemon that keeps one pod of which the quota is divided by 1.25."""

    async def run() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU, uid=POD_UID)
            async with n.running():
                await n.run_pod(pod)
                await n.create(pod, "c1c1c1c1c1")
                path = n.kubelet.path(pod.cgroup, "cpu.max")
                await until("the quota", lambda: n.kernel.text(path) == "80000 100000")

                async def ask(*arguments: str) -> int:
                    # The client blocks, and the daemon lives in this loop.
                    run_dir = str(n.folder / "run")
                    return await asyncio.to_thread(main, ["--run-dir", run_dir, *arguments])

                await test(n, ask)

    asyncio.run(asyncio.wait_for(run(), 30))


@contextmanager
def answering(run_dir: Path, answer: bytes) -> Iterator[None]:
    """Answer one question at the admin socket with these bytes while the block runs."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(run_dir / "admin.sock"))
        listener.listen()
        listener.settimeout(10)

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join(10)
