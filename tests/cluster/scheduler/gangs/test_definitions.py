"""Gangs as PodGroups and annotations define them, and as bad ones do not."""

from __future__ import annotations

from typing import Any

import pytest

from apis.core import ObjectMeta
from apis.quota import PodGroup, PodGroupSpec
from cluster.scheduler.configuration.koordinator_arguments import GangMatchPolicy
from cluster.scheduler.tables.gang_definitions import (
    GangDefaults,
    GangDefinition,
    GangMode,
    GangName,
    Read,
    gang_from_pod,
    gang_from_pod_group,
    gang_name,
)

DEFAULTS = GangDefaults()
PREFIX = "gang.scheduling.koordinator.sh/"
POD_GROUP = "pod-group.scheduling.sigs.k8s.io"


def meta(labels: dict[str, str] | None = None, **annotations: str) -> ObjectMeta:
    """Annotations of gangs, with _ for -."""
    return ObjectMeta(
        name="p",
        namespace="ns",
        labels=labels or {},
        annotations={PREFIX + key.replace("_", "-"): text for key, text in annotations.items()},
    )


@pytest.mark.parametrize(
    ("labels", "annotation", "expected"),
    [
        ({}, None, None),
        ({}, "a", GangName("ns/a", by_pod_group=False)),
        ({f"{POD_GROUP}/name": "b"}, "a", GangName("ns/b", by_pod_group=False)),
        ({POD_GROUP: "c", f"{POD_GROUP}/name": "b"}, "a", GangName("ns/c", by_pod_group=True)),
        ({POD_GROUP: ""}, "a", GangName("ns/a", by_pod_group=False)),
    ],
)
def test_the_gang_of_a_pod(
    labels: dict[str, str], annotation: str | None, expected: GangName | None
) -> None:
    values: dict[str, Any] = {} if annotation is None else {"name": annotation}
    assert gang_name(meta(labels, **values)) == expected


def test_a_pod_that_says_the_minimum_alone_gets_the_defaults() -> None:
    read = gang_from_pod(meta(name="a", min_available="3"), DEFAULTS)
    assert read.errors == ()
    assert read.definition == GangDefinition(
        id="ns/a",
        min_member=3,
        total=3,
        mode=GangMode.STRICT,
        wait_s=600.0,
        group=("ns/a",),
        match_policy=GangMatchPolicy.ONCE_SATISFIED,
    )


def test_a_pod_that_says_everything() -> None:
    read = gang_from_pod(
        meta(
            name="a",
            min_available="3",
            total_number="5",
            mode="NonStrict",
            waiting_time="1h",
            groups='["ns/b", "other/c", "ns/a", "ns/b"]',
            match_policy="only-waiting",
        ),
        DEFAULTS,
    )
    assert read.errors == ()
    definition = read.definition
    assert definition == GangDefinition(
        id="ns/a",
        min_member=3,
        total=5,
        mode=GangMode.NON_STRICT,
        wait_s=3600.0,
        group=("ns/a", "ns/b", "other/c"),
        match_policy=GangMatchPolicy.ONLY_WAITING,
    )
    assert definition is not None and definition.group_id == "ns/a,ns/b,other/c"


def test_the_deprecated_label_of_the_minimum_wins() -> None:
    read = gang_from_pod(
        meta({f"{POD_GROUP}/min-available": "2"}, name="a", min_available="9"), DEFAULTS
    )
    assert read.definition is not None and read.definition.min_member == 2


def test_a_gang_is_a_member_of_its_own_group() -> None:
    read = gang_from_pod(meta(name="a", min_available="1", groups='["ns/b"]'), DEFAULTS)
    assert read.definition is not None and read.definition.group == ("ns/a", "ns/b")


@pytest.mark.parametrize("minimum", [None, "", "-1", "three", "1.5", "1" * 40, "²", "99999999999"])
def test_without_a_usable_minimum_there_is_no_gang(minimum: str | None) -> None:
    values: dict[str, Any] = {"name": "a"}
    if minimum is not None:
        values["min_available"] = minimum
    read = gang_from_pod(meta(**values), DEFAULTS)
    assert read.definition is None
    assert len(read.errors) == (1 if minimum else 0)


