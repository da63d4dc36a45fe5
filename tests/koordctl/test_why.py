"""`koordctl why`: from the scheduler that leads, or from what stands on the pod."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

import koordctl.why
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.process import SchedulerProcess
from cluster.scheduler.serving.debugging import debugging_page
from koordctl.main import main
from kube.client import Client, encode_object
from kube.kept_client import KeptClient
from kube.resources import LEASES, NODES, PODS, SCHEDULE_EXPLANATIONS
from service.http_server import Server
from tests.beds.apiserver import ApiServer, api_server, eventually
from tests.cluster.conftest import install, kubeconfig
from tests.cluster.scheduler.simulation.dumps import Tree, node, pod
from tests.ports import free_ports

pytestmark = pytest.mark.apiserver

_CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {leaderElect: false}
profiles: [{schedulerName: koord-scheduler}]
"""
_NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with api_server() as running:
        asyncio.run(install(running))
        yield running


async def _create(client: Client, *objects: Tree) -> None:
    for each in objects:
        for member in ("uid", "creationTimestamp"):
            each["metadata"].pop(member, None)
        body = json.dumps(each).encode()
        if each["kind"] == "Pod":
            each["spec"]["automountServiceAccountToken"] = False
            body = json.dumps(each).encode()
            await client.create(PODS, body, namespace="default")
            continue
        name = each["metadata"]["name"]
        await client.create(NODES, body)
        status = json.dumps({"status": each["status"]}).encode()
        await client.patch(NODES, name, status, subresource="status")
        await client.patch(NODES, name, b'{"spec":{"taints":null}}')


def _ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["why", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_scores_and_reasons_come_from_the_scheduler_and_conditions_without_it(
    server: ApiServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(koordctl.why, "DEFAULT_SCHEDULER", _NOWHERE)
    config = ("--kubeconfig", str(kubeconfig(server, tmp_path)))
    seen: dict[str, Any] = {}

    def look(*arguments: str) -> dict[str, Any]:
        status, out, err = _ask(capsys, "-o", "json", *arguments)
        assert status == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    async def run() -> None:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(server.client())
            kept = KeptClient(server.connection(), user_agent="koord-scheduler")
            await stack.enter_async_context(kept)
            process = SchedulerProcess(kept, read_configuration(_CONFIGURATION, obj="test"), seed=1)
            pages = Server({}, otherwise=debugging_page(process, leading=lambda: process.ready))
            stack.push_async_callback(pages.close)
            (port,) = free_ports(1)
            await pages.listen_tcp("127.0.0.1", port)
            url = f"http://127.0.0.1:{port}"
            stop = asyncio.Event()
            task = asyncio.create_task(process.run(stop))
            koord: Tree = {"schedulerName": "koord-scheduler"}
            try:
                await _create(client, node("n1", 4), node("n2", 8))
                await eventually(lambda: process.ready or task.done(), seconds=30)
                await _create(client, pod("fits", "2", **koord), pod("huge", "9", **koord))

                async def decided() -> bool:
                    raw = await client.request("GET", PODS.path(namespace="default"))
                    pods = {each["metadata"]["name"]: each for each in json.loads(raw)["items"]}
                    conditions = pods["huge"]["status"].get("conditions")
                    return bool(pods["fits"]["spec"].get("nodeName")) and bool(conditions)

                await eventually(decided, seconds=30)
                for name in ("fits", "huge"):
                    seen[name] = await asyncio.to_thread(
                        look, f"default/{name}", "--scheduler", url
                    )
                explanation = {
                    "apiVersion": SCHEDULE_EXPLANATIONS.api_version,
                    "kind": SCHEDULE_EXPLANATIONS.kind,
                    "metadata": {"name": "asked"},
                    "spec": {"questionObjectKey": "default/huge"},
                }
                await client.create(
                    SCHEDULE_EXPLANATIONS, json.dumps(explanation).encode(), namespace="default"
                )

                async def answered() -> bool:
                    raw = await client.request(
                        "GET", SCHEDULE_EXPLANATIONS.path(namespace="default", name="asked")
                    )
                    return bool(json.loads(raw).get("status"))

                await eventually(answered, seconds=30)
                seen["missing"] = await asyncio.to_thread(
                    _ask, capsys, "missing", "--scheduler", url
                )
                seen["text"] = await asyncio.to_thread(_ask, capsys, "fits", "--scheduler", url)
                seen["refused"] = await asyncio.to_thread(_ask, capsys, "huge", "--scheduler", url)
                lease = {
                    "metadata": {"name": "koord-scheduler"},
                    "spec": {"holderIdentity": "koord-scheduler-abc_0f1e"},
                }
                body = encode_object(LEASES, lease)
                await client.create(LEASES, body, namespace="koordinator-system")
            finally:
                stop.set()
                await task

    asyncio.run(run())
    fits, huge = seen["fits"], seen["huge"]
    assert (fits["state"], fits["scores"]["feasible"]) in {("bound", 2), ("has a node", 2)}
    assert fits["scores"]["best"][0]["node"] == fits["node"] == "n2"
    assert fits["source"].startswith("http://127.0.0.1:")
    assert huge["nearest"][0]["text"] == "2 of 2 nodes lack only cpu (1 of them 3 or less)"
    status, _, err = seen["missing"]
    assert (status, "pod 'default/missing' is not known" in err) == (2, True)
    assert "2 of 2 nodes could take it; the best:" in seen["text"][1]
    assert "NodeResourcesFit" in seen["text"][1]
    assert "WHAT WOULD HAVE TO CHANGE" in seen["refused"][1]
    # The scheduler is gone: the pod itself says why, and the answer says that it did.
    found = look("default/huge", *config)
    assert found["state"] == "unschedulable"
    assert found["message"] == huge["message"]
    assert found["source"] == "the pod's condition PodScheduled, and ScheduleExplanation asked"
    assert found["explanation"]["failedMessage"] == huge["message"]
    (domain,) = found["explanation"]["detailedExplanation"]
    assert domain["scheduleExplanation"]["nodeFailedDetails"] == [
        {
            "failedPlugin": "NodeResourcesFit",
            "reason": "Insufficient cpu",
            "failedNodes": ["n1", "n2"],
        }
    ]
    assert look("fits", *config)["node"] == "n2"
    status, out, _ = _ask(capsys, "huge", *config)
    assert "source: the pod's condition PodScheduled" in out
    assert "kubectl -n koordinator-system port-forward koord-scheduler-abc 10251" in out
    assert f"need the scheduler: {_NOWHERE}: no scheduler answers" in " ".join(out.split())
    status, _, err = _ask(capsys, "missing", *config)
    assert (status, '"missing" not found' in err) == (2, True)


@pytest.mark.parametrize("name", ["a/b/c", "", "/", "a/"])
def test_what_is_no_pod_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = _ask(capsys, name)
    assert (status, "expected namespace/name" in err) == (2, True)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        (_NOWHERE, "no scheduler answers"),
        ("https://x", "expected http://HOST:PORT"),
        ("http://x:y", "not an address of a scheduler"),
    ],
)
def test_a_scheduler_that_is_named_has_to_answer(
    url: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = _ask(capsys, "a", "--scheduler", url)
    assert (status, text in err) == (2, True), err
