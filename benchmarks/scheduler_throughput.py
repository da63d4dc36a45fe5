"""How fast a scheduler binds pods on a real API server, and what a pod costs it.

    python -m benchmarks.scheduler_throughput [--nodes 5000] [--pods 3000] [--kinds plain,owned]
        [--beside]

For each kind of pods: nodes and pods are made first, then a scheduler starts, and pods are counted
as the API server shows them bound. `--beside` repeats each kind but gangs, which it does not have,
with kube-scheduler, on an API server of its own, in the same run. Rate: between the first tenth and
the last pod. CPU: of the scheduler's process in that time, user and system. API server, etcd and
this program share the machine with it.
"""

from __future__ import annotations

import argparse
import asyncio
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

from apis.crd import KINDS, custom_resource_definition
from benchmarks.running import run_main
from kube.client import ApiError, encode_object
from kube.kept_client import KeptClient
from kube.resources import CRDS, NODES, POD_GROUPS, PODS, Resource
from tests.beds.apiserver import ApiServer, api_server, eventually
from tests.beds.kubernetes import API_SERVER, programs

_REPLICA_SETS = Resource("apps", "v1", "replicasets", "ReplicaSet", True)
_KINDS = ("plain", "owned", "shapes", "affinity", "spread", "anti", "gang")
_GANG = 100
"""Pods of a gang."""
_AT_ONCE = 16
"""Requests in parallel while nodes and pods are made."""
_CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {{kubeconfig: {kubeconfig}, qps: 5000, burst: 5000}}
leaderElection: {{leaderElect: false}}
profiles:
- schedulerName: bench
{plugins}
"""
_PLUGINS = """
  plugins:
    filter:
      enabled: [{name: LoadAwareScheduling}, {name: NodeNUMAResource}, {name: DeviceShare}]
    score:
      enabled:
      - {name: LoadAwareScheduling, weight: 1}
      - {name: NodeNUMAResource, weight: 1}
      - {name: DeviceShare, weight: 1}
    reserve:
      enabled: [{name: LoadAwareScheduling}, {name: NodeNUMAResource}, {name: DeviceShare}]
    preEnqueue: {enabled: [{name: Coscheduling}]}
    permit: {enabled: [{name: Coscheduling}]}
