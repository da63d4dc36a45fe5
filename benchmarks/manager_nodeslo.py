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
import multiprocessing
import resource
import time
from multiprocessing.connection import Connection as Pipe
from typing import Any

import msgspec

from apis.core import ObjectMeta
from apis.decode import Wire
from cluster.manager.flags import parse
from cluster.manager.manager import Manager
from kube.cache import Cache
from kube.client import Client, encode_object
from kube.connection import token_connection
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


def manage(pipe: Pipe, url: str, token: str, certificate: str) -> None:
    """Run a manager; answer "report" with (CPU seconds, writes, resident MB)."""

    async def run() -> None:
        connection = token_connection(url, token=token, ca_file=certificate)
        assert connection.tls is not None
        connection.tls.check_hostname = False
        settings = parse(
            [
                "--metrics-addr=0",
                "--health-probe-addr=0",
                "--feature-gates=WebhookFramework=false",
                "--controllers=nodeslo",
                "--enable-leader-election=false",
                "--workers=32",
            ],
            {},
        )
        stop = asyncio.Event()
        async with Client(connection, user_agent="koordinator-manager") as client:
            one = Manager(client, settings)
            task = asyncio.create_task(one.run(stop))
            await eventually(lambda: one.leading, seconds=60)
            pipe.send("ready")
            while await asyncio.to_thread(pipe.recv) != "stop":
                controller: Any = one.controllers["nodeslo"]
                rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
                pipe.send((time.process_time(), controller.writes, rss))
            stop.set()
            await task

    import uvloop

    uvloop.run(run())


async def measure(server: ApiServer, pipe: Pipe, nodes: int) -> dict[str, Any]:
    def report() -> tuple[float, int, int]:
        pipe.send("report")
        cpu, writes, rss = pipe.recv()
        return float(cpu), int(writes), int(rss)

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
        cpu, writes, _ = report()
        right["count"], percent["wanted"] = 0, 50
        started = time.perf_counter()
        body = msgspec.json.encode({"data": config(50)})
        await client.patch(CONFIG_MAPS, "slo-controller-config", body, namespace=NAMESPACE)
        await eventually(lambda: right["count"] >= nodes, seconds=600, every=0.02)
        seconds = time.perf_counter() - started
        await asyncio.sleep(3)
        cpu_after, writes_after, rss = report()
        following.cancel()
    return {
        "nodes": nodes,
        "created_s": round(created, 1),
        "changed_s": round(seconds, 1),
        "objects_per_s": round(nodes / seconds),
        "manager_cpu_ms_per_object": round((cpu_after - cpu) / nodes * 1000, 3),
        "writes_needed": nodes,
        "writes_made": writes_after - writes,
        "manager_rss_mb": rss,
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
        ours, theirs = multiprocessing.Pipe()
        arguments = (
            theirs,
            server.url,
            server.tokens["admin"],
            str(server.folder / "certs" / "apiserver.crt"),
        )
        process = multiprocessing.get_context("spawn").Process(target=manage, args=arguments)
        process.start()
        assert ours.recv() == "ready"
        print(json.dumps(asyncio.run(measure(server, ours, options.nodes))))
        ours.send("stop")
        process.join(20)


if __name__ == "__main__":
    main()
