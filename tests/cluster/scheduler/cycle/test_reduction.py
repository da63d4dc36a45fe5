"""Pods that differ in nothing that a selector mentions share one evaluation; the others do not."""

from __future__ import annotations

import json
import weakref
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as struct_replace

from apis.core import OwnerReference
from apis.meta import LabelSelector
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.cycle.evaluation import Evaluator
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.mentions import Mentions, label
from cluster.scheduler.tables.reduction import Reduction
from cluster.scheduler.tables.shapes import PodShape, Shapes, personal
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.configuration.files import args, chart_profile, file
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.reservations.making import make_facts

_QUOTA = "quota.scheduling.koordinator.sh/name"
_GANG = "pod-group.scheduling.sigs.k8s.io"
_NEAR = "scheduling.koordinator.sh/network-topology-selector"
_ZONE = "topology.kubernetes.io/zone"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def _scheduling() -> tuple[Tables, Evaluator]:
    """Return the tables of four nodes in two zones, and the plugins of the chart's profile, where
    pods of a workload are spread over the zones."""
    tables = Tables()
    spread = {"maxSkew": 1, "topologyKey": _ZONE, "whenUnsatisfiable": "DoNotSchedule"}
    defaults = args("PodTopologySpread", defaultConstraints=[spread], defaultingType="List")
    profile = chart_profile()
    profile["pluginConfig"] = [*profile.get("pluginConfig", ()), defaults]
    text = json.dumps(file(profiles=[profile]))
    plugins = make_plugins(read_configuration(text, obj="test"), tables)
    for number in range(4):
        tables.upsert_node(make_node(f"n{number}", labels={_ZONE: f"z{number % 2}"}))
    return tables, Evaluator(plugins.profiles["koord-scheduler"], tables)


def _place(tables: Tables, shape: PodShape, name: str, node: str) -> None:
    tables.place(Booking(f"default/{name}", name, shape, node))


# --- cases ---------------------------------------------------------------------------------------


def test_what_no_plugin_looks_at_leaves_one_reduced_shape() -> None:
    tables, _ = _scheduling()
    shapes = Shapes()
    pods = [
        make_pod("a"),
        make_pod("a", namespace="other"),
        make_pod("a", labels={_QUOTA: "q1"}, priority=5, preemptionPolicy="Never"),
        make_pod("a", labels={_GANG: "g1", "apps.kubernetes.io/pod-index": "7"}),
        make_pod("a", annotations={"gang.scheduling.koordinator.sh/name": "g2"}),
    ]
    assert len({shapes.of(pod) for pod in pods}) == 5
    assert len({tables.reduction.of(shapes.of(pod)) for pod in pods}) == 1


def test_what_filters_and_scores_read_separates_reduced_shapes() -> None:
    tables, _ = _scheduling()
    shapes = Shapes()
    term = {"labelSelector": {"matchLabels": {"app": "a"}}, "topologyKey": _ZONE}
    constraint = {"maxSkew": 1, "topologyKey": _ZONE, "whenUnsatisfiable": "DoNotSchedule"}
    of_workload = LabelSelector(match_labels={"app": "a"})
    kept = [
        shapes.of(make_pod("a")),
        shapes.of(make_pod("a", requests={"cpu": "1"})),
        shapes.of(make_pod("a", hostNetwork=True, hostUsers=False)),
        shapes.of(make_pod("a", labels={"koordinator.sh/qosClass": "LSR"})),
        shapes.of(make_pod("a", labels={"koordinator.sh/gpu-isolation-provider": "x"})),
        shapes.of(make_pod("a", affinity={"podAffinity": {_REQUIRED: [term]}})),
        shapes.of(make_pod("a", topologySpreadConstraints=[constraint])),
        shapes.of(make_pod("a"), spread_by=of_workload),
        shapes.of(make_pod("a", annotations={_NEAR: "job"}, labels={"job": "x"})),
        shapes.of(make_pod("a", annotations={_NEAR: "job"}, labels={"job": "y"})),
        shapes.of(make_pod("a", tolerations=[{"key": "a", "operator": "Exists"}])),
        shapes.of(make_pod("a", nodeSelector={"disk": "ssd"})),
    ]
    assert len({tables.reduction.of(shape) for shape in kept}) == len(kept)


