"""Names, types and labels of metrics: as docs/facts/scheduler.md lists them, and as a real
kube-scheduler has them."""

from __future__ import annotations

import asyncio
import re
import ssl
import urllib.request
from fnmatch import fnmatch
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from cluster.scheduler.serving.health import Check, Health
from cluster.scheduler.serving.resource_metrics import pod_lines
from kube.client import Client
from service.http_server import Request
from tests.beds.apiserver import ApiServer, eventually
from tests.beds.kube_scheduler import kube_scheduler
from tests.beds.packages import CHECKOUT
from tests.cluster.scheduler.beds.on_api_server import make_node, make_pod, nodes_of
from tests.cluster.scheduler.making import make_pod as decoded_pod
from tests.cluster.scheduler.serving.exercised import Shown, exercise, names, new_process
from tests.ports import free_ports

_OURS: Final = {"koord_scheduler_faults"}
"""Names that nobody else has."""


_PATHS: Final = ("/livez", "/metrics", "/metrics/slis", "/metrics/resources")
_PODS: Final = 150
"""With 40, one run in 70 would measure no plugin."""


class _Row(NamedTuple):
    type: str
    labels: frozenset[str]
    of: str


def _table() -> dict[str, _Row]:
    text = (CHECKOUT / "docs" / "facts" / "scheduler.md").read_text()
    section = text.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w, ]*) ?\| (.*) \|$", section, re.MULTILINE)
    return {
        name: _Row(kind, frozenset(filter(None, labels.replace(" ", "").split(","))), of)
        for name, kind, labels, of in rows
    }


def _left_out() -> set[str]:
    """Return the names and patterns that docs/compatibility.md says are not exported."""
    text = (CHECKOUT / "docs" / "compatibility.md").read_text()
    section = text.partition("**Metrics of the scheduler**")[2].partition("\n**Extenders**")[0]
    cells = re.findall(r"^\| (`.*) \| .* \|$", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([\w*]+)`", cell)}


def _ours() -> dict[str, Shown]:
    process = new_process()
    exercise(process)
    health = Health({"livez": (Check("ping", str),)})
    health.page(Request("GET", "/livez", {}, b""))
    pod = decoded_pod("a", requests={"cpu": "1"}, limits={"cpu": "1"})
    return names(
        "".join(
            (
                *process.metrics.registry.slices(),
                *health.lines(),
                *pod_lines((pod,), process.source.shape_of),
            )
        )
    )


def test_every_metric_of_the_table_is_exported_with_its_type_and_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With the usual tenth, one run in 620 would measure no plugin.
    monkeypatch.setattr("cluster.scheduler.cycle.timings.SAMPLED_PART", 1.0)
    table, ours = _table(), _ours()
    assert len(table) > 40
    assert ours.keys() == table.keys() | _OURS
    for name, row in table.items():
        assert ours[name].type == row.type, name
        assert ours[name].labels == {row.labels}, name


@pytest.mark.apiserver
@pytest.mark.kube_scheduler
def test_a_real_kube_scheduler_has_the_names_of_the_table(
    server: ApiServer, tmp_path: Path
) -> None:
    asyncio.run(_compare(server, tmp_path))


async def _compare(server: ApiServer, folder: Path) -> None:
    (port,) = free_ports(1)
    async with server.client() as client:
        with kube_scheduler(server, folder, secure_port=port, elected=True):
            await _use(client)
            of_theirs = {name: row for name, row in _table().items() if row.of.startswith("K")}

            async def complete() -> dict[str, Shown] | None:
                text = "".join([await asyncio.to_thread(_scrape, port, path) for path in _PATHS])
                found = names(text)
                return found if of_theirs.keys() <= found.keys() else None

            # It counts what plugins take with a delay of a second.
            theirs = await eventually(complete, seconds=30)
    left_out = _left_out()
    for name, row in of_theirs.items():
        shown = theirs[name]
        assert shown.type == row.type, name
        assert not shown.series or shown.labels == {row.labels}, name
    unknown = {
        name
        for name in theirs.keys() - of_theirs.keys()
        if not any(fnmatch(name, pattern) for pattern in left_out)
    }
    assert not unknown, "neither in the table nor among those that are left out"


async def _use(client: Client) -> None:
    await make_node(client, "metrics-n0", cpu=8)
    resources = {"requests": {"cpu": "10m"}, "limits": {"cpu": "20m"}}
    containers = [{"name": "main", "image": "x", "resources": resources}]
    mine = [f"metrics-{number}" for number in range(_PODS)]
    for name in mine:
        await make_pod(
            client, name, cpu="", schedulerName="default-scheduler", containers=containers
        )
    await make_pod(client, "metrics-large", cpu="64", schedulerName="default-scheduler")

    async def placed() -> bool:
        nodes = await nodes_of(client)
        return sum(bool(nodes[name]) for name in mine) >= 100

    await eventually(placed, seconds=60)


def _scrape(port: int, path: str) -> str:
    context = ssl._create_unverified_context()
    request = urllib.request.Request(f"https://127.0.0.1:{port}{path}")
    with urllib.request.urlopen(request, context=context, timeout=30) as answer:
        body: str = answer.read().decode()
    return "" if path == "/livez" else body
