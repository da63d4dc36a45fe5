"""How fast, and in how much memory, the cache holds the pods of a large cluster.

    KUBEBUILDER_ASSETS=... python -m benchmarks.kube_cache [--pods 10000]

Pods are written to a real API server; a fresh process then lists and follows them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection as Pipe
from typing import Any

import psutil

from apis.core import Pod
from benchmarks.running import run_main
from cluster.manager.objects import shrink_pod
from kube.cache import Cache
from kube.client import Client, encode_object
from kube.connection import token_connection
from kube.resources import PODS
from tests.beds.apiserver import ApiServer, api_server


def pod(number: int) -> dict[str, Any]:
    """Return a pod with what pods usually carry."""
    return {
        "metadata": {
            "name": f"app-{number:05d}",
            "namespace": "default",
            "labels": {"app": f"app-{number % 50}", "pod-template-hash": "5d8f7c9b", "team": "web"},
            "annotations": {f"example.com/{n}": "y" * 60 for n in range(4)},
        },
        "spec": {
            "containers": [
                {
                    "name": f"c{index}",
                    "image": "registry.example.com/team/app:1.2.3",
                    "env": [{"name": f"VARIABLE_{n}", "value": "x" * 40} for n in range(10)],
                    "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
                }
                for index in range(2)
            ]
        },
    }


async def fill(server: ApiServer, count: int) -> None:
    """Write the pods."""
    async with server.client() as client:
        gate = asyncio.Semaphore(32)

        async def one(number: int) -> None:
            async with gate:
                body = encode_object(PODS, pod(number))
                await client.create(PODS, body, namespace="default")

        for start in range(0, count, 1000):
            await asyncio.gather(*(one(n) for n in range(start, min(count, start + 1000))))


def rss_mb() -> float:
    """Return the resident memory of this process, in MiB."""
    return psutil.Process().memory_info().rss / 2**20


def follow(pipe: Pipe, url: str, token: str, certificate: str, count: int) -> None:
    """List the pods in a process of its own and report."""

    async def run() -> dict[str, Any]:
        connection = token_connection(url, token=token, ca_file=certificate)
        assert connection.tls is not None
        connection.tls.check_hostname = False
        async with Client(connection) as client:
            before = rss_mb()
            cache: Cache[Pod] = Cache(client, PODS, Pod, shrink=shrink_pod)
            started, cpu = time.perf_counter(), time.process_time()
            task = asyncio.create_task(cache.run())
            await cache.wait_synced()
            seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
            assert len(cache.items) == count
            figures = {
                "pods": count,
                "list_s": round(seconds, 2),
                "list_cpu_s": round(cpu, 2),
                "process_rss_mb": round(rss_mb(), 1),
                "cache_mb": round(rss_mb() - before, 1),
            }
            task.cancel()
            return figures

    import uvloop

    pipe.send(uvloop.run(run()))


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=10000)
    options = parser.parse_args()
    with api_server() as server:
        started = time.perf_counter()
        asyncio.run(fill(server, options.pods))
        print(f"written in {time.perf_counter() - started:.0f} s", flush=True)
        ours, theirs = multiprocessing.Pipe()
        arguments = (
            theirs,
            server.url,
            server.tokens["admin"],
            str(server.folder / "certs" / "apiserver.crt"),
            options.pods,
        )
        process = multiprocessing.get_context("spawn").Process(target=follow, args=arguments)
        process.start()
        print(json.dumps(ours.recv()))
        process.join(10)


if __name__ == "__main__":
    run_main(main)
