"""How long koord-scheduler takes to start on a large cluster, and how much memory it needs there.

    python -m benchmarks.scheduler_start [--nodes 5000] [--pods 150000] [--beside]

A real API server and etcd. The objects are put into etcd in bulk before the API server starts;
every pod runs on a node and has labels, annotations, an owner, two containers with probes and
volumes, and a status as kubelet writes it (about 4 KiB). One more pod waits. Printed are the time
from the start of the process to the binding of that pod, and the process's memory then and its
peak. `--beside` repeats it with kube-scheduler, on an API server of its own.
"""

from __future__ import annotations

import argparse
import base64
import json
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

from benchmarks.running import run_main
from tests.beds.apiserver import ApiServer, api_server
from tests.beds.kubernetes import API_SERVER, programs

_AT_ONCE: Final = 100
"""Objects in one transaction: etcd takes up to 128, and 1.5 MiB."""
_LONGEST_START_S: Final = 600.0
_CREATED: Final = "2026-01-01T00:00:00Z"
_CONFIGURATION: Final = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {{kubeconfig: {kubeconfig}, qps: 5000, burst: 5000}}
leaderElection: {{leaderElect: false}}
profiles:
- schedulerName: bench
{plugins}
"""
_PLUGINS: Final = """
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
"""
Object = tuple[str, dict[str, Any]]
"""The key in etcd below /registry, and the object."""


def _metadata(name: str, number: int, **more: Any) -> dict[str, Any]:
    uid = f"00000000-0000-4000-8000-{number:012d}"
    return {"name": name, "uid": uid, "creationTimestamp": _CREATED, **more}


def _nodes(count: int) -> Iterator[Object]:
    for number in range(count):
        name = f"n{number}"
        amounts = {"cpu": "64", "memory": "256Gi", "pods": "110"}
        labels = {
            "kubernetes.io/hostname": name,
            "topology.kubernetes.io/zone": f"z{number % 3}",
        }
        images = [
            {"names": [f"registry.example/app-{n}:v1"], "sizeBytes": 10**8 + n} for n in range(30)
        ]
        yield (
            f"minions/{name}",
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": _metadata(name, 10**6 + number, labels=labels),
                "spec": {},
                "status": {"capacity": amounts, "allocatable": amounts, "images": images},
            },
        )


def _pods(count: int, nodes: int) -> Iterator[Object]:
    for number in range(count):
        workload = f"app-{number % 1000}"
        yield _pod(f"{workload}-{number:06d}", number, workload, node=f"n{number % nodes}")
    yield _pod("waiting", 10**7, "waiting", node="")


def _pod(name: str, number: int, workload: str, *, node: str) -> Object:
    owner = {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "name": workload,
        "uid": f"uid-of-{workload}",
        "controller": True,
    }
    probe = {"httpGet": {"path": "/healthz", "port": 8080}, "periodSeconds": 10}
    mounts = [
        {"name": "token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"},
        {"name": "config", "mountPath": "/etc/app"},
    ]
    containers = [
        {
            "name": container,
            "image": f"registry.example/{workload}:v1",
            "env": [{"name": f"SETTING_{n}", "value": f"value-{n}"} for n in range(8)],
            "resources": {
                "requests": {"cpu": "500m", "memory": "1Gi"},
                "limits": {"cpu": "1", "memory": "1Gi"},
            },
            "volumeMounts": mounts,
            "livenessProbe": probe,
            "readinessProbe": probe,
            "terminationMessagePath": "/dev/termination-log",
            "imagePullPolicy": "IfNotPresent",
        }
        for container in ("main", "sidecar")
    ]
    running = [
        {
            "name": each["name"],
            "image": each["image"],
            "imageID": "sha256:" + "0" * 64,
            "containerID": "containerd://" + "0" * 64,
            "ready": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": _CREATED}},
        }
        for each in containers
    ]
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": _CREATED}
        for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    ]
    metadata = _metadata(
        name,
        number,
        namespace="default",
        labels={"app": workload, "version": "v1", "koordinator.sh/qosClass": "LS"},
        annotations={"example.com/checksum": "0" * 64},
        ownerReferences=[owner],
    )
    status: dict[str, Any] = {"phase": "Pending"}
    if node:
        status = {"phase": "Running", "conditions": conditions, "containerStatuses": running}
    return (
        f"pods/default/{name}",
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": {
                "schedulerName": "bench",
                "nodeName": node,
                "containers": containers,
                "restartPolicy": "Always",
                "terminationGracePeriodSeconds": 30,
                "dnsPolicy": "ClusterFirst",
                "securityContext": {},
                "volumes": [{"name": "token", "emptyDir": {}}, {"name": "config", "emptyDir": {}}],
                "tolerations": [
                    {"key": f"node.kubernetes.io/{what}", "operator": "Exists"}
                    for what in ("not-ready", "unreachable")
                ],
            },
            "status": status,
        },
    )


def _put(server: ApiServer, objects: Iterable[Object]) -> None:
    """Put objects into etcd through its JSON gateway. The API server reads JSON as well."""
    url = f"http://127.0.0.1:{server.etcd_port}/v3/kv/txn"
    rest = iter(objects)
    while some := list(islice(rest, _AT_ONCE)):
        operations = [
            {
                "requestPut": {
                    "key": base64.b64encode(f"/registry/{key}".encode()).decode(),
                    "value": base64.b64encode(json.dumps(plain).encode()).decode(),
                }
            }
            for key, plain in some
        ]
        body = json.dumps({"success": operations}).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
            answer.read()


def _command(server: ApiServer, folder: Path, *, other: bool) -> list[str]:
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(server.kubeconfig())
    configuration = folder / "configuration.yaml"
    plugins = "" if other else _PLUGINS
    configuration.write_text(_CONFIGURATION.format(kubeconfig=kubeconfig, plugins=plugins))
    if other:
        program = [str(programs(*API_SERVER, "kube-scheduler") / "kube-scheduler")]
    else:
        program = [sys.executable, "-m", "cluster.scheduler.main", "--port=0"]
    return [*program, f"--config={configuration}", "--secure-port=0"]


def _is_bound(server: ApiServer) -> bool:
    request = urllib.request.Request(f"{server.url}/api/v1/namespaces/default/pods/waiting")
    request.add_header("Authorization", f"Bearer {server.tokens['admin']}")
    tls = ssl._create_unverified_context()
    with urllib.request.urlopen(request, timeout=60, context=tls) as answer:
        return bool(json.load(answer)["spec"].get("nodeName"))


def _memory_mb(pid: int, field: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) / 1024
    raise SystemExit(f"process {pid} has no {field}")


def _run(nodes: int, pods: int, *, other: bool) -> tuple[float, float, float]:
    """Return the seconds to the first binding, and the memory then and at its peak, in MiB."""
    quota = ("--quota-backend-bytes=8589934592",)
    with api_server(etcd_flags=quota) as server, tempfile.TemporaryDirectory() as folder:
        server.stop("kube-apiserver")
        _put(server, _nodes(nodes))
        _put(server, _pods(pods, nodes))
        server.start_apiserver()
        with (Path(folder) / "log").open("w") as log:
            began = time.monotonic()
            command = _command(server, Path(folder), other=other)
            process = subprocess.Popen(command, stderr=log, stdout=log)
            try:
                while not _is_bound(server):
                    if process.poll() is not None or time.monotonic() - began > _LONGEST_START_S:
                        raise SystemExit((Path(folder) / "log").read_text()[-2000:])
                    time.sleep(0.2)
                took = time.monotonic() - began
                return took, _memory_mb(process.pid, "VmRSS"), _memory_mb(process.pid, "VmHWM")
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--pods", type=int, default=150_000)
    parser.add_argument("--beside", action="store_true", help="kube-scheduler too")
    given = parser.parse_args()
    print(f"{given.nodes} nodes, {given.pods} pods on them")
    for other in (False, True) if given.beside else (False,):
        took, memory, peak = _run(given.nodes, given.pods, other=other)
        name = "kube-scheduler" if other else "koord-scheduler"
        print(
            f"{name:16} first binding after {took:5.1f} s, {memory:6.0f} MiB then,"
            f" {peak:6.0f} MiB at most",
            flush=True,
        )


if __name__ == "__main__":
    run_main(main)
