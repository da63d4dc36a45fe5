"""The manager under its own rights, and while servers, leaders and certificates come and go."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from apis.core import Node
from apis.decode import Wire
from cluster.manager.flags import parse
from cluster.manager.manager import Manager
from cluster.manager.manifests import CLUSTER_RULES, NAMESPACE_RULES, files
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
    Resource,
)
from tests.beds.apiserver import ApiServer, api_server, eventually
from tests.cluster.conftest import (
    NAMESPACE,
    install,
    kubeconfig,
    manager,
    read,
    register_webhooks,
    set_config,
    unregister_webhooks,
)
from tests.conftest import require

pytestmark = pytest.mark.apiserver

COLOCATION = {"colocation-config": '{"enable":true}'}
_RBAC = "rbac.authorization.k8s.io"


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


async def grant(client: Client, user: str) -> None:
    """Give `user` the manager's rights and no others."""
    subject = {"apiGroup": _RBAC, "kind": "User", "name": user}
    for kind, rules, namespace in (
        ("ClusterRole", CLUSTER_RULES, ""),
        ("Role", NAMESPACE_RULES, NAMESPACE),
    ):
        role = Resource(_RBAC, "v1", f"{kind.lower()}s", kind, bool(namespace))
        binding = Resource(
            _RBAC, "v1", f"{kind.lower()}bindings", f"{kind}Binding", bool(namespace)
        )
        metadata = {"name": "koord-manager-test"}
        body = encode_object(role, {"metadata": metadata, "rules": list(rules)})
        await client.create(role, body, namespace=namespace)
        bound = {
            "metadata": metadata,
            "subjects": [subject],
            "roleRef": {"apiGroup": _RBAC, "kind": kind, "name": metadata["name"]},
        }
        await client.create(binding, encode_object(binding, bound), namespace=namespace)


