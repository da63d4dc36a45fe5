"""The columns' verdicts on random clusters equal the oracle's, plugin by plugin."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.cycle.evaluation import Evaluator, Profile
from cluster.scheduler.plugins.contract import Filter, Refusal, RowScore, Score
from cluster.scheduler.plugins.nodes.image_locality import ImageLocality
from cluster.scheduler.plugins.nodes.node_affinity import NodeAffinity
from cluster.scheduler.plugins.nodes.node_ports import NodePorts
from cluster.scheduler.plugins.nodes.taints import NodeUnschedulable, TaintToleration
from cluster.scheduler.plugins.resources.fit import NodeResourcesFit
from cluster.scheduler.plugins.resources.fit_plus import (
    NodeResourcesFitPlus,
    ScarceResourceAvoidance,
    Strategy,
)
from cluster.scheduler.plugins.resources.resource_scores import (
    BalancedAllocation,
    LeastAllocated,
    MostAllocated,
    RequestedToCapacityRatio,
    capacity_and_use,
)
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.reasons.counterfactuals import nearest
from cluster.scheduler.reasons.diagnosis import diagnose
from cluster.scheduler.sources.objects import pod_keeper
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler import oracle
from tests.cluster.scheduler import resource_oracle as amounts
from tests.cluster.scheduler.configuration.files import file
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.oracle import OracleNode

_KEYS = st.sampled_from(["zone", "disk", "size"])
_VALUES = st.sampled_from(["a", "b", "3", "12", ""])
_LABELS = st.dictionaries(_KEYS, _VALUES, max_size=3)
_EFFECT = st.sampled_from(["NoSchedule", "PreferNoSchedule", "NoExecute"])
_TAINTS = st.lists(
    st.fixed_dictionaries({"key": _KEYS, "value": _VALUES, "effect": _EFFECT}), max_size=3
)
_TOLERATIONS = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"key": _KEYS, "value": _VALUES, "effect": st.one_of(st.just(""), _EFFECT)}
        ),
        st.fixed_dictionaries(
            {"key": st.one_of(st.just(""), _KEYS), "operator": st.just("Exists")}
        ),
        st.just({"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}),
    ),
    max_size=3,
)
_EXPRESSION = st.one_of(
    st.fixed_dictionaries(
        {
            "key": _KEYS,
            "operator": st.sampled_from(["In", "NotIn"]),
            "values": st.lists(_VALUES, min_size=1, max_size=3),
        }
    ),
    st.fixed_dictionaries({"key": _KEYS, "operator": st.sampled_from(["Exists", "DoesNotExist"])}),
    st.fixed_dictionaries(
        {
            "key": _KEYS,
            "operator": st.sampled_from(["Gt", "Lt"]),
            "values": st.lists(st.sampled_from(["3", "5"]), min_size=1, max_size=1),
        }
    ),
)
_FIELDS = st.fixed_dictionaries(
    {
        "key": st.just("metadata.name"),
        "operator": st.sampled_from(["In", "NotIn"]),
        "values": st.lists(st.sampled_from(["n0", "n1", "none"]), min_size=1, max_size=1),
    }
)
_TERM = st.fixed_dictionaries(
    {},
    optional={
        "matchExpressions": st.lists(_EXPRESSION, max_size=2),
        "matchFields": st.lists(_FIELDS, max_size=1),
    },
)
_AFFINITY = st.fixed_dictionaries(
    {
        "nodeAffinity": st.fixed_dictionaries(
            {},
            optional={
                "requiredDuringSchedulingIgnoredDuringExecution": st.fixed_dictionaries(
                    {"nodeSelectorTerms": st.lists(_TERM, min_size=1, max_size=2)}
                ),
                "preferredDuringSchedulingIgnoredDuringExecution": st.lists(
                    st.fixed_dictionaries({"weight": st.integers(1, 100), "preference": _TERM}),
                    max_size=3,
                ),
            },
        )
    }
)
_IMAGES = st.sampled_from(["web:1", "web", "db:2"])
_MIB = 1024 * 1024
_NODE = st.fixed_dictionaries(
    {
        "labels": _LABELS,
        "taints": _TAINTS,
        "unschedulable": st.booleans(),
        "allocatable": st.fixed_dictionaries(
            {
                "cpu": st.sampled_from(["0", "500m", "3", "16"]),
                "memory": st.sampled_from(["1Gi", "7Gi", "64Gi"]),
                "pods": st.sampled_from(["1", "3", "110"]),
            },
            optional={"example.com/gpu": st.sampled_from(["0", "2"])},
        ),
        "images": st.lists(
            st.fixed_dictionaries(
                {
                    "names": st.sampled_from([["web:1"], ["web:latest", "w"], ["db:2"]]),
                    "sizeBytes": st.integers(1, 2000 * _MIB),
                }
            ),
            max_size=2,
            unique_by=lambda image: str(image["names"]),
        ),
    }
)
_CONTAINER = st.fixed_dictionaries(
    {
        "name": st.just("c"),
        "image": _IMAGES,
        "resources": st.fixed_dictionaries(
            {
                "requests": st.fixed_dictionaries(
                    {},
                    optional={
                        "cpu": st.sampled_from(["0", "100m", "1", "2500m"]),
                        "memory": st.sampled_from(["0", "333Mi", "2Gi"]),
                        "example.com/gpu": st.sampled_from(["0", "1"]),
                    },
                )
            }
        ),
        "ports": st.lists(
            st.fixed_dictionaries(
                {
                    "hostPort": st.sampled_from([0, 80, 81]),
                    "hostIP": st.sampled_from(["", "10.0.0.1", "10.0.0.2"]),
                    "protocol": st.sampled_from(["TCP", "UDP"]),
                }
            ),
            max_size=2,
        ),
    }
)
_POD = st.fixed_dictionaries(
    {
        "containers": st.lists(_CONTAINER, min_size=1, max_size=2),
        "tolerations": _TOLERATIONS,
    },
    optional={
        "nodeSelector": _LABELS,
        "affinity": _AFFINITY,
    },
)


def _cluster(
    nodes: list[dict[str, Any]], running: list[tuple[int, dict[str, Any]]]
) -> tuple[Tables, Shapes, list[OracleNode]]:
    tables = Tables()
    shapes = Shapes()
    objects = [OracleNode(make_node(f"n{number}", **node)) for number, node in enumerate(nodes)]
    for on in objects:
        tables.upsert_node(on.node)
    for number, (where, spec) in enumerate(running):
        on = objects[where % len(objects)]
        pod = make_pod(f"r{number}", node=on.node.metadata.name, **spec)
        on.pods.append(pod)
        tables.place(
            Booking(
                key="",
                uid=pod.metadata.uid,
                shape=shapes.of(pod),
                node=on.node.metadata.name,
            )
        )
    return tables, shapes, objects


def _reasons(plugin: Filter, shape: PodShape, tables: Tables) -> list[list[str]]:
    """Return each row's reasons, evaluated as a whole and row by row."""
    if not plugin.applies(shape, tables):
        return [[] for _ in range(len(tables.nodes))]
    whole = plugin.filter(shape, tables, slice(0, len(tables.nodes)))
    for row in range(len(tables.nodes)):
        assert plugin.filter(shape, tables, np.array([row]))[0] == whole[row]
    texts = [reason.text for reason in plugin.reasons(shape)]
    return [
        [text for number, text in enumerate(texts) if mask >> number & 1] for mask in whole.tolist()
    ]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(_NODE, min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), _POD), max_size=6),
    _POD,
)
def test_filters_equal_the_oracle(
    nodes: list[dict[str, Any]], running: list[tuple[int, dict[str, Any]]], spec: dict[str, Any]
) -> None:
    tables, shapes, objects = _cluster(nodes, running)
    pod = make_pod("p", **spec)
    shape = shapes.of(pod)
    for plugin, expected in (
        (NodeUnschedulable(), oracle.unschedulable),
        (TaintToleration(), oracle.taints),
        (NodeAffinity(), oracle.affinity),
        (NodePorts(), oracle.ports),
        (NodeResourcesFit(), oracle.fit),
    ):
        found = _reasons(plugin, shape, tables)
        for on, texts in zip(objects, found, strict=True):
            assert sorted(texts) == sorted(expected(pod, on)), plugin.name


