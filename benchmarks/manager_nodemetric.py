"""What a NodeMetric update costs the manager: decoding, calculating, comparing.

    python -m benchmarks.manager_nodemetric [--nodes 5000] [--pods 4] [--updates 10000]

Events enter where the watch delivers them; patches end in a client that only counts. Prints the
CPU time of one update, the share of a core that 5,000 updates a minute take, and how many patches
were wanted (usage moves by less than the threshold, so none are).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
from datetime import UTC, datetime
from typing import Any

import msgspec

from apis.core import ConfigMap, Node, Pod
from apis.device import Device
from apis.meta import format_time
from apis.nodemetric import NodeMetric
from apis.topology import NodeResourceTopology
from benchmarks.running import run_main
from cluster.manager.config_source import SLOConfigSource
from cluster.manager.node_resource import NodeResourceController
from cluster.manager.objects import shrink_node, shrink_node_metric, shrink_pod
from cluster.metrics import ManagerMetrics
from kube.cache import Cache
from kube.client import Client
from kube.connection import Connection
from kube.events import EventRecorder
from kube.resources import (
    CONFIG_MAPS,
    DEVICES,
    NODE_METRICS,
    NODE_RESOURCE_TOPOLOGIES,
    NODES,
    PODS,
    Resource,
)


class CountingClient(Client):
    """Counts patches and applies those of nodes, as the API server would."""

    def __init__(self) -> None:
        super().__init__(Connection("http://localhost"))
        self.patches = 0
        self.nodes: dict[str, dict[str, Any]] = {}
        self.changed: list[str] = []

    async def patch(
        self,
        resource: Resource,
        name: str,
        body: bytes,
        *,
        content_type: str = "",
        namespace: str = "",
        subresource: str = "",
        field_manager: str = "",
        force: str = "",
    ) -> bytes:
        self.patches += 1
        if resource is NODES:
            merge(self.nodes[name], msgspec.json.decode(body))
            self.changed.append(name)
        return body


def merge(target: dict[str, Any], patch: dict[str, Any]) -> None:
    """Apply a merge patch in place."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


def usage(cpu: str, memory: str) -> dict[str, Any]:
    return {"resources": {"cpu": cpu, "memory": memory}}


def report(node: int, pods: int, version: int) -> dict[str, Any]:
    """Return a NodeMetric as koordlet reports it, with percentiles."""
    windows = [
        {
            "duration": text,
            "usage": {p: usage("3", "9Gi") for p in ("avg", "p50", "p90", "p95", "p99")},
        }
        for text in ("5m0s", "10m0s", "30m0s")
    ]
    # Between reports usage moves by a few percent.
    wiggle = version % 7
    return {
        "metadata": {"name": f"n{node}", "resourceVersion": str(version)},
        "spec": {"metricCollectPolicy": {"aggregateDurationSeconds": 300}},
        "status": {
            "updateTime": format_time(datetime.now(UTC)),
            "nodeMetric": {
                "nodeUsage": usage(f"{3000 + wiggle}m", "9Gi"),
                "aggregatedNodeUsages": windows,
                "systemUsage": usage(f"{1000 + wiggle}m", "1Gi"),
                "aggregatedSystemUsages": windows,
            },
            "podsMetric": [
                {
                    "name": f"p{node}-{pod}",
                    "namespace": "default",
                    "podUsage": usage(f"{200 + wiggle}m", f"{500 + wiggle}Mi"),
                    "priority": "koord-prod",
                    "qos": "LS",
                }
                for pod in range(pods)
            ],
            "prodReclaimableMetric": {"resource": usage("1", "2Gi")},
        },
    }


def watch_line(obj: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"type": "MODIFIED", "object": obj})


async def measure(nodes: int, pods: int, updates: int) -> dict[str, Any]:
    """Return the figures."""
    client = CountingClient()
    metrics = ManagerMetrics()
    caches: dict[str, Cache[Any]] = {
        "nodes": Cache(client, NODES, Node, shrink=shrink_node),
        "pods": Cache(client, PODS, Pod, shrink=shrink_pod),
        "metrics": Cache(client, NODE_METRICS, NodeMetric, shrink=shrink_node_metric),
        "topologies": Cache(client, NODE_RESOURCE_TOPOLOGIES, NodeResourceTopology),
        "devices": Cache(client, DEVICES, Device),
        "configs": Cache(client, CONFIG_MAPS, ConfigMap),
    }
    events = EventRecorder(client, component="benchmark")
    source = SLOConfigSource(
        caches["configs"], events, metrics, namespace="ns", name="slo-controller-config"
    )
    controller = NodeResourceController(
        client,
        caches["nodes"],
        caches["pods"],
        caches["metrics"],
        caches["topologies"],
        caches["devices"],
        source,
        events,
        metrics,
    )
    config = {
        "metadata": {"name": "slo-controller-config", "namespace": "ns"},
        "data": {"colocation-config": '{"enable":true}'},
    }
    caches["configs"].take(watch_line(config))
    amounts = {"cpu": "32", "memory": "128Gi"}
    for node in range(nodes):
        plain: dict[str, Any] = {
            "metadata": {"name": f"n{node}", "labels": {"pool": "a"}},
            "status": {"capacity": dict(amounts), "allocatable": dict(amounts)},
        }
        client.nodes[f"n{node}"] = plain
        caches["nodes"].take(watch_line(plain))
        for pod in range(pods):
            caches["pods"].take(
                watch_line(
                    {
                        "metadata": {"name": f"p{node}-{pod}", "namespace": "default"},
                        "spec": {
                            "nodeName": f"n{node}",
                            "priority": 9500,
                            "containers": [
                                {"name": "c", "resources": {"requests": {"cpu": "500m"}}}
                            ],
                        },
                        "status": {"phase": "Running"},
                    }
                )
            )
    lines = [watch_line(report(update % nodes, pods, update)) for update in range(nodes + updates)]
    for line in lines[:nodes]:
        caches["metrics"].take(line)
    while controller.queue.due or client.changed:
        while client.changed:
            caches["nodes"].take(watch_line(client.nodes[client.changed.pop()]))
        await controller.reconcile(controller.queue.take())
    first = client.patches
    started = time.process_time()
    for line in lines[nodes:]:
        caches["metrics"].take(line)
        await controller.reconcile(controller.queue.take())
    seconds = (time.process_time() - started) / updates
    return {
        "cpu_ms_per_update": round(seconds * 1000, 3),
        "percent_of_a_core_at_5000_a_minute": round(seconds * 5000 / 60 * 100, 1),
        "patches_at_start": first,
        "patches_for_updates": client.patches - first,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "nodes": nodes,
        "pods": nodes * pods,
    }


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--pods", type=int, default=4)
    parser.add_argument("--updates", type=int, default=10000)
    options = parser.parse_args()
    figures = asyncio.run(measure(options.nodes, options.pods, options.updates))
    print(json.dumps(figures))


if __name__ == "__main__":
    run_main(main)
