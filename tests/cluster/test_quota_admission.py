"""Elastic quotas: defaults, the rules of the tree, and what a pod books."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from apis.core import Node, Pod
from apis.decode import to_plain
from apis.errors import InputError
from apis.quota import ElasticQuota, ElasticQuotaProfile
from apis.replace_resources import parse_replacements
from cluster.gates import parse_gates
from cluster.manager.caches import Caches
from cluster.manager.flags import parse
from cluster.manager.quota_profile import QuotaProfileController, scaled, tree_id
from cluster.metrics import ManagerMetrics
from cluster.quota_tree import (
    QuotaRefused,
    QuotaRules,
    QuotaTree,
    check_create,
    check_delete,
    check_update,
)
from cluster.webhook.elastic_quota import QuotaAdmission, by_quota, unlabelled
from cluster.webhook.quota_evaluation import QuotaEvaluator, exceeded, masked_request
from cluster.webhook.replace_resources import replaced, with_replaced_resources
from kube.client import Client
from kube.connection import Connection
from kube.events import EventRecorder
from kube.resources import PODS
from tests.cluster.admission import admission, convert, filled, request, settled

PREFIX = "quota.scheduling.koordinator.sh/"


def quota(
    name: str,
    *,
    parent: str = "",
    least: dict[str, str] | None = None,
    most: dict[str, str] | None = None,
    used: dict[str, str] | None = None,
    is_parent: bool = False,
    tree: str = "",
    force: bool = False,
    annotations: dict[str, Any] | None = None,
) -> ElasticQuota:
    labels = {f"{PREFIX}is-parent": "true" if is_parent else "false"}
    if parent:
        labels[f"{PREFIX}parent"] = parent
    if tree:
        labels[f"{PREFIX}tree-id"] = tree
    if force:
        labels[f"{PREFIX}allow-force-update"] = "true"
    found: ElasticQuota = convert(
        {
            "metadata": {
                "name": name,
                "namespace": "default",
                "labels": labels,
                "annotations": {
                    f"{PREFIX}{key}": json.dumps(value)
                    for key, value in (annotations or {}).items()
                },
            },
            "spec": {"min": least or {}, "max": {"cpu": "20"} if most is None else most},
            "status": {"used": used or {}},
        },
        ElasticQuota,
    )
    return found


PARENT = quota("p", least={"cpu": "10"}, is_parent=True)
A = quota("a", parent="p", least={"cpu": "6"})


def refusal(stored: list[ElasticQuota], new: ElasticQuota, rules: QuotaRules | None = None) -> str:
    try:
        check_create(QuotaTree(stored), new, rules or QuotaRules())
    except QuotaRefused as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("new", "problem"),
    [
        (quota("b", parent="p", least={"cpu": "4"}), ""),
        (quota("b", parent="p", least={"cpu": "5"}), "cpu 11 in all, above its own 10"),
        (quota("b", parent="p", least={"cpu": "5"}, force=True), ""),
        (quota("b", parent="p", most={"cpu": "20", "memory": "1Gi"}), "keys of spec.max"),
        (quota("b", parent="a"), "is not a parent quota"),
        (quota("b", parent="nobody"), "does not exist"),
        (quota("b", parent="p", tree="7"), "tree-id '7' differs"),
        (quota("a", least={"cpu": "1"}), "unique in the cluster"),
        (quota("b", parent="b", is_parent=True), "leads back"),
        (quota("b", least={"cpu": "21"}), "spec.min cpu 21 is above spec.max 20"),
        (quota("b", least={"memory": "1Gi"}), "which spec.max lacks"),
        (quota("b", most={"cpu": "-1"}), "spec.max of cpu is negative"),
        (quota("b", parent="p", annotations={"namespaces": ["x"]}), "bound to quota n"),
        (
            quota(
                "b",
                used={"cpu": "30"},
                annotations={"max-strict-check-resource-keys": ["cpu"]},
            ),
            "below status.used 30",
        ),
    ],
)
def test_a_new_quota_keeps_the_rules(new: ElasticQuota, problem: str) -> None:
    bound = quota("n", annotations={"namespaces": ["x"]})
    got = refusal([PARENT, A, bound], new)
    assert problem in got
    assert bool(got) is bool(problem)


def test_keys_may_be_a_subset_under_the_gate() -> None:
    wide = quota("p", most={"cpu": "20", "memory": "1Gi"}, is_parent=True)
    child = quota("c", parent="p")
    assert "keys of spec.max" in refusal([wide], child)
    assert refusal([wide], child, QuotaRules(update_resource_key=True)) == ""


def test_a_guarantee_must_be_covered_further_up() -> None:
    def tree(guaranteed: str) -> list[ElasticQuota]:
        return [
            quota(
                "r",
                least={"cpu": "20"},
                is_parent=True,
                tree="t",
                annotations={"guaranteed": {"cpu": guaranteed}},
            ),
            quota(
                "s",
                parent="r",
                least={"cpu": "2"},
                tree="t",
                annotations={"guaranteed": {"cpu": "5"}},
            ),
        ]

    rules = QuotaRules(guarantee_usage=True)
    new = quota("b", parent="r", least={"cpu": "4"}, tree="t")
    assert refusal(tree("20"), new, rules) == ""
    assert "guarantees enough" in refusal(tree("8"), new, rules)


def changed(old: ElasticQuota, new: ElasticQuota, *stored: ElasticQuota, pods: int = 0) -> str:
    try:
        check_update(
            QuotaTree([old, *stored]),
            old,
            new,
            QuotaRules(),
            pods=pods,
        )
    except QuotaRefused as error:
        return str(error)
    return ""


def test_a_change_keeps_the_rules() -> None:
    leaf = quota("p", least={"cpu": "10"})
    assert "has 1 children" in changed(PARENT, leaf, A)
    assert "2 pods use the quota" in changed(leaf, PARENT, pods=2)
    assert changed(leaf, PARENT) == ""
    assert "tree-id cannot change" in changed(PARENT, quota("p", is_parent=True, tree="9"))
    assert "children of p" in changed(PARENT, quota("p", least={"cpu": "5"}, is_parent=True), A)
    root = quota("koordinator-root-quota", is_parent=True)
    assert "cannot be modified" in changed(root, quota("koordinator-root-quota", most={}))


@pytest.mark.parametrize(
    ("namespace", "label", "counts"),
    [
        ("elsewhere", "team", True),
        ("team", None, True),
        ("bound", None, True),
        ("elsewhere", None, False),
        ("bound", "other", False),
    ],
)
def test_pods_use_a_quota_by_label_or_by_where_they_live(
    namespace: str, label: str | None, counts: bool
) -> None:
    pods = filled(
        PODS,
        Pod,
        {
            "metadata": {
                "name": "web",
                "namespace": namespace,
                "labels": {f"{PREFIX}name": label} if label else {},
            }
        },
    )
    leaf = quota("team", annotations={"namespaces": ["bound"]})
    parent = quota("team", annotations={"namespaces": ["bound"]}, is_parent=True)
    judge = QuotaAdmission(
        lambda: QuotaTree([leaf]),
        pods.index(by_quota),
        pods.index(unlabelled),
        parse_gates(""),
        ManagerMetrics(),
    )
    verdict = judge.validate(
        request(
            to_plain(parent),
            old=to_plain(leaf),
            kind="ElasticQuota",
            resource="elasticquotas",
            operation="UPDATE",
        )
    )
    assert verdict.allowed is not counts
    assert ("1 pods use the quota" in verdict.message) is counts


def test_a_change_of_status_is_not_validated() -> None:
    broken = quota("b", parent="nobody")
    assert changed(broken, quota("b", parent="nobody", used={"cpu": "3"})) == ""


def test_what_pods_use_of_a_quota_leaves_the_tree_as_it_is() -> None:
    """The scheduler writes usage all the time; rebuilding the tree would slow down every review."""
    caches = Caches(Client(Connection("http://localhost")), parse([], {}))
    caches.quotas.put(quota("a", most={"cpu": "20"}))
    tree = caches.quota_tree()
    booked = {"child-request": {"cpu": "3"}, "runtime": {"cpu": "9"}}
    caches.quotas.put(quota("a", most={"cpu": "20"}, used={"cpu": "3"}, annotations=booked))
    assert caches.quota_tree() is tree
    for change in (
        quota("a", most={"cpu": "21"}),
        quota("a", most={"cpu": "21"}, annotations={"namespaces": ["team"]}),
        quota("b", most={"cpu": "1"}),
    ):
        caches.quotas.put(change)
        assert caches.quota_tree() is not tree
        tree = caches.quota_tree()
    assert tree.of_namespace == {"team": "a"}
    assert set(tree.nodes) == {"a", "b"}


def test_a_quota_that_is_used_is_not_deleted() -> None:
    tree = QuotaTree([PARENT, A])
    with pytest.raises(QuotaRefused, match=r"has children, e\.g\. a"):
        check_delete(tree, PARENT, pods=())
    with pytest.raises(QuotaRefused, match=r"2 pods use it, e\.g\. d/x, d/y"):
        check_delete(tree, A, pods=["d/y", "d/x"])
    with pytest.raises(QuotaRefused, match="cannot be deleted"):
        check_delete(tree, quota("koordinator-default-quota"), pods=())
    check_delete(tree, A, pods=())


def test_a_pod_books_what_its_quota_counts() -> None:
    limited = quota(
        "q",
        most={"cpu": "10", "memory": "10Gi"},
        annotations={"child-request": {"cpu": "8"}},
    )
    requested = convert(
        {"spec": {"min": {"cpu": "3", "example.com/x": "1"}}}, ElasticQuota
    ).spec.min
    masked = masked_request(limited, requested)
    assert set(masked) == {"cpu"}
    assert exceeded(limited, masked) == (
        "exceeded quota: default/q, requested: cpu=3, used: cpu=8, limited: cpu=10"
    )
    admitted = quota(
        "q",
        most={"cpu": "10"},
        annotations={"child-request": {"cpu": "8"}, "admission": {"cpu": "12"}},
    )
    assert exceeded(admitted, masked) is None
    assert masked_request(quota("x", most={"example.com/x": "1"}), requested) == {}


def test_an_ambiguous_quota_name_books_nothing() -> None:
    """Quotas of one name were created in two namespaces while the webhook did not run."""
    stored = [to_plain(quota("team")), to_plain(quota("team"))]
    stored[1]["metadata"]["namespace"] = "other"
    gates = "EnableQuotaAdmission=true"
    judge = admission(quotas=stored, gates=gates)

    async def run() -> str:
        async with Client(Connection("http://127.0.0.1:1")) as client:
            evaluator = QuotaEvaluator(client, judge, parse_gates(gates), judge.tree)
            labels = {f"{PREFIX}name": "team"}
            plain = {
                "metadata": {"name": "web", "namespace": "default", "labels": labels},
                "spec": {"containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}}}]},
            }
            return (await settled(evaluator.validate(request(plain)))).message

    assert "several elastic quotas are named team" in asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        ("a:x", {"a": "1", "b": "2"}, {"x": "1", "b": "2"}),
        (" a : x , b : ", {"a": "1", "b": "2"}, {"x": "1"}),
        # What is not a pair says nothing.
        ("c, c:y:z, d:e, , :", {"c": "3"}, {"c": "3"}),
        ("", {"c": "3"}, {"c": "3"}),
        # cpu counts milli-cores under its other name, and only there.
        ("cpu:batch", {"cpu": "1500m"}, {"batch": "1500"}),
        ("cpu:batch", {"cpu": "2"}, {"batch": "2k"}),
        ("cpu:batch", {"cpu": 0.5}, {"batch": "500"}),
        ("memory:m", {"memory": "1Gi"}, {"m": "1Gi"}),
        ("x:cpu", {"x": "1500m"}, {"cpu": "1500m"}),
        # A target that is there stays, and its source with it.
        ("a:b", {"a": "1", "b": "2"}, {"a": "1", "b": "2"}),
        ("a:a", {"a": "1"}, {"a": "1"}),
        # A name that was renamed is not renamed again.
        ("a:b,b:c", {"a": "1"}, {"b": "1"}),
        ("b:c,a:b", {"a": "1"}, {"b": "1"}),
        ("a:b,b:c", {"a": "1", "b": "2"}, {"a": "1", "c": "2"}),
        ("b:c,a:b", {"a": "1", "b": "2"}, {"a": "1", "c": "2"}),
        # What is taken out makes room, and is not renamed.
        ("a:b,b:", {"a": "1", "b": "2"}, {"b": "1"}),
        ("a:b,a:", {"a": "1"}, {}),
        # Of two sources of one target the first counts; of two targets the last.
        ("a:x,b:x", {"a": "1", "b": "2"}, {"x": "1", "b": "2"}),
        ("a:x,a:y", {"a": "1"}, {"y": "1"}),
    ],
)
def test_resources_are_renamed_for_counting(
    text: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    untouched = dict(before)
    assert replaced(before, parse_replacements(text), obj="Pod a/b", where="here") == after
    assert before == untouched


def test_all_requests_of_a_pod_are_renamed() -> None:
    def pod(**resources: str) -> dict[str, Any]:
        part = {"resources": {"requests": resources, "limits": resources}}
        return {
            "spec": {
                "initContainers": [{"name": "i", **part}],
                "containers": [{"name": "c", **part}, {"name": "none"}, {"resources": None}],
                "overhead": resources,
            }
        }

    before = pod(cpu="1", memory="1Gi")
    got = with_replaced_resources(before, "cpu:x,memory:", obj="Pod a/b")
    assert got == pod(x="1k")
    assert before == pod(cpu="1", memory="1Gi")
    assert with_replaced_resources({}, "cpu:x", obj="Pod a/b") == {}
    with pytest.raises(InputError, match=r"spec.initContainers\[0\].resources.requests.cpu"):
        with_replaced_resources(pod(cpu="much"), "cpu:x", obj="Pod a/b")


@pytest.mark.parametrize(
    ("labels", "ready", "cpu", "pauses"),
    [
        ("x", "True", "8", []),
        ("y", "True", "8", [1.0]),
        ("x", "False", "8", [1.0]),
        ("x", "True", "9", [10.0]),
        ("y", "True", "9", [1.0]),
    ],
)
def test_amounts_that_change_all_the_time_are_summed_up_seldom(
    monkeypatch: pytest.MonkeyPatch, labels: str, ready: str, cpu: str, pauses: list[float]
) -> None:
    def node(labels: str, ready: str, cpu: str) -> Node:
        status = {
            "conditions": [{"type": "Ready", "status": ready}],
            "allocatable": {"kubernetes.io/batch-cpu": cpu},
        }
        metadata = {"name": "n", "labels": {"pool": labels}}
        return cast(Node, convert({"metadata": metadata, "status": status}, Node))

    client = Client(Connection("http://localhost"))
    caches = Caches(client, parse([], {}))
    controller = QuotaProfileController(
        client,
        caches.quota_profiles,
        caches.quotas,
        caches.nodes,
        EventRecorder(client, component="test"),
    )
    asked: list[float] = []
    monkeypatch.setattr(controller.queue, "add_after", lambda _, seconds: asked.append(seconds))
    caches.nodes.put(node("x", "True", "8"))
    profile = {"metadata": {"name": "p", "namespace": "default"}, "spec": {"quotaName": "q"}}
    caches.quota_profiles.put(convert(profile, ElasticQuotaProfile))
    caches.nodes.put(node(labels, ready, cpu))
    assert asked == pauses


def test_the_numbers_of_a_profile() -> None:
    assert tree_id("default", "pool-a") == "10329762061428129167"
    amounts = convert({"spec": {"min": {"cpu": "24", "memory": "96Gi"}}}, ElasticQuota).spec.min
    got = scaled(amounts, "0.9")
    assert {name: str(amount) for name, amount in got.items()} == {
        "cpu": "21600m",
        "memory": "92771293593",
    }
    # 32 characters are read, more are not a ratio.
    assert str(scaled(amounts, "0." + "5" * 30)["memory"]) == "57266230613"
    for odd in ("2", "0", "x", "NaN", "0." + "5" * 31, "1.01", "-1"):
        assert scaled(amounts, odd) == amounts
