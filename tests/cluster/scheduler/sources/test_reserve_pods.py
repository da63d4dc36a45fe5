"""What of a Reservation becomes its reserve pod, and which Reservations cannot be used."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.core import pod_requests
from apis.keys import (
    ANNOTATION_IS_PRE_ALLOCATION,
    ANNOTATION_RESERVATION_NODE,
    ANNOTATION_RESERVE_POD,
    LABEL_PRE_ALLOCATION_REQUIRED,
)
from apis.meta import LabelSelectorRequirement
from apis.quantity import ZERO, parse_quantity
from apis.scheduling import ReservationOwner
from apis.scheduling_pod import NodeSelectorRequirement, SchedulingPod
from cluster.scheduler.sources.objects import kept_pod
from cluster.scheduler.sources.reserve_pods import read_reserve_pod
from cluster.scheduler.tables.reservations import pre_allocation
from tests.cluster.scheduler.sources.reserve_pod_making import read, reservation, template

DEVICES = "scheduling.koordinator.sh/device-allocated"
STATUS = "scheduling.koordinator.sh/resource-status"
AFFINITY = "scheduling.koordinator.sh/reservation-affinity"
RESIZE = "scheduling.koordinator.sh/reservation-resize-allocatable"


def test_the_reservation_goes_over_its_template() -> None:
    found = read(
        template(
            metadata={
                "namespace": "team",
                "labels": {"app": "web", "tier": "a"},
                "annotations": {"koordinator.sh/x": "template", DEVICES: "of a pod", STATUS: "{}"},
            }
        ),
        metadata={
            "labels": {"tier": "b"},
            "annotations": {"koordinator.sh/x": "own", AFFINITY: "{}"},
        },
    )
    assert not found.problems
    pod = found.pod
    assert (pod.metadata.namespace, pod.metadata.name, pod.metadata.uid) == ("team", "u", "u")
    assert pod.metadata.labels == {"app": "web", "tier": "b"}
    assert pod.metadata.annotations == {"koordinator.sh/x": "own", ANNOTATION_RESERVE_POD: "true"}
    assert pod.spec.scheduler_name == "koord-scheduler"
    assert pod.spec.node_name == ""
    assert {name: str(amount) for name, amount in found.allocatable.items()} == {
        "cpu": "4",
        "memory": "8Gi",
    }


def test_a_template_without_much_gets_kubernetes_defaults() -> None:
    found = read({})
    assert not found.problems
    assert found.pod.metadata.namespace == "default"
    assert found.pod.spec.scheduler_name == "default-scheduler"
    assert found.allocatable == {}


def test_a_pod_of_a_user_cannot_pass_for_a_reserve_pod() -> None:
    pod = SchedulingPod()
    marked = msgspec.structs.replace(
        pod,
        metadata=msgspec.structs.replace(
            pod.metadata, annotations={ANNOTATION_RESERVE_POD: "true", "a": "b"}
        ),
    )
    assert kept_pod(marked).metadata.annotations == {"a": "b"}


@pytest.mark.parametrize(
    ("in_template", "label", "expected"),
    [
        ({"priority": 5}, "9", 5),
        ({}, "9", 9),
        ({}, "-9", -9),
        ({}, None, 2**31 - 1),
    ],
)
def test_priority(in_template: dict[str, int], label: str | None, expected: int) -> None:
    labels = {"koordinator.sh/priority": label} if label is not None else {}
    found = read(template(spec=in_template), metadata={"labels": labels})
    assert not found.problems
    assert found.pod.spec.priority == expected


def test_a_template_with_a_node_name_may_go_to_that_node_alone() -> None:
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term, {}]}}
    on_node = NodeSelectorRequirement(key="metadata.name", operator="In", values=("n1",))
    for affinity, expressions in (({}, 0), ({"nodeAffinity": required}, 1)):
        found = read(template(spec={"nodeName": "n1", "affinity": affinity}))
        assert found.pod.spec.node_name == ""
        wanted = found.pod.spec.affinity
        assert wanted is not None and wanted.node_affinity is not None
        assert wanted.node_affinity.required is not None
        (only,) = wanted.node_affinity.required.node_selector_terms
        assert only.match_fields == (on_node,)
        assert len(only.match_expressions) == expressions


def test_one_with_a_node_holds_what_its_status_says() -> None:
    conditions = [
        {"type": "Scheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    ]
    status = {
        "phase": "Available",
        "nodeName": "n1",
        "allocatable": {"cpu": "6", "memory": "8Gi"},
        "conditions": conditions,
    }
    found = read(
        template(spec={"overhead": {"cpu": "1"}}),
        metadata={"annotations": {DEVICES: "own"}},
        status=status,
    )
    pod = found.pod
    assert pod.spec.node_name == "n1"
    assert pod_requests(pod) == {"cpu": parse_quantity("6"), "memory": parse_quantity("8Gi")}
    assert pod.metadata.annotations[DEVICES] == "own"
    (condition,) = pod.status.conditions
    assert (condition.type, condition.last_transition_time) == (
        "PodScheduled",
        "2026-01-01T00:00:00Z",
    )


def test_claims_count_for_the_choice_of_the_node_alone() -> None:
    claim = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
    given = template(spec={"volumes": [claim]})
    assert len(read(given).pod.spec.volumes) == 1
    assert read(given, status={"phase": "Available", "nodeName": "n1"}).pod.spec.volumes == ()


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_an_ended_one_is_an_ended_pod(phase: str) -> None:
    assert read(template(), status={"phase": phase, "nodeName": "n"}).pod.status.phase == phase


def test_resized_resources_go_over_those_of_the_template() -> None:
    text = '{"resources": {"cpu": "2", "koordinator.sh/gpu-core": "100"}}'
    found = read(template(), metadata={"annotations": {RESIZE: text}})
    assert {name: str(amount) for name, amount in found.allocatable.items()} == {
        "cpu": "2",
        "memory": "8Gi",
        "koordinator.sh/gpu-core": "100",
    }
    # A node is chosen that has them.
    assert pod_requests(found.pod) == found.allocatable


@pytest.mark.parametrize(
    ("given_", "named"),
    [
        ({"template": None}, "spec.template is not set"),
        ({"template": "text"}, "spec.template = 'text': expected a pod template"),
        (
            {"preAllocation": True, "allocatePolicy": "Aligned"},
            "spec.allocatePolicy = 'Aligned': preAllocation needs Restricted",
        ),
        (
            {"template": template(cpu="much")},
            "spec.template.spec.containers[0].resources.requests",
        ),
        ({"template": template(spec={"nodeSelector": 5})}, "spec.template.spec.nodeSelector"),
        ({"owners": []}, "spec.owners"),
        (
            {"owners": [{"labelSelector": {"matchExpressions": [{"key": "a", "operator": "Is"}]}}]},
            "spec.owners[0].labelSelector",
        ),
        ({"ttl": None}, "expected ttl or expires"),
        ({"ttl": "a while"}, "spec.ttl = 'a while'"),
        ({"expires": "tomorrow"}, "spec.expires = 'tomorrow'"),
        (
            {"metadata": {"labels": {"koordinator.sh/priority": "high"}}},
            "metadata.labels[\"koordinator.sh/priority\"] = 'high'",
        ),
        ({"metadata": {"annotations": {RESIZE: "4"}}}, RESIZE),
    ],
)
def test_what_cannot_be_used_is_named_and_one_with_a_node_keeps_it(
    given_: dict[str, Any], named: str
) -> None:
    members = {"template": template(), **given_}
    found = read(**members)
    assert named in "; ".join(str(problem) for problem in found.problems)
    assert all(str(problem).startswith("Reservation r") for problem in found.problems)
    status = {"phase": "Available", "nodeName": "n1", "allocatable": {"cpu": "3", "memory": "1Gi"}}
    kept = read(**{**members, "status": status}).pod
    assert kept.spec.node_name == "n1"
    assert pod_requests(kept)["cpu"] == parse_quantity("3")


_NEGATIVE = "-4"


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"template": template(cpu=_NEGATIVE)}, "spec.template.spec"),
        (
            {"metadata": {"annotations": {RESIZE: f'{{"resources":{{"cpu":"{_NEGATIVE}"}}}}'}}},
            f'metadata.annotations["{RESIZE}"].resources',
        ),
        ({"status": {"nodeName": "n", "allocatable": {"cpu": _NEGATIVE}}}, "status.allocatable"),
    ],
)
def test_a_negative_amount_is_named_and_holds_nothing(members: dict[str, Any], field: str) -> None:
    found = read(**{"template": template(), **members})
    (problem,) = found.problems
    assert (problem.field, problem.value) == (field, _NEGATIVE)
    assert "0 or more cpu" in problem.problem
    assert min(*found.allocatable.values(), *pod_requests(found.pod).values()) >= ZERO


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["metadata", "spec", "containers", "resources", "requests", "labels", "x"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(_JSON)
def test_any_template_is_read_or_named(text: Any) -> None:
    found = read(text)
    assert found.pod.metadata.uid == "u"
    for problem in found.problems:
        assert problem.field.startswith("spec.template")


def test_a_template_that_nests_too_deep_costs_itself_alone() -> None:
    nested: dict[str, Any] = {}
    for _ in range(5000):
        nested = {"x": nested}
    broken = msgspec.structs.replace(
        reservation(template()),
        spec=msgspec.structs.replace(reservation(template()).spec, template=nested),
    )
    (problem,) = read_reserve_pod(broken).problems
    assert problem.problem == "nested too deep"


def test_label_keys_of_affinity_terms_mean_the_labels_of_the_reserve_pod() -> None:
    """The API server merges them into the selectors of pods alone, not of templates."""
    term = {"topologyKey": "zone", "labelSelector": {}, "matchLabelKeys": ["version"]}
    rules = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    spec = {"affinity": {"podAntiAffinity": rules}}
    found = read(template(spec=spec, metadata={"labels": {"version": "1"}}))
    affinity = found.pod.spec.affinity
    assert affinity is not None and affinity.pod_anti_affinity is not None
    (read_term,) = affinity.pod_anti_affinity.required
    assert read_term.label_selector is not None
    assert read_term.label_selector.match_expressions == (
        LabelSelectorRequirement(key="version", operator="In", values=("1",)),
    )


def test_priority_is_that_of_the_template_its_label_the_reservations_label_or_the_highest() -> None:
    label = {"koordinator.sh/priority": "7"}
    of_template = template(metadata={"labels": label})
    assert read(of_template).pod.spec.priority == 7
    own = {"labels": {"koordinator.sh/priority": "8"}}
    assert read(of_template, metadata=own).pod.spec.priority == 8
    for text in ("2147483648", "x", "1.0", "--1"):
        found = read(template(), metadata={"labels": {"koordinator.sh/priority": text}})
        (problem,) = found.problems
        assert (problem.field, problem.value) == (
            'metadata.labels["koordinator.sh/priority"]', text
        )  # fmt: skip
        assert found.pod.spec.priority == 2**31 - 1


def test_a_pinned_template_keeps_what_it_prefers_and_an_empty_demand_goes_nowhere() -> None:
    term = {"matchExpressions": [{"key": "a", "operator": "Exists"}]}
    preference = {"weight": 1, "preference": term}
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}
    no_terms: dict[str, Any] = {"nodeSelectorTerms": []}
    nowhere = {"requiredDuringSchedulingIgnoredDuringExecution": no_terms}
    for rules, terms, preferences in ((preferred, 1, 1), (nowhere, 0, 0)):
        spec = {"nodeName": "n1", "affinity": {"nodeAffinity": rules}}
        found = read(template(spec=spec)).pod
        assert found.spec.affinity is not None and found.spec.affinity.node_affinity is not None
        wanted = found.spec.affinity.node_affinity
        assert wanted.required is not None
        assert len(wanted.required.node_selector_terms) == terms
        assert len(wanted.preferred) == preferences
        assert found.metadata.annotations[ANNOTATION_RESERVATION_NODE] == "n1"
    assert read(template()).pod.spec.affinity is None
    assert ANNOTATION_RESERVATION_NODE not in read(template()).pod.metadata.annotations


@pytest.mark.parametrize(
    ("policy", "cluster", "multiple"),
    [
        (None, False, False),
        ({"mode": "Default", "enableMultiple": True}, False, True),
        ({"mode": "Cluster"}, True, False),
    ],
)
@pytest.mark.parametrize("required", ["true", "false"])
def test_a_reservation_that_takes_over_room_says_how_until_it_has_a_node(
    policy: dict[str, Any] | None, cluster: bool, multiple: bool, required: str
) -> None:
    members: dict[str, Any] = {
        "preAllocation": True,
        "allocatePolicy": "Restricted",
        "owners": [{"labelSelector": {"matchLabels": {"app": "a"}}}],
        "metadata": {"labels": {LABEL_PRE_ALLOCATION_REQUIRED: required}},
    }
    if policy is not None:
        members["preAllocationPolicy"] = policy
    found = read(template(), **members)
    assert found.problems == ()
    marks = found.pod.metadata.annotations
    assert marks[ANNOTATION_IS_PRE_ALLOCATION] == "true"
    assert marks[pre_allocation.ANNOTATION] == pre_allocation.text_of(
        pre_allocation.PreAllocation(
            name="r",
            owners=(ReservationOwner(),) if cluster else found.reservation.spec.owners,
            taints=(),
            cluster=cluster,
            multiple=multiple,
            required=required == "true",
        )
    )
    status = {"phase": "Available", "nodeName": "n"}
    kept = read(template(), **members, status=status).pod.metadata.annotations
    assert ANNOTATION_IS_PRE_ALLOCATION not in kept and pre_allocation.ANNOTATION not in kept
    members["preAllocation"] = False
    assert ANNOTATION_IS_PRE_ALLOCATION not in read(template(), **members).pod.metadata.annotations


@pytest.mark.parametrize(
    ("members", "field", "value"),
    [
        ({"owners": []}, "spec.owners", "[]"),
        ({"ttl": None}, "spec", ""),
        ({"ttl": "x"}, "spec.ttl", "x"),
        ({"ttl": None, "expires": "x"}, "spec.expires", "x"),
        (
            {"preAllocation": True, "allocatePolicy": ""}, "spec.allocatePolicy", ""
        ),
        ({"preAllocationPolicy": {"mode": "All"}}, "spec.preAllocationPolicy.mode", "All"),
        ({"template": 7}, "spec.template", "7"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_field_and_value(
    members: dict[str, Any], field: str, value: str
) -> None:
    (problem,) = read(**{"template": template(), **members}).problems
    assert (problem.obj, problem.field, problem.value) == ("Reservation r", field, value)


def test_a_reservation_ends_after_a_time_or_at_a_moment() -> None:
    for ttl in ("24h", None):
        assert read(template(), ttl=ttl, expires="2026-01-01T00:00:00Z").problems == ()


@pytest.mark.parametrize("policy", [{}, {"mode": ""}, {"mode": "Default"}, {"mode": "Cluster"}])
def test_the_modes_of_a_pre_allocation(policy: dict[str, Any]) -> None:
    assert read(template(), preAllocationPolicy=policy).problems == ()