@settings(max_examples=150, deadline=None)
@given(
    st.lists(_NODE, min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), _POD), max_size=6),
    _POD,
)
def test_scores_equal_the_oracle(
    nodes: list[dict[str, Any]], running: list[tuple[int, dict[str, Any]]], spec: dict[str, Any]
) -> None:
    tables, shapes, objects = _cluster(nodes, running)
    pod = make_pod("p", **spec)
    shape = shapes.of(pod)
    rows = slice(0, len(tables.nodes))

    raw = NodeAffinity().score(shape, tables, rows)
    assert raw.tolist() == [oracle.preferred(pod, on) for on in objects]
    for plugin, most in ((LeastAllocated(), False), (MostAllocated(), True)):
        scores = plugin.score(shape, tables, rows).tolist()
        assert scores == [oracle.least_allocated(pod, on, most=most) for on in objects]
    if BalancedAllocation().applies(shape, tables):
        scores = BalancedAllocation().score(shape, tables, rows).tolist()
        assert scores == [oracle.balanced(pod, on) for on in objects]
    if ImageLocality().applies(shape, tables):
        scores = ImageLocality().score(shape, tables, rows).tolist()
        assert scores == [oracle.image_locality(pod, on, objects) for on in objects]


_RESOURCES = st.sampled_from(["cpu", "memory", "example.com/gpu", "ephemeral-storage"])
_WEIGHTS = st.dictionaries(_RESOURCES, st.integers(1, 5), min_size=1)
_POINTS = st.dictionaries(st.integers(0, 100), st.integers(0, 10), min_size=1, max_size=4).map(
    lambda points: tuple(sorted(points.items()))
)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(_NODE, min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), _POD), max_size=6),
    _POD,
    _WEIGHTS,
    _POINTS,
    st.dictionaries(_RESOURCES, st.booleans(), min_size=1),
)
def test_configured_scores_equal_the_oracle(
    nodes: list[dict[str, Any]],
    running: list[tuple[int, dict[str, Any]]],
    spec: dict[str, Any],
    by_name: dict[str, int],
    points: tuple[tuple[int, int], ...],
    fuller: dict[str, bool],
) -> None:
    tables, shapes, objects = _cluster(nodes, running)
    pod = make_pod("p", **spec)
    shape = shapes.of(pod)
    rows = slice(0, len(tables.nodes))
    weights = tuple(by_name.items())
    strategies = {name: (most, by_name.get(name, 1)) for name, most in fuller.items()}
    plugins: list[tuple[Score, list[int]]] = [
        (LeastAllocated(weights), [amounts.fit(pod, on, by_name, amounts.least) for on in objects]),
        (MostAllocated(weights), [amounts.fit(pod, on, by_name, amounts.most) for on in objects]),
        (
            RequestedToCapacityRatio(points, weights),
            [amounts.fit(pod, on, by_name, amounts.ratio(points), by_ratio=True) for on in objects],
        ),
        (
            NodeResourcesFitPlus(tuple((name, Strategy(*s)) for name, s in strategies.items())),
            [amounts.fit_plus(pod, on, strategies) for on in objects],
        ),
        (
            ScarceResourceAvoidance(frozenset(fuller)),
            [amounts.scarce(pod, on, fuller) for on in objects],
        ),
        (
            BalancedAllocation(tuple(by_name)),
            [amounts.balanced(pod, on, by_name) for on in objects],
        ),
        (
            TaintToleration(),
            amounts.fewest_first([amounts.taints_left(pod, on) for on in objects]),
        ),
        (NodeAffinity(), amounts.largest_first([oracle.preferred(pod, on) for on in objects])),
    ]
    for plugin, expected in plugins:
        if not plugin.applies(shape, tables):
            assert len(set(expected)) == 1, plugin.name
            continue
        raw = plugin.score(shape, tables, rows)
        assert plugin.normalize(raw).tolist() == expected, plugin.name
        if isinstance(plugin, RowScore):
            for row in range(len(objects)):
                assert plugin.score_row(shape, tables, row) == raw[row], plugin.name


