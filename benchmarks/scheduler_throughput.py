"""How fast a scheduler binds pods on a real API server, and what a pod costs it.

    python -m benchmarks.scheduler_throughput [--nodes 5000] [--pods 3000] [--kinds plain,owned]
        [--beside]

For each kind of pods (`benchmarks.scheduler_kinds`): nodes and pods are made first, then a
scheduler starts, and pods are counted as the API server shows them bound. koord-scheduler runs with
the profile of Koordinator's chart. `--beside` repeats each kind that needs no feature of
Koordinator with kube-scheduler, on an API server of its own, in the same run. Rate: between the
first tenth and the last pod. CPU: of the scheduler's process in that time, user and system; and
until the process is idle, with the events and conditions that are written behind the bindings. API
server, etcd and this program share the machine with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from apis.crd import KINDS as CRD_KINDS
from apis.crd import custom_resource_definition
from benchmarks.running import run_main
from benchmarks.scheduler_kinds import KINDS, Kind
from kube.client import ApiError, encode_object
from kube.kept_client import KeptClient
from kube.resources import (
    CRDS,
    DEVICES,
    ELASTIC_QUOTAS,
    NODE_RESOURCE_TOPOLOGIES,
    NODES,
    POD_GROUPS,
    PODS,
    RESERVATIONS,
    Resource,
)
from tests.beds.apiserver import ApiServer, api_server, eventually
from tests.beds.kubernetes import API_SERVER, programs
from tests.cluster.scheduler.configuration.files import chart_profile, file

_AT_ONCE = 16
"""Requests in parallel while nodes and pods are made."""
_IDLE_S = 0.05
"""Seconds of CPU in a second: less is an idle process."""
_SERVED = (DEVICES, ELASTIC_QUOTAS, NODE_RESOURCE_TOPOLOGIES, POD_GROUPS, RESERVATIONS)


@dataclass(frozen=True)
class Result:
    rate: float
    cpu_ms: float
    whole_cpu_ms: float
    """Until the process is idle, for each pod that was not bound at the first count, stuck ones
    included."""


async def _fill(server: ApiServer, kind: Kind, nodes: int, pods: int) -> None:
    gate = asyncio.Semaphore(_AT_ONCE)
    async with KeptClient(server.connection(), connections=_AT_ONCE) as client:

        async def node(number: int) -> None:
            amounts = {
                "cpu": "32",
                "memory": "128Gi",
                "pods": "110",
                "koordinator.sh/gpu-core": "800",
                "koordinator.sh/gpu-memory-ratio": "800",
            }
            labels = {
                "kubernetes.io/hostname": f"n{number}",
                "topology.kubernetes.io/zone": f"z{number % 3}",
                "size": f"s{number % 4}",
            }
            body = {
                "metadata": {"name": f"n{number}", "labels": labels},
                "status": {"capacity": amounts, "allocatable": amounts},
            }
            async with gate:
                await client.create(NODES, encode_object(NODES, body))
                # The API server taints new nodes as not ready.
                await client.patch(NODES, f"n{number}", b'{"spec":{"taints":null}}')

        async def put(resource: Resource, namespace: str, plain: dict[str, Any]) -> None:
            async with gate:
                body = encode_object(resource, plain)
                await client.create(resource, body, namespace=namespace)
                if resource is RESERVATIONS:
                    status = msgspec.json.encode({"status": plain["status"]})
                    name = plain["metadata"]["name"]
                    await client.patch(resource, name, status, subresource="status")

        await _install(client)
        await asyncio.gather(*(node(number) for number in range(nodes)))
        await asyncio.gather(*(put(*each) for each in kind.needs(nodes, pods)))
        made = ((PODS, "default", kind.pod(number)) for number in range(pods))
        await asyncio.gather(*(put(*each) for each in made))


async def _install(client: KeptClient) -> None:
    """Install the project's CRDs, and wait until they are served."""
    for kind in CRD_KINDS:
        definition = msgspec.json.encode(custom_resource_definition(kind))
        await client.create(CRDS, definition)

    async def served() -> bool:
        try:
            for resource in _SERVED:
                await client.request("GET", resource.path())
        except ApiError:
            return False
        return True

    await eventually(served, seconds=60)


