"""Admitted quotas that the cache does not show yet count in the rules of the tree."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from apis.core import Pod
from apis.quota import ElasticQuota
from cluster.gates import parse_gates
from cluster.metrics import ManagerMetrics
from cluster.quota_tree import QuotaTree, quota_node
from cluster.webhook.elastic_quota import QuotaAdmission, by_quota, quota_topology, unlabelled
from cluster.webhook.pending_quotas import PENDING_SECONDS, PendingQuotas, with_pending
from kube.resources import ELASTIC_QUOTAS, PODS
from tests.cluster.admission import convert, filled, request

PREFIX = "quota.scheduling.koordinator.sh/"


def plain(
    name: str,
    cpu: str,
    *,
    parent: str = "p",
    namespace: str = "default",
    is_parent: bool = False,
    bound: list[str] | None = None,
) -> dict[str, Any]:
    labels = {f"{PREFIX}parent": parent, f"{PREFIX}is-parent": str(is_parent).lower()}
    annotations = {f"{PREFIX}namespaces": json.dumps(bound)} if bound else {}
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": labels,
            "annotations": annotations,
        },
        "spec": {"min": {"cpu": cpu}, "max": {"cpu": "100"}},
    }


def parent(cpu: str) -> dict[str, Any]:
    return plain("p", cpu, parent="koordinator-root-quota", is_parent=True)


@dataclass
class Bed:
    """A webhook and a cache whose contents the test sets."""

    now: float = 0.0
    stored: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = filled(ELASTIC_QUOTAS, ElasticQuota)
        pods = filled(PODS, Pod)
        self.judge = QuotaAdmission(
            lambda: QuotaTree(self.cache.items.values()),
            pods.index(by_quota),
            pods.index(unlabelled),
            parse_gates(""),
            ManagerMetrics(),
        )
        self.judge._pending = PendingQuotas(lambda: self.now)
        self.show(parent("10"))

    def show(self, quota: dict[str, Any]) -> None:
        self.stored[quota["metadata"]["name"]] = quota
        self.cache.put(convert(quota, ElasticQuota))

    def create(self, quota: dict[str, Any], *, dry_run: bool = False) -> str:
        return self._ask(quota, None, "CREATE", dry_run)

    def update(self, quota: dict[str, Any]) -> str:
        return self._ask(quota, self.stored[quota["metadata"]["name"]], "UPDATE", False)

    def delete(self, name: str) -> str:
        return self._ask(None, self.stored[name], "DELETE", False)

    def _ask(self, new: Any, old: Any, operation: str, dry_run: bool) -> str:
        meta = (new or old)["metadata"]
        verdict = self.judge.validate(
            request(
                new,
                old=old,
                kind="ElasticQuota",
                resource="elasticquotas",
                operation=operation,
                namespace=meta["namespace"],
                dry_run=dry_run,
            )
        )
        return verdict.message


def test_children_that_are_created_together_stay_below_their_parents_minimum() -> None:
    bed = Bed()
    assert bed.create(plain("a", "6")) == ""
    assert "children of p have spec.min cpu 11 in all, above its own 10" in bed.create(
        plain("b", "5")
    )
    assert bed.create(plain("b", "4")) == ""
    assert "spec.min cpu 11 in all" in bed.create(plain("c", "1"))


def test_reviews_in_two_threads_count_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A review of more than 64 KiB is answered in a thread, beside those on the event loop."""
    bed = Bed()
    real, calls, noted = bed.judge._tree, [0], threading.Event()

    def tree() -> QuotaTree:
        calls[0] += 1
        if calls[0] == 2:  # the first review is checked, and not noted yet
            noted.wait(0.3)
        return real()

    monkeypatch.setattr(bed.judge, "_tree", tree)
    answers: list[str] = []

    def second() -> None:
        answers.append(bed.create(plain("b", "6")))
        noted.set()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(bed.create, plain("a", "6"))
        while calls[0] < 2:
            time.sleep(0.001)
        pool.submit(second).result()
        assert first.result() == ""
    assert "children of p have spec.min cpu 12 in all, above its own 10" in answers[0]


def test_a_quota_counts_once_when_the_cache_shows_it() -> None:
    bed = Bed()
    assert bed.create(plain("a", "6")) == ""
    bed.show(plain("a", "6"))
    assert bed.create(plain("b", "4")) == ""
    # What the cache shows counts, also where it is less than what was admitted.
    bed.show(plain("a", "6"))
    bed.show(plain("b", "4"))
    assert bed.update(plain("a", "2")) == ""
    bed.show(plain("a", "2"))
    assert bed.create(plain("c", "4")) == ""


