"""The manager while API servers, leaders and certificates fail or are replaced."""

from __future__ import annotations

import asyncio
import base64
import signal
import ssl
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from apis.core import Node
from apis.decode import Wire
from cluster.manager.flags import parse
from cluster.manager.manager import Manager
from cluster.webhook.configuration import Address, sync_configuration
from kube.cache import Cache
from kube.certificates import make_certificates, problem_with
from kube.client import ApiError, Client, encode_object, retry_on_conflict
from kube.leader import LeadershipLost
from kube.resources import (
    LEASES,
    MUTATING_WEBHOOKS,
    NODE_METRICS,
    NODE_SLOS,
    NODES,
    PODS,
    SECRETS,
)
from tests.beds.apiserver import ApiServer, api_server, eventually
from tests.cluster.conftest import (
    NAMESPACE,
    install,
    manager,
    read,
    register_webhooks,
    set_config,
    unregister_webhooks,
)

pytestmark = pytest.mark.apiserver

COLOCATION = {"colocation-config": '{"enable":true}'}


class OddMeta(Wire, frozen=True):
    """Metadata whose labels are numbers, which no stored label is."""

    name: str = ""
    namespace: str = ""
    resource_version: str = ""
    labels: dict[str, int] = msgspec.field(default_factory=dict)


class OddMetric(Wire, frozen=True):
    metadata: OddMeta = msgspec.field(default_factory=OddMeta)


async def make_node(client: Client, name: str, **labels: str) -> None:
    body = encode_object(NODES, {"metadata": {"name": name, "labels": labels}})
    await client.create(NODES, body)


def test_another_replica_takes_over_and_only_one_leads(server: ApiServer) -> None:
    async def run() -> None:
        async with server.client() as client:
            await set_config(client, COLOCATION)
            async with manager(server) as first:
                await eventually(lambda: first.leading)
                async with manager(server) as second:
                    await asyncio.sleep(0.5)
                    assert not second.leading
                    await make_node(client, "led-by-first")
                    await eventually(lambda: read(client, NODE_SLOS, "led-by-first"))
                await make_node(client, "still-first")
                await eventually(lambda: read(client, NODE_SLOS, "still-first"))
            # A clean end releases the lease: no waiting for it to run out.
            async with manager(server) as third:
                await eventually(lambda: third.leading, seconds=5)

    asyncio.run(run())


def test_work_goes_on_after_api_server_and_etcd_restart() -> None:
    async def run(fresh: ApiServer) -> None:
        async with fresh.client() as client:
            await set_config(client, COLOCATION)
            await make_node(client, "before")
            async with manager(fresh, ["--enable-leader-election=false"]) as one:
                await eventually(lambda: read(client, NODE_SLOS, "before"))
                await asyncio.to_thread(fresh.stop, "kube-apiserver", how=signal.SIGKILL)
                await asyncio.to_thread(fresh.start_apiserver)
                await make_node(client, "after-apiserver")
                await eventually(lambda: read(client, NODE_SLOS, "after-apiserver"), seconds=60)
                lists = one.caches.nodes.lists
                # The watch goes on where it was, unless the new server has forgotten the place.
                assert lists <= 2
                await asyncio.to_thread(fresh.stop, "etcd", how=signal.SIGKILL)
                await asyncio.to_thread(fresh.start_etcd)
                await asyncio.sleep(1)
                await eventually(lambda: _try(make_node(client, "after-etcd")), seconds=60)
                await eventually(lambda: read(client, NODE_SLOS, "after-etcd"), seconds=60)

    with api_server() as fresh:
        asyncio.run(install(fresh))
        asyncio.run(run(fresh))


async def _try(work: Any) -> bool:
    try:
        await work
    except ApiError as error:
        return error.already_exists
    except Exception:  # noqa: BLE001 - tried again
        return False
    return True


def test_a_watch_that_missed_a_compaction_lists_again() -> None:
    async def run(fresh: ApiServer) -> None:
        async with fresh.client() as client:
            cache: Cache[Node] = Cache(client, NODES, Node)
            following = asyncio.create_task(cache.run())
            await cache.wait_synced()
            await make_node(client, "one")
            await eventually(lambda: "one" in cache.items)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            # While no watch is open, objects change and the history is compacted.
            await client.delete(NODES, "one")
            for number in range(20):
                await make_node(client, f"new-{number}")
            await asyncio.to_thread(fresh.compact_etcd)
            await asyncio.to_thread(fresh.stop, "kube-apiserver")
            await asyncio.to_thread(fresh.start_apiserver)
            following = asyncio.create_task(cache.run())
            await eventually(lambda: len(cache.items) == 20 and "one" not in cache.items)
            assert cache.lists == 2
            following.cancel()

    with api_server() as fresh:
        asyncio.run(run(fresh))


