"""ClusterColocationProfiles: odd values, many profiles, several namespaces."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from apis.errors import InputError
from apis.profile import ClusterColocationProfile
from cluster.webhook.colocation_profile import drawn, pod_identity, probability_percent
from tests.cluster.admission import admission, convert, patched, request


def profile(name: str = "p", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": spec}


def typed(**spec: Any) -> ClusterColocationProfile:
    found: ClusterColocationProfile = convert(profile(**spec), ClusterColocationProfile)
    return found


@pytest.mark.parametrize(
    ("value", "percent"),
    [
        (None, 100),
        (0, 0),
        (1, 1),
        (100, 100),
        (250, 100),
        ("0%", 0),
        ("7%", 7),
        ("100%", 100),
        ("999999999%", 100),
    ],
)
def test_a_probability_is_a_percentage(value: Any, percent: int) -> None:
    assert probability_percent(typed(probability=value)) == percent


@pytest.mark.parametrize("value", [-1, "50", "", "%", "-1%", "0.5%", "1234567890%", "\u0665%"])
def test_a_bad_probability_is_named(value: Any) -> None:
    with pytest.raises(InputError, match=r"^ClusterColocationProfile p: spec\.probability = "):
        probability_percent(typed(probability=value))


def test_a_share_of_one_percent_is_one_percent() -> None:
    one = typed(probability=1)
    assert 50 < sum(drawn(one, str(number)) for number in range(10_000)) < 150
    # Profiles draw independently of each other.
    other = convert(profile("q", probability=50), ClusterColocationProfile)
    half = typed(probability=50)
    agree = sum(drawn(half, str(number)) == drawn(other, str(number)) for number in range(2000))
    assert 850 < agree < 1150


def test_a_pod_is_drawn_by_its_name_or_by_its_request() -> None:
    assert pod_identity({"metadata": {"name": "web"}}, "a", "uid") == "a/web"
    assert pod_identity({"metadata": {"generateName": "web-"}}, "a", "uid") == "a/uid"
    assert pod_identity({}, "a", "uid") == "a/uid"


def mutated(
    profiles: list[dict[str, Any]], labels: dict[str, str], namespace: str = "default"
) -> Any:
    obj = {"metadata": {"name": "web", "labels": labels}, "spec": {"containers": [{"name": "a"}]}}
    verdict = admission(profiles=profiles).mutate(request(obj, namespace=namespace))
    return patched(obj, verdict)


def test_profiles_of_several_namespaces_reach_their_own_pods_only() -> None:
    profiles = [
        profile("a", namespaceSelector={"matchLabels": {"tier": "app"}}, labels={"from": "a"}),
        profile("b", namespaceSelector={"matchLabels": {"tier": "batch"}}, labels={"from": "b"}),
        profile(
            "c",
            namespaceSelector={"matchExpressions": [{"key": "tier", "operator": "Exists"}]},
            selector={"matchExpressions": [{"key": "x", "operator": "NotIn", "values": ["1"]}]},
            labels={"seen": "c"},
        ),
    ]
    assert mutated(profiles, {}, "default")["metadata"]["labels"] == {"from": "a", "seen": "c"}
    assert mutated(profiles, {}, "ml")["metadata"]["labels"] == {"from": "b", "seen": "c"}
    assert mutated(profiles, {"x": "1"}, "ml")["metadata"]["labels"] == {"x": "1", "from": "b"}
    assert mutated(profiles, {"x": "1"}, "unknown")["metadata"]["labels"] == {"x": "1"}


def test_an_empty_namespace_selector_selects_namespaces_that_are_not_known_yet() -> None:
    got = mutated([profile("a", namespaceSelector={}, labels={"from": "a"})], {}, "unknown")
    assert got["metadata"]["labels"] == {"from": "a"}


def test_profiles_select_by_what_was_submitted_and_not_by_each_other() -> None:
    profiles = [
        profile("a", labels={"x": "1"}),
        profile("b", selector={"matchLabels": {"x": "1"}}, labels={"y": "1"}),
    ]
    assert mutated(profiles, {})["metadata"]["labels"] == {"x": "1"}
    assert mutated(profiles, {"x": "1"})["metadata"]["labels"] == {"x": "1", "y": "1"}


def test_everything_that_a_profile_sets() -> None:
    one = profile(
        labels={"a": "1"},
        annotations={"b": "2"},
        labelKeysMapping={"old": "new", "absent": "none"},
        annotationKeysMapping={"b": "copy"},
        labelSuffixes={"old": "-x", "absent": "-y"},
        qosClass="BE",
        koordinatorPriority=0,
        schedulerName="s",
        priorityClassName="koord-mid",
        patch={"spec": {"hostname": "h"}, "metadata": {"labels": {"a": "9"}}},
    )
    got = mutated([one], {"old": "v"})
    assert got["metadata"] == {
        "name": "web",
        "labels": {
            "old": "v-x",
            "new": "v",
            "a": "9",
            "koordinator.sh/qosClass": "BE",
            "koordinator.sh/priority": "0",
        },
        "annotations": {"b": "2", "copy": "2"},
    }
    assert got["spec"] == {
        "containers": [{"name": "a"}],
        "schedulerName": "s",
        "priorityClassName": "koord-mid",
        "priority": 7000,
        "hostname": "h",
    }


def test_a_priority_class_without_a_preemption_policy_removes_an_earlier_one() -> None:
    obj = {"metadata": {"name": "w"}, "spec": {"preemptionPolicy": "Never", "containers": []}}
    judge = admission(profiles=[profile(priorityClassName="koord-mid")])
    got = patched(obj, judge.mutate(request(obj)))
    assert "preemptionPolicy" not in got["spec"]
    judge = admission(profiles=[profile(priorityClassName="koord-batch")])
    assert patched(obj, judge.mutate(request(obj)))["spec"]["preemptionPolicy"] == (
        "PreemptLowerPriority"
    )


def test_a_bad_profile_is_reported_once_and_harms_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = profile("bad", probability="x", labels={"bad": "1"})
    broken = profile(
        "broken",
        selector={"matchExpressions": [{"key": "x", "operator": "Near"}]},
        labels={"bad": "2"},
    )
    judge = admission(profiles=[bad, broken, profile("good", labels={"good": "1"})])
    obj = {"metadata": {"name": "w"}, "spec": {"containers": []}}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            got = patched(obj, judge.mutate(request(obj)))
    assert got["metadata"]["labels"] == {"good": "1"}
    lines = sorted(record.message for record in caplog.records)
    assert len(lines) == 2
    assert lines[0].startswith("ClusterColocationProfile bad: spec.probability = 'x'")
    assert lines[1].startswith("ClusterColocationProfile broken: selector = ")
    assert all(line.endswith("; the profile is not applied") for line in lines)


QUOTA_PREFIX = "quota.scheduling.koordinator.sh/"


@pytest.mark.parametrize(
    ("label", "namespace", "pool"),
    [
        ("q", "ml", "a"),
        ("", "team", "b"),
        ("", "bound", "c"),
        ("", "default", None),
        ("gone", "default", None),
        ("plain", "default", None),
    ],
)
def test_the_tree_of_a_pods_quota_selects_its_nodes(label: str, namespace: str, pool: Any) -> None:
    def quota(name: str, space: str, tree: str, bound: str = "") -> dict[str, Any]:
        annotations = {f"{QUOTA_PREFIX}namespaces": f'["{bound}"]'} if bound else {}
        labels = {f"{QUOTA_PREFIX}tree-id": tree} if tree else {}
        metadata = {"name": name, "namespace": space, "labels": labels, "annotations": annotations}
        return {"metadata": metadata}

    def of_tree(name: str, tree: str, **selector: Any) -> dict[str, Any]:
        labels = {f"{QUOTA_PREFIX}tree-id": tree}
        metadata = {"name": name, "namespace": "default", "labels": labels}
        return {"metadata": metadata, "spec": {"nodeSelector": selector}}

    expressions = [
        {"key": "pool", "operator": "In", "values": ["b"]},
        {"key": "x", "operator": "Exists"},
    ]
    judge = admission(
        quotas=[
            quota("q", "default", "1"),
            quota("team", "team", "2"),
            quota("n", "default", "3", "bound"),
            quota("plain", "default", ""),
        ],
        quota_profiles=[
            of_tree("a", "1", matchLabels={"pool": "a"}),
            of_tree("b", "2", matchExpressions=expressions),
            of_tree("c", "3", matchLabels={"pool": "c"}),
            of_tree("d", "3", matchLabels={"pool": "d"}),
        ],
        gates="MultiQuotaTree=true",
    )
    labels = {f"{QUOTA_PREFIX}name": label} if label else {}
    obj = {"metadata": {"name": "w", "labels": labels}, "spec": {"containers": []}}
    got = patched(obj, judge.mutate(request(obj, namespace=namespace)))
    if pool is None:
        assert got == obj
        return
    required = got["spec"]["affinity"]["nodeAffinity"]
    (term,) = required["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    if pool == "b":
        assert term["matchExpressions"] == expressions
    else:
        assert term["matchExpressions"] == [{"key": "pool", "operator": "In", "values": [pool]}]
    assert patched(got, judge.mutate(request(got, namespace=namespace))) == got


def test_a_tree_narrows_every_term_that_a_pod_brings() -> None:
    tree = {f"{QUOTA_PREFIX}tree-id": "1"}
    quota = {"metadata": {"name": "q", "namespace": "default", "labels": tree}}
    of_tree = {
        "metadata": {"name": "p", "namespace": "default", "labels": tree},
        "spec": {"nodeSelector": {"matchLabels": {"pool": "a"}}},
    }
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    own = {"key": "arch", "operator": "Exists"}
    terms = [{"matchExpressions": [own], "matchFields": [{"key": "f"}]}, {"matchFields": []}]
    affinity = {"nodeAffinity": {key: {"nodeSelectorTerms": terms}, "other": 1}, "podAffinity": {}}
    obj = {
        "metadata": {"name": "w", "labels": {f"{QUOTA_PREFIX}name": "q"}},
        "spec": {"affinity": affinity, "containers": []},
    }
    judge = admission(quotas=[quota], quota_profiles=[of_tree], gates="MultiQuotaTree=true")
    got = patched(obj, judge.mutate(request(obj)))["spec"]["affinity"]
    added = {"key": "pool", "operator": "In", "values": ["a"]}
    assert got["podAffinity"] == {} and got["nodeAffinity"]["other"] == 1
    assert got["nodeAffinity"][key]["nodeSelectorTerms"] == [
        {"matchExpressions": [own, added], "matchFields": [{"key": "f"}]},
        {"matchExpressions": [added], "matchFields": []},
    ]


def test_containers_without_resources_keep_no_other_from_being_replaced() -> None:
    one = profile(priorityClassName="koord-batch", qosClass="BE")
    asks = {"requests": {"cpu": "1"}}
    containers = [{"name": "a"}, {"name": "b", "resources": asks}, {"name": "c", "resources": {}}]
    obj = {"metadata": {"name": "w"}, "spec": {"containers": containers}}
    got = patched(obj, admission(profiles=[one]).mutate(request(obj)))["spec"]["containers"]
    assert got[1]["resources"] == {"requests": {"kubernetes.io/batch-cpu": "1k"}}
    assert (got[0], got[2]) == (containers[0], containers[2])
