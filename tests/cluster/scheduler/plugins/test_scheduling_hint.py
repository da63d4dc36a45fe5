"""SchedulingHint: nodes that another component names for a pod."""

from __future__ import annotations

import json
from typing import Any

import pytest

from apis.cpuset import CpuSet
from apis.keys import (
    ANNOTATION_DEVICE_ALLOCATED,
    ANNOTATION_RESOURCE_STATUS,
    LABEL_QOS_CLASS,
)
from cluster.scheduler.cycle.scheduling import Placed, Scheduling, Unplaced
from cluster.scheduler.plugins.numa.asked import Settings
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.tables.booking import Allocation
from cluster.scheduler.tables.scheduling_hint import NO_HINT, SchedulingHint, hint_of
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.configuration.files import args, enabled, file, load
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.numa.making import SMALL, SMALL_ZONES, NumaCluster, make_topology

_HINT = "internal.scheduling.koordinator.sh/scheduling-hint"
_OLD = "scheduling.koordinator.sh/scheduling-hint"
_CPUS = {"n0": "4", "n1": "8", "n2": "16", "n3": "2"}
_NO_NODE = "node(s) didn't satisfy plugin(s) [SchedulingHint]"


def _decide(
    annotations: dict[str, str], *, cpu: str = "3", most: int = 100, hints: bool = True
) -> str:
    """Return the node of a pod with these annotations, or why it has none.

    By the scores alone, the pod goes to n2, the emptiest node.
    """
    plugins = {"preFilter": enabled("SchedulingHint")} if hints else {}
    profile = {
        "schedulerName": "koord-scheduler",
        "plugins": plugins,
        "pluginConfig": [args("SchedulingHint", maxHintNodes=most)],
    }
    tables = Tables()
    made = make_plugins(load(file(profiles=[profile])), tables)
    for name, cpus in _CPUS.items():
        tables.upsert_node(make_node(name, allocatable={"cpu": cpus}))
    shape = Shapes().of(make_pod("p", requests={"cpu": cpu}, annotations=annotations))
    outcome = Scheduling(tables, made.profiles, seed=1).schedule(
        key="default/p", uid="p", shape=shape, profile="koord-scheduler", now=0.0
    )
    if isinstance(outcome, Placed):
        return outcome.booking.node
    assert isinstance(outcome, Unplaced)
    return outcome.diagnosis.message


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ({}, "n2"),
        ({"nodeNames": ["n0"]}, "n0"),
        ({"nodeNames": ["n0", "n1"]}, "n1"),
        (
            {"nodeNames": ["n3", "gone"]},
            f"0/4 nodes are available: 1 Insufficient cpu, 3 {_NO_NODE}.",
        ),
        ({"nodeNames": ["gone"]}, f"0/4 nodes are available: 4 {_NO_NODE}."),
        ({"preferredNodeNames": ["n0", "n1"]}, "n0"),
        # A preferred node that the pod does not fit, or that is not there, is passed over.
        ({"preferredNodeNames": ["gone", "n3", "n1"]}, "n1"),
        ({"preferredNodeNames": ["n3"]}, "n2"),
        ({"nodeNames": ["n1", "n2"], "preferredNodeNames": ["n0", "n1"]}, "n1"),
    ],
)
def test_a_hint_names_the_only_nodes_and_those_to_try_first(
    hint: dict[str, Any], expected: str
) -> None:
    assert _decide({_HINT: json.dumps(hint)}) == expected


def test_the_internal_annotation_counts_before_the_old_one() -> None:
    assert _decide({_OLD: '{"nodeNames": ["n0"]}'}) == "n0"
    assert _decide({_OLD: '{"nodeNames": ["n0"]}', _HINT: '{"nodeNames": ["n1"]}'}) == "n1"


def test_only_so_many_preferred_nodes_are_tried() -> None:
    hint = {_HINT: '{"preferredNodeNames": ["n3", "n0"]}'}
    assert _decide(hint, most=1) == "n2"
    assert _decide(hint, most=2) == "n0"


def test_a_hint_counts_only_where_the_profile_enables_the_plugin() -> None:
    assert _decide({_HINT: '{"nodeNames": ["n0"]}'}, hints=False) == "n2"


@pytest.mark.parametrize("text", ["{", '{"nodeNames": "n0"}', "[]", '{"nodeNames": [1]}'])
def test_a_hint_that_cannot_be_read_refuses_its_pod(text: str) -> None:
    message = _decide({_HINT: text})
    assert message.startswith("0/4 nodes are available: ")
    assert _HINT in message


# --- the allocation that is recorded on the pod --------------------------------------------------


def _pod(status: dict[str, Any], *, recorded: bool = True) -> PodShape:
    extensions: dict[str, Any] = {"NodeNUMAResource": {}} if recorded else {}
    return Shapes().of(
        make_pod(
            "p",
            requests={"cpu": "4", "memory": "8Gi"},
            limits={"cpu": "4", "memory": "8Gi"},
            labels={LABEL_QOS_CLASS: "LSR"},
            annotations={
                _HINT: json.dumps({"nodeNames": ["n"], "extensions": extensions}),
                ANNOTATION_RESOURCE_STATUS: json.dumps(status),
            },
        )
    )


def _cluster(*, follows: bool = True) -> NumaCluster:
    cluster = NumaCluster(Settings(follows_hints=follows))
    cluster.add_node("n", make_topology("n", cpus=SMALL.cpus(), zones=SMALL_ZONES))
    return cluster


