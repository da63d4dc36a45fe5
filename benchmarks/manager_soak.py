"""The whole manager for a while on a large cluster that does not stand still.

    KUBEBUILDER_ASSETS=... python -m benchmarks.manager_soak [--minutes 15] [--nodes 5000]
    python -m benchmarks.manager_soak --in-memory

Behind a real API server, or one in memory, every node reports once a minute. Meanwhile

- one report in a hundred moves the node's use across the threshold, so the node is to be written;
- nodes stop reporting for three minutes, so that a timer has to withdraw what they offer;
- the configuration is edited once a minute: a NodeSLO key and the co-location key in turn, each of
  which changes an object of every node;
- nodes are made and deleted, one a second;
- /metrics is read four times a minute.

Prints a line for each sample to standard error, and one JSON line of figures at the end. Times are
what a client of the API server sees. The driver, the API server and etcd run on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import aiohttp
import msgspec
import uvloop

from apis.core import Node
from apis.meta import format_time
from benchmarks.manager_scale import fill, in_parallel
from benchmarks.memory_api_server import memory_api_server
from benchmarks.running import run_main
from benchmarks.whole_manager import Managed, Target, Used, manager
from cluster.manager.objects import shrink_node
from kube.cache import Cache, Change, Event
from kube.client import ApiError, Client, Unreachable, encode_object
from kube.resources import NODE_METRICS, NODES
from tests.beds.apiserver import api_server, eventually
from tests.cluster.conftest import install, set_config
from tests.ports import free_ports

BATCH = "kubernetes.io/batch-cpu"
DEGRADE_MINUTES = 2
SILENT_S = 180.0
SAMPLE_S = 10.0


@dataclass(slots=True)
class Seen:
    """What the driver measured. Times in seconds."""

    crossed: list[float] = field(default_factory=list)
    """From a report across the threshold to the changed Node."""
    withdrawn: list[float] = field(default_factory=list)
    """From the moment at which a report was stale to the changed Node."""
    edits: dict[str, list[float]] = field(default_factory=dict)
    """From an edit of a key to the last object that it changes."""
    scrapes: list[float] = field(default_factory=list)
    samples: list[tuple[float, Used]] = field(default_factory=list)
    reports: int = 0
    refused: int = 0


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the value below which that share lies; None of nothing."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 3) if ordered else None


def growth_mb_per_hour(samples: Sequence[tuple[float, Used]]) -> float | None:
    """Return the slope of resident memory over the second half of the samples."""
    half = samples[len(samples) // 2 :]
    if len(half) < 3:
        return None
    slope = statistics.linear_regression([at for at, _ in half], [u.rss_mb for _, u in half]).slope
    return round(slope * 3600, 1)


class Soak:
    """The cluster around the manager."""

    def __init__(self, client: Client, managed: Managed, nodes: int, pods: int, url: str) -> None:
        self._client = client
        self._managed = managed
        self._nodes = nodes
        self._pods = pods
        self._url = url
        self.seen = Seen()
        self._random = random.Random(1)
        self._high = [False] * nodes
        self._silent: dict[int, float] = {}
        self._sent: dict[str, float] = {}
        self._stale: dict[str, float] = {}
        self._asking = asyncio.Lock()
        self._stalls: list[tuple[float, float]] = []
        """Since the last sample."""
        self.cache: Cache[Node] = Cache(client, NODES, Node, shrink=shrink_node)
        self.cache.subscribe(self._node_changed)

    def _node_changed(self, event: Event[Node]) -> None:
        if event.change is not Change.MODIFIED or event.old is None:
            return
        name = event.new.metadata.name
        old, new = (each.status.allocatable.get(BATCH) for each in (event.old, event.new))
        now = time.monotonic()
        if old == new:
            return
        if new is None and name in self._stale:
            self.seen.withdrawn.append(now - self._stale.pop(name))
        elif new is not None and name in self._sent:
            self.seen.crossed.append(now - self._sent.pop(name))

    async def report(self, number: int) -> None:
        """Have one node report."""
        name = f"node-{number:05d}"

        def usage(cpu: int, memory: str) -> dict[str, Any]:
            return {"resources": {"cpu": f"{cpu}m", "memory": memory}}

        if self._random.random() < 0.01:
            self._high[number] = not self._high[number]
            self._sent[name] = time.monotonic()
        system = (9000 if self._high[number] else 900) + self._random.randrange(100)
        status = {
            "updateTime": format_time(datetime.now(UTC)),
            "nodeMetric": {"nodeUsage": usage(4000, "20Gi"), "systemUsage": usage(system, "1Gi")},
            "podsMetric": [
                {
                    "name": f"pod-{pod:05d}",
                    "namespace": "default",
                    "priority": "koord-prod",
                    "podUsage": usage(200 + self._random.randrange(10), "500Mi"),
                }
                for pod in range(number, self._pods, self._nodes)
            ],
            "prodReclaimableMetric": {"resource": usage(1000, "2Gi")},
        }
        body = msgspec.json.encode({"status": status})
        try:
            await self._client.patch(NODE_METRICS, name, body, subresource="status")
            self.seen.reports += 1
        except (ApiError, Unreachable):
            self.seen.refused += 1

    async def reports(self) -> None:
        """Every node once a minute, evenly spread."""
        started, count = time.monotonic(), 0
        async with asyncio.TaskGroup() as group:
            while True:
                number = count % self._nodes
                count += 1
                await asyncio.sleep(max(0.0, started + count * 60 / self._nodes - time.monotonic()))
                if self._silent.get(number, 0.0) < time.monotonic():
                    group.create_task(self.report(number))

    async def silences(self) -> None:
        """Every half minute one node in a hundred stops reporting for a while."""
        while True:
            await asyncio.sleep(30)
            now = time.monotonic()
            self._silent = {at: end for at, end in self._silent.items() if end > now}
            for number in self._random.sample(range(self._nodes), max(1, self._nodes // 100)):
                if number not in self._silent:
                    await self.report(number)
                    name = f"node-{number:05d}"
                    self._silent[number] = time.monotonic() + SILENT_S
                    self._stale[name] = time.monotonic() + DEGRADE_MINUTES * 60
                    # What it crosses now is not waited for: the next write withdraws.
                    self._sent.pop(name, None)

    async def edits(self) -> None:
        """Once a minute one key, which changes an object of every node."""
        turn = 0
        while True:
            await asyncio.sleep(30)
            turn += 1
            key = "noderesource" if turn % 2 else "nodeslo"
            before = (await self.used()).writes[key]
            started = time.monotonic()
            await set_config(self._client, configuration(turn))
            with suppress(AssertionError):
                await eventually(partial(self._grew, key, before), seconds=60, every=0.25)
                self.seen.edits.setdefault(key, []).append(time.monotonic() - started)
            await asyncio.sleep(max(0.0, started + 30 - time.monotonic()))

    async def _grew(self, key: str, before: int) -> bool:
        # A few nodes are silent and offer nothing that could change.
        return (await self.used()).writes[key] - before >= self._nodes * 0.9

    async def churn(self) -> None:
        """A node comes every second and lives for half a minute."""
        number = 0
        while True:
            await asyncio.sleep(1)
            body = encode_object(NODES, {"metadata": {"name": f"spot-{number:05d}"}})
            with suppress(ApiError, Unreachable):
                await self._client.create(NODES, body)
                if number >= 30:
                    await self._client.delete(NODES, f"spot-{number - 30:05d}")
            number += 1

    async def scrapes(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                await asyncio.sleep(15)
                started = time.monotonic()
                async with session.get(self._url) as page:
                    await page.read()
                self.seen.scrapes.append(time.monotonic() - started)

    async def samples(self) -> None:
        started = time.monotonic()
        while True:
            await asyncio.sleep(SAMPLE_S)
            used = await self.used(keep_stall=False)
            at = time.monotonic() - started
            self.seen.samples.append((at, used))
            print(
                f"{at:5.0f} s: {used.rss_mb} MB, longest stall {used.stall_s * 1000:.0f} ms "
                f"({used.stall_cpu_s * 1000:.0f} ms of CPU), "
                f"{sum(used.writes.values())} writes, {used.remembered} remembered, "
                f"{used.faults} faults, waiting for {len(self._sent)} nodes",
                file=sys.stderr,
                flush=True,
            )

    async def used(self, *, keep_stall: bool = True) -> Used:
        """Ask the manager; its process answers one question at a time."""
        async with self._asking:
            used = await asyncio.to_thread(self._managed.used)
            self._stalls.append((used.stall_s, used.stall_cpu_s))
            if not keep_stall:
                wall, cpu = (max(each) for each in zip(*self._stalls, strict=True))
                used = used._replace(stall_s=wall, stall_cpu_s=cpu)
                self._stalls.clear()
            return used

    async def run(self, seconds: float) -> dict[str, Any]:
        """Let it live for so long; return the figures."""
        following = asyncio.create_task(self.cache.run())
        await self.cache.wait_synced()
        print("manager started", file=sys.stderr, flush=True)
        await in_parallel((partial(self.report, number) for number in range(self._nodes)), 16)
        await eventually(self._all_offer, seconds=300, every=1)
        print("every node offers", file=sys.stderr, flush=True)
        self.seen = Seen()
        self._sent.clear()
        first, started = await self.used(keep_stall=False), time.monotonic()
        try:
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for work in (
                    *(self.reports, self.silences, self.edits),
                    *(self.churn, self.scrapes, self.samples),
                ):
                    group.create_task(work())
        except TimeoutError:
            pass
        finally:
            following.cancel()
        return figures(self.seen, first, time.monotonic() - started)

    def _all_offer(self) -> bool:
        offering = sum(BATCH in node.status.allocatable for node in self.cache.items.values())
        return offering >= self._nodes


def configuration(turn: int) -> dict[str, str]:
    """Return the config map after so many edits: odd ones change co-location.

    The short time after which a report is stale counts from the first edit on: on a slow machine
    the first reports take longer than that.
    """
    co_location = {
        "enable": True,
        "degradeTimeMinutes": DEGRADE_MINUTES if turn else 60,
        # With these a node whose use crosses meanwhile still changes by more than the threshold.
        "cpuReclaimThresholdPercent": 60 if (turn + 1) // 2 % 2 == 0 else 100,
    }
    qos = {"clusterStrategy": {"beClass": {"cpuQOS": {"enable": turn // 2 % 2 == 0}}}}
    return {"colocation-config": json.dumps(co_location), "resource-qos-config": json.dumps(qos)}


def figures(seen: Seen, first: Used, seconds: float) -> dict[str, Any]:
    """Return what a reader wants to know."""
    used = [each for _, each in seen.samples]
    last = used[-1]
    return {
        "minutes": round(seconds / 60, 1),
        "reports": seen.reports,
        "reports_refused": seen.refused,
        "crossed_threshold": len(seen.crossed),
        "node_written_after_p50_s": percentile(seen.crossed, 0.5),
        "node_written_after_p99_s": percentile(seen.crossed, 0.99),
        "withdrawn": len(seen.withdrawn),
        "withdrawn_after_stale_p50_s": percentile(seen.withdrawn, 0.5),
        "withdrawn_after_stale_p99_s": percentile(seen.withdrawn, 0.99),
        "edits_s": {key: [round(each, 1) for each in took] for key, took in seen.edits.items()},
        "scrape_p50_s": percentile(seen.scrapes, 0.5),
        "scrape_longest_s": percentile(seen.scrapes, 1.0),
        "writes": {name: last.writes[name] - count for name, count in first.writes.items()},
        "longest_stall_ms": round(max(each.stall_s for each in used) * 1000),
        "longest_stall_cpu_ms": round(max(each.stall_cpu_s for each in used) * 1000),
        "median_of_10_s_longest_stall_ms": round(
            statistics.median(each.stall_s for each in used) * 1000
        ),
        "manager_percent_of_a_core": round((last.cpu_s - first.cpu_s) / seconds * 100, 1),
        "rss_mb_over_time": [each.rss_mb for each in used[:: max(1, len(used) // 12)]],
        "growth_mb_per_hour": growth_mb_per_hour(seen.samples),
        "remembered_at_end": last.remembered,
        "faults": last.faults,
    }


async def measure(
    target: Target, managed: Managed, options: argparse.Namespace, url: str
) -> dict[str, Any]:
    async with Client(target.connection()) as client:
        soak = Soak(client, managed, options.nodes, options.pods, url)

        await eventually(
            lambda: managed.used().writes["nodemetric"] >= options.nodes, seconds=300, every=1
        )
        return await soak.run(options.minutes * 60)


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--pods", type=int, default=20000)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--in-memory", action="store_true", help="no kube-apiserver and etcd")
    options = parser.parse_args()
    (port,) = free_ports(1)
    with ExitStack() as stack:
        if options.in_memory:
            target = Target(stack.enter_context(memory_api_server()))
        else:
            server = stack.enter_context(api_server())
            uvloop.run(install(server))
            target = Target.of(server)

        async def prepare() -> None:
            async with Client(target.connection()) as client:
                await set_config(client, configuration(0))
                await fill(client, options.nodes, options.pods)

        uvloop.run(prepare())
        print("cluster written", file=sys.stderr, flush=True)
        with manager(target, "--workers=16", f"--metrics-addr=127.0.0.1:{port}") as managed:
            url = f"http://127.0.0.1:{port}/metrics"
            print(json.dumps(uvloop.run(measure(target, managed, options, url))))


if __name__ == "__main__":
    run_main(main)