@pytest.mark.parametrize(
    ("annotation", "value", "problem"),
    [
        ("total_number", "many", "expected a number of pods"),
        ("total_number", "2", "is below the minimum, 3 pods"),
        ("mode", "strict", "expected Strict or NonStrict"),
        ("waiting_time", "soon", "not a duration"),
        ("waiting_time", "0s", "must be above 0"),
        ("waiting_time", "-5m", "must be above 0"),
        ("groups", "ns/b", "not valid JSON"),
        ("groups", '{"ns/b": 1}', ""),
        ("groups", '["b"]', "expected the id of a gang"),
        ("groups", '["ns/b,ns/c"]', "expected the id of a gang"),
        ("groups", "[" * 100_000, ""),
        ("match_policy", "always", "expected one of once-satisfied"),
    ],
)
def test_a_bad_optional_value_costs_itself_alone(annotation: str, value: str, problem: str) -> None:
    values: dict[str, Any] = {"name": "a", "min_available": "3", annotation: value}
    read = gang_from_pod(meta(**values), DEFAULTS)
    plain = gang_from_pod(meta(name="a", min_available="3"), DEFAULTS)
    assert read.definition == plain.definition
    (error,) = read.errors
    assert error.obj == "Pod ns/p"
    assert annotation.replace("_", "-") in error.field
    assert problem in error.problem


def group(min_member: int, timeout: int | None = None, **annotations: Any) -> PodGroup:
    return PodGroup(
        metadata=meta(**annotations),
        spec=PodGroupSpec(min_member=min_member, schedule_timeout_seconds=timeout),
    )


@pytest.mark.parametrize(
    ("timeout", "seconds"), [(None, 600.0), (0, 600.0), (-1, 600.0), (30, 30.0), (7200, 7200.0)]
)
def test_the_wait_of_a_pod_group_is_not_cut(timeout: int | None, seconds: float) -> None:
    read = gang_from_pod_group(group(2, timeout, waiting_time="1s"), DEFAULTS)
    assert read.definition is not None and read.definition.wait_s == seconds


def test_a_pod_group_takes_mode_policy_total_and_groups_from_annotations() -> None:
    read = gang_from_pod_group(
        group(2, mode="NonStrict", total_number="4", groups='["ns/q"]'),
        GangDefaults(wait_s=5.0, match_policy=GangMatchPolicy.WAITING_AND_RUNNING),
    )
    assert read.definition == GangDefinition(
        id="ns/p",
        min_member=2,
        total=4,
        mode=GangMode.NON_STRICT,
        wait_s=5.0,
        group=("ns/p", "ns/q"),
        match_policy=GangMatchPolicy.WAITING_AND_RUNNING,
    )


def test_the_other_spelling_of_the_match_policy() -> None:
    odd = ObjectMeta(
        name="p", namespace="ns", annotations={f"{POD_GROUP}/match-policy": "only-waiting"}
    )
    read = gang_from_pod_group(PodGroup(metadata=odd, spec=PodGroupSpec(min_member=1)), DEFAULTS)
    assert read.definition is not None
    assert read.definition.match_policy is GangMatchPolicy.ONLY_WAITING


def test_a_pod_group_with_a_negative_minimum_defines_nothing() -> None:
    read = gang_from_pod_group(group(-1), DEFAULTS)
    assert read.definition is None
    assert [error.field for error in read.errors] == ["spec.minMember"]


@pytest.mark.parametrize(
    ("text", "minimum"), [("0", 0), ("2147483647", 2147483647), ("2147483648", None)]
)
def test_a_minimum_is_what_the_minimum_of_a_pod_group_can_be(
    text: str, minimum: int | None
) -> None:
    read = gang_from_pod(meta(name="a", min_available=text), DEFAULTS)
    assert (read.definition.min_member if read.definition else None) == minimum


@pytest.mark.parametrize("name", ["b", "/b", "ns/", "ns/b/c", "ns/b,c"])
def test_only_ids_of_gangs_make_a_group(name: str) -> None:
    read = gang_from_pod(meta(name="a", min_available="1", groups=f'["ns/x", "{name}"]'), DEFAULTS)
    assert read.definition is not None and read.definition.group == ("ns/a",)
    (error,) = read.errors
    assert (error.field, error.value) == (f'metadata.annotations["{PREFIX}groups"]', name)


def test_a_bad_network_annotation_costs_the_gathering_alone_and_only_where_gangs_gather() -> None:
    bad = meta(name="a", min_available="1", network_topology_spec="{")
    plain = gang_from_pod(meta(name="a", min_available="1"), DEFAULTS)
    assert gang_from_pod(bad, DEFAULTS) == plain
    read = gang_from_pod(bad, GangDefaults(gathers=True))
    assert read.definition == plain.definition
    assert [error.field for error in read.errors] == [
        f'metadata.annotations["{PREFIX}network-topology-spec"]'
    ]


def test_a_pod_without_a_gang_of_its_own_definition_defines_none() -> None:
    nothing = Read(None, ())
    assert gang_from_pod(meta(min_available="3"), DEFAULTS) == nothing
    grouped = meta({POD_GROUP: "c"}, name="a", min_available="3")
    assert gang_from_pod(grouped, DEFAULTS) == nothing


def test_a_pod_group_may_ask_for_no_pod() -> None:
    read = gang_from_pod_group(group(0), DEFAULTS)
    assert read.errors == ()
    assert read.definition is not None and read.definition.min_member == 0
