"""Pods at admission: how profiles change them, and which pods are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.profile import ClusterColocationProfile
from cluster.webhook.colocation_profile import apply_metadata, drawn
from cluster.webhook.enhanced import EnhancedRules, Rule
from kube.patches import json_patch, merge_patch
from tests.cluster.admission import admission, convert, patched, request

BATCH = {
    "metadata": {"name": "batch"},
    "spec": {
        "selector": {"matchLabels": {"team": "ml"}},
        "qosClass": "BE",
        "priorityClassName": "koord-batch",
        "labels": {"profiled": "yes"},
    },
}


def profile(name: str, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": spec}


def pod(
    labels: dict[str, str] | None = None, resources: dict[str, Any] | None = None, **spec: Any
) -> dict[str, Any]:
    return {
        "metadata": {"name": "web", "namespace": "default", "labels": labels or {}},
        "spec": {"containers": [{"name": "main", "resources": resources or {}}], **spec},
    }


def mutated(obj: dict[str, Any], profiles: list[dict[str, Any]], **options: Any) -> Any:
    namespace = options.pop("namespace", "default")
    judge = admission(profiles=profiles, **options)
    verdict = judge.mutate(request(obj, namespace=namespace))
    assert verdict.allowed, verdict.message
    return patched(obj, verdict)


def test_a_profile_makes_a_batch_pod() -> None:
    amounts = {"cpu": "1500m", "memory": "1Gi"}
    got = mutated(pod({"team": "ml"}, {"requests": amounts, "limits": amounts}), [BATCH])
    assert got["metadata"]["labels"] == {
        "team": "ml",
        "profiled": "yes",
        "koordinator.sh/qosClass": "BE",
    }
    assert got["spec"]["priority"] == 5000
    assert got["spec"]["preemptionPolicy"] == "PreemptLowerPriority"
    batch = {"kubernetes.io/batch-cpu": "1500", "kubernetes.io/batch-memory": "1Gi"}
    assert got["spec"]["containers"][0]["resources"] == {"requests": batch, "limits": batch}


def test_a_pod_that_no_profile_selects_is_left_alone() -> None:
    verdict = admission(profiles=[BATCH]).mutate(request(pod({"team": "web"})))
    assert verdict.allowed
    assert verdict.patch == ()


@pytest.mark.parametrize(
    ("amount", "expected"),
    [("500m", "500"), ("1", "1k"), ("1500m", "1500"), ("0.5m", "1"), ("2", "2k"), (1, "1k")],
)
def test_cpu_becomes_whole_milli_cores(amount: Any, expected: str) -> None:
    got = mutated(pod({"team": "ml"}, {"limits": {"cpu": amount}}), [BATCH])
    resources = got["spec"]["containers"][0]["resources"]
    assert resources["limits"] == {"kubernetes.io/batch-cpu": expected}
    # A limit without a request is also the request.
    assert resources["requests"] == {"kubernetes.io/batch-cpu": expected}


def test_init_containers_mid_resources_and_overhead_are_replaced_and_described() -> None:
    mid = profile("mid", priorityClassName="koord-mid")
    limits = {"limits": {"memory": "1Gi"}}
    obj = pod(
        {},
        {"requests": {"cpu": "1", "example.com/gpu": "1"}},
        initContainers=[{"name": "init", "resources": limits}],
        overhead={"cpu": "250m"},
    )
    got = mutated(obj, [mid])
    assert got["spec"]["overhead"] == {"kubernetes.io/mid-cpu": "250"}
    assert got["spec"]["containers"][0]["resources"]["requests"] == {
        "example.com/gpu": "1",
        "kubernetes.io/mid-cpu": "1k",
    }
    described = json.loads(
        got["metadata"]["annotations"]["node.koordinator.sh/extended-resource-spec"]
    )
    assert described == {
        "containers": {
            "init": {
                "limits": {"kubernetes.io/mid-memory": "1Gi"},
                "requests": {"kubernetes.io/mid-memory": "1Gi"},
            },
            "main": {"requests": {"kubernetes.io/mid-cpu": "1k"}},
        }
    }


def test_a_limit_becomes_the_request_that_is_missing() -> None:
    said: list[dict[str, Any]] = [{}, {"requests": None}, {"requests": {}}]
    for requests in said:
        got = mutated(pod({"team": "ml"}, {**requests, "limits": {"cpu": "1"}}), [BATCH])
        resources = got["spec"]["containers"][0]["resources"]
        assert resources["requests"] == resources["limits"] == {"kubernetes.io/batch-cpu": "1k"}


def test_profiles_apply_by_name_and_later_ones_win() -> None:
    got = mutated(
        pod(),
        [profile("b", labels={"x": "b"}), profile("a", labels={"x": "a", "y": "a"})],
    )
    assert got["metadata"]["labels"] == {"x": "b", "y": "a"}


def test_the_namespace_selector_counts() -> None:
    only_ml = profile("p", namespaceSelector={"matchLabels": {"tier": "batch"}}, labels={"x": "1"})
    assert "x" not in mutated(pod(), [only_ml])["metadata"].get("labels", {})
    assert mutated(pod(), [only_ml], namespace="ml")["metadata"]["labels"] == {"x": "1"}
    # A namespace that is not known yet is not guessed at.
    assert "x" not in mutated(pod(), [only_ml], namespace="new")["metadata"].get("labels", {})


def test_a_broken_selector_matches_nothing() -> None:
    broken = profile(
        "broken",
        selector={"matchExpressions": [{"key": "a", "operator": "Like"}]},
        qosClass="BE",
        labels={"x": "1"},
    )
    verdict = admission(profiles=[broken, profile("ok", labels={"y": "1"})]).mutate(request(pod()))
    assert patched(pod(), verdict)["metadata"]["labels"] == {"y": "1"}


def test_a_missing_priority_class_refuses_the_pod_and_says_so() -> None:
    judge = admission(profiles=[profile("p", priorityClassName="gold")])
    with pytest.raises(ValueError, match="no such PriorityClass"):
        judge.mutate(request(pod()))


def test_keys_are_mapped_and_suffixes_appended_once() -> None:
    one = convert(
        profile(
            "p",
            labelKeysMapping={"team": "owner", "absent": "new"},
            annotationKeysMapping={"a": "b"},
            labelSuffixes={"team": "-x", "none": "-y"},
        ),
        ClusterColocationProfile,
    )
    obj = {"metadata": {"labels": {"team": "ml"}, "annotations": {"a": "1"}}}
    apply_metadata(obj, one)
    assert obj["metadata"] == {
        "labels": {"team": "ml-x", "owner": "ml"},
        "annotations": {"a": "1", "b": "1"},
    }
    apply_metadata(obj, one)
    assert obj["metadata"]["labels"]["team"] == "ml-x"


def test_probability_is_a_stable_share() -> None:
    half = convert(profile("p", probability="50%"), ClusterColocationProfile)
    chosen = [drawn(half, f"default/pod-{number}") for number in range(2000)]
    assert 900 < sum(chosen) < 1100
    assert chosen == [drawn(half, f"default/pod-{number}") for number in range(2000)]
    never = convert(profile("p", probability=0), ClusterColocationProfile)
    always = convert(profile("p", probability="100%"), ClusterColocationProfile)
    assert not any(drawn(never, str(number)) for number in range(100))
    assert all(drawn(always, str(number)) for number in range(100))


def test_a_profile_that_was_not_drawn_replaces_no_resources() -> None:
    never = profile("p", probability=0, priorityClassName="koord-batch")
    marked = pod({"koordinator.sh/priority-class": "koord-batch"}, {"requests": {"cpu": "1"}})
    got = mutated(marked, [never])
    assert got["spec"]["containers"][0]["resources"]["requests"] == {"cpu": "1"}


def test_the_skip_annotation_and_the_gate_leave_resources_alone() -> None:
    skipping = json.loads(json.dumps(BATCH))
    skipping["metadata"]["annotations"] = {"config.koordinator.sh/skip-update-resources": ""}
    obj = pod({"team": "ml"}, {"requests": {"cpu": "1"}})
    for got in (
        mutated(obj, [skipping]),
        mutated(obj, [BATCH], gates="ColocationProfileSkipMutatingResources=true"),
    ):
        assert got["spec"]["containers"][0]["resources"]["requests"] == {"cpu": "1"}


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        (
            {"koordinator.sh/gpu": "200"},
            {
                "koordinator.sh/gpu-core": "200",
                "koordinator.sh/gpu-memory-ratio": "200",
                "koordinator.sh/gpu.shared": "2",
            },
        ),
        (
            {"koordinator.sh/gpu-core": "50", "koordinator.sh/gpu-memory-ratio": "50"},
            {
                "koordinator.sh/gpu-core": "50",
                "koordinator.sh/gpu-memory-ratio": "50",
                "koordinator.sh/gpu.shared": "1",
            },
        ),
        (
            {"koordinator.sh/gpu.shared": "3", "koordinator.sh/gpu-core": "300"},
            {"koordinator.sh/gpu.shared": "3", "koordinator.sh/gpu-core": "300"},
        ),
    ],
)
def test_gpu_short_hands_are_spelled_out(
    requests: dict[str, str], expected: dict[str, str]
) -> None:
    got = mutated(pod({}, {"requests": requests}), [])
    assert got["spec"]["containers"][0]["resources"]["requests"] == expected


def test_limits_without_requests_get_the_shares_of_a_gpu_in_both() -> None:
    got = mutated(pod({}, {"limits": {"koordinator.sh/gpu-core": "200"}}), [])
    assert got["spec"]["containers"][0]["resources"] == {
        "requests": {"koordinator.sh/gpu.shared": "1"},
        "limits": {"koordinator.sh/gpu-core": "200", "koordinator.sh/gpu.shared": "1"},
    }


def test_admitting_a_pod_twice_is_admitting_it_once() -> None:
    suffix = profile("s", labelSuffixes={"team": "-x"}, patch={"spec": {"hostname": "h"}})
    obj = pod({"team": "ml"}, {"requests": {"cpu": "1", "koordinator.sh/gpu": "100"}})
    profiles = [profile("b", priorityClassName="koord-batch", qosClass="BE"), suffix]
    once = mutated(obj, profiles)
    assert mutated(once, profiles) == once


def test_a_quota_tree_binds_its_pods_to_its_nodes() -> None:
    tree = {"quota.scheduling.koordinator.sh/tree-id": "7"}
    quota = {"metadata": {"name": "q", "namespace": "default", "labels": tree}}
    of_tree = {
        "metadata": {"name": "p", "namespace": "default", "labels": tree},
        "spec": {"quotaName": "q", "nodeSelector": {"matchLabels": {"pool": "a"}}},
    }
    obj = pod({"quota.scheduling.koordinator.sh/name": "q"})
    got = mutated(obj, [], quotas=[quota], quota_profiles=[of_tree], gates="MultiQuotaTree=true")
    required = got["spec"]["affinity"]["nodeAffinity"]
    terms = required["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms == [{"matchExpressions": [{"key": "pool", "operator": "In", "values": ["a"]}]}]


# --- validating --------------------------------------------------------------------------------


def verdict_on(obj: dict[str, Any], old: dict[str, Any] | None = None, **options: Any) -> Any:
    operation = "UPDATE" if old is not None else "CREATE"
    return admission(**options).validate(request(obj, old=old, operation=operation))


BATCH_REQUEST = {"requests": {"kubernetes.io/batch-cpu": "1k"}}
QOS = "koordinator.sh/qosClass"


@pytest.mark.parametrize(
    ("labels", "spec", "resources", "problem"),
    [
        ({}, {}, {}, ""),
        ({}, {}, BATCH_REQUEST, "is for pods of QoS class BE"),
        ({QOS: "LS"}, {"priority": 9000}, BATCH_REQUEST, "is for pods of QoS class BE"),
        ({QOS: "BE"}, {"priority": 5500}, BATCH_REQUEST, ""),
        ({QOS: "BE"}, {}, {}, "does not go with priority class none"),
        ({QOS: "BE"}, {"priority": 9500}, {}, "does not go with priority class koord-prod"),
        ({QOS: "BE"}, {"priority": 3500}, {}, ""),
        ({QOS: "LSR"}, {"priority": 9500}, {"requests": {"cpu": "2"}}, ""),
        ({QOS: "LSR"}, {"priority": 7500}, {"requests": {"cpu": "2"}}, "does not go with"),
        ({QOS: "LSR"}, {"priority": 9500}, {"requests": {"cpu": "1500m"}}, "whole number of CPUs"),
        ({QOS: "LSR"}, {"priority": 9500}, {}, "whole number of CPUs"),
        ({QOS: "LSE"}, {"priority": 9500}, {"requests": {"cpu": "1500m"}}, "QoS class LSE"),
        ({QOS: "LSE"}, {"priority": 7500}, {"requests": {"cpu": "1"}}, "does not go with"),
        ({QOS: "LS"}, {"priority": 7500}, {"requests": {"cpu": "1500m"}}, ""),
    ],
)
def test_qos_priority_and_resources_go_together(
    labels: dict[str, str], spec: dict[str, Any], resources: dict[str, Any], problem: str
) -> None:
    verdict = verdict_on(pod(labels, resources, **spec))
    assert verdict.allowed is not bool(problem)
    assert problem in verdict.message


def test_classes_of_a_running_pod_do_not_change() -> None:
    old = pod({QOS: "LS", "koordinator.sh/priority": "1"}, priority=9500)
    for new, problem in (
        (pod({QOS: "LSR", "koordinator.sh/priority": "1"}, priority=9500), "QoS class cannot"),
        (pod({QOS: "LS", "koordinator.sh/priority": "1"}, priority=7500), "priority class cannot"),
        (pod({QOS: "LS", "koordinator.sh/priority": "2"}, priority=9500), "koordinator.sh/prio"),
    ):
        assert problem in verdict_on(new, old).message
    changed = pod({QOS: "LS", "koordinator.sh/priority": "2"}, priority=9500)
    gate = "ColocationProfileSkipValidatingPriority=true"
    assert verdict_on(changed, old, gates=gate).allowed
    # An empty label says as much as none.
    empty = {"koordinator.sh/priority": "", "quota.scheduling.koordinator.sh/preemptible": ""}
    assert verdict_on(pod({QOS: "LS", **empty}), pod({QOS: "LS"})).allowed


@pytest.mark.parametrize(
    ("labels", "spec", "rules"),
    [
        ({"koordinator.sh/qosClass": "LSR"}, {"priority": 9500}, None),
        ({"koordinator.sh/qosClass": "BE"}, {"priority": 9500}, None),
        ({}, {}, EnhancedRules(True, (Rule("owner", ("owner",)),))),
    ],
    ids=["LSR without CPUs", "BE with a Prod priority", "a label that a new rule requires"],
)
def test_a_rule_that_the_stored_pod_breaks_does_not_refuse_its_update(
    labels: dict[str, str], spec: dict[str, Any], rules: EnhancedRules | None
) -> None:
    """A Job's pod whose finalizer cannot be removed stays for ever."""
    stored = pod(labels, **spec)
    judge = admission(rules=rules, gates="EnablePodEnhancedValidator=true")
    assert not judge.validate(request(stored)).allowed
    held = {**stored, "metadata": {**stored["metadata"], "finalizers": ["batch.kubernetes.io/x"]}}
    assert judge.validate(request(stored, old=held, operation="UPDATE")).allowed


