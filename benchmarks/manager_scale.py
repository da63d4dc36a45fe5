"""The whole manager on a large cluster behind a real API server.

    KUBEBUILDER_ASSETS=... python -m benchmarks.manager_scale [--nodes 5000] [--pods 20000]

Nodes, pods and reports are written; the manager, in a process of its own with all controllers,
brings every node to what it should offer. Then reports go on at a steady rate and its CPU is
measured, with usage that moves by less than the threshold. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec

from apis.meta import format_time
from benchmarks.running import run_main
from benchmarks.whole_manager import Managed, manager
from kube.client import Client, encode_object
from kube.resources import NODE_METRICS, NODES, PODS
from tests.beds.apiserver import ApiServer, api_server, eventually
from tests.cluster.conftest import install, set_config


async def in_parallel(work: Iterable[Callable[[], Coroutine[Any, Any, Any]]], width: int) -> None:
    """Run all of `work`, at most `width` at a time."""
    waiting = iter(work)

    async def worker() -> None:
        for one in waiting:
            await one()

    await asyncio.gather(*(worker() for _ in range(width)))


async def fill(client: Client, nodes: int, pods: int) -> None:
    """Write nodes with capacity, and pods bound to them."""
    amounts = {"cpu": "32", "memory": "128Gi", "pods": "110"}
    status = {"capacity": amounts, "allocatable": amounts}

    def node(number: int) -> Callable[[], Coroutine[Any, Any, None]]:
        async def make() -> None:
            plain = {"metadata": {"name": f"node-{number:05d}"}, "status": status}
            await client.create(NODES, encode_object(NODES, plain))

        return make

    def pod(number: int) -> Callable[[], Coroutine[Any, Any, None]]:
        async def make() -> None:
            container = {
                "name": "c",
                "image": "x",
                "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
            }
            spec = {"nodeName": f"node-{number % nodes:05d}", "containers": [container]}
            body = {"metadata": {"name": f"pod-{number:05d}"}, "spec": spec}
            await client.create(PODS, encode_object(PODS, body), namespace="default")

        return make

    await in_parallel((node(number) for number in range(nodes)), 32)
    await in_parallel((pod(number) for number in range(pods)), 32)


def report(number: int, nodes: int, pods: int, turn: int) -> bytes:
    """Return the status that one node reports."""

    def usage(cpu: int, memory: str) -> dict[str, Any]:
        return {"resources": {"cpu": f"{cpu}m", "memory": memory}}

    status = {
        "updateTime": format_time(datetime.now(UTC)),
        "nodeMetric": {"nodeUsage": usage(4000, "20Gi"), "systemUsage": usage(900 + turn, "1Gi")},
        "podsMetric": [
            {
                "name": f"pod-{pod:05d}",
                "namespace": "default",
                "priority": "koord-prod",
                "podUsage": usage(200 + turn, "500Mi"),
            }
            for pod in range(number, pods, nodes)
        ],
        "prodReclaimableMetric": {"resource": usage(1000, "2Gi")},
    }
    return msgspec.json.encode({"status": status})


async def measure(
    server: ApiServer, managed: Managed, nodes: int, pods: int, seconds: int
) -> dict[str, Any]:
    async with server.client() as client:

        async def metrics() -> bool:
            pages = await client.request("GET", NODE_METRICS.path(), params={"limit": "1"})
            left = msgspec.json.decode(pages)["metadata"].get("remainingItemCount", 0)
            return bool(left + 1 >= nodes)

        await eventually(metrics, seconds=300, every=1)

        def send(number: int, turn: int) -> Callable[[], Coroutine[Any, Any, Any]]:
            body = report(number, nodes, pods, turn)
            name = f"node-{number:05d}"
            return lambda: client.patch(NODE_METRICS, name, body, subresource="status")

        started = time.perf_counter()
        await in_parallel((send(number, 0) for number in range(nodes)), 16)
        await eventually(
            lambda: managed.used().writes["noderesource"] >= nodes, seconds=300, every=0.2
        )
        offered = time.perf_counter() - started
        await asyncio.sleep(10)
        before = managed.used()
        rate = 5000 / 60
        begin = time.perf_counter()
        count = int(rate * seconds)
        running: set[asyncio.Task[Any]] = set()
        for number in range(count):
            await asyncio.sleep(max(0.0, begin + number / rate - time.perf_counter()))
            turn = 1 + number % 5
            task = asyncio.create_task(send(number % nodes, turn)())
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
        elapsed = time.perf_counter() - begin
        after = managed.used()
    return {
        "nodes": nodes,
        "pods": pods,
        "all_nodes_offer_after_s": round(offered, 1),
        "updates": count,
        "updates_per_minute": round(count / elapsed * 60),
        "manager_percent_of_a_core": round((after.cpu_s - before.cpu_s) / elapsed * 100, 1),
        "writes_at_rest": {
            name: after.writes[name] - count for name, count in before.writes.items()
        },
        "manager_rss_mb": after.peak_mb,
    }


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--pods", type=int, default=20000)
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args()
    with api_server() as server:
        asyncio.run(install(server))

        async def prepare() -> None:
            async with server.client() as client:
                await set_config(client, {"colocation-config": '{"enable":true}'})
                await fill(client, options.nodes, options.pods)

        asyncio.run(prepare())
        print("cluster written", flush=True)
        with manager(server, "--workers=16") as managed:
            work = measure(server, managed, options.nodes, options.pods, options.seconds)
            figures = asyncio.run(work)
        print(json.dumps({"lists_read_after_s": round(managed.ready_s, 1), **figures}))


if __name__ == "__main__":
    run_main(main)
