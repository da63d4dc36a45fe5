"""How fast pods are admitted: one core, TLS, keep-alive connections, profiles to match.

    python -m benchmarks.manager_webhook [--requests 3000] [--profiles 20] [--rate 300]

Prints the time inside the handler, the time over HTTPS as the API server sees it at a fixed rate
of requests, and the server's CPU per request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import ssl
import statistics
import time
from multiprocessing.connection import Connection as Pipe
from typing import Any

import aiohttp
import msgspec

from benchmarks.running import run_main
from kube.certificates import make_certificates
from kube.webhook import WebhookServer
from tests.cluster.admission import admission, request


def pod(number: int) -> dict[str, Any]:
    """Return a pod as a deployment of some size makes it."""
    amounts = {"cpu": "1500m", "memory": "2Gi"}
    containers = [
        {
            "name": f"c{index}",
            "image": "registry.example.com/team/app:1.2.3",
            "env": [{"name": f"VARIABLE_{n}", "value": "x" * 40} for n in range(12)],
            "resources": {"requests": amounts, "limits": amounts},
            "volumeMounts": [{"name": "config", "mountPath": f"/etc/app{index}"}],
        }
        for index in range(2)
    ]
    return {
        "metadata": {
            "generateName": "app-5d8f-",
            "namespace": "default",
            "labels": {"app": "app", "team": "ml", "number": str(number)},
            "annotations": {f"example.com/{n}": "y" * 60 for n in range(6)},
        },
        "spec": {
            "containers": containers,
            "volumes": [{"name": "config", "configMap": {"name": "app"}}],
            "tolerations": [{"key": "x", "operator": "Exists"}],
        },
    }


def judge(profiles: int) -> Any:
    """Return admission with some profiles that match and many that do not."""
    matching = [
        {
            "metadata": {"name": f"match-{number}"},
            "spec": {
                "selector": {"matchLabels": {"team": "ml"}},
                "labels": {f"l{number}": "1"},
                "qosClass": "BE",
                "priorityClassName": "koord-batch",
            },
        }
        for number in range(3)
    ]
    others = [
        {
            "metadata": {"name": f"other-{number}"},
            "spec": {"selector": {"matchLabels": {"team": f"team-{number}"}}},
        }
        for number in range(profiles)
    ]
    return admission(profiles=[*matching, *others])


def review(number: int) -> bytes:
    """Return the bytes of one AdmissionReview."""
    made = request(pod(number))
    return msgspec.json.encode(
        {
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "request": {
                "uid": made.uid,
                "kind": {"group": "", "version": "v1", "kind": "Pod"},
                "resource": {"group": "", "version": "v1", "resource": "pods"},
                "operation": "CREATE",
                "namespace": "default",
                "userInfo": {"username": "system:serviceaccount:kube-system:replicaset"},
                "object": pod(number),
                "oldObject": None,
            },
        }
    )


def serve(pipe: Pipe, profiles: int) -> None:
    """Run the server in a process of its own; report its port, then its CPU time."""

    async def run() -> None:
        server = WebhookServer(
            host="127.0.0.1",
            port=0,
            certificates=make_certificates(("localhost",)),
            routes={"/mutate-pod": judge(profiles).mutate},
        )
        await server.start()
        pipe.send(server.port)
        while True:
            await asyncio.to_thread(pipe.recv)
            pipe.send(time.process_time())

    import uvloop

    try:
        uvloop.run(run())
    except (EOFError, KeyboardInterrupt):
        return


async def drive(port: int, requests: int, rate: float) -> list[float]:
    """Send requests at a steady rate; return the seconds that each took."""
    trusting = ssl.create_default_context()
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    bodies = [review(number) for number in range(50)]
    seconds: list[float] = []
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=trusting, limit=16)
    ) as session:

        async def one(number: int) -> None:
            started = time.perf_counter()
            async with session.post(
                f"https://127.0.0.1:{port}/mutate-pod", data=bodies[number % len(bodies)]
            ) as answer:
                body = await answer.json(content_type=None)
                assert body["response"]["allowed"], body
                assert body["response"]["patch"]
            seconds.append(time.perf_counter() - started)

        begin = time.perf_counter()
        tasks = []
        for number in range(requests):
            await asyncio.sleep(max(0.0, begin + number / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(one(number)))
        await asyncio.gather(*tasks)
    return seconds


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--profiles", type=int, default=20)
    parser.add_argument("--rate", type=float, default=300)
    options = parser.parse_args()

    made = judge(options.profiles)
    inside = []
    for number in range(500):
        asked = request(pod(number))
        started = time.perf_counter()
        verdict = made.mutate(asked)
        inside.append(time.perf_counter() - started)
        assert verdict.patch

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(theirs, options.profiles), daemon=True
    )
    process.start()
    port = ours.recv()
    asyncio.run(drive(port, 200, options.rate))
    ours.send("cpu")
    before = ours.recv()
    seconds = sorted(asyncio.run(drive(port, options.requests, options.rate)))
    ours.send("cpu")
    cpu = ours.recv() - before
    process.terminate()
    process.join(5)
    print(
        json.dumps(
            {
                "handler_p50_ms": round(statistics.median(inside) * 1000, 3),
                "https_p50_ms": round(seconds[len(seconds) // 2] * 1000, 3),
                "https_p99_ms": round(seconds[int(len(seconds) * 0.99)] * 1000, 3),
                "server_cpu_ms_per_request": round(cpu / options.requests * 1000, 3),
                "requests_per_core_second": round(options.requests / cpu),
                "rate": options.rate,
            }
        )
    )


if __name__ == "__main__":
    run_main(main)