"""


@dataclass(frozen=True)
class Result:
    rate: float
    cpu_ms: float
    bound: int


def _pod(kind: str, number: int) -> dict[str, Any]:
    labels = {"app": f"a{number % 20}"}
    spec: dict[str, Any] = {}
    metadata: dict[str, Any] = {"name": f"p{number}", "labels": labels}
    selector = {"matchLabels": labels}
    cpu = "100m"
    if kind in ("shapes", "affinity"):
        cpu = f"{100 + 10 * (number % 20)}m"
    if kind == "affinity":
        expression = {"key": "size", "operator": "In", "values": ["s0", "s1"]}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
        spec["affinity"] = {"nodeAffinity": required}
    if kind == "spread":
        constraint = {
            "maxSkew": 1,
            "topologyKey": "topology.kubernetes.io/zone",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": selector,
        }
        spec["topologySpreadConstraints"] = [constraint]
    if kind == "anti":
        term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": selector}
        rule = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        spec["affinity"] = {"podAntiAffinity": rule}
    if kind == "gang":
        labels["pod-group.scheduling.sigs.k8s.io"] = f"g{number // _GANG}"
    if kind == "owned":
        owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "controller": True}
        name = f"a{number % 20}"
        metadata["ownerReferences"] = [{**owner, "name": name, "uid": f"uid-{name}"}]
    resources = {"requests": {"cpu": cpu, "memory": "64Mi"}}
    return {
        "metadata": metadata,
        "spec": {
            "schedulerName": "bench",
            "automountServiceAccountToken": False,
            "containers": [{"name": "main", "image": "x", "resources": resources}],
            **spec,
        },
    }


async def _fill(server: ApiServer, kind: str, nodes: int, pods: int) -> None:
    gate = asyncio.Semaphore(_AT_ONCE)
    async with KeptClient(server.connection(), connections=_AT_ONCE) as client:

        async def node(number: int) -> None:
            amounts = {"cpu": "32", "memory": "128Gi", "pods": "110"}
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

        async def pod(number: int) -> None:
            async with gate:
                body = encode_object(PODS, _pod(kind, number))
                await client.create(PODS, body, namespace="default")

        if kind == "owned":
            for number in range(20):
                labels = {"app": f"a{number}"}
                container = {"name": "main", "image": "x"}
                body = {
                    "metadata": {"name": f"a{number}"},
                    "spec": {
                        "replicas": 0,
                        "selector": {"matchLabels": labels},
                        "template": {
                            "metadata": {"labels": labels},
                            "spec": {"containers": [container]},
                        },
                    },
                }
                encoded = encode_object(_REPLICA_SETS, body)
                await client.create(_REPLICA_SETS, encoded, namespace="default")
        if kind == "gang":
            await _make_groups(client, pods)
        await asyncio.gather(*(node(number) for number in range(nodes)))
        await asyncio.gather(*(pod(number) for number in range(pods)))


async def _make_groups(client: KeptClient, pods: int) -> None:
    kind = next(kind for kind in KINDS if kind.plural == POD_GROUPS.plural)
    definition = msgspec.json.encode(custom_resource_definition(kind))
    await client.create(CRDS, definition)

    async def served() -> bool:
        try:
            await client.request("GET", POD_GROUPS.path())
        except ApiError:
            return False
        return True

    await eventually(served)
    for number in range(0, pods, _GANG):
        least = min(_GANG, pods - number)
        group = {"metadata": {"name": f"g{number // _GANG}"}, "spec": {"minMember": least}}
        body = encode_object(POD_GROUPS, group)
        await client.create(POD_GROUPS, body, namespace="default")


async def _measure(server: ApiServer, pid: int, pods: int, seconds: float) -> Result:
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
    return Result(more / (ended[0] - begun[0]), 1000 * (ended[2] - begun[2]) / more, len(bound))


def _cpu(pid: int) -> float:
    """Return the seconds of CPU that a process used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _scheduler(server: ApiServer, folder: Path, *, other: bool) -> Iterator[int]:
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(server.kubeconfig())
    configuration = folder / "configuration.yaml"
    plugins = "" if other else _PLUGINS
    configuration.write_text(_CONFIGURATION.format(kubeconfig=kubeconfig, plugins=plugins))
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


def _run(kind: str, nodes: int, pods: int, *, other: bool) -> Result:
    with api_server() as server, tempfile.TemporaryDirectory() as folder:
        asyncio.run(_fill(server, kind, nodes, pods))

        async def measure() -> Result:
            with _scheduler(server, Path(folder), other=other) as pid:
                return await _measure(server, pid, pods, seconds=60)

        return asyncio.run(measure())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--pods", type=int, default=3000)
    parser.add_argument("--kinds", default="plain,owned", help=f"of {', '.join(_KINDS)}")
    parser.add_argument("--beside", action="store_true", help="kube-scheduler too")
    given = parser.parse_args()
    print(f"{given.nodes} nodes, {given.pods} pods")
    for kind in given.kinds.split(","):
        if kind not in _KINDS:
            parser.error(f"{kind!r} is none of {', '.join(_KINDS)}")
        for other in (False, True) if given.beside and kind != "gang" else (False,):
            result = _run(kind, given.nodes, given.pods, other=other)
            name = "kube-scheduler" if other else "koord-scheduler"
            print(
                f"{kind:10} {name:16} {result.rate:7.0f} pods/s {result.cpu_ms:7.2f} ms CPU a pod",
                flush=True,
            )


if __name__ == "__main__":
    run_main(main)