def test_two_writers_of_one_object_both_get_through(server: ApiServer) -> None:
    async def run() -> None:
        async with server.client() as client:
            await make_node(client, "contended")
            decode = msgspec.json.Decoder(dict[str, Any]).decode

            async def add(name: str) -> None:
                async def write() -> bytes:
                    node = await client.get(NODES, "contended", decode)
                    labels = {**node["metadata"].get("labels", {}), name: "x"}
                    node["metadata"]["labels"] = labels
                    return await client.replace(NODES, "contended", msgspec.json.encode(node))

                await retry_on_conflict(write, tries=20)

            await asyncio.gather(*(add(f"label-{number}") for number in range(8)))
            stored = await read(client, NODES, "contended")
            assert {f"label-{n}" for n in range(8)} <= set(stored["metadata"]["labels"])

    asyncio.run(run())


def test_an_object_that_cannot_be_decoded_harms_no_other(server: ApiServer) -> None:
    async def run() -> None:
        async with server.client() as client:
            for name in ("fine", "odd"):
                body = encode_object(NODE_METRICS, {"metadata": {"name": name}})
                await client.create(NODE_METRICS, body)

            patch = msgspec.json.encode({"metadata": {"labels": {"x": "y"}}})
            await client.patch(NODE_METRICS, "odd", patch)
            cache: Cache[Any] = Cache(client, NODE_METRICS, OddMetric)
            following = asyncio.create_task(cache.run())
            await cache.wait_synced()
            assert "fine" in cache.items
            assert "odd" not in cache.items
            assert "odd" in cache.undecodable
            following.cancel()

    asyncio.run(run())


# --- certificates ------------------------------------------------------------------------------


def test_a_new_manifest_and_new_certificates_do_not_interrupt_admission(server: ApiServer) -> None:
    async def run() -> None:
        async with server.client() as client:
            await register_webhooks(client)
            async with manager(server, webhooks=True) as one:
                assert one.admission.server is not None

                async def refused() -> bool:
                    """Return whether admission works: it must refuse this contradictory pod."""
                    labels = {"koordinator.sh/qosClass": "BE"}
                    bad = {
                        "metadata": {"name": "bad", "labels": labels},
                        "spec": {"containers": [{"name": "a", "image": "x"}]},
                    }
                    body = encode_object(PODS, bad)
                    try:
                        await client.create(PODS, body, namespace="default")
                    except ApiError as error:
                        assert "does not go with" in str(error), error
                        return True
                    raise AssertionError("a pod slipped through")

                assert await refused()
                before = await _served(one.admission.server.port)
                # The Secret is lost: new certificates, trusted before they are served.
                await client.delete(SECRETS, "koordinator-webhook-certs", namespace=NAMESPACE)
                config = await read(
                    client, MUTATING_WEBHOOKS, "koordinator-mutating-webhook-configuration"
                )
                touch = {"metadata": {"annotations": {"touched": "1"}}}
                await client.patch(
                    MUTATING_WEBHOOKS, config["metadata"]["name"], msgspec.json.encode(touch)
                )

                async def rotated() -> bool:
                    assert await refused()
                    port = one.admission.server.port if one.admission.server else 0
                    return await _served(port) != before

                await eventually(rotated, seconds=20)
                assert await refused()
                ends = one.metrics.certificate_expiry.value
                assert ends > (datetime.now(UTC) + timedelta(days=300)).timestamp()
                secret = await read(client, SECRETS, "koordinator-webhook-certs", NAMESPACE)
                assert secret["data"]["ca-cert.pem"]

    asyncio.run(run())