def test_an_update_that_breaks_a_rule_is_refused() -> None:
    judge = admission(
        rules=EnhancedRules(True, (Rule("owner", ("owner",)),)),
        gates="EnablePodEnhancedValidator=true",
    )
    owned = pod({"owner": "me"})
    verdict = judge.validate(request(pod(), old=owned, operation="UPDATE"))
    assert "requires the labels owner" in verdict.message


def test_the_schedulers_own_annotation_is_refused() -> None:
    obj = pod()
    obj["metadata"]["annotations"] = {"scheduling.koordinator.sh/reserve-pod": "true"}
    assert "reserve-pod" in verdict_on(obj).message


def test_pods_use_leaf_quotas() -> None:
    parent = {
        "metadata": {
            "name": "p",
            "namespace": "default",
            "labels": {"quota.scheduling.koordinator.sh/is-parent": "true"},
        }
    }
    obj = pod({"quota.scheduling.koordinator.sh/name": "p"})
    assert "parent quota" in verdict_on(obj, quotas=[parent]).message
    gate = "SupportParentQuotaSubmitPod=true"
    assert verdict_on(obj, quotas=[parent], gates=gate).allowed
    old = pod({"quota.scheduling.koordinator.sh/preemptible": "false"})
    assert "preemptible" in verdict_on(pod(), old).message