def test_the_same_creation_may_be_tried_again() -> None:
    bed = Bed()
    assert bed.create(plain("a", "6")) == ""
    assert bed.create(plain("a", "7")) == ""
    assert "spec.min cpu 11 in all" in bed.create(plain("b", "4"))


def test_a_dry_run_and_a_refused_creation_count_nothing() -> None:
    bed = Bed()
    assert bed.create(plain("a", "6"), dry_run=True) == ""
    assert bed.create(plain("b", "11")) != ""
    assert bed.create(plain("c", "10")) == ""


def test_an_admitted_quota_that_is_never_stored_counts_for_a_limited_time() -> None:
    bed = Bed()
    assert bed.create(plain("a", "6")) == ""
    bed.now = PENDING_SECONDS - 0.001
    assert bed.create(plain("b", "5")) != ""
    bed.now = PENDING_SECONDS
    assert bed.create(plain("b", "5")) == ""


def test_a_child_that_grows_and_a_parent_that_shrinks_count_at_once() -> None:
    bed = Bed()
    bed.show(plain("a", "2"))
    assert bed.update(plain("a", "6")) == ""
    assert "spec.min cpu 11 in all" in bed.create(plain("b", "5"))
    assert "spec.min cpu 6 in all, above its own 5" in bed.update(parent("5"))
    assert bed.update(parent("7")) == ""
    assert "spec.min cpu 8 in all, above its own 7" in bed.create(plain("b", "2"))
    assert bed.create(plain("b", "1")) == ""


def test_a_child_that_shrinks_and_a_parent_that_grows_count_when_they_are_stored() -> None:
    bed = Bed()
    bed.show(plain("a", "6"))
    assert bed.update(plain("a", "2")) == ""
    assert bed.update(parent("20")) == ""
    assert "spec.min cpu 11 in all, above its own 10" in bed.create(plain("b", "5"))
    bed.show(plain("a", "2"))
    assert bed.create(plain("b", "5")) == ""


def test_a_child_that_moves_counts_at_its_new_place() -> None:
    bed = Bed()
    bed.show(plain("q", "10", parent="koordinator-root-quota", is_parent=True))
    bed.show(plain("a", "6", parent="q"))
    assert bed.update(plain("a", "6")) == ""
    assert "children of p have spec.min cpu 11" in bed.create(plain("b", "5"))
    assert "children of q have spec.min cpu 11" in bed.create(plain("c", "5", parent="q"))


def test_names_and_namespaces_of_quotas_under_way_are_taken() -> None:
    bed = Bed()
    assert bed.create(plain("a", "1", bound=["x"])) == ""
    message = bed.create(plain("a", "1", namespace="other"))
    assert "ElasticQuota default/a is being created" in message
    assert "namespace x is bound to quota a" in bed.create(plain("b", "1", bound=["x"]))
    assert "has children, e.g. a" in bed.delete("p")


def test_a_tree_does_not_change_by_what_is_pending() -> None:
    tree = QuotaTree([convert(parent("10"), ElasticQuota), convert(plain("a", "2"), ElasticQuota)])
    assert with_pending(tree, []) is tree
    node = quota_node(convert(plain("a", "5", bound=["x"]), ElasticQuota))
    other = with_pending(tree, [node])
    assert str(other.children["p"][0].min["cpu"]) == "5"
    assert str(other.nodes["a"].min["cpu"]) == "2"
    assert other.of_namespace == {"x": "a"}
    assert str(tree.children["p"][0].min["cpu"]) == "2"
    assert (tree.of_namespace, len(tree.children["p"])) == ({}, 1)


@pytest.mark.parametrize("lends", [None, "true", "false"])
def test_the_tree_is_shown_as_upstream_shows_it(lends: str | None) -> None:
    child = plain("a", "2")
    if lends is not None:
        child["metadata"]["labels"][f"{PREFIX}allow-lent-resource"] = lends
    tree = QuotaTree([convert(parent("10"), ElasticQuota), convert(child, ElasticQuota)])
    assert json.loads(quota_topology(tree)) == {
        "quotaInfoMap": {
            "p": {
                "name": "p",
                "parentName": "koordinator-root-quota",
                "isParent": True,
                "allowLentResource": True,
                "max": {"cpu": "100"},
                "min": {"cpu": "10"},
            },
            "a": {
                "name": "a",
                "parentName": "p",
                "isParent": False,
                "allowLentResource": lends != "false",
                "max": {"cpu": "100"},
                "min": {"cpu": "2"},
            },
        },
        "quotaHierarchyInfo": {"koordinator-root-quota": ["p"], "p": ["a"], "a": []},
    }