async def _measure(server: ApiServer, pid: int, pods: int, seconds: float, *, stuck: int) -> Result:
    """Count bound pods by a watch until all are bound or nothing happens for `seconds`."""
    bound: set[str] = set()
    begun: tuple[float, int, float] | None = None
    ended = (time.monotonic(), 0, 0.0)
    async with server.client() as client:
        raw = await client.request("GET", PODS.path(namespace="default"), params={"limit": "1"})
        version = msgspec.json.decode(raw)["metadata"]["resourceVersion"]
        params = {"watch": "1", "resourceVersion": version, "fieldSelector": "spec.nodeName!="}
        path = PODS.path(namespace="default")
        async with client.stream(path, params=params, silence_seconds=seconds) as lines:
            async for line in lines:
                bound.add(line[line.index(b'"name":') :][:40].decode(errors="replace"))
                count = len(bound)
                if begun is None and count >= pods // 10:
                    begun = (time.monotonic(), count, _cpu(pid))
                if count >= pods or count % 200 == 0:
                    ended = (time.monotonic(), count, _cpu(pid))
                if count >= pods:
                    break
    if begun is None or ended[1] <= begun[1]:
        raise SystemExit(f"only {len(bound)} of {pods} pods were bound")
    more = ended[1] - begun[1]
    whole = await _until_idle(pid) - begun[2]
    return Result(
        more / (ended[0] - begun[0]),
        1000 * (ended[2] - begun[2]) / more,
        1000 * whole / (more + stuck),
    )


async def _until_idle(pid: int) -> float:
    """Return the seconds of CPU that a process used, once it is idle."""
    used = _cpu(pid)
    while True:
        await asyncio.sleep(1)
        before, used = used, _cpu(pid)
        if used - before < _IDLE_S:
            return used


def _cpu(pid: int) -> float:
    """Return the seconds of CPU that a process used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _scheduler(server: ApiServer, folder: Path, *, other: bool) -> Iterator[int]:
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(server.kubeconfig())
    configuration = folder / "configuration.yaml"
    profile = {"schedulerName": "bench"} if other else chart_profile("bench")
    client = {"kubeconfig": str(kubeconfig), "qps": 5000, "burst": 5000}
    tree = file(clientConnection=client, leaderElection={"leaderElect": False}, profiles=[profile])
    # YAML is a superset of JSON.
    configuration.write_text(json.dumps(tree))
    if other:
        program = str(programs(*API_SERVER, "kube-scheduler") / "kube-scheduler")
        command = [program, f"--config={configuration}", "--secure-port=0"]
    else:
        command = [sys.executable, "-m", "cluster.scheduler.main", f"--config={configuration}"]
        command.append("--port=0")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log)
        try:
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _run(kind: Kind, nodes: int, pods: int, *, other: bool) -> Result:
    with api_server() as server, tempfile.TemporaryDirectory() as folder:
        asyncio.run(_fill(server, kind, nodes, pods))

        async def measure() -> Result:
            with _scheduler(server, Path(folder), other=other) as pid:
                fit = kind.bindable(pods)
                return await _measure(server, pid, fit, seconds=60, stuck=pods - fit)

        return asyncio.run(measure())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--pods", type=int, default=3000)
    parser.add_argument("--kinds", default="plain,owned", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--beside", action="store_true", help="kube-scheduler too")
    given = parser.parse_args()
    print(f"{given.nodes} nodes, {given.pods} pods")
    for name in given.kinds.split(","):
        kind = KINDS.get(name)
        if kind is None:
            parser.error(f"{name!r} is none of {', '.join(KINDS)}")
        for other in (False, True) if given.beside and kind.kubernetes else (False,):
            result = _run(kind, given.nodes, given.pods, other=other)
            program = "kube-scheduler" if other else "koord-scheduler"
            print(
                f"{name:10} {program:16} {result.rate:7.0f} pods/s"
                f" {result.cpu_ms:7.2f} ms CPU a pod, {result.whole_cpu_ms:.2f} in all",
                flush=True,
            )


if __name__ == "__main__":
    run_main(main)
