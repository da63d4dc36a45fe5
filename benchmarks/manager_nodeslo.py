"""A change of slo-controller-config on a large cluster: how fast all NodeSLOs have it.

    KUBEBUILDER_ASSETS=... python -m benchmarks.manager_nodeslo [--nodes 5000]

A real API server and etcd; the manager runs in a process of its own, so its CPU is counted alone.
Prints the time until the last NodeSLO is right, the manager's CPU per object, the writes that were
needed and those that were made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import msgspec

from apis.core import ObjectMeta
from apis.decode import Wire
from benchmarks.running import run_main
from benchmarks.whole_manager import Managed, manager
from kube.cache import Cache
from kube.client import encode_object
from kube.resources import CONFIG_MAPS, NODE_SLOS, NODES
from tests.beds.apiserver import ApiServer, api_server, eventually
from tests.cluster.conftest import NAMESPACE, install, set_config


class Spec(Wire, frozen=True):
    resource_used_threshold_with_be: dict[str, Any] = msgspec.field(
        name="resourceUsedThresholdWithBE", default_factory=dict
    )


class Slim(Wire, frozen=True):
    """What is looked at from outside."""

    metadata: ObjectMeta = ObjectMeta()
    spec: Spec = Spec()


def config(percent: int) -> dict[str, str]:
    threshold = {
        "clusterStrategy": {"enable": True, "cpuSuppressThresholdPercent": percent},
        "nodeStrategies": [
            {
                "name": "db",
                "nodeSelector": {"matchLabels": {"pool": "db"}},
                "cpuSuppressThresholdPercent": percent - 1,
            }
        ],
    }
    return {
        "colocation-config": '{"enable":false}',
        "resource-threshold-config": json.dumps(threshold),
    }


async def fill(server: ApiServer, nodes: int) -> None:
    async with server.client() as client:
        gate = asyncio.Semaphore(32)

        async def one(number: int) -> None:
            async with gate:
                labels = {"pool": "db" if number % 10 == 0 else "web"}
                body = encode_object(
                    NODES, {"metadata": {"name": f"node-{number:05d}", "labels": labels}}
                )
                await client.create(NODES, body)

        for start in range(0, nodes, 1000):
            await asyncio.gather(*(one(n) for n in range(start, min(nodes, start + 1000))))


async def measure(server: ApiServer, managed: Managed, nodes: int) -> dict[str, Any]:
    async with server.client() as client:
        slos: Cache[Slim] = Cache(client, NODE_SLOS, Slim)
        following = asyncio.create_task(slos.run())
        right = {"count": 0}
        percent = {"wanted": 60}

        def count(event: Any) -> None:
            strategy = event.new.spec.resource_used_threshold_with_be
            got = strategy.get("cpuSuppressThresholdPercent")
            if got in (percent["wanted"], percent["wanted"] - 1):
                right["count"] += 1

        slos.subscribe(count)
        started = time.perf_counter()
        await eventually(lambda: len(slos.items) == nodes, seconds=600, every=0.1)
        created = time.perf_counter() - started
        await asyncio.sleep(3)
        before = managed.used()
        right["count"], percent["wanted"] = 0, 50
        started = time.perf_counter()
        body = msgspec.json.encode({"data": config(50)})
        await client.patch(CONFIG_MAPS, "slo-controller-config", body, namespace=NAMESPACE)
        await eventually(lambda: right["count"] >= nodes, seconds=600, every=0.02)
        seconds = time.perf_counter() - started
        await asyncio.sleep(3)
        after = managed.used()
        following.cancel()
    return {
        "nodes": nodes,
        "created_s": round(created, 1),
        "changed_s": round(seconds, 1),
        "objects_per_s": round(nodes / seconds),
        "manager_cpu_ms_per_object": round((after.cpu_s - before.cpu_s) / nodes * 1000, 3),
        "writes_needed": nodes,
        "writes_made": after.writes["nodeslo"] - before.writes["nodeslo"],
        "manager_rss_mb": after.peak_mb,
    }


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    options = parser.parse_args()
    with api_server() as server:
        asyncio.run(install(server))

        async def prepare() -> None:
            async with server.client() as client:
                await set_config(client, config(60))

        asyncio.run(prepare())
        asyncio.run(fill(server, options.nodes))
        with manager(server, "--controllers=nodeslo", "--workers=32") as managed:
            print(json.dumps(asyncio.run(measure(server, managed, options.nodes))))


if __name__ == "__main__":
    run_main(main)