@pytest.mark.parametrize(
    ("requests", "problem"),
    [
        ({"koordinator.sh/gpu": "1", "koordinator.sh/gpu.shared": "1"}, "exclude each other"),
        ({"koordinator.sh/gpu": "150"}, "multiple of 100"),
        ({"koordinator.sh/gpu": "300"}, ""),
        ({"koordinator.sh/gpu.shared": "0"}, "above 0"),
        ({"koordinator.sh/gpu.shared": "2"}, "exactly one of"),
        ({"koordinator.sh/gpu.shared": "2", "koordinator.sh/gpu-memory": "1Gi"}, ""),
        (
            {
                "koordinator.sh/gpu.shared": "2",
                "koordinator.sh/gpu-memory-ratio": "100",
                "koordinator.sh/gpu-core": "51",
            },
            "not divisible",
        ),
        ({"koordinator.sh/gpu.shared": "2", "huawei.com/npu-core": "1"}, ""),
    ],
)
def test_gpu_requests_do_not_contradict_each_other(requests: dict[str, str], problem: str) -> None:
    obj = pod({}, {"requests": requests})
    verdict = verdict_on(obj, gates="ValidatePodDeviceResource=true")
    assert verdict.allowed is not bool(problem)
    assert problem in verdict.message
    assert verdict_on(obj).allowed