def test_a_label_separates_pods_as_long_as_a_running_pod_mentions_it() -> None:
    tables, evaluator = _scheduling()
    shapes = Shapes()
    red = shapes.of(make_pod("a", labels={"app": "red"}))
    blue = shapes.of(make_pod("a", labels={"app": "blue"}))
    term = {"labelSelector": {"matchLabels": {"app": "red"}}, "topologyKey": _ZONE}
    apart = shapes.of(make_pod("x", affinity={"podAntiAffinity": {_REQUIRED: [term]}}))

    assert tables.reduction.of(red) is tables.reduction.of(blue)
    _place(tables, apart, "x", "n0")
    assert [len(evaluator.evaluate_nodes(each).feasible) for each in (red, blue)] == [2, 4]
    tables.remove("x")
    assert [len(evaluator.evaluate_nodes(each).feasible) for each in (red, blue)] == [4, 4]
    assert tables.reduction.of(red) is tables.reduction.of(blue)


def test_a_selector_of_namespaces_separates_namespaces() -> None:
    tables, evaluator = _scheduling()
    shapes = Shapes()
    one, two = (shapes.of(make_pod("a", namespace=name)) for name in ("one", "two"))
    tables.namespaces.set("two", {"team": "a"})
    teams = {"matchLabels": {"team": "a"}}
    term = {"labelSelector": {}, "namespaceSelector": teams, "topologyKey": _ZONE}
    apart = shapes.of(make_pod("x", affinity={"podAntiAffinity": {_REQUIRED: [term]}}))
    _place(tables, apart, "x", "n0")
    assert [len(evaluator.evaluate_nodes(each).feasible) for each in (one, two)] == [4, 2]


def test_the_selector_of_the_workload_separates_pods() -> None:
    tables, evaluator = _scheduling()
    shapes = Shapes()
    workload = LabelSelector(match_labels={"app": "a"})
    member = shapes.of(make_pod("a", labels={"app": "a"}), spread_by=workload)
    other = shapes.of(make_pod("a", labels={"app": "b"}), spread_by=workload)
    _place(tables, member, "x", "n0")
    assert [len(evaluator.evaluate_nodes(each).feasible) for each in (member, other)] == [2, 4]


def test_a_label_separates_pods_as_long_as_a_reservation_mentions_it() -> None:
    tables, _ = _scheduling()
    shapes = Shapes()
    red = shapes.of(make_pod("a", labels={"app": "red"}))
    blue = shapes.of(make_pod("a", labels={"app": "blue"}))
    facts = make_facts("r", owners=({"labelSelector": {"matchLabels": {"app": "red"}}},))
    tables.reservations.upsert(facts)
    reduced = [tables.reduction.of(each) for each in (red, blue)]
    assert [len(tables.reservations.matched(each)) for each in reduced] == [1, 0]
    tables.reservations.delete(facts.uid)
    assert tables.reduction.of(red) is tables.reduction.of(blue)


def test_a_mention_counts_until_the_last_that_has_it_is_gone() -> None:
    tables, _ = _scheduling()
    shapes = Shapes()
    red = shapes.of(make_pod("a", labels={"app": "red"}))
    blue = shapes.of(make_pod("a", labels={"app": "blue"}))
    first, last = make_facts("r1"), make_facts("r2")
    for facts in (first, last, make_facts("r1", unschedulable=True)):
        tables.reservations.upsert(facts)
    tables.reservations.delete(first.uid)
    assert tables.reduction.of(red) is not tables.reduction.of(blue)
    tables.reservations.delete(last.uid)
    assert tables.reduction.of(red) is tables.reduction.of(blue)


def test_a_mention_that_changes_nothing_keeps_what_is_mentioned() -> None:
    tables, _ = _scheduling()
    shapes = Shapes()
    red = shapes.of(make_pod("a", labels={"app": "red"}))
    tables.reservations.upsert(make_facts("r1"))
    before = tables.reduction.of(red)
    tables.reservations.upsert(make_facts("r2"))
    assert tables.reduction.of(red) is before


def test_a_shape_does_not_keep_the_mentions_of_its_time_in_memory() -> None:
    mentions = Mentions()
    mentions.add([label("app")])
    reduction = Reduction(mentions)
    shape = Shapes().of(make_pod("a"))
    reduction.of(shape)
    earlier = weakref.ref(mentions.now)
    mentions.add([label("job")])
    assert label("job") in mentions.now
    assert earlier() is None


# --- random lives --------------------------------------------------------------------------------


def _selector(random: Random) -> dict[str, Any]:
    key, values = random.choice(("app", "job")), ["x", "y"]
    operator = random.choice(("In", "NotIn", "Exists", "DoesNotExist"))
    if random.random() < 0.4:
        return {"matchLabels": {key: random.choice(values)}}
    one = [random.choice(values)] if operator in ("In", "NotIn") else []
    return {"matchExpressions": [{"key": key, "operator": operator, "values": one}]}