def test_a_pod_gets_the_cpus_that_are_recorded_on_it() -> None:
    given = _cluster().allocate(_pod({"cpuset": "10-13"}), "n")
    assert isinstance(given, Allocation)
    assert str(given.cpus) == "10-13"


@pytest.mark.parametrize(("follows", "recorded"), [(False, True), (True, False)])
def test_recorded_cpus_count_only_when_profile_and_hint_say_so(
    follows: bool, recorded: bool
) -> None:
    shape = _pod({"cpuset": "10-13"}, recorded=recorded)
    given = _cluster(follows=follows).allocate(shape, "n")
    assert isinstance(given, Allocation)
    assert str(given.cpus) == "0-3"


def test_recorded_cpus_that_another_pod_has_are_not_given() -> None:
    cluster = _cluster()
    cluster.place(cluster.shape({"cpu": "2"}, qos="LSR"), "n", cpus="12-13")
    assert cluster.allocate(_pod({"cpuset": "10-13"}), "n") == (
        "not enough cpus available to satisfy request"
    )


def test_a_pod_gets_the_numa_node_that_is_recorded_on_it() -> None:
    cluster = NumaCluster(Settings(follows_hints=True))
    labels = {"node.koordinator.sh/numa-topology-policy": "SingleNUMANode"}
    topology = make_topology("n", cpus=SMALL.cpus(), zones=SMALL_ZONES)
    cluster.add_node("n", topology, labels=labels)
    zone = {"node": 1, "resources": {"cpu": "4", "memory": "8Gi"}}
    given = cluster.allocate(_pod({"cpuset": "8-11", "numaNodeResources": [zone]}), "n")
    assert isinstance(given, Allocation)
    assert given.numa == ((1, {"cpu": 4000, "memory": 8 << 30}),)
    small = {"node": 1, "resources": {"cpu": "4", "memory": "4Gi"}}
    shape = _pod({"cpuset": "8-11", "numaNodeResources": [small]})
    assert cluster.allocate(shape, "n") == "Insufficient NUMA memory"


_NAMES = '{"nodeNames": ["n1"], "preferredNodeNames": ["n2", "n3"]}'


@pytest.mark.parametrize(
    ("annotations", "hint"),
    [
        ({}, NO_HINT),
        ({_HINT: ""}, NO_HINT),
        ({_HINT: "null"}, NO_HINT),
        ({_OLD: "{}"}, NO_HINT),
        ({_HINT: _NAMES}, SchedulingHint(nodes=("n1",), preferred=("n2", "n3"))),
        ({_HINT: "", _OLD: _NAMES}, SchedulingHint(nodes=("n1",), preferred=("n2", "n3"))),
        ({_HINT: '{"nodeNames": ["n0"]}', _OLD: _NAMES}, SchedulingHint(nodes=("n0",))),
        (
            {
                _HINT: '{"extensions": {"NodeNUMAResource": {}}}',
                ANNOTATION_RESOURCE_STATUS: '{"cpuset": "0-1"}',
            },
            SchedulingHint(recorded=True, cpus=CpuSet.parse("0-1")),
        ),
        (
            {
                _HINT: '{"extensions": {"NodeNUMAResource": {}}}',
                ANNOTATION_RESOURCE_STATUS: (
                    '{"numaNodeResources": [{"node": 1, "resources": {"cpu": "2"}}]}'
                ),
            },
            SchedulingHint(recorded=True, numa=((1, {"cpu": 2000}),)),
        ),
        # Without the extension, what is recorded says nothing.
        ({_HINT: "{}", ANNOTATION_RESOURCE_STATUS: '{"cpuset": "0-1"}'}, NO_HINT),
    ],
)
def test_hints_as_they_are_read(annotations: dict[str, str], hint: SchedulingHint) -> None:
    assert hint_of(Shapes().of(make_pod("p", annotations=annotations))) == hint


def test_devices_of_a_hint_are_those_that_are_recorded() -> None:
    recorded = '{"gpu": [{"minor": 3, "resources": {"koordinator.sh/gpu-core": "100"}}]}'
    for extensions, expected in (("DeviceShare", [3]), ("NodeNUMAResource", [])):
        annotations = {
            _HINT: json.dumps({"extensions": {extensions: {}}}),
            ANNOTATION_DEVICE_ALLOCATED: recorded,
        }
        hint = hint_of(Shapes().of(make_pod("p", annotations=annotations)))
        assert [device.minor for device in hint.devices.get("gpu", ())] == expected
        assert not hint.recorded


@pytest.mark.parametrize(
    "annotations",
    [
        {_HINT: "{"},
        {_HINT: '{"nodeNames": "n1"}'},
        {
            _HINT: '{"extensions": {"NodeNUMAResource": {}}}',
            ANNOTATION_RESOURCE_STATUS: "{",
        },
        {_HINT: '{"extensions": {"DeviceShare": {}}}', ANNOTATION_DEVICE_ALLOCATED: "{"},
    ],
)
def test_a_hint_that_cannot_be_read_is_an_error_of_the_pod(annotations: dict[str, str]) -> None:
    hint = hint_of(Shapes().of(make_pod("p", annotations=annotations)))
    assert hint.error is not None and hint.error.obj == "Pod"
    assert hint == SchedulingHint(error=hint.error)
