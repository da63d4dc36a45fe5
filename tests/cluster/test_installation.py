"""Installation: the manifests in order and by kubectl, and objects as users write them."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from cluster.manager import manifests as of_manager
from cluster.scheduler import manifests as of_scheduler
from kube.client import ApiError
from tests.beds import kubernetes
from tests.beds.apiserver import ApiServer, api_server
from tests.cluster.conftest import kubeconfig
from tests.conftest import require

pytestmark = pytest.mark.apiserver


def test_the_installed_manifests_are_accepted_in_their_order() -> None:
    async def run(fresh: ApiServer) -> None:
        async with fresh.client() as client:
            for documents in (*of_manager.files().values(), *of_scheduler.files().values()):
                for document in documents:
                    await client.request(
                        "POST", _collection(document), body=msgspec.json.encode(document)
                    )

    with api_server() as fresh:
        asyncio.run(run(fresh))


def test_kubectl_applies_what_is_shipped_and_a_second_time_changes_nothing(
    tmp_path: Path,
) -> None:
    program = kubernetes.kubectl()
    require(program, "needs kubectl: apt-get install kubernetes-client", tier="kubectl")
    deploy = Path(__file__).parents[2] / "deploy"

    def kubectl(config: Path, verb: str, *folders: str) -> list[str]:
        command = [str(program), f"--kubeconfig={config}", *verb.split()]
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
        folders = "manager", "scheduler", "scheduler/node-locks", "koordlet"
        first += kubectl(config, "apply", *folders)
        assert len(first) == len(list(manifests_of(deploy)))
        assert all(line.endswith(" created") for line in first), first
        stored = kubectl(config, _VERSIONS, *folders)
        kubectl(config, "apply", *folders)
        assert kubectl(config, _VERSIONS, *folders) == stored
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
