"""Two scheduler programs with the shipped configuration and rights: the leader is killed.

About 15 s, most of it the API server's start and the time that a lease of a dead leader lasts.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from apis.cpuset import CpuSet
from cluster.scheduler.manifests import configuration, rbac
from kube.client import Client, encode_object
from kube.resources import LEASES, PODS
from tests.beds.apiserver import ApiServer, eventually
from tests.cluster.conftest import NAMESPACE, grant, read
from tests.cluster.scheduler.beds.on_api_server import make_cpus, make_node
from tests.ports import free_ports

pytestmark = pytest.mark.apiserver

_USER = "koord-scheduler"
_NODES = 4
_CPUS = 16
_PODS = _NODES * _CPUS // 2
"""Each with two CPUs of its own: they fill the nodes exactly."""


@dataclass(frozen=True, slots=True)
class _Replica:
    process: subprocess.Popen[bytes]
    port: int
    secure_port: int
    log: Path


@contextmanager
def _replica(server: ApiServer, folder: Path, name: str) -> Iterator[_Replica]:
    kubeconfig, file, log = (folder / f"{name}.{part}" for part in ("kubeconfig", "json", "log"))
    kubeconfig.write_text(server.kubeconfig(_USER))
    tree = configuration(NAMESPACE)
    tree["clientConnection"] = {"kubeconfig": str(kubeconfig), "qps": 1000, "burst": 1000}
    file.write_text(json.dumps(tree))
    port, secure_port = free_ports(2)
    command = [
        *(sys.executable, "-m", "cluster.scheduler.main", f"--config={file}"),
        *("--address=127.0.0.1", f"--port={port}", "--bind-address=127.0.0.1"),
        *(f"--secure-port={secure_port}", "--authentication-skip-lookup=true"),
        *("--leader-elect-lease-duration=6s", "--leader-elect-renew-deadline=5s"),
        "--leader-elect-retry-period=1s",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield _Replica(process, port, secure_port, log)
    finally:
        process.kill()
        process.wait()


async def _status(session: aiohttp.ClientSession, url: str, token: str = "") -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with session.get(url, headers=headers, ssl=False) as answer:
            return answer.status
    except aiohttp.ClientConnectionError:
        return 0


async def _leads(session: aiohttp.ClientSession, replica: _Replica) -> bool:
    page = f"http://127.0.0.1:{replica.port}/apis/v1/__services__"
    return await _status(session, page) == 200


async def _make_nodes(client: Client) -> None:
    for number in range(_NODES):
        await make_node(client, f"n{number}", cpu=_CPUS)
        await make_cpus(client, f"n{number}", _CPUS)


async def _make_pod(client: Client, name: str) -> None:
    amounts = {"cpu": "2", "memory": "1Gi"}
    body = {
        "metadata": {"name": name, "labels": {"koordinator.sh/qosClass": "LSR"}},
        "spec": {
            "schedulerName": "koord-scheduler",
            "priorityClassName": "koord-prod",
            "automountServiceAccountToken": False,
            "containers": [
                {"name": "c", "image": "x", "resources": {"requests": amounts, "limits": amounts}}
            ],
        },
    }
    await client.create(PODS, encode_object(PODS, body), namespace="default")


async def _bound(client: Client) -> dict[str, tuple[str, str]]:
    """Return node and CPUs of each pod that is bound."""
    raw = await client.request("GET", PODS.path(namespace="default"))
    result = {}
    for pod in msgspec.json.decode(raw)["items"]:
        node = pod["spec"].get("nodeName")
        if node:
            annotations = pod["metadata"]["annotations"]
            status = json.loads(annotations["scheduling.koordinator.sh/resource-status"])
            result[pod["metadata"]["name"]] = (node, status["cpuset"])
    return result


async def _play(server: ApiServer, first: _Replica, second: _Replica) -> None:
    replicas = (first, second)
    async with server.client() as client, aiohttp.ClientSession() as session:

        async def ready() -> bool:
            assert all(each.process.poll() is None for each in replicas)
            pages = [f"http://127.0.0.1:{each.port}/readyz" for each in replicas]
            pages += [f"https://127.0.0.1:{each.secure_port}/readyz" for each in replicas]
            return [await _status(session, page) for page in pages] == [200] * 4

        await eventually(ready, seconds=60)

        async def one_leads() -> _Replica | None:
            leading = [each for each in replicas if await _leads(session, each)]
            assert len(leading) < 2
            return leading[0] if leading else None

        leader: _Replica = await eventually(one_leads, seconds=60)
        (other,) = (each for each in replicas if each is not leader)
        for number in range(_PODS // 2):
            await _make_pod(client, f"p{number}")

        async def some() -> bool:
            return len(await _bound(client)) >= 4

        await eventually(some, every=0.01)
        # Bindings and events of the others are under way.
        leader.process.send_signal(signal.SIGKILL)
        leader.process.wait()
        for number in range(_PODS // 2, _PODS):
            await _make_pod(client, f"p{number}")

        async def all_bound() -> bool:
            return len(await _bound(client)) == _PODS

        await eventually(all_bound, seconds=60)
        assert await _leads(session, other)
        _no_cpu_twice(await _bound(client))
        # The secure port asks the API server under the scheduler's own rights.
        page = f"https://127.0.0.1:{other.secure_port}/apis/v1/nodes/n0"
        assert await _status(session, page, server.tokens["nobody"]) == 403
        assert await _status(session, page, server.tokens["admin"]) == 200
        other.process.terminate()
        assert await asyncio.to_thread(other.process.wait, 30) == 0
        lease: dict[str, Any] = await read(client, LEASES, "koord-scheduler", NAMESPACE)
        assert not lease["spec"].get("holderIdentity")
        messages = [json.loads(line)["message"] for line in other.log.read_text().splitlines()]
        pages = f"http://127.0.0.1:{other.port} and https://127.0.0.1:{other.secure_port}"
        assert f"koord-scheduler started: profiles koord-scheduler; pages on {pages}" in messages
        assert messages[-1] == "koord-scheduler stops as it was asked to"
        for each in replicas:
            assert "forbidden" not in each.log.read_text().lower()


def _no_cpu_twice(bound: dict[str, tuple[str, str]]) -> None:
    by_node: dict[str, list[int]] = {}
    for node, cpus in bound.values():
        by_node.setdefault(node, []).extend(CpuSet.parse(cpus))
    assert {node: sorted(cpus) for node, cpus in by_node.items()} == {
        f"n{number}": list(range(_CPUS)) for number in range(_NODES)
    }


def test_the_second_replica_takes_over_and_no_cpu_is_given_twice(
    server: ApiServer, tmp_path: Path
) -> None:
    async def prepare() -> None:
        async with server.client() as client:
            await grant(client, _USER, *rbac())
            await _make_nodes(client)

    asyncio.run(prepare())
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(_replica(server, tmp_path, name)) for name in ("first", "second")
        )
        asyncio.run(_play(server, first, second))
