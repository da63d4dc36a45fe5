"""What a binding and an event cost: aiohttp, kept connections, and the scheduler's writers.

    KUBEBUILDER_ASSETS=... python -m benchmarks.kube_writes [--rounds 7] [--pods 300]

Pods are made on a real API server (TLS, etcd on the same machine) first. Then both clients bind
and write events in turn, `--at-once` at a time, on uvloop. CPU is this process' own, user and
system time, without the API server's. Medians of the rounds. The last line is the scheduler's
binder and event writer together: a binding and an event for each pod, all given at once.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import uvloop

from benchmarks.running import run_main
from cluster.scheduler.binding.binder import Binder
from cluster.scheduler.binding.events import EventWriter, pod_reference, scheduled
from cluster.scheduler.binding.placement import Bound, Outcome, Placement
from kube.client import Client, encode_object
from kube.kept_client import KeptClient
from kube.resources import EVENTS, NODES, PODS
from tests.beds.apiserver import ApiServer, api_server

ANNOTATIONS = {
    "scheduling.koordinator.sh/resource-status": '{"cpuset":"0-3","numaNodeResources":[]}',
    "internal.scheduling.koordinator.sh/bind-gang-group-id": "default/gang",
}


def pod(name: str) -> dict[str, Any]:
    """Return a small pod."""
    return {
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "containers": [
                {
                    "name": "main",
                    "image": "example.com/app:1",
                    "resources": {"requests": {"cpu": "1"}},
                }
            ]
        },
    }


async def bind(client: Client, name: str) -> None:
    """Bind a pod to the node, with annotations in the Binding."""
    body = msgspec.json.encode(
        {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, "namespace": "default", "annotations": ANNOTATIONS},
            "target": {"apiVersion": "v1", "kind": "Node", "name": "node"},
        }
    )
    path = PODS.path(namespace="default", name=name, subresource="binding")
    await client.request("POST", path, body=body)


async def report(client: Client, name: str) -> None:
    """Write the event of a binding."""
    event = {
        "metadata": {"name": f"{name}.1", "namespace": "default"},
        "involvedObject": {"kind": "Pod", "namespace": "default", "name": name},
        "type": "Normal",
        "reason": "Scheduled",
        "message": f"Successfully assigned default/{name} to node",
        "source": {"component": "koord-scheduler"},
    }
    await client.create(EVENTS, encode_object(EVENTS, event), namespace="default")


async def timed(
    write: Callable[[Client, str], Awaitable[None]], client: Client, names: list[str], at_once: int
) -> tuple[float, float]:
    """Return µs of CPU and of elapsed time for each of the names."""
    waiting = iter(names)

    async def worker() -> None:
        for name in waiting:
            await write(client, name)

    cpu, elapsed = time.process_time(), time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(at_once)))
    count = len(names)
    return (
        (time.process_time() - cpu) / count * 1e6,
        (time.perf_counter() - elapsed) / count * 1e6,
    )


async def scheduler_writes(
    client: Client, pods: dict[str, str], at_once: int
) -> tuple[float, float]:
    """Return µs of CPU and of elapsed time a pod, for its binding and its event.

    pods: uids by name.
    """
    writer = EventWriter(client, instance="benchmark", now=time.time)
    running = asyncio.create_task(writer.run())

    def report_outcome(placement: Placement, outcome: Outcome) -> None:
        assert outcome == Bound(), outcome
        about = pod_reference(placement.namespace, placement.name, placement.uid)
        writer.record(scheduled(about, placement.node, controller="koord-scheduler"))

    binder = Binder(client, report_outcome, at_once=at_once)
    cpu, elapsed = time.process_time(), time.perf_counter()
    for name, uid in pods.items():
        binder.submit(Placement("default", name, uid, "node", annotations=ANNOTATIONS))
    assert await binder.drain(300) == ()
    assert await writer.flush(300) == 0
    figures = time.process_time() - cpu, time.perf_counter() - elapsed
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert writer.counts.written == len(pods)
    return figures[0] / len(pods) * 1e6, figures[1] / len(pods) * 1e6


async def measure(server: ApiServer, rounds: int, pods: int, at_once: int) -> None:
    """Bind and report with both clients in alternation, and print the medians."""
    kinds: tuple[type[Client], ...] = (Client, KeptClient)
    figures: dict[tuple[str, str], list[tuple[float, float]]] = {}
    # Room for the event writer's requests beside the binder's.
    many = KeptClient(server.connection(), connections=at_once + 8)
    async with Client(server.connection()) as plain, many as kept:
        clients = dict(zip(kinds, (plain, kept), strict=True))
        await kept.create(NODES, encode_object(NODES, {"metadata": {"name": "node"}}))
        for number in range(rounds + 1):
            for kind in kinds if number % 2 else kinds[::-1]:
                names = [f"{kind.__name__.lower()}-{number}-{n}" for n in range(pods)]

                async def create(client: Client, name: str) -> None:
                    body = encode_object(PODS, pod(name))
                    await client.create(PODS, body, namespace="default")

                await timed(create, kept, names, at_once)
                for write in (bind, report):
                    figure = await timed(write, clients[kind], names, at_once)
                    if number:  # The first round opens the connections.
                        figures.setdefault((write.__name__, kind.__name__), []).append(figure)
            uids: dict[str, str] = {}
            for n in range(pods):
                name = f"whole-{number}-{n}"
                body = encode_object(PODS, pod(name))
                made = await kept.create(PODS, body, namespace="default")
                uids[name] = msgspec.json.decode(made)["metadata"]["uid"]
            figure = await scheduler_writes(kept, uids, at_once)
            if number:
                figures.setdefault(("both", "Binder"), []).append(figure)
    for (write_name, kind_name), found in figures.items():
        cpu = statistics.median(each for each, _ in found)
        elapsed = statistics.median(each for _, each in found)
        spread = f"{min(c for c, _ in found):.0f}..{max(c for c, _ in found):.0f}"
        print(
            f"{write_name:8s} {kind_name:12s} {cpu:6.0f} us of CPU ({spread}), "
            f"{1e6 / elapsed:6.0f} a second"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pods", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=16)
    options = parser.parse_args()
    with api_server() as server:
        uvloop.run(measure(server, options.rounds, options.pods, options.at_once))


if __name__ == "__main__":
    run_main(main)
