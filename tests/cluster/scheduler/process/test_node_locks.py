"""Pods whose device plugin hands devices to one pod of a node at a time, on a real API server.

A task of the test does what the plugin does: when a pod that holds the lock is bound, it removes
the lock. About 15 s, half of it the API server's start.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.scheduler.binding.lock_text import parse_lock
from cluster.scheduler.manifests import node_locks_rbac, rbac
from kube.client import Client, encode_object
from kube.resources import DEVICES, NODES
from tests.beds.apiserver import ApiServer, eventually
from tests.beds.packages import CHECKOUT, DIES_WITH_US
from tests.cluster.conftest import grant, read
from tests.cluster.scheduler.beds.on_api_server import (
    make_node,
    make_pod,
    nodes_of,
    play,
    pods,
    refusal,
    scheduler,
)
from tests.cluster.scheduler.devices.making import a_gpu

pytestmark = pytest.mark.apiserver

_USER = "koord-scheduler"
_LOCK = "hami.io/mutex.lock"
_GATES = {"DevicePluginAdaption": True}
_POINTS = ("preFilter", "filter", "score", "reserve", "preBind")
_CONFIGURATION = json.dumps(
    {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "podMaxBackoffSeconds": 1,
        "profiles": [
            {
                "schedulerName": "koord-scheduler",
                "plugins": {point: {"enabled": [{"name": "DeviceShare"}]} for point in _POINTS},
            }
        ],
    }
)
_DIES_BEFORE_IT_BINDS = """\
import os, signal, sys
from cluster.scheduler.main import main
from kube.client import Client

request = Client.request

async def dies(self, method, path, **rest):
    if path.endswith("/binding"):
        os.kill(os.getpid(), signal.SIGKILL)
    return await request(self, method, path, **rest)

