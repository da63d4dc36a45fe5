"""What a scrape gets: text that parsers take, and every name that the documentation has."""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.answering import answering
from tests.koordlet.daemon.bed import NODE, SLO, node, node_object, request
from tests.simulated.kubelet import Limits

_PATHS = ("/metrics", "/internal-metrics", "/external-metrics")
_OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"

UPSTREAMS = {
    "koordlet_start_time",
    "koordlet_runtime_hook_invoked_duration_milliseconds",
    "koordlet_runtime_hook_reconciler_invoked_duration_milliseconds",
    "koordlet_resource_update_duration_milliseconds",
    "koordlet_kubelet_request_duration_seconds",
    "koordlet_container_core_sched_cookie",
    "koordlet_core_sched_cookie_manage_status",
    "koordlet_container_oom_score_adj",
    "koordlet_container_resource_requests",
    "koordlet_container_resource_limits",
}
"""Upstream's series of hooks and executor (docs/facts/koordlet.md, "Metrics"), on any node."""

_TOPOLOGY = {
    "apiVersion": "topology.node.k8s.io/v1alpha1",
    "kind": "NodeResourceTopology",
    "metadata": {
        "name": NODE,
        "annotations": {
            f"node.koordinator.sh/{pool}": '[{"socket":0,"node":0,"cpuset":"0-1"}]'
            for pool in ("cpu-shared-pools", "be-cpu-shared-pools")
        },
    },
}


async def scrapes() -> dict[str, str]:
    """Return the three pages of a daemon with one container that was adjusted."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = probe.getsockname()[:2]
    async with node(http={"address": f"127.0.0.1:{address[1]}"}) as n:
        n.put(SLO, node_object("1.25"), _TOPOLOGY)
        pod = n.kubelet.add_pod(Limits(cpu_request_milli=1000, cpu_limit_milli=1000))
        async with n.running():
            await n.run_pod(pod)
            await n.create(pod, "c1")
            while True:
                pages = {path: await page(address, path) for path in _PATHS}
                # A round of measurements that ends in between adds series.
                if types(await page(address, "/metrics")) == types(pages["/metrics"]):
                    return pages


async def page(address: tuple[str, int], path: str) -> str:
    status, body = await request(address, "GET", path)
    assert status == 200
    return body.decode()


def types(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("# TYPE")]


def test_a_scrape_is_read_by_prometheus_and_has_every_series_once() -> None:
    pages = asyncio.run(asyncio.wait_for(scrapes(), 30))
    families = {path: list(text_string_to_metric_families(page)) for path, page in pages.items()}
    for found in families.values():
        series = Counter(
            (sample.name, tuple(sorted(sample.labels.items())))
            for family in found
            for sample in family.samples
        )
        assert [name for name, times in series.items() if times > 1] == []
        assert [family.name for family in found if not family.documentation] == []
    names = {path: {family.name for family in found} for path, found in families.items()}
    assert names["/metrics"] == names["/internal-metrics"] | names["/external-metrics"]
    assert UPSTREAMS - names["/metrics"] == set()


def test_requests_to_kubelet_are_counted_by_path() -> None:
    async def test(port: int) -> set[tuple[str, str, str]]:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = probe.getsockname()[:2]
        kubelet = {"enabled": True, "readOnly": True, "readOnlyPort": port}
        http = {"address": f"127.0.0.1:{address[1]}"}
        async with node(http=http, kubelet=kubelet) as n, n.running():
            while True:
                text = await page(address, "/internal-metrics")
                found = {
                    (each.labels["verb"], each.labels["path"], each.labels["code"])
                    for family in text_string_to_metric_families(text)
                    for each in family.samples
                    if each.name == "koordlet_kubelet_request_duration_seconds_count"
                }
                if len(found) > 1:
                    return found

    with answering(200, b'{"items": null, "kubeletconfig": {}}') as (port, _, _):
        found = asyncio.run(asyncio.wait_for(test(port), 30))
    assert found == {("get", "/pods/", "200"), ("get", "/configz", "200")}


def test_every_metric_that_the_documentation_names_is_served() -> None:
    page = asyncio.run(asyncio.wait_for(scrapes(), 30))["/metrics"]
    served = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    named = set(re.findall(r"\bkoordlet_\w+", _OPERATIONS.read_text()))
    assert named - served == set()