_CORDON = "node.kubernetes.io/unschedulable"


@pytest.mark.parametrize(
    ("toleration", "takes"),
    [
        ({"key": _CORDON, "operator": "Exists"}, True),
        ({"key": _CORDON, "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"key": _CORDON, "operator": "Exists", "effect": "NoExecute"}, False),
        ({"operator": "Exists"}, True),
        ({"key": "other", "operator": "Exists"}, False),
    ],
)
def test_a_cordoned_node_takes_pods_that_tolerate_the_taint_of_cordoning(
    toleration: dict[str, str], takes: bool
) -> None:
    tables = Tables()
    tables.upsert_node(make_node("n", unschedulable=True))
    shape = Shapes().of(make_pod("p", tolerations=[toleration]))
    plugin = NodeUnschedulable()
    refuses = plugin.applies(shape, tables) and bool(
        plugin.filter(shape, tables, np.array([0])).any()
    )
    assert refuses is not takes


@pytest.mark.parametrize(("restart", "held"), [("Always", True), ("", False)])
def test_of_init_containers_sidecars_alone_hold_host_ports(restart: str, held: bool) -> None:
    """An ordinary init container has ended when its pod runs; kube-scheduler 1.36 counts none of
    its ports."""
    ports = [{"containerPort": 80, "hostPort": 8080}]
    first = {"name": "i", "ports": ports} | ({"restartPolicy": restart} if restart else {})
    main = {"name": "c"}
    tables, shapes = Tables(), Shapes()
    tables.upsert_node(make_node("n"))
    running = shapes.of(make_pod("u", containers=[main], initContainers=[first]))
    tables.place(Booking(key="", uid="u", shape=running, node="n"))
    pod = shapes.of(make_pod("p", containers=[main | {"ports": ports}]))
    assert NodePorts().filter(pod, tables, slice(0, 1)).tolist() == [held]
    assert NodePorts().applies(running, tables) is held


def test_images_of_volumes_count_like_those_of_containers() -> None:
    """As kube-scheduler 1.36.3 scores: what could be there is counted by containers alone."""
    mib = 1024 * 1024
    tables, shapes = Tables(), Shapes()
    tables.upsert_node(make_node("n", images=[{"names": ["i:1"], "sizeBytes": 500 * mib}]))
    volume = {"name": "v", "image": {"reference": "i:1"}}
    pods = (
        make_pod("container", containers=[{"name": "c", "image": "i:1"}]),
        make_pod("volume", containers=[{"name": "c", "image": "x"}], volumes=[volume]),
        make_pod("both", containers=[{"name": "c", "image": "i:1"}], volumes=[volume]),
    )
    scores = [
        ImageLocality().score(shapes.of(pod_keeper({})(pod)), tables, slice(0, 1)).tolist()
        for pod in pods
    ]
    assert scores == [[48], [48], [100]]
    several = make_pod(
        "two", containers=[{"name": "c", "image": "i:1"}, {"name": "d", "image": "x"}]
    )
    assert ImageLocality().score(shapes.of(several), tables, slice(0, 1)).tolist() == [24]
    # Of two nodes one has it, so half of the size counts there.
    tables.upsert_node(make_node("m"))
    one = shapes.of(pods[0])
    assert ImageLocality().score(one, tables, slice(0, 2)).tolist() == [23, 0]


def _default_profile(tables: Tables) -> Profile:
    text = json.dumps(file(profiles=[{"schedulerName": "koord-scheduler"}]))
    return make_plugins(read_configuration(text, obj="test"), tables).profiles["koord-scheduler"]


def _named(*names: str, operator: str = "In", **more: Any) -> dict[str, Any]:
    field = {"key": "metadata.name", "operator": operator, "values": list(names)}
    return {"matchFields": [field], **more}


@pytest.mark.parametrize(
    ("terms", "others"),
    [
        ([_named("n0")], 3),
        ([_named("n0"), _named("n3")], 2),
        ([_named("gone")], 4),
        # A term that names no node may mean any: NodeAffinity decides about each.
        ([_named("n0"), _named("n1", operator="NotIn")], 0),
        ([_named("n0"), {"matchExpressions": [{"key": "x", "operator": "Exists"}]}], 0),
    ],
)
def test_nodes_that_no_term_names_are_held_back_before_all_others(
    terms: list[dict[str, Any]], others: int
) -> None:
    tables = Tables()
    for number in range(4):
        tables.upsert_node(make_node(f"n{number}", unschedulable=number > 1))
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    shape = Shapes().of(make_pod("p", affinity={"nodeAffinity": required}))
    profile = _default_profile(tables)
    evaluation = Evaluator(profile, tables).evaluate(shape)
    counts = diagnose(shape, tables, evaluation.masks).counts
    assert counts.get("node(s) didn't satisfy plugin(s) [NodeAffinity]", 0) == others
    # Such a node fails in nothing else, so what is nearest names it.
    changes = nearest(shape, tables, evaluation.masks).changes
    assert not others or any("[NodeAffinity]" in change.text for change in changes)


def test_terms_that_name_no_node_refuse_the_pod() -> None:
    tables = Tables()
    tables.upsert_node(make_node("n0"))
    fields = [_named(name)["matchFields"][0] for name in ("n0", "n1")]
    terms = {"nodeSelectorTerms": [{"matchFields": fields}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    shape = Shapes().of(make_pod("p", affinity=affinity))
    profile = _default_profile(tables)
    with pytest.raises(Refusal, match="pod affinity terms conflict"):
        Evaluator(profile, tables).evaluate(shape)


def test_the_worked_example_of_resource_scores() -> None:
    tables = Tables()
    shapes = Shapes()
    tables.upsert_node(make_node("n", allocatable={"cpu": "16", "memory": "64Gi"}))
    used = shapes.of(make_pod("u", requests={"cpu": "4", "memory": "16Gi"}))
    tables.place(Booking(key="", uid="u", shape=used, node="n"))
    pod = shapes.of(make_pod("p", requests={"cpu": "2", "memory": "4Gi"}))
    rows = slice(0, 1)
    assert LeastAllocated().score(pod, tables, rows).tolist() == [65]
    assert MostAllocated().score(pod, tables, rows).tolist() == [34]
    assert BalancedAllocation().score(pod, tables, rows).tolist() == [73]


@pytest.mark.parametrize(
    ("allocatable", "used", "requests", "score"),
    [
        # The first four are lines of the log of kube-scheduler 1.36.3.
        ((6000, 13088333345), (0, 0), (795, 823132160), 73),
        ((2545, 12403692953), (0, 0), (795, 823132160), 68),
        ((2688, 9865011716), (62, 0), (795, 823132160), 70),
        ((8442, 22998463712), (1262, 1873805312), (1109, 6378487808), 75),
        # The pod makes the node even: more than 75.
        ((1000, 1000), (500, 0), (0, 500), 87),
    ],
)
def test_balance_is_the_change_that_the_pod_makes(
    allocatable: tuple[int, int], used: tuple[int, int], requests: tuple[int, int], score: int
) -> None:
    def amounts(of: tuple[int, int]) -> dict[str, str]:
        return {"cpu": f"{of[0]}m", "memory": str(of[1])}

    tables = Tables()
    shapes = Shapes()
    tables.upsert_node(make_node("n", allocatable=amounts(allocatable)))
    running = shapes.of(make_pod("u", requests=amounts(used)))
    tables.place(Booking(key="", uid="u", shape=running, node="n"))
    pod = shapes.of(make_pod("p", requests=amounts(requests)))
    assert BalancedAllocation().score(pod, tables, slice(0, 1)).tolist() == [score]


@pytest.mark.parametrize(
    ("spec", "running", "pending"),
    [
        # (cpu, memory) as LeastAllocated counts a pod on a node, and one that is to be placed.
        ({}, (100, 200 * _MIB), (100, 200 * _MIB)),
        ({"cpu": "0", "memory": "0"}, (0, 0), (0, 0)),
        # Requests of the pod itself do not count for the pod that is to be placed ...
        ({"own": {"cpu": "2", "memory": "4k"}}, (2000, 4000), (100, 200 * _MIB)),
        # ... and on a node defaults count only beside them, for what nothing names.
        ({"own": {"cpu": "2"}}, (2000, 200 * _MIB), (100, 200 * _MIB)),
        ({"own": {"cpu": "2"}, "memory": "0"}, (2000, 0), (100, 0)),
        (
            {"own": {"cpu": "2"}, "beside": {"memory": "1k"}},
            (2000, 1000),
            (200, 1000 + 200 * _MIB),
        ),
        (
            {"own": {"cpu": "2"}, "overhead": {"cpu": "1", "memory": "1k"}},
            (3000, 1000),
            (1100, 1000 + 200 * _MIB),
        ),
    ],
)
def test_what_a_pod_counts_with_in_resource_scores(
    spec: dict[str, Any], running: tuple[int, int], pending: tuple[int, int]
) -> None:
    """As kube-scheduler 1.36.3 logs it."""
    requests = {name: spec[name] for name in ("cpu", "memory") if name in spec}
    containers: list[dict[str, Any]] = [{"name": "c", "resources": {"requests": requests}}]
    if beside := spec.get("beside"):
        containers.append({"name": "d", "resources": {"requests": beside}})
    members: dict[str, Any] = {"overhead": spec.get("overhead", {})}
    if own := spec.get("own"):
        members["resources"] = {"requests": own}
    pod = make_pod("p", containers=containers, **members)
    tables, shapes = Tables(), Shapes()
    tables.upsert_node(make_node("n"))
    rows = slice(0, 1)

    def used(shape: PodShape) -> tuple[int, ...]:
        return tuple(
            int(capacity_and_use(shape, tables, rows, name, with_defaults=True)[1][0])
            for name in ("cpu", "memory")
        )

    assert used(shapes.of(pod)) == pending
    tables.place(Booking(key="", uid="u", shape=shapes.of(pod), node="n"))
    assert used(shapes.of(make_pod("q", requests={"cpu": "0", "memory": "0"}))) == running


def test_terms_of_the_profile_count_beside_those_of_the_pod() -> None:
    tables = Tables()
    for name, labels in (
        ("n0", {"pool": "a", "disk": "ssd"}),
        ("n1", {"pool": "a"}),
        ("n2", {"pool": "b", "disk": "ssd"}),
        ("n3", {"pool": "b"}),
    ):
        tables.upsert_node(make_node(name, labels=labels))

    def terms(key: str, value: str, weight: int) -> dict[str, Any]:
        term = {"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]}
        return {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]},
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": weight, "preference": term}
            ],
        }

    def shape(node_affinity: dict[str, Any]) -> PodShape:
        return Shapes().of(make_pod("p", affinity={"nodeAffinity": node_affinity}))

    profile = shape(terms("pool", "a", 3)).affinity
    assert profile is not None
    plugin, every = NodeAffinity(added=profile.node_affinity), slice(0, 4)
    pod, plain = shape(terms("disk", "ssd", 4)), Shapes().of(make_pod("q"))
    assert plugin.applies(plain, tables)
    assert not NodeAffinity().applies(plain, tables)
    assert plugin.filter(plain, tables, every).tolist() == [0, 0, 2, 2]
    # kube-scheduler names the terms of the profile alone where both hold a node back.
    assert plugin.filter(pod, tables, every).tolist() == [0, 1, 2, 2]
    assert plugin.reasons(pod)[1].text == "node(s) didn't match scheduler-enforced node affinity"
    assert plugin.score(pod, tables, every).tolist() == [7, 3, 4, 0]
    assert plugin.normalize(plugin.score(pod, tables, every)).tolist() == [100, 42, 57, 0]


@pytest.mark.parametrize(
    ("requests", "headroom"),
    [
        pytest.param({}, [3, 110, 110], id="only the count of pods limits"),
        pytest.param({"cpu": "4"}, [3, 3, 4], id="whole pods"),
        pytest.param({"cpu": "4", "memory": "32Gi"}, [2, 2, 2], id="the scarcest resource"),
        pytest.param({"cpu": "0"}, [3, 110, 110], id="a request of nothing"),
        pytest.param({"cpu": "1", "example.com/x": "1"}, [0, 5, 0], id="what one node has"),
        pytest.param({"cpu": "1", "example.com/y": "1"}, [0, 0, 0], id="what no node has"),
        pytest.param(
            {"cpu": "1", "example.com/y": "1", "example.com/z": "1"}, [0, 0, 0], id="two such"
        ),
        pytest.param({"cpu": "17"}, [0, 0, 0], id="more than a node has"),
    ],
)
def test_how_many_pods_of_a_shape_a_node_has_left(
    requests: dict[str, str], headroom: list[int]
) -> None:
    tables, shapes = Tables(), Shapes()
    tables.upsert_node(make_node("n0", allocatable={"pods": "4"}))
    tables.upsert_node(make_node("n1", allocatable={"pods": "111", "example.com/x": "5"}))
    tables.upsert_node(make_node("n2"))
    for node, cpu in (("n0", "1"), ("n1", "3")):
        running = shapes.of(make_pod(f"of-{node}", requests={"cpu": cpu}))
        tables.place(Booking(key="", uid=node, shape=running, node=node))
    pod = shapes.of(make_pod("p", requests=requests))
    plugin = NodeResourcesFit()
    found = plugin.headroom(pod, tables, slice(0, 3), 1000)
    assert found.tolist() == headroom
    mask = plugin.filter(pod, tables, slice(0, 3))
    assert (mask == 0).tolist() == [count > 0 for count in headroom]
    assert [plugin.filter_row(pod, tables, row) for row in range(3)] == mask.tolist()


def test_resources_that_extenders_manage_are_not_looked_at() -> None:
    tables, shapes = Tables(), Shapes()
    tables.upsert_node(make_node("n"))
    requests = {"cpu": "1", "a.io/x": "1", "a.io/y": "1", "b.io/z": "1"}
    pod = shapes.of(make_pod("p", requests=requests))
    plugin = NodeResourcesFit(ignored=frozenset({"a.io/x"}), ignored_groups=frozenset({"b.io"}))
    assert sorted(plugin.looked_at(pod)) == [("a.io/y", 1), ("cpu", 1000)]
    texts = [reason.text for reason in plugin.reasons(pod)]
    assert sorted(texts) == ["Insufficient a.io/y"] * 2 + ["Insufficient cpu"] * 2 + [
        "Too many pods"
    ]
    assert plugin.filter(pod, tables, slice(0, 1)).tolist() != [0]
    ignoring = NodeResourcesFit(ignored_groups=frozenset({"a.io", "b.io"}))
    assert ignoring.filter(pod, tables, slice(0, 1)).tolist() == [0]


def test_what_containers_request_by_default_counts_for_fullness_and_not_for_balance() -> None:
    """100 millicores and 200 MiB, of the pod that is placed and of those that run."""
    tables, shapes = Tables(), Shapes()
    tables.upsert_node(make_node("n", allocatable={"cpu": "1", "memory": "1000Mi"}))
    tables.place(Booking(key="", uid="u", shape=shapes.of(make_pod("u")), node="n"))
    pod = shapes.of(make_pod("p", requests={"cpu": "500m"}))
    for plugin, score in (
        (LeastAllocated(), (40 + 60) // 2),
        (MostAllocated(), (60 + 40) // 2),
        (BalancedAllocation(), 75 + (75 - 100) // 2),
    ):
        assert plugin.score(pod, tables, slice(0, 1)).tolist() == [score]
        assert plugin.score_row(pod, tables, 0) == score


@pytest.mark.parametrize(
    ("effect", "held", "score"),
    [("NoSchedule", 1, 0), ("NoExecute", 1, 0), ("PreferNoSchedule", 0, 1)],
)
def test_what_a_taint_does_to_pods_that_do_not_tolerate_it(
    effect: str, held: int, score: int
) -> None:
    tables, shapes = Tables(), Shapes()
    tables.upsert_node(make_node("n", taints=[{"key": "k", "value": "v", "effect": effect}]))
    plugin, rows = TaintToleration(), slice(0, 1)
    plain = shapes.of(make_pod("p"))
    tolerations = [{"key": "k", "operator": "Exists"}]
    tolerant = shapes.of(make_pod("q", tolerations=tolerations))
    assert plugin.applies(plain, tables)
    assert plugin.filter(plain, tables, rows).tolist() == [held]
    assert plugin.score(plain, tables, rows).tolist() == [score]
    assert plugin.filter(tolerant, tables, rows).tolist() == [0]
    assert plugin.score(tolerant, tables, rows).tolist() == [0]
