"""The fields that the caches keep of an object: all that are read, and no others."""

from __future__ import annotations

from typing import Any

import msgspec

from apis.core import Node, Pod
from apis.decode import dec_hook, to_plain
from apis.nodemetric import NodeMetric
from cluster.manager.caches import Caches
from cluster.manager.flags import parse
from cluster.manager.objects import (
    StoredNodeSLO,
    detach_node_slo,
    plain_spec,
    shrink_node,
    shrink_node_metric,
    shrink_pod,
)
from kube.client import Client
from kube.connection import Connection

NOISE = {"kubectl.kubernetes.io/last-applied-configuration": "{...}", "kept": "x"}


def read(plain: dict[str, Any], type_: type[Any]) -> Any:
    return msgspec.convert(plain, type_, dec_hook=dec_hook)


def test_a_node_keeps_its_amounts_and_whether_it_is_ready() -> None:
    beat = {"lastHeartbeatTime": "2026-01-01T00:00:00Z"}
    ready = {"type": "Ready", "status": "True", "message": "kubelet is fine", **beat}
    node = read(
        {
            "metadata": {"name": "n", "labels": {"a": "b"}, "annotations": NOISE},
            "spec": {"unschedulable": True},
            "status": {
                "allocatable": {"cpu": "1"},
                "capacity": {"cpu": "2"},
                "conditions": [{"type": "DiskPressure", "status": "False"}, ready],
                "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}],
            },
        },
        Node,
    )
    kept = shrink_node(node)
    assert kept.metadata.annotations == {"kept": "x"}
    assert kept.metadata.labels == {"a": "b"} and kept.spec.unschedulable
    assert (kept.status.allocatable, kept.status.capacity) == (
        node.status.allocatable,
        node.status.capacity,
    )
    assert [(each.type, each.status, each.message) for each in kept.status.conditions] == [
        ("Ready", "True", "")
    ]
    assert kept.status.addresses == ()
    # The next heartbeat changes nothing that is kept.
    later = msgspec.structs.replace(
        node.status.conditions[1], message="still", last_transition_time="2026-01-02T00:00:00Z"
    )
    conditions = (node.status.conditions[0], later)
    status = msgspec.structs.replace(node.status, conditions=conditions)
    assert shrink_node(msgspec.structs.replace(node, status=status)) == kept


def test_a_pod_keeps_its_requests_and_loses_what_only_kubelets_need() -> None:
    container = {
        "name": "c",
        "image": "x",
        "volumeMounts": [{"name": "v", "mountPath": "/v"}],
        "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "2"}},
    }
    pod = read(
        {
            "metadata": {
                "name": "p",
                "namespace": "ns",
                "annotations": NOISE,
                "finalizers": ["example.com/x"],
                "ownerReferences": [{"kind": "Job", "name": "j", "uid": "u", "apiVersion": "v1"}],
            },
            "spec": {
                "nodeName": "n",
                "priority": 5000,
                "containers": [container],
                "initContainers": [{**container, "name": "i", "restartPolicy": "Always"}],
                "volumes": [{"name": "v"}],
                "tolerations": [{"key": "k"}],
            },
            "status": {"phase": "Running"},
        },
        Pod,
    )
    kept = to_plain(shrink_pod(pod))
    assert kept["metadata"] == {"name": "p", "namespace": "ns", "annotations": {"kept": "x"}}
    spec = kept["spec"]
    assert not spec.get("volumes") and not spec.get("tolerations")
    for part, name in (("containers", "c"), ("initContainers", "i")):
        (one,) = spec[part]
        assert one["name"] == name and one["resources"] == container["resources"]
        assert not one.get("image") and not one.get("volumeMounts")
    assert spec["initContainers"][0]["restartPolicy"] == "Always"
    assert (spec["nodeName"], spec["priority"], kept["status"]["phase"]) == ("n", 5000, "Running")


def test_a_report_keeps_what_the_formulas_read() -> None:
    usage = {"resources": {"cpu": "1", "memory": "1Gi"}}
    percentiles = [{"duration": "5m", "usage": {"p99": usage}}]
    metric = read(
        {
            "metadata": {"name": "n"},
            "status": {
                "updateTime": "2026-01-01T00:00:00Z",
                "nodeMetric": {
                    "nodeUsage": usage,
                    "systemUsage": usage,
                    "aggregatedNodeUsages": percentiles,
                    "aggregatedSystemUsages": percentiles,
                    "numaUsages": [{"numaNodeID": 0}],
                },
                "podsMetric": [{"name": "p", "podUsage": usage}],
                "prodReclaimableMetric": {"resource": usage},
            },
        },
        NodeMetric,
    )
    kept = shrink_node_metric(metric).status
    info = metric.status.node_metric
    assert kept.node_metric is not None
    assert kept.node_metric.node_usage == info.node_usage
    assert kept.node_metric.system_usage == info.system_usage
    assert kept.node_metric.aggregated_node_usages == ()
    assert kept.node_metric.aggregated_system_usages == ()
    assert kept.node_metric.numa_usages == ()
    assert kept.pods_metric == metric.status.pods_metric
    assert kept.prod_reclaimable_metric == metric.status.prod_reclaimable_metric
    bare = read({"metadata": {"name": "n"}}, NodeMetric)
    assert shrink_node_metric(bare) is bare


def test_specs_of_node_slos_are_kept_as_bytes_and_shared() -> None:
    def stored() -> StoredNodeSLO:
        page = b'{"metadata":{"name":"n"},"spec":{"cpuBurstStrategy":{"policy":"auto"},"odd":1}}'
        found: StoredNodeSLO = msgspec.json.decode(page, type=StoredNodeSLO, dec_hook=dec_hook)
        return detach_node_slo(found)

    first, second = stored(), stored()
    assert bytes(first.spec) == b'{"cpuBurstStrategy":{"policy":"auto"},"odd":1}'
    assert plain_spec(bytes(first.spec)) is plain_spec(bytes(second.spec))
    assert plain_spec(bytes(first.spec))["odd"] == 1
    assert plain_spec(b"") == {} and plain_spec(b"null") == {} and plain_spec(b"[1]") == {}


def test_the_caches_of_the_manager_keep_their_objects_so() -> None:
    caches = Caches(Client(Connection("http://localhost")), parse([], {}))

    def kept(name: str, **content: Any) -> Any:
        metadata = {"name": "a", "annotations": NOISE}
        page = msgspec.json.encode({"type": "ADDED", "object": {"metadata": metadata, **content}})
        cache = getattr(caches, name)
        cache.take(page)
        return cache.items["a"]

    assert kept("nodes").metadata.annotations == {"kept": "x"}
    assert kept("pods").metadata.annotations == {"kept": "x"}
    percentiles = [{"duration": "5m", "usage": {}}]
    status = {"nodeMetric": {"aggregatedNodeUsages": percentiles}}
    assert kept("node_metrics", status=status).status.node_metric.aggregated_node_usages == ()
    spec = {"cpuBurstStrategy": {"policy": "auto"}}
    first, second = (kept("node_slos", spec=spec).spec for _ in range(2))
    assert plain_spec(bytes(first)) is plain_spec(bytes(second))