def test_required_labels_of_a_namespace() -> None:
    rules = EnhancedRules(True, (Rule("owner", ("team",), ("kube-system",)),))
    options: dict[str, Any] = {"rules": rules, "gates": "EnablePodEnhancedValidator=true"}
    assert "requires the labels team" in verdict_on(pod(), **options).message
    assert verdict_on(pod({"team": ""}), **options).allowed
    assert verdict_on(
        pod({"pod.koordinator.sh/skip-enhanced-validation": "true"}), **options
    ).allowed


# --- patches -----------------------------------------------------------------------------------

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.text("a/~", max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("ab/~", max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text("ab/~", max_size=2), PLAIN, max_size=4)


@settings(max_examples=150)
@given(OBJECTS, OBJECTS)
def test_a_json_patch_turns_the_first_object_into_the_second(before: Any, after: Any) -> None:
    from kube.webhook import Verdict

    assert patched(before, Verdict(True, patch=tuple(json_patch(before, after)))) == after


def apply_merge(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = apply_merge(result.get(key), value)
    return result


def no_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: no_nulls(member) for key, member in value.items() if member is not None}
    return value


@settings(max_examples=150)
@given(OBJECTS, OBJECTS)
def test_a_merge_patch_turns_the_first_object_into_the_second(before: Any, after: Any) -> None:
    before, after = no_nulls(before), no_nulls(after)
    assert apply_merge(before, merge_patch(before, after)) == after
