"""The start of admission, against a scripted API server: certificates, registration, serving."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import ssl
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from cluster.manager.admission import Admission, RewriteBackoff
from cluster.manager.caches import Caches
from cluster.manager.config_source import SLOConfigSource
from cluster.manager.flags import Settings, parse
from cluster.metrics import ManagerMetrics
from cluster.webhook.certificate_store import FolderStore, SecretStore, WebhookRegistration
from cluster.webhook.configuration import (
    WEBHOOKS,
    Address,
    ConfigurationMissing,
    active_paths,
    configuration_manifest,
    sync_configuration,
)
from kube.certificates import Certificates, make_certificates, problem_with
from kube.client import ApiError, Client
from kube.events import EventRecorder
from kube.resources import (
    ELASTIC_QUOTAS,
    MUTATING_WEBHOOKS,
    NAMESPACES,
    PODS,
    PROFILES,
    SECRETS,
    VALIDATING_WEBHOOKS,
)
from tests.cluster.fake_api import FakeApi
from tests.kube.scripted import answer, api, status

OWN = "koordinator-system"
SECRET = "koordinator-webhook-certs"
NAMES = ("svc.ns.svc", "localhost")
MUTATING = "koordinator-mutating-webhook-configuration"
VALIDATING = "koordinator-validating-webhook-configuration"
PATH = SECRETS.path(namespace=OWN, name=SECRET)


# --- certificates ------------------------------------------------------------------------------


def secret_of(certificates: Certificates, **changes: str) -> dict[str, Any]:
    texts = {
        "ca-cert.pem": certificates.ca_cert,
        "ca-key.pem": certificates.ca_key,
        "cert.pem": certificates.cert,
        "key.pem": certificates.key,
        "tls.crt": certificates.cert,
        "tls.key": certificates.key,
    }
    data = {key: base64.b64encode(text).decode() for key, text in texts.items()}
    return {"metadata": {"name": SECRET, "namespace": OWN}, "data": {**data, **changes}}


def ensured(server: FakeApi, *, serving: Certificates | None = None) -> Certificates:
    store = SecretStore(server.client(), OWN, SECRET)
    return asyncio.run(store.ensure(NAMES, serving=serving))


def test_missing_certificates_are_made_and_kept_for_all_replicas() -> None:
    server = FakeApi()
    made = ensured(server)
    assert problem_with(made, NAMES) is None
    kept = server.get(SECRETS, SECRET, namespace=OWN)
    assert kept["data"] == secret_of(made)["data"]
    assert kept["type"] == "Opaque"
    server.writes.clear()
    assert ensured(server) == made
    assert server.writes == []


def long_ago(names: tuple[str, ...] = NAMES) -> Certificates:
    return make_certificates(names, now=datetime.now(UTC) - timedelta(days=300))


@pytest.mark.parametrize(
    "stored",
    [
        secret_of(long_ago()),
        secret_of(make_certificates(("other",))),
        secret_of(make_certificates(NAMES), **{"cert.pem": "!"}),
        secret_of(make_certificates(NAMES), **{"key.pem": base64.b64encode(b"x").decode()}),
        {"metadata": {"name": SECRET, "namespace": OWN}, "data": {"cert.pem": ""}},
        {"metadata": {"name": SECRET, "namespace": OWN}, "data": None},
        {"metadata": {"name": SECRET, "namespace": OWN}},
    ],
)
def test_unusable_certificates_are_replaced(stored: dict[str, Any]) -> None:
    server = FakeApi()
    server.put(SECRETS, stored)
    made = ensured(server)
    assert problem_with(made, NAMES) is None
    assert server.get(SECRETS, SECRET, namespace=OWN)["data"] == secret_of(made)["data"]
    assert [method for method, _, _ in server.writes] == ["PATCH"]


def test_a_leaf_is_renewed_under_the_same_authority() -> None:
    server = FakeApi()
    old = long_ago()
    server.put(SECRETS, secret_of(old))
    made = ensured(server)
    assert (made.ca_cert, made.ca_key) == (old.ca_cert, old.ca_key)
    assert made.cert != old.cert


def test_a_lost_secret_is_made_again_under_the_authority_that_serves() -> None:
    serving = make_certificates(NAMES)
    assert ensured(FakeApi(), serving=serving).ca_cert == serving.ca_cert


@pytest.mark.parametrize("stored", [None, secret_of(long_ago())])
def test_replicas_that_start_together_serve_the_same(stored: dict[str, Any] | None) -> None:
    server = FakeApi()
    if stored is not None:
        server.put(SECRETS, stored)

    async def run() -> list[Certificates]:
        stores = [SecretStore(server.client(), OWN, SECRET) for _ in range(3)]
        return await asyncio.gather(*(store.ensure(NAMES) for store in stores))

    first, *others = asyncio.run(run())
    assert others == [first, first]
    assert len(server.writes) == 3


@pytest.mark.parametrize(
    ("code", "raised", "problem"),
    [(409, RuntimeError, f"Secret {OWN}/{SECRET} keeps changing"), (403, ApiError, "403")],
)
def test_a_secret_that_cannot_be_kept_is_named(
    code: int, raised: type[Exception], problem: str
) -> None:
    server = FakeApi()
    server.put(SECRETS, secret_of(long_ago()))
    server.refuse[PATH] = code
    with pytest.raises(raised, match=problem):
        ensured(server)
    assert len(server.writes) == (5 if code == 409 else 1)


def test_a_folder_keeps_certificates_for_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "certs"
    store = FolderStore(folder)

    async def ensure(names: tuple[str, ...] = NAMES) -> Certificates:
        return await store.ensure(names)

    made = asyncio.run(ensure())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    names = ["ca-cert.pem", "ca-key.pem", "cert.pem", "key.pem", "tls.crt", "tls.key"]
    assert sorted(file.name for file in folder.iterdir()) == names
    assert (folder / "tls.crt").read_bytes() == made.cert
    assert asyncio.run(ensure()) == made
    # What a killed process left is not an obstacle, and a missing file means that all are made.
    (folder / ".key.pem.new").write_bytes(b"half")
    (folder / "key.pem").unlink()
    again = asyncio.run(ensure())
    assert problem_with(again, NAMES) is None and again != made
    other = asyncio.run(ensure(("other",)))
    assert other.ca_cert == again.ca_cert and problem_with(other, ("other",)) is None


# --- registration ------------------------------------------------------------------------------

ALL_ON = (
    "EnableQuotaAdmission=true,NodeMutatingWebhook=true,NodeValidatingWebhook=true,"
    "ConfigMapValidatingWebhook=true,BindingAdmissionWebhook=true,ReservationMutatingWebhook=true"
)


def with_configurations() -> FakeApi:
    server = FakeApi()
    server.put(MUTATING_WEBHOOKS, configuration_manifest(mutating=True, namespace=OWN))
    server.put(VALIDATING_WEBHOOKS, configuration_manifest(mutating=False, namespace=OWN))
    return server


def synced(
    server: FakeApi,
    *,
    mutating: bool = True,
    ca: bytes = b"ca",
    address: Address = Address(OWN),  # noqa: B008 - frozen
    active: frozenset[str] | None = None,
) -> bool:
    paths = frozenset(webhook.path for webhook in WEBHOOKS) if active is None else active
    return asyncio.run(
        sync_configuration(
            server.client(),
            MUTATING_WEBHOOKS if mutating else VALIDATING_WEBHOOKS,
            MUTATING if mutating else VALIDATING,
            ca_bundle=ca,
            address=address,
            active=paths,
        )
    )


def entries(server: FakeApi, *, mutating: bool = True) -> list[dict[str, Any]]:
    found = (
        server.get(MUTATING_WEBHOOKS, MUTATING)
        if mutating
        else server.get(VALIDATING_WEBHOOKS, VALIDATING)
    )
    webhooks: list[dict[str, Any]] = found["webhooks"]
    return webhooks


@pytest.mark.parametrize("mutating", [True, False])
def test_a_configuration_gets_trust_and_address_once(mutating: bool) -> None:
    server = with_configurations()
    address = Address("other", service="svc")
    before = entries(server, mutating=mutating)
    assert synced(server, mutating=mutating, address=address)
    for was, entry in zip(before, entries(server, mutating=mutating), strict=True):
        assert entry["clientConfig"] == {
            "caBundle": base64.b64encode(b"ca").decode(),
            "service": {
                "namespace": "other",
                "name": "svc",
                "path": was["clientConfig"]["service"]["path"],
            },
        }
        assert {**entry, "clientConfig": 0} == {**was, "clientConfig": 0}
    assert not synced(server, mutating=mutating, address=address)
    assert len(server.writes) == 1
    assert synced(server, mutating=mutating, address=address, ca=b"new")


def test_a_host_outside_the_cluster_is_called_by_url() -> None:
    server = with_configurations()
    assert synced(server, address=Address(OWN, host="10.0.0.1", port=1234))
    config = entries(server)[0]["clientConfig"]
    assert config["url"] == "https://10.0.0.1:1234/mutate-pod"
    assert "service" not in config
    # And back, from the list as it was applied.
    assert synced(server)
    assert entries(server)[0]["clientConfig"]["service"]["path"] == "/mutate-pod"


def test_webhooks_of_disabled_gates_are_removed_and_come_back_with_the_gate() -> None:
    server = with_configurations()
    names = [entry["name"] for entry in entries(server)]
    assert synced(server, active=frozenset({"/mutate-pod"}))
    assert [entry["name"] for entry in entries(server)] == names[:2]
    assert synced(server)
    assert [entry["name"] for entry in entries(server)] == names


def test_a_port_of_the_service_is_kept_and_defaults_make_no_difference() -> None:
    server = with_configurations()
    stored = server.get(MUTATING_WEBHOOKS, MUTATING)
    stored["webhooks"][0]["clientConfig"]["service"]["port"] = 8443
    server.put(MUTATING_WEBHOOKS, stored)
    assert synced(server)
    stored = server.get(MUTATING_WEBHOOKS, MUTATING)
    assert stored["webhooks"][0]["clientConfig"]["service"]["port"] == 8443
    for entry in stored["webhooks"]:
        # What an API server adds.
        entry["clientConfig"]["service"].setdefault("port", 443)
        entry.update(reinvocationPolicy="Never", timeoutSeconds=10, matchPolicy="Equivalent")
        entry.setdefault("namespaceSelector", {})
        entry.setdefault("objectSelector", {})
        entry["rules"] = [{**rule, "scope": "*"} for rule in entry["rules"]]
    server.put(MUTATING_WEBHOOKS, stored)
    assert not synced(server)
    stored["webhooks"][0]["timeoutSeconds"] = 3
    server.put(MUTATING_WEBHOOKS, stored)
    assert synced(server)
    assert entries(server)[0]["timeoutSeconds"] == 10


def test_a_newly_applied_list_of_webhooks_replaces_the_stored_one() -> None:
    server = with_configurations()
    assert synced(server)
    again = configuration_manifest(mutating=True, namespace=OWN)
    again["webhooks"][0]["timeoutSeconds"] = 7
    server.put(MUTATING_WEBHOOKS, again)
    assert synced(server)
    assert entries(server)[0]["timeoutSeconds"] == 7
    template = server.get(MUTATING_WEBHOOKS, MUTATING)["metadata"]["annotations"]["template"]
    assert "caBundle" not in template


def registration(server: FakeApi, store: Any) -> WebhookRegistration:
    active = frozenset(webhook.path for webhook in WEBHOOKS)
    return WebhookRegistration(server.client(), store, Address(OWN), active)


def test_a_certificate_is_served_only_after_its_authority_is_trusted() -> None:
    server = with_configurations()

    async def run() -> None:
        one = registration(server, SecretStore(server.client(), OWN, SECRET))
        served: list[tuple[Certificates, str]] = []

        def serve(certificates: Certificates) -> None:
            bundle = entries(server, mutating=False)[0]["clientConfig"]["caBundle"]
            served.append((certificates, base64.b64decode(bundle).decode()))

        assert await one.sync(serve)
        assert not await one.sync(serve)
        # Another replica made new ones, under a new authority.
        other = make_certificates(Address(OWN).dns_names)
        server.put(SECRETS, secret_of(other))
        assert await one.sync(serve)
        assert [bundle for _, bundle in served] == [one.ca_cert.decode() for one, _ in served]
        assert served[1][0] == other == one.current

    asyncio.run(run())


def test_a_missing_configuration_is_named_with_its_manifest() -> None:
    server = FakeApi()
    with pytest.raises(ConfigurationMissing, match=f"{MUTATING} does not exist; apply deploy/"):
        synced(server)


def test_the_back_off_grows_while_another_process_rewrites_and_then_resets() -> None:
    backoff = RewriteBackoff()
    pauses = [backoff.pause(now) for now in range(0, 1000, 100)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert backoff.pause(900 + 301) == 0.5
    assert backoff.pause(900 + 301 + 300) == 1.0


# --- the start ---------------------------------------------------------------------------------


def bridge(server: FakeApi) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Answer lists, watches and single objects over HTTP from a server in memory."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.query.get("watch"):
            response = web.StreamResponse()
            await response.prepare(request)
            _, at = server.changes(request.path, 0)
            while True:
                await asyncio.sleep(0.01)
                changes, at = server.changes(request.path, at)
                for kind, plain in changes:
                    line = msgspec.json.encode({"type": kind, "object": plain}) + b"\n"
                    await response.write(line)
        if "limit" in request.query:
            items = server.collection(request.path)
            return answer({"metadata": {"resourceVersion": "1"}, "items": items})
        try:
            body = await request.read()
            return answer(await server.handle(request.method, request.path, body or None))
        except ApiError as error:
            return status(error.status, error.reason)

    return handle


def settings_of(gates: str = "", **environment: str) -> Settings:
    flags = [f"--feature-gates={gates}"] if gates else []
    return parse(flags, environment)


@asynccontextmanager
async def started(
    server: FakeApi, settings: Settings, tasks: list[asyncio.Task[Any]] | None = None
) -> AsyncIterator[tuple[Admission, ManagerMetrics]]:
    """Run an admission with its caches until the block ends."""
    async with api(bridge(server)) as client, AsyncExitStack() as stack:
        one, caches, metrics = admission_of(client, settings)
        running = [asyncio.create_task(cache.run()) for cache in caches.all]
        try:
            await one.start(stack)
            yield one, metrics
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


def admission_of(client: Client, settings: Settings) -> tuple[Admission, Caches, ManagerMetrics]:
    caches = Caches(client, settings)
    metrics = ManagerMetrics()
    events = EventRecorder(client, component="test")
    source = SLOConfigSource(caches.config_maps, events, metrics, namespace=OWN, name="config")
    return Admission(client, settings, caches, source, metrics, port=0), caches, metrics


async def get(port: int, path: str, *, ca: bytes, body: bytes | None = None) -> Any:
    trusting = ssl.create_default_context(cadata=ca.decode())
    async with aiohttp.ClientSession() as session:
        method = "GET" if body is None else "POST"
        async with session.request(
            method, f"https://localhost:{port}{path}", data=body, ssl=trusting
        ) as got:
            return got.status, await got.read()


def review(resource: str, kind: str, plain: Mapping[str, Any]) -> bytes:
    request = {
        "uid": "u",
        "operation": "CREATE",
        "kind": {"kind": kind},
        "resource": {"resource": resource},
        "namespace": "default",
        "object": plain,
    }
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "request": request}).encode()


def test_admission_serves_what_it_registered() -> None:
    server = with_configurations()
    server.put(NAMESPACES, {"metadata": {"name": "default"}})
    profile = {"metadata": {"name": "p"}, "spec": {"labels": {"touched": "yes"}}}
    server.put(PROFILES, profile)
    quota = {
        "metadata": {"name": "team", "namespace": "default"},
        "spec": {"min": {"cpu": "1"}, "max": {"cpu": "2"}},
    }
    server.put(ELASTIC_QUOTAS, quota)
    server.put(PODS, {"metadata": {"name": "other", "namespace": "default"}, "spec": {}})

    async def run() -> None:
        async with started(server, settings_of(ALL_ON)) as (one, metrics):
            assert one.registered and one.wanted and one.behind_a_service
            assert one.server is not None
            port, certificates = one.server.port, one._registration.current
            assert certificates is not None
            bundle = entries(server)[0]["clientConfig"]["caBundle"]
            ca = base64.b64decode(bundle)
            assert ca == certificates.ca_cert
            pod = {"metadata": {"name": "web"}, "spec": {"containers": [{"name": "a"}]}}
            code, body = await get(port, "/mutate-pod", ca=ca, body=review("pods", "Pod", pod))
            response = json.loads(body)["response"]
            assert (code, response["allowed"]) == (200, True)
            patch = json.loads(base64.b64decode(response["patch"]))
            assert patch == [{"op": "add", "path": "/metadata/labels", "value": {"touched": "yes"}}]
            code, body = await get(port, "/elasticQuota", ca=ca)
            assert json.loads(body)["quotaHierarchyInfo"]["koordinator-root-quota"] == ["team"]
            assert (await get(port, "/healthz", ca=ca))[0] == 200
            # Every registered path is served.
            for mutating in (True, False):
                for entry in entries(server, mutating=mutating):
                    path = entry["clientConfig"]["service"]["path"]
                    assert (await get(port, path, ca=ca, body=b"{}"))[0] == 400
            assert (await get(port, "/convert", ca=ca, body=b"{}"))[0] == 404
            shown = "".join(metrics.registry.slices())
            assert 'object_type="Pod",operation="CREATE"' in shown.replace(", ", ",")

    asyncio.run(run())


def test_a_replica_takes_the_certificates_that_are_there() -> None:
    server = with_configurations()
    stored = make_certificates(Address(OWN).dns_names)
    server.put(SECRETS, secret_of(stored))

    async def run() -> None:
        async with started(server, settings_of()) as (one, _):
            assert one._registration.current == stored

    asyncio.run(run())
    assert all(path != PATH for _, path, _ in server.writes)


def test_a_manager_outside_the_cluster_is_called_at_the_port_that_it_listens_on(
    tmp_path: Path,
) -> None:
    server = with_configurations()
    settings = settings_of(WEBHOOK_HOST="127.0.0.1", WEBHOOK_CERT_DIR=str(tmp_path / "certs"))

    async def run() -> None:
        async with started(server, settings) as (one, _):
            assert one.server is not None and not one.behind_a_service
            url = entries(server)[0]["clientConfig"]["url"]
            assert url == f"https://127.0.0.1:{one.server.port}/mutate-pod"
            assert (tmp_path / "certs" / "tls.crt").exists()

    asyncio.run(run())


def test_without_its_configurations_a_manager_does_not_start() -> None:
    async def run() -> None:
        async with started(FakeApi(), settings_of()):
            raise AssertionError("it started")

    with pytest.raises(ConfigurationMissing):
        asyncio.run(run())


def test_an_outside_change_of_a_configuration_is_repaired() -> None:
    server = with_configurations()

    async def run() -> None:
        async with started(server, settings_of()) as (one, _):
            keeping = asyncio.create_task(one.keep_registered())
            await asyncio.sleep(0.3)
            stored = dict(server.get(MUTATING_WEBHOOKS, MUTATING))
            right = stored["webhooks"]
            server.put(MUTATING_WEBHOOKS, {**stored, "webhooks": right[1:]})
            while entries(server) != right:  # noqa: ASYNC110 - the server reports it to no one
                await asyncio.sleep(0.02)
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize(
    ("gates", "missing"),
    [
        ("WebhookFramework=false", {webhook.path for webhook in WEBHOOKS}),
        ("PodMutatingWebhook=false", {"/mutate-pod"}),
        ("PodValidatingWebhook=false", {"/validate-pod"}),
        ("", set()),
    ],
)
def test_only_paths_whose_gates_are_on_are_served(gates: str, missing: set[str]) -> None:
    on = ",".join(part for part in (ALL_ON, gates) if part)
    settings = settings_of(on)
    client = FakeApi().client()
    one, _, _ = admission_of(client, settings)
    every = {webhook.path for webhook in WEBHOOKS}
    assert set(one.routes(client)) == every - missing == active_paths(settings.gates)
    assert one.wanted is (missing != every)


def test_the_environment_selects_the_store_of_certificates() -> None:
    client = FakeApi().client()
    for environment, store in (
        ({}, SecretStore),
        ({"WEBHOOK_HOST": "h"}, FolderStore),
        ({"WEBHOOK_HOST": "h", "WEBHOOK_CERT_WRITER": "secret"}, SecretStore),
        ({"WEBHOOK_CERT_WRITER": "fs"}, FolderStore),
    ):
        one, _, _ = admission_of(client, settings_of(**environment))
        assert type(one._registration._store) is store
    named = admission_of(client, settings_of(POD_NAMESPACE="x", SECRET_NAME="y", SERVICE_NAME="z"))[
        0
    ]._registration
    assert dataclasses.replace(named._address, port=0) == Address("x", service="z", port=0)
    assert isinstance(named._store, SecretStore)
    assert (named._store.namespace, named._store.name) == ("x", "y")
