"""A whole koord-manager in a process of its own, and what it used so far."""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import NamedTuple

import psutil

from cluster.collection import collect_seldom
from cluster.manager.flags import parse
from cluster.manager.manager import Manager
from kube.client import Client
from kube.connection import Connection, token_connection
from tests.beds.apiserver import ApiServer, eventually

_TICK_S = 0.005
"""Between two looks at the clock: shorter stalls than this are not seen."""
_FLAGS = (
    "--metrics-addr=0",
    "--health-probe-addr=0",
    "--feature-gates=WebhookFramework=false",
    "--enable-leader-election=false",
)


class Used(NamedTuple):
    """What the process used since it started, but for stall_s.

    cpu_s: processor time; writes: by controller; peak_mb, rss_mb: resident memory, at most and now;
    stall_s, stall_cpu_s: the longest time in which the event loop did not turn since the last
    report, on the clock and in processor time (which does not count waiting for a processor);
    faults: exceptions that parts survived; remembered: entries in work queues for later.
    """

    cpu_s: float
    writes: Mapping[str, int]
    peak_mb: int
    rss_mb: float
    stall_s: float
    stall_cpu_s: float
    faults: int
    remembered: int


@dataclass(frozen=True, slots=True)
class Managed:
    """ready_s: until the manager had read its lists and led."""

    ready_s: float
    pipe: Pipe

    def used(self) -> Used:
        """Ask the process."""
        self.pipe.send("report")
        used: Used = self.pipe.recv()
        return used


@dataclass(frozen=True, slots=True)
class Target:
    """An API server to talk to. token, certificate: "" where it asks for neither."""

    url: str
    token: str = ""
    certificate: str = ""

    @classmethod
    def of(cls, server: ApiServer) -> Target:
        certificate = str(server.folder / "certs" / "apiserver.crt")
        return cls(server.url, server.tokens["admin"], certificate)

    def connection(self) -> Connection:
        if not self.certificate:
            return Connection(self.url)
        connection = token_connection(self.url, token=self.token, ca_file=self.certificate)
        assert connection.tls is not None
        connection.tls.check_hostname = False
        return connection


@contextmanager
def manager(server: ApiServer | Target, *flags: str) -> Iterator[Managed]:
    """The manager with these flags, ended with the block."""
    target = server if isinstance(server, Target) else Target.of(server)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_manage,
        args=(theirs, target, (*_FLAGS, *flags)),
    )
    process.start()
    try:
        yield Managed(ours.recv(), ours)
    finally:
        with suppress(BrokenPipeError):  # it has ended, perhaps by the signal that ends us
            ours.send("stop")
        process.join(20)
        process.kill()


class _Stalls:
    """How long the event loop did not turn."""

    def __init__(self) -> None:
        self.longest_s = self.longest_cpu_s = 0.0

    async def watch(self) -> None:
        while True:
            started, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(_TICK_S)
            self.longest_s = max(self.longest_s, time.perf_counter() - started - _TICK_S)
            self.longest_cpu_s = max(self.longest_cpu_s, time.thread_time() - cpu)


def _manage(pipe: Pipe, target: Target, flags: tuple[str, ...]) -> None:
    async def run() -> None:
        stop = asyncio.Event()
        async with Client(target.connection(), user_agent="koordinator-manager") as client:
            collecting = asyncio.create_task(collect_seldom())
            one = Manager(client, parse(list(flags), {}))
            started = time.perf_counter()
            task = asyncio.create_task(one.run(stop))
            await eventually(lambda: one.leading, seconds=120)
            pipe.send(time.perf_counter() - started)
            stalls = _Stalls()
            watching = asyncio.create_task(stalls.watch())
            while await asyncio.to_thread(pipe.recv) != "stop":
                writes = {
                    name: getattr(each, "writes", 0) for name, each in one.controllers.items()
                }
                peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                pipe.send(
                    Used(
                        cpu_s=time.process_time(),
                        writes=writes,
                        peak_mb=peak_kb // 1024,
                        rss_mb=round(psutil.Process().memory_info().rss / 2**20, 1),
                        stall_s=stalls.longest_s,
                        stall_cpu_s=stalls.longest_cpu_s,
                        faults=sum(each.count for each in one.metrics.faults),
                        remembered=sum(each.queue.remembered for each in one.controllers.values()),
                    )
                )
                stalls.longest_s = stalls.longest_cpu_s = 0.0
            watching.cancel()
            collecting.cancel()
            stop.set()
            await task

    import uvloop

    uvloop.run(run())
