"""Which reasons of a node evictions could change: preemption looks at no other nodes.

As kube-scheduler divides them into Unschedulable and UnschedulableAndUnresolvable.
"""

from __future__ import annotations

import pytest

from cluster.scheduler.exact.devices import failures
from cluster.scheduler.plugins.between_pods.pod_affinity import InterPodAffinity
from cluster.scheduler.plugins.between_pods.topology_spread import PodTopologySpread
from cluster.scheduler.plugins.contract import Filter
from cluster.scheduler.plugins.nodes.declared_features import NodeDeclaredFeatures
from cluster.scheduler.plugins.nodes.node_affinity import NamedNodes, NodeAffinity
from cluster.scheduler.plugins.nodes.node_ports import NodePorts
from cluster.scheduler.plugins.nodes.scheduling_hint import SchedulingHintNodes
from cluster.scheduler.plugins.nodes.taints import NodeUnschedulable, TaintToleration
from cluster.scheduler.plugins.numa.reasons import REASONS
from cluster.scheduler.plugins.resources.fit import NodeResourcesFit
from cluster.scheduler.plugins.volumes.binding import VolumeBinding
from cluster.scheduler.plugins.volumes.limits import NodeVolumeLimits
from cluster.scheduler.plugins.volumes.restrictions import VolumeRestrictions
from cluster.scheduler.plugins.volumes.zone import VolumeZone
from cluster.scheduler.tables.shapes import Shapes
from tests.cluster.scheduler.making import make_pod


@pytest.mark.parametrize(
    ("plugin", "changes", "lasts"),
    [
        (TaintToleration(), "", "untolerated taint"),
        (NodeUnschedulable(), "", "were unschedulable"),
        (NodeAffinity(), "", "node affinity/selector, scheduler-enforced node affinity"),
        (NamedNodes(), "", "plugin(s) [NodeAffinity]"),
        (NodePorts(), "free ports", ""),
        (NodeDeclaredFeatures(), "", "required features"),
        (SchedulingHintNodes(), "", "plugin(s) [SchedulingHint]"),
        # A request above the whole node has the same text as one above what is left.
        (NodeResourcesFit(), "Too many pods, Insufficient cpu", "Insufficient cpu"),
        (VolumeRestrictions(), "no available disk, already in-use by another pod", ""),
        (NodeVolumeLimits(), "max volume count", ""),
        (
            VolumeBinding(),
            "",
            "PersistentVolume's node affinity, volumes to bind, free storage, non-existent pv(s)",
        ),
        (VolumeZone(), "", "available volume zone"),
        (PodTopologySpread(), "spread constraints", "missing required label"),
        (
            InterPodAffinity(),
            "match pod anti-affinity rules, existing pods anti-affinity rules",
            "match pod affinity rules",
        ),
    ],
)
def test_of_the_filters(plugin: Filter, changes: str, lasts: str) -> None:
    reasons = plugin.reasons(Shapes().of(make_pod("p", requests={"cpu": "1"})))
    for parts, resolvable in ((changes, True), (lasts, False)):
        texts = [reason.text for reason in reasons if reason.resolvable is resolvable]
        expected = list(filter(None, parts.split(", ")))
        assert len(texts) == len(expected)
        for text, part in zip(texts, expected, strict=True):
            assert part in text


def test_of_numa_nodes() -> None:
    assert {reason.text for reason in REASONS if reason.resolvable} == {
        "Insufficient amplified cpu",
        "not enough cpus available to satisfy request",
        "node(s) Insufficient NUMA Node resources",
        "Unaligned NUMA Hint",
    }


def test_of_devices() -> None:
    types = ("gpu", "rdma", "fpga")
    lasting = [failure.text for failure in failures.ALL if not failure.resolvable]
    assert sorted(lasting) == sorted(
        [
            # Of a node that has none at all.
            *(f"Insufficient {type_} devices" for type_ in types),
            *(f"node(s) missing {name} Device Topology Tree" for name in ("GPU", "rdma", "fpga")),
            "node(s) missing GPU Partition Table",
            "node(s) Unsupported number of GPU requests",
            "node(s) Unsupported Multi-Shared GPU",
            "no matched GPU shared resource template",
        ]
    )
    assert {failures.INSUFFICIENT[type_].text for type_ in types} < set(lasting)
    assert failures.NOT_IN_SCOPE["gpu"].text == "Insufficient Topology Scoped GPU Devices"
    assert failures.NOT_IN_SCOPE["rdma"].text == "Insufficient Topology Scoped rdma Devices"
