"""The command koord-manager, concurrent bookings on quotas, and profiles for waiting pods."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kube.client import ApiError, Client, Unreachable, encode_object
from kube.connection import Connection, ConnectionConfigError, load_connection
from kube.discovery import Discovery, evict
from kube.resources import ELASTIC_QUOTAS, LEASES, NODE_SLOS, NODES, PODS, PROFILES
from tests.beds.apiserver import ApiServer, eventually
from tests.cluster.conftest import (
    NAMESPACE,
    kubeconfig,
    manager,
    read,
    register_webhooks,
    set_config,
    unregister_webhooks,
)
from tests.ports import free_port

pytestmark = pytest.mark.apiserver


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def start(server: ApiServer, folder: Path, metrics: int, health: int) -> subprocess.Popen[str]:
    """The manager as a process of its own; its log goes to a pipe."""
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "cluster.manager.main",
            f"--kubeconfig={kubeconfig(server, folder)}",
            f"--metrics-addr=127.0.0.1:{metrics}",
            f"--health-probe-addr=127.0.0.1:{health}",
            "--rest-config-qps=100",
        ],
        env={
            **os.environ,
            "WEBHOOK_PORT": str(free_port()),
            "WEBHOOK_HOST": "127.0.0.1",
            "WEBHOOK_CERT_WRITER": "fs",
            "WEBHOOK_CERT_DIR": str(folder / "certs"),
        },
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_command_runs_serves_its_pages_and_ends_cleanly(
    server: ApiServer, tmp_path: Path
) -> None:
    async def prepare() -> None:
        async with server.client() as client:
            await set_config(client, {"colocation-config": '{"enable":true}'})
            await register_webhooks(client)
            body = encode_object(NODES, {"metadata": {"name": "by-command"}})
            await client.create(NODES, body)

    async def stored() -> Any:
        async with server.client() as client:
            return await read(client, NODE_SLOS, "by-command")

    async def clean() -> None:
        async with server.client() as client:
            await unregister_webhooks(client)

    async def lease() -> Any:
        async with server.client() as client:
            return await read(client, LEASES, "koordinator-manager", NAMESPACE)

    asyncio.run(prepare())
    metrics, health = free_port(), free_port()
    process = start(server, tmp_path, metrics, health)
    try:

        async def ready() -> bool:
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            return (await asyncio.to_thread(get, f"http://127.0.0.1:{health}/readyz"))[0] == 200

        asyncio.run(eventually(ready, seconds=40, every=0.2))
        asyncio.run(eventually(stored, seconds=20))
        assert get(f"http://127.0.0.1:{health}/healthz") == (200, "ok")
        status, text = get(f"http://127.0.0.1:{metrics}/metrics")
        assert status == 200
        assert "slo_controller_nodeslo_reconcile_count{" in text
        assert "koordinator_manager_is_leader 1\n" in text
        assert "\nprocess_resident_memory_bytes " in text
        key = tmp_path / "certs" / "key.pem"
        assert key.stat().st_mode & 0o777 == 0o600
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
        assert process.returncode == 0, log
        assert all(json.loads(line)["message"] for line in log.splitlines())
        assert asyncio.run(lease())["spec"].get("holderIdentity", "") == ""
    finally:
        process.kill()
        process.wait()
        asyncio.run(clean())


def test_a_killed_leader_is_replaced_within_its_lease(server: ApiServer, tmp_path: Path) -> None:
    async def prepare() -> None:
        async with server.client() as client:
            await set_config(client, {"colocation-config": '{"enable":true}'})
            await register_webhooks(client)

    async def clean() -> None:
        async with server.client() as client:
            await unregister_webhooks(client)

    async def cared_for(name: str) -> None:
        async with server.client() as client:
            await client.create(NODES, encode_object(NODES, {"metadata": {"name": name}}))
            await eventually(lambda: read(client, NODE_SLOS, name), seconds=40, every=0.2)

    def leads(port: int) -> bool:
        _, text = get(f"http://127.0.0.1:{port}/metrics")
        return "koordinator_manager_is_leader 1\n" in text

    asyncio.run(prepare())
    running: dict[int, subprocess.Popen[str]] = {}
    try:
        for name in ("one", "two"):
            folder = tmp_path / name
            folder.mkdir()
            port = free_port()
            running[port] = start(server, folder, port, free_port())

        async def leader() -> int:
            return next((port for port in running if leads(port)), 0)

        first = asyncio.run(eventually(leader, seconds=40, every=0.2))
        asyncio.run(cared_for("before-the-crash"))
        dead = running.pop(first)
        dead.kill()
        dead.communicate()
        asyncio.run(cared_for("after-the-crash"))
        assert [port for port in running if leads(port)] == list(running)
    finally:
        for process in running.values():
            process.terminate()  # hands the lease back, which the next test's manager needs
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        asyncio.run(clean())


def test_a_wrong_kubeconfig_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConnectionConfigError, match="--kubeconfig") as raised:
        load_connection(str(tmp_path / "missing"))
    assert f"No such file or directory: '{tmp_path}/missing'" in str(raised.value)
    # Of a list of paths, one has to be there, as for kubectl.
    (tmp_path / "empty").touch()
    with pytest.raises(ConnectionConfigError) as raised:
        load_connection(f"{tmp_path}/missing:{tmp_path}/empty")
    assert "No such file" not in str(raised.value)


def test_missing_webhook_configurations_are_one_line_that_says_what_to_apply(
    server: ApiServer, tmp_path: Path
) -> None:
    running = start(server, tmp_path, free_port(), free_port())
    try:
        _, told = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 1
    assert "apply deploy/manager/50-webhooks.yaml" in told
    assert "Traceback" not in told


def test_an_unreachable_server_is_one_error() -> None:
    async def run() -> None:
        async with Client(Connection(f"http://127.0.0.1:{free_port()}")) as client:
            with pytest.raises(Unreachable):
                await client.request("GET", "/version", tries=1)

    asyncio.run(run())


def test_a_quota_is_never_overbooked(server: ApiServer) -> None:
    async def run() -> None:
        async with server.client() as client:
            await register_webhooks(client)
            quota = {
                "metadata": {"name": "narrow", "namespace": "default"},
                "spec": {"min": {"cpu": "10"}, "max": {"cpu": "10"}},
            }
            gates = "--feature-gates=EnableQuotaAdmission=true"
            async with manager(server, [gates], webhooks=True) as one:
                await client.create(
                    ELASTIC_QUOTAS, encode_object(ELASTIC_QUOTAS, quota), namespace="default"
                )
                await eventually(lambda: "narrow" in one.caches.quota_tree().nodes)
                await asyncio.sleep(0.3)
                label = {"quota.scheduling.koordinator.sh/name": "narrow"}

                async def create(number: int) -> str:
                    pod = {
                        "metadata": {"name": f"quota-{number}", "labels": label},
                        "spec": {
                            "containers": [
                                {
                                    "name": "a",
                                    "image": "x",
                                    "resources": {"requests": {"cpu": "1"}},
                                }
                            ]
                        },
                    }
                    try:
                        await client.create(PODS, encode_object(PODS, pod), namespace="default")
                    except ApiError as error:
                        return str(error)
                    return ""

                results = await asyncio.gather(*(create(number) for number in range(16)))
                refused = [text for text in results if text]
                assert len(refused) == 6, refused
                others = [text for text in refused if "exceeded quota: default/narrow" not in text]
                assert others == []
                stored = await read(client, ELASTIC_QUOTAS, "narrow", "default")
                key = "quota.scheduling.koordinator.sh/child-request"
                assert json.loads(stored["metadata"]["annotations"][key]) == {"cpu": "10"}

    asyncio.run(run())


def test_booking_does_not_wait_behind_the_controllers(server: ApiServer) -> None:
    async def run() -> None:
        async with server.client() as client:
            await register_webhooks(client)
            await set_config(client, {"colocation-config": '{"enable":true}'})
            quota = {
                "metadata": {"name": "quick", "namespace": "default"},
                "spec": {"min": {"cpu": "1"}, "max": {"cpu": "1"}},
            }
            gates = "--feature-gates=EnableQuotaAdmission=true"
            async with manager(server, [gates], webhooks=True, qps=3) as one:
                await client.create(
                    ELASTIC_QUOTAS, encode_object(ELASTIC_QUOTAS, quota), namespace="default"
                )
                await eventually(lambda: "quick" in one.caches.quota_tree().nodes)
                names = [f"busy-{number}" for number in range(120)]
                for name in names:
                    await client.create(NODES, encode_object(NODES, {"metadata": {"name": name}}))
                # What the controllers have to write takes them a minute.
                await eventually(lambda: one.leading and len(one.caches.nodes.items) >= len(names))
                metadata = {
                    "name": "booked",
                    "labels": {"quota.scheduling.koordinator.sh/name": "quick"},
                }
                container = {
                    "name": "a",
                    "image": "x",
                    "resources": {"requests": {"cpu": "1"}},
                }
                body = encode_object(
                    PODS, {"metadata": metadata, "spec": {"containers": [container]}}
                )
                await client.create(PODS, body, namespace="default")
                for name in names:
                    await client.delete(NODES, name)

    asyncio.run(run())


def test_profiles_reach_pods_that_already_wait(server: ApiServer) -> None:
    async def run() -> None:
        async with server.client() as client:
            pod = {
                "metadata": {"name": "waiting", "labels": {"team": "late"}},
                "spec": {"containers": [{"name": "a", "image": "x"}]},
            }
            await client.create(PODS, encode_object(PODS, pod), namespace="default")
            profile = {
                "metadata": {
                    "name": "late",
                    "labels": {"config.koordinator.sh/controller-managed": "true"},
                },
                "spec": {
                    "selector": {"matchLabels": {"team": "late"}},
                    "labels": {"seen": "yes"},
                    "labelSuffixes": {"team": "-x"},
                    "qosClass": "BE",
                },
            }
            await client.create(PROFILES, encode_object(PROFILES, profile))
            flags = [
                "--feature-gates=WebhookFramework=false,ColocationProfileController=true",
                "--colocation-profile-reconcile-interval=200ms",
            ]
            async with manager(server, flags, webhooks=True):

                async def metadata() -> Any:
                    return (await read(client, PODS, "waiting", "default"))["metadata"]

                async def seen() -> bool:
                    return bool((await metadata())["labels"].get("seen"))

                await eventually(seen)
                profiled = await metadata()
                assert profiled["labels"] == {"team": "late-x", "seen": "yes"}
                # The suffixed label no longer matches; no further round changes anything.
                await asyncio.sleep(1)
                assert await metadata() == profiled

    asyncio.run(run())


def test_evictions_use_the_version_that_the_server_supports(server: ApiServer) -> None:
    async def run() -> None:
        async with server.client() as client:
            pod = {
                "metadata": {"name": "evicted"},
                "spec": {"containers": [{"name": "a", "image": "x"}]},
            }
            stored = msgspec.json.decode(
                await client.create(PODS, encode_object(PODS, pod), namespace="default")
            )
            discovery = Discovery(client)
            with pytest.raises(ApiError) as caught:
                await evict(client, discovery, namespace="default", name="evicted", uid="other")
            assert caught.value.status == 409
            uid = stored["metadata"]["uid"]
            await evict(client, discovery, namespace="default", name="evicted", uid=uid)
            assert await read(client, PODS, "evicted", "default") is None

    asyncio.run(run())