Client.request = dies
sys.exit(main())
"""


async def _make_machine(client: Client, name: str, gpus: int) -> None:
    await make_node(client, name, cpu=32)
    amounts = {"koordinator.sh/gpu": str(100 * gpus)}
    status = msgspec.json.encode({"status": {"capacity": amounts, "allocatable": amounts}})
    await client.patch(NODES, name, status, subresource="status")
    device = {
        "metadata": {"name": name, "labels": {"node.koordinator.sh/gpu-vendor": "metax"}},
        "spec": {"devices": [a_gpu(minor) for minor in range(gpus)]},
    }
    await client.create(DEVICES, encode_object(DEVICES, device))


async def _make_pods(client: Client, *names: str, **spec: Any) -> None:
    amounts = {"cpu": "1", "koordinator.sh/gpu": "100"}
    container = {"name": "main", "image": "x"}
    container["resources"] = {"requests": amounts, "limits": amounts}  # type: ignore[assignment]
    for name in names:
        await make_pod(client, name, cpu="1", containers=[container], **spec)


async def _lock(client: Client, node: str) -> str:
    found = await read(client, NODES, node)
    return str(found["metadata"].get("annotations", {}).get(_LOCK, ""))


async def _gpus(client: Client) -> dict[str, list[tuple[str, int]]]:
    """Return what each bound pod has: node and minor of its GPUs."""
    key = "scheduling.koordinator.sh/device-allocated"
    return {
        pod["metadata"]["name"]: [
            (pod["spec"]["nodeName"], gpu["minor"])
            for gpu in json.loads(pod["metadata"]["annotations"][key])["gpu"]
        ]
        for pod in await pods(client)
        if pod["spec"].get("nodeName")
    }


class _Plugin:
    """The device plugin of a node. handed: pods that have their devices, in order.

    wrong: what the plugin could not have told apart.
    """

    def __init__(self, client: Client, node: str) -> None:
        self._client = client
        self._node = node
        self.handed: list[str] = []
        self.wrong: list[str] = []

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(0.05)

    async def look(self) -> None:
        bound = {pod for pod, node in (await nodes_of(self._client)).items() if node == self._node}
        waiting = bound - set(self.handed)
        if len(waiting) > 1:
            self.wrong.append(f"{sorted(waiting)} wait for devices at once")
        lock = parse_lock(await _lock(self._client, self._node))
        if lock is not None and lock.name in waiting:
            self.handed.append(lock.name)
            body = {"metadata": {"annotations": {_LOCK: None}}}
            await self._client.patch(NODES, self._node, msgspec.json.encode(body))


@asynccontextmanager
async def _plugins(client: Client, *nodes: str) -> AsyncIterator[list[_Plugin]]:
    plugins = [_Plugin(client, node) for node in nodes]
    tasks = [asyncio.create_task(plugin.run()) for plugin in plugins]
    try:
        yield plugins
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended


def test_pods_of_one_node_are_bound_one_after_the_other(server: ApiServer) -> None:
    """With the rights of the manifests alone; without that of the locks nothing is bound."""

    async def scenario(server: ApiServer, client: Client) -> None:
        await grant(client, _USER, *rbac())
        for node in ("n1", "n2"):
            await _make_machine(client, node, gpus=4)
        connection = server.connection(_USER)
        async with (
            scheduler(connection, _CONFIGURATION, gates=_GATES) as process,
            _plugins(client, "n1", "n2") as plugins,
        ):
            await _make_pods(client, "p0")

            async def refused() -> str:
                return refusal((await pods(client))[0])

            message = await eventually(refused)
            assert "lock hami.io/mutex.lock of node n" in message
            assert "deploy/scheduler/node-locks" in message
            assert not any((await nodes_of(client)).values())
            await grant(client, _USER, *node_locks_rbac())
            names = [f"p{number}" for number in range(1, 8)]
            await _make_pods(client, *names)

            async def all_handed() -> bool:
                return sum(len(plugin.handed) for plugin in plugins) == 8

            await eventually(all_handed, seconds=90)
            assert [plugin.wrong for plugin in plugins] == [[], []]
            found = await _gpus(client)
            assert len({gpu for gpus in found.values() for gpu in gpus}) == 8
            assert [await _lock(client, node) for node in ("n1", "n2")] == ["", ""]
            assert process.node_locks.in_flight == 0

    play(server, scenario)


def test_a_scheduler_that_is_killed_with_the_lock_keeps_its_pod_from_nothing(
    server: ApiServer, tmp_path: Path
) -> None:
    async def scenario(server: ApiServer, client: Client) -> None:
        await _make_machine(client, "n1", gpus=2)
        await _make_pods(client, "first")
        await asyncio.to_thread(_run_until_it_dies, server, tmp_path)
        lock = parse_lock(await _lock(client, "n1"))
        assert lock is not None and lock.pod == "default/first"
        assert not any((await nodes_of(client)).values())
        # A pod that is more important is decided first, and would wait for the lock.
        await _make_pods(client, "second", priorityClassName="koord-prod")
        async with (
            scheduler(server.connection(), _CONFIGURATION, gates=_GATES) as process,
            _plugins(client, "n1") as (plugin,),
        ):
            await eventually(lambda: len(plugin.handed) == 2, seconds=30)
            assert plugin.wrong == []
            assert process.node_locks.counts.refused == 0
            found = await _gpus(client)
            assert sorted(gpu for gpus in found.values() for gpu in gpus) == [("n1", 0), ("n1", 1)]

    play(server, scenario)


def _run_until_it_dies(server: ApiServer, folder: Path) -> None:
    (folder / "kubeconfig").write_text(server.kubeconfig())
    tree = json.loads(_CONFIGURATION)
    tree["clientConnection"] = {"kubeconfig": str(folder / "kubeconfig")}
    (folder / "config.json").write_text(json.dumps(tree))
    (folder / "scheduler.py").write_text(_DIES_BEFORE_IT_BINDS)
    command = [
        *(*DIES_WITH_US, sys.executable, str(folder / "scheduler.py")),
        *(f"--config={folder / 'config.json'}", "--port=0", "--secure-port=0"),
        "--feature-gates=DevicePluginAdaption=true",
    ]
    environment = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(CHECKOUT)}
    ended = subprocess.run(
        command, cwd=folder, env=environment, timeout=120, capture_output=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-4000:].decode()