def test_the_manager_does_all_its_work_under_its_own_rights(
    server: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with server.client() as client:
            await grant(client, "koord-manager")
            await register_webhooks(client)
            await set_config(client, {**COLOCATION, "cpu-burst-config": "{"})
            await make_node(client, "rights")
            gates = (
                "--feature-gates=NodeMutatingWebhook=true,ColocationProfileController=true,"
                "ConfigMapValidatingWebhook=true,ReservationMutatingWebhook=true"
            )
            async with manager(server, [gates], user="koord-manager", webhooks=True) as one:
                await eventually(lambda: one.leading)
                await eventually(lambda: read(client, NODE_SLOS, "rights"))
                await eventually(lambda: read(client, NODE_METRICS, "rights"))
                config = await read(
                    client, MUTATING_WEBHOOKS, "koordinator-mutating-webhook-configuration"
                )
                called = {hook["name"] for hook in config["webhooks"]}
                assert called == {
                    "mpod-create.koordinator.sh",
                    "mpod-update.koordinator.sh",
                    "melasticquota.koordinator.sh",
                    "mnode-status.koordinator.sh",
                    "mreservation-create.koordinator.sh",
                }
                await client.delete(NODES, "rights")

                async def gone() -> bool:
                    return await read(client, NODE_SLOS, "rights") is None

                await eventually(gone)
        assert "Forbidden" not in caplog.text
        # It may not read what it does not need.
        async with server.client("koord-manager") as client:
            for path in ("/api/v1/secrets", "/api/v1/namespaces/default/configmaps"):
                with pytest.raises(ApiError, match="forbidden"):
                    await client.request("GET", path)

    asyncio.run(run())


def test_the_installed_manifests_are_accepted_in_their_order() -> None:
    async def run(fresh: ApiServer) -> None:
        async with fresh.client() as client:
            for documents in files().values():
                for document in documents:
                    await client.request(
                        "POST", _collection(document), body=msgspec.json.encode(document)
                    )

    with api_server() as fresh:
        asyncio.run(run(fresh))


def test_kubectl_applies_what_is_shipped_and_a_second_time_changes_nothing(
    tmp_path: Path,
) -> None:
    require(
        shutil.which("kubectl"), "needs kubectl: apt-get install kubernetes-client", tier="kubectl"
    )
    deploy = Path(__file__).parents[2] / "deploy"

    def kubectl(config: Path, verb: str, *folders: str) -> list[str]:
        command = ["kubectl", f"--kubeconfig={config}", *verb.split()]
        for folder in folders:
            command += ["-f", str(deploy / folder)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    with api_server() as fresh:
        config = kubeconfig(fresh, tmp_path)
        first = kubectl(config, "apply", "crds")
        first += kubectl(config, "apply", "manager", "koordlet")
        assert len(first) == len(list(manifests_of(deploy)))
        assert all(line.endswith(" created") for line in first), first
        stored = kubectl(config, _VERSIONS, "manager", "koordlet")
        kubectl(config, "apply", "manager", "koordlet")
        assert kubectl(config, _VERSIONS, "manager", "koordlet") == stored
        second = kubectl(config, "apply", "crds")
        assert all(line.endswith(" unchanged") for line in second), second


# kubectl calls webhook configurations "configured" also where nothing of them changed.
_VERSIONS = "get -o jsonpath={.items[*].metadata.resourceVersion}"


def manifests_of(deploy: Path) -> Iterator[Any]:
    """The documents of all files."""
    for path in deploy.rglob("*.yaml"):
        yield from yaml.safe_load_all(path.read_text())


def _collection(document: dict[str, Any]) -> str:
    group, _, version = document["apiVersion"].rpartition("/")
    root = f"/apis/{group}/{version}" if group else f"/api/{version}"
    plural = document["kind"].lower() + ("es" if document["kind"].endswith("s") else "s")
    namespace = document["metadata"].get("namespace")
    return f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"


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
            # While nobody watches, things change and history is forgotten.
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


def test_one_object_that_cannot_be_read_harms_no_other(server: ApiServer) -> None:
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


def test_a_new_manifest_and_new_certificates_leave_no_gap(server: ApiServer) -> None:
    async def run() -> None:
        async with server.client() as client:
            await register_webhooks(client)
            async with manager(server, webhooks=True) as one:
                assert one.admission.server is not None

                async def refused() -> bool:
                    """Whether admission judges: this pod contradicts itself."""
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
                ends = one.metrics.certificate_expiry._value.get()
                assert ends > (datetime.now(UTC) + timedelta(days=300)).timestamp()
                secret = await read(client, SECRETS, "koordinator-webhook-certs", NAMESPACE)
                assert secret["data"]["ca-cert.pem"]

    asyncio.run(run())


@pytest.mark.parametrize("because", ["told", "lease lost"])
def test_admission_is_served_on_while_the_service_forgets_a_replica_that_ends(
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


def test_replicas_that_want_different_webhooks_do_not_storm_the_api_server(
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


def test_a_template_that_is_no_list_gives_way_to_the_live_list(server: ApiServer) -> None:
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


def test_certificates_are_judged() -> None:
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


def test_objects_of_the_documentation_are_accepted_and_broken_ones_refused(
    server: ApiServer,
) -> None:
    async def run() -> None:
        async with server.client() as client:
            for case in DOCUMENTED:
                await client.request("POST", case["path"], body=msgspec.json.encode(case["object"]))
            for case in REFUSED:
                with pytest.raises(ApiError, match=case["match"]):
                    await client.request(
                        "POST", case["path"], body=msgspec.json.encode(case["object"])
                    )

    asyncio.run(run())


def _object(kind: str, api_version: str, **members: Any) -> dict[str, Any]:
    return {"apiVersion": api_version, "kind": kind, **members}


_SCHEDULING = "scheduling.koordinator.sh/v1alpha1"
DOCUMENTED: list[dict[str, Any]] = [
    {
        "path": "/apis/scheduling.koordinator.sh/v1alpha1/reservations",
        "object": _object(
            "Reservation",
            _SCHEDULING,
            metadata={"name": "reservation-demo"},
            spec={
                "template": {"spec": {"containers": [{"name": "a", "image": "b"}]}},
                "owners": [{"object": {"name": "pod-demo-0", "namespace": "default"}}],
                "ttl": "1h",
            },
        ),
    },
    {
        "path": "/apis/scheduling.koordinator.sh/v1alpha1/podmigrationjobs",
        "object": _object(
            "PodMigrationJob",
            _SCHEDULING,
            metadata={"name": "migrate-demo"},
            spec={
                "paused": False,
                "ttl": "5m",
                "mode": "ReservationFirst",
                "podRef": {"namespace": "default", "name": "pod-demo-0"},
            },
        ),
    },
    {
        "path": "/apis/config.koordinator.sh/v1alpha1/clustercolocationprofiles",
        "object": _object(
            "ClusterColocationProfile",
            "config.koordinator.sh/v1alpha1",
            metadata={"name": "documented"},
            spec={
                "namespaceSelector": {"matchLabels": {"koordinator.sh/enable-colocation": "true"}},
                "selector": {"matchLabels": {"sparkoperator.k8s.io/launched-by": "spark"}},
                "qosClass": "BE",
                "priorityClassName": "koord-batch",
                "koordinatorPriority": 1000,
                "schedulerName": "koord-scheduler",
                "labels": {"koordinator.sh/mutated": "true"},
                "patch": {"spec": {"terminationGracePeriodSeconds": 30}},
            },
        ),
    },
    {
        "path": "/apis/slo.koordinator.sh/v1alpha1/nodeslos",
        "object": _object(
            "NodeSLO",
            "slo.koordinator.sh/v1alpha1",
            metadata={"name": "documented"},
            spec={
                "resourceUsedThresholdWithBE": {"enable": True, "cpuSuppressThresholdPercent": 65},
                "resourceQOSStrategy": {"beClass": {"networkQOS": {"enable": True}}},
                "extensions": {"Object": {"vendor": {"x": 1}}},
            },
        ),
    },
    {
        "path": "/apis/scheduling.sigs.k8s.io/v1alpha1/namespaces/default/podgroups",
        "object": _object(
            "PodGroup",
            "scheduling.sigs.k8s.io/v1alpha1",
            metadata={"name": "gang-example"},
            spec={"scheduleTimeoutSeconds": 100, "minMember": 2},
        ),
    },
]
REFUSED: list[dict[str, Any]] = [
    {
        "path": "/apis/slo.koordinator.sh/v1alpha1/nodeslos",
        "object": _object(
            "NodeSLO",
            "slo.koordinator.sh/v1alpha1",
            metadata={"name": "broken"},
            spec={"resourceUsedThresholdWithBE": {"cpuSuppressThresholdPercent": 101}},
        ),
        "match": "should be less than or equal to 100",
    },
    {
        "path": "/apis/scheduling.koordinator.sh/v1alpha1/reservations",
        "object": _object(
            "Reservation",
            _SCHEDULING,
            metadata={"name": "broken"},
            spec={"template": {}, "owners": []},
        ),
        "match": "at least 1 item",
    },
    {
        "path": "/apis/config.koordinator.sh/v1alpha1/clustercolocationprofiles",
        "object": _object(
            "ClusterColocationProfile",
            "config.koordinator.sh/v1alpha1",
            metadata={"name": "broken"},
            spec={"qosClass": "BESTEFFORT"},
        ),
        "match": "Unsupported value",
    },
]
