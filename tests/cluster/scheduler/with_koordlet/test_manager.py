"""What the manager writes about nodes and quotas: koordlet keeps it, and the scheduler reads it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.core import Node
from apis.decode import dec_hook, decode_object, to_plain
from apis.keys import (
    ANNOTATION_NODE_RESERVATION,
    ANNOTATION_RAW_ALLOCATABLE,
    ANNOTATION_RESOURCE_AMPLIFICATION_RATIO,
    BATCH_CPU,
    BATCH_MEMORY,
    CPU,
    MEMORY,
)
from apis.quota import ElasticQuotaProfile, decode_elastic_quota
from apis.scheduling_pod import decode_scheduling_node
from apis.topology import NodeResourceTopology
from cluster.manager.amounts import Amount
from cluster.manager.node_offer import Wanted
from cluster.manager.node_patches import zones_patch
from cluster.manager.normalization import amplification_text
from cluster.manager.quota_profile import tree_id, wanted_quota
from cluster.scheduler.sources.objects import kept_node
from cluster.scheduler.tables.numa.facts import parse_numa_facts
from cluster.scheduler.tables.quotas.table import QuotaTable
from cluster.scheduler.tables.tables import Tables
from cluster.webhook.node import amplified_node
from tests.cluster.scheduler.quotas.making import Bed
from tests.cluster.scheduler.with_koordlet.cpus import NAME, BothSides
from tests.cluster.scheduler.with_koordlet.machines import Machine, Setting, nodes
from tests.koordlet.reporters.bed import merged


@given(nodes(), st.integers(100, 250), st.integers(0, 64_000))
@settings(max_examples=20)
def test_batch_resources_of_numa_nodes_stay_in_koordlets_report_and_are_read(
    node: tuple[Machine, Setting], normalization: int, milli: int
) -> None:
    both = BothSides(*node)
    numbers = list(node[0].memory)
    offered = {number: Amount(milli + number, 1 << 30) for number in numbers}
    stored = decode_object(both.stored, NodeResourceTopology, obj=NAME)
    patch = zones_patch(stored, Wanted(zones=offered, normalization=normalization), threshold=0.1)
    both.stored = json.loads(msgspec.json.encode(merged(both.stored, patch)))
    before = both.read()
    both.report()
    facts = both.read()
    assert facts == before
    for number in numbers:
        # Normalised once, by the manager: the node's amplification does not concern batch.
        assert facts.zones[number][BATCH_CPU] == -(-(milli + number) * normalization // 100)
        assert facts.zones[number][BATCH_MEMORY] == 1 << 30


ratios = st.fixed_dictionaries(
    {}, optional={CPU: st.integers(100, 500), MEMORY: st.integers(100, 300)}
)


@given(ratios, st.integers(1, 64), st.integers(0, 999))
@settings(max_examples=30)
def test_an_amplified_node_offers_what_its_numa_nodes_do(
    percents: dict[str, int], cpus: int, kept_milli: int
) -> None:
    raw = {"cpu": f"{1000 * cpus - kept_milli}m", "memory": "64Gi", "pods": "110"}
    annotations = {}
    if percents:
        annotations[ANNOTATION_RESOURCE_AMPLIFICATION_RATIO] = amplification_text(percents)
    plain: dict[str, Any] = {
        "metadata": {"name": NAME, "annotations": annotations},
        "status": {"capacity": {**raw, "cpu": str(cpus)}, "allocatable": raw},
    }
    problems: list[Any] = []
    typed = decode_object(plain, Node, obj=NAME)
    admitted = amplified_node(plain, typed, typed, obj=NAME, report=problems.append)
    assert not problems
    node = decode_scheduling_node(msgspec.json.encode(admitted))
    zone = {"name": "node-0", "type": "Node", "resources": [_zone_of("cpu", str(cpus))]}
    topology = decode_object({"zones": [zone]}, NodeResourceTopology, obj=NAME)
    facts, errors = parse_numa_facts(node, topology)
    assert not errors
    tables = Tables()
    row = tables.upsert_node(node)
    ratio = percents.get(CPU, 100)
    offered = int(tables.nodes.allocatable[row, tables.resources.column(CPU)])
    assert offered == (1000 * cpus - kept_milli) * ratio // 100
    assert facts.cpu_ratio == ratio
    assert facts.zones[0][CPU] == 10 * ratio * cpus
    # What kubelet offers is kept for those who need it, where there is something to tell apart.
    assert (ANNOTATION_RAW_ALLOCATABLE in node.metadata.annotations) == bool(percents)


def _zone_of(name: str, amount: str) -> dict[str, str]:
    return {"name": name, "capacity": amount, "allocatable": amount, "available": amount}


pool_nodes = st.lists(
    st.fixed_dictionaries(
        {
            "cpu": st.integers(1, 128),
            "reserved": st.integers(0, 3),
            "ready": st.booleans(),
            "cordoned": st.booleans(),
            "inside": st.booleans(),
        }
    ),
    max_size=5,
)


@given(pool_nodes, st.sampled_from([None, "0.9", "0.333"]), st.booleans())
@settings(max_examples=30)
def test_the_quota_of_a_profile_is_the_root_of_a_tree_with_its_nodes(
    pool: list[dict[str, Any]], ratio: str | None, apart: bool
) -> None:
    members = [
        {
            "metadata": {
                "name": f"n{n}",
                "labels": {"pool": "a" if one["inside"] else "b"},
                "annotations": {
                    ANNOTATION_NODE_RESERVATION: json.dumps(
                        {"resources": {"cpu": str(one["reserved"])}}
                    )
                },
            },
            "spec": {"unschedulable": one["cordoned"]},
            "status": {
                "allocatable": {"cpu": str(one["cpu"]), "memory": "8Gi"},
                "conditions": [{"type": "Ready", "status": str(one["ready"])}],
            },
        }
        for n, one in enumerate(pool)
    ]
    labels = {"quota.scheduling.koordinator.sh/ignore-default-tree": "true"} if apart else {}
    profile = msgspec.convert(
        {
            "metadata": {"name": "pool", "namespace": "team"},
            "spec": {
                "quotaName": "root",
                "quotaLabels": labels,
                "nodeSelector": {"matchLabels": {"pool": "a"}},
                **({"resourceRatio": ratio} if ratio else {}),
            },
        },
        ElasticQuotaProfile,
        dec_hook=dec_hook,
    )
    tree = tree_id("team", "pool")
    spec, own_labels, annotations = wanted_quota(
        profile,
        [decode_object(member, Node, obj="Node") for member in members],
        tree=tree,
        keys=(CPU, MEMORY),
    )
    meta = {
        "name": "root",
        "namespace": "team",
        "labels": own_labels,
        "annotations": annotations,
    }
    body = {"metadata": meta, "spec": to_plain(spec)}
    table = Bed(several_trees=True).table
    for row, member in enumerate(members):
        table.set_node(row, kept_node(decode_scheduling_node(msgspec.json.encode(member))))
    if not members:
        table.forget_node(0)
    assert table.set_quota(decode_elastic_quota(msgspec.json.encode(body))) == ""
    assert not table.problems()

    def milli(*, inside: bool) -> int:
        return sum(
            max(0, 1000 * (one["cpu"] - one["reserved"])) for one in pool if one["inside"] == inside
        )

    # Truncated to milli-cores once, for all nodes together.
    offered = milli(inside=True) * {None: 1000, "0.9": 900, "0.333": 333}[ratio] // 1000
    assert _total(table, tree) == offered
    everything = milli(inside=True) + milli(inside=False)
    assert _total(table, "") == (everything if apart else everything - offered)


def _total(table: QuotaTable, tree: str) -> int:
    top = table.top(tree)
    assert top is not None
    return top.runtime(CPU)