def _affinity(random: Random) -> dict[str, Any]:
    def term() -> dict[str, Any]:
        made: dict[str, Any] = {"labelSelector": _selector(random), "topologyKey": _ZONE}
        if random.random() < 0.3:
            made["namespaces"] = random.choice((["one"], ["two"], ["one", "two"]))
        if random.random() < 0.3:
            made["namespaceSelector"] = random.choice(({}, {"matchLabels": {"team": "a"}}))
        if random.random() < 0.2:
            made[random.choice(("matchLabelKeys", "mismatchLabelKeys"))] = ["tier"]
        return made

    rules: dict[str, Any] = {}
    if random.random() < 0.6:
        rules[_REQUIRED] = [term()]
    else:
        preferred = [{"weight": 7, "podAffinityTerm": term()}]
        rules["preferredDuringSchedulingIgnoredDuringExecution"] = preferred
    return {random.choice(("podAffinity", "podAntiAffinity")): rules}


def _shape(random: Random, shapes: Shapes) -> PodShape:
    labels = {key: random.choice("xy") for key in ("app", "job", "tier") if random.random() < 0.7}
    if random.random() < 0.5:
        labels[_QUOTA] = random.choice("xy")
    spec: dict[str, Any] = {"schedulerName": "koord-scheduler", "priority": random.choice((0, 9))}
    if random.random() < 0.3:
        spec["affinity"] = _affinity(random)
    if random.random() < 0.2:
        spec["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": _ZONE,
                "whenUnsatisfiable": random.choice(("DoNotSchedule", "ScheduleAnyway")),
                "labelSelector": _selector(random),
                "matchLabelKeys": random.choice(([], ["tier"])),
            }
        ]
    pod = make_pod(
        "a",
        namespace=random.choice(("one", "two")),
        labels=labels,
        requests={"cpu": random.choice(("1", "2"))},
        **spec,
    )
    if random.random() < 0.5:
        name = random.choice("xy")
        owner = OwnerReference(api_version="batch/v1", kind="Job", name=name, controller=True)
        metadata = struct_replace(pod.metadata, owner_references=(owner,))
        pod = struct_replace(pod, metadata=metadata)
    default = LabelSelector(match_labels={"app": labels.get("app", "")})
    return shapes.of(pod, spread_by=default if random.random() < 0.2 else None)


def _owner(random: Random) -> dict[str, Any]:
    return random.choice(
        (
            {"labelSelector": _selector(random)},
            {"object": {"namespace": random.choice(("one", "two"))}},
            {"controller": {"name": random.choice("xy")}},
            {"controller": {"kind": "Job", "namespace": "one"}},
        )
    )


def _change(random: Random, tables: Tables, shapes: Shapes, number: int) -> None:
    name = f"r{random.randint(0, 2)}"
    match random.choice(("place", "place", "place", "remove", "reserve", "unreserve", "label")):
        case "place":
            _place(tables, _shape(random, shapes), f"p{number}", f"n{random.randint(0, 3)}")
        case "remove":
            tables.remove(f"p{random.randint(0, number)}")
        case "reserve":
            tables.reservations.upsert(make_facts(name, owners=(_owner(random),)))
            held = shapes.of(make_pod(name, requests={"cpu": "4"}))
            _place(tables, held, f"uid-{name}", f"n{random.randint(0, 3)}")
        case "unreserve":
            tables.reservations.delete(f"uid-{name}")
            tables.remove(f"uid-{name}")
        case "label":
            tables.namespaces.set(random.choice(("one", "two")), {"team": random.choice("ab")})


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_a_reduced_shape_has_the_verdicts_of_the_whole_shape(seed: int) -> None:
    random = Random(seed)
    tables, evaluator = _scheduling()
    shapes = Shapes()
    waiting = [_shape(random, shapes) for _ in range(8)]
    for number in range(10):
        _change(random, tables, shapes, number)
        for shape in waiting:
            # The shape of a single pod is not reduced.
            whole = evaluator.evaluate_nodes(personal(shape, "a", "u"))
            found = evaluator.evaluate_nodes(shape)
            assert found.feasible.tolist() == whole.feasible.tolist()
            assert found.totals.tolist() == whole.totals.tolist()
            assert [plugin.name for plugin, _ in found.masks] == [
                plugin.name for plugin, _ in whole.masks
            ]
            for (_, mask), (_, expected) in zip(found.masks, whole.masks, strict=True):
                assert mask.tolist() == expected.tolist()