@pytest.mark.parametrize("because", ["told", "lease lost"])
def test_a_stopping_replica_serves_admission_until_it_is_no_endpoint(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, because: str
) -> None:
    monkeypatch.setattr("cluster.manager.manager._DRAIN_SECONDS", 2.0)

    async def run() -> None:
        stop = asyncio.Event()
        async with server.client() as client:
            await register_webhooks(client)
            settings = parse(["--metrics-addr=0", "--health-probe-addr=0"], {})
            one = Manager(client, settings, webhook_port=0)
            running = asyncio.create_task(one.run(stop))
            try:
                await eventually(lambda: one.leading, seconds=30)
                assert one.admission.server is not None
                port = one.admission.server.port
                if because == "told":
                    stop.set()
                else:
                    taken = msgspec.json.encode({"spec": {"holderIdentity": "another"}})
                    await client.patch(LEASES, "koordinator-manager", taken, namespace=NAMESPACE)
                await eventually(lambda: not one.leading)
                lease = await read(client, LEASES, "koordinator-manager", NAMESPACE)
                left = "" if because == "told" else "another"
                assert lease["spec"].get("holderIdentity", "") == left
                assert not one.ready
                assert await _served(port)
                if because == "told":
                    await asyncio.wait_for(running, 15)
                else:
                    with pytest.raises(LeadershipLost):
                        await asyncio.wait_for(running, 15)
                with pytest.raises(OSError):
                    await _served(port)
            finally:
                stop.set()
                await asyncio.wait({running}, timeout=20)
                await client.delete(LEASES, "koordinator-manager", namespace=NAMESPACE)
                await unregister_webhooks(client)

    asyncio.run(run())


def test_replicas_with_different_webhooks_back_off(
    server: ApiServer,
) -> None:
    """As during a rolling update to other gates; here each also names a port of its own."""

    async def run() -> None:
        name = "koordinator-mutating-webhook-configuration"
        async with server.client() as client:
            await register_webhooks(client)
            other = "--feature-gates=ReservationMutatingWebhook=true"
            async with manager(server, webhooks=True), manager(server, [other], webhooks=True):
                before = (await read(client, MUTATING_WEBHOOKS, name))["metadata"]["generation"]
                await asyncio.sleep(4)
                after = (await read(client, MUTATING_WEBHOOKS, name))["metadata"]["generation"]
                # Each is heard, and each gives way for longer and longer.
                assert after - before <= 12

    asyncio.run(run())


def test_an_unreadable_template_is_replaced_by_the_live_list(server: ApiServer) -> None:
    async def run() -> None:
        name = "koordinator-mutating-webhook-configuration"
        async with server.client() as client:
            await register_webhooks(client)
            try:
                broken = {"metadata": {"annotations": {"template": '{"not":"a list"}'}}}
                await client.patch(MUTATING_WEBHOOKS, name, msgspec.json.encode(broken))
                assert await sync_configuration(
                    client,
                    MUTATING_WEBHOOKS,
                    name,
                    ca_bundle=make_certificates(("a",)).ca_cert,
                    address=Address(NAMESPACE, host="127.0.0.1"),
                    active=frozenset({"/mutate-pod"}),
                )
                stored = await read(client, MUTATING_WEBHOOKS, name)
                kept = msgspec.json.decode(stored["metadata"]["annotations"]["template"])
                assert {each["name"] for each in stored["webhooks"]} <= {e["name"] for e in kept}
            finally:
                await unregister_webhooks(client)

    asyncio.run(run())


async def _served(port: int) -> str:
    certificate = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
    return base64.b64encode(certificate.encode()).decode()


def test_the_validity_of_certificates_is_checked() -> None:
    names = ("svc.ns.svc", "localhost", "127.0.0.1")
    made = make_certificates(names)
    assert problem_with(made, names) is None
    assert "does not name other" in str(problem_with(made, ("other",)))
    again = make_certificates(names, previous=made)
    assert again.ca_cert == made.ca_cert
    assert again.cert != made.cert
    mixed = type(made)(made.ca_cert, made.ca_key, made.cert, again.key)
    assert "do not belong together" in str(problem_with(mixed, names))
    broken = type(made)(b"x", b"x", b"x", b"x")
    assert "cannot be read" in str(problem_with(broken, names))
    # A CA that ended is replaced, and trusted on beside the new one.
    later = datetime.now(UTC) + timedelta(days=3600)
    renewed = make_certificates(names, previous=made, now=later)
    assert renewed.ca_cert != made.ca_cert
    assert renewed.ca_cert.endswith(made.ca_cert)
    assert "ends at" in str(problem_with(made, names, now=later))
