"""Booking of pods on quotas, with an API server in memory; defaults of a new quota."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from apis.core import Pod
from apis.quota import ElasticQuota
from cluster.gates import parse_gates
from cluster.metrics import ManagerMetrics
from cluster.quota_tree import QuotaTree
from cluster.webhook.elastic_quota import QuotaAdmission, by_quota, unlabelled
from cluster.webhook.quota_evaluation import QuotaEvaluator, RetryRules
from kube.client import ApiError
from kube.resources import ELASTIC_QUOTAS, PODS
from kube.webhook import Verdict
from tests.cluster.admission import admission, convert, filled, patched, request, settled
from tests.cluster.fake_api import FakeApi

PREFIX = "quota.scheduling.koordinator.sh/"
ON = "EnableQuotaAdmission=true"
PATH = ELASTIC_QUOTAS.path(namespace="teams", name="team")


def quota(name: str = "team", **annotations: Any) -> dict[str, Any]:
    texts = {
        f"{PREFIX}{key.replace('_', '-')}": json.dumps(value) for key, value in annotations.items()
    }
    return {
        "metadata": {"name": name, "namespace": "teams", "annotations": texts},
        "spec": {"max": {"cpu": "10", "memory": "10Gi"}, "min": {}},
    }


def pod(cpu: str = "4", *, name: str = "team", annotation: str = "", **more: str) -> dict[str, Any]:
    annotations = {"pod.koordinator.sh/replace-resources": annotation} if annotation else {}
    return {
        "metadata": {
            "name": "web",
            "namespace": "default",
            "labels": {f"{PREFIX}name": name} if name else {},
            "annotations": annotations,
        },
        "spec": {"containers": [{"name": "a", "resources": {"requests": {"cpu": cpu, **more}}}]},
    }


class Bed:
    """An evaluator and an API server that holds one quota."""

    def __init__(self, stored: dict[str, Any], *, gates: str = ON, **rules: Any) -> None:
        self.server = FakeApi()
        self.server.put(ELASTIC_QUOTAS, stored)
        judge = admission(quotas=[stored], gates=gates)
        self.evaluator = QuotaEvaluator(
            self.server.client(), judge, parse_gates(gates), judge.tree, RetryRules(**rules)
        )

    async def ask(self, *pods: dict[str, Any], old: Any = None, dry: bool = False) -> list[Verdict]:
        operation = "CREATE" if old is None else "UPDATE"
        reviews = [request(one, old=old, operation=operation, dry_run=dry) for one in pods]
        return await asyncio.gather(*(settled(self.evaluator.validate(one)) for one in reviews))

    def messages(self, *pods: dict[str, Any], **options: Any) -> list[str]:
        return [verdict.message for verdict in asyncio.run(self.ask(*pods, **options))]

    @property
    def booked(self) -> Any:
        stored = self.server.get(ELASTIC_QUOTAS, "team", namespace="teams")
        text = stored["metadata"]["annotations"].get(f"{PREFIX}child-request")
        return json.loads(text) if text else None


def test_pods_that_come_together_book_what_fits() -> None:
    bed = Bed(quota())
    messages = bed.messages(pod("4"), pod("4"), pod("4"), pod("2"))
    assert messages == [
        "",
        "",
        "exceeded quota: teams/team, requested: cpu=4, used: cpu=8, limited: cpu=10",
        "",
    ]
    assert bed.booked == {"cpu": "10"}
    assert [method for method, _, _ in bed.server.writes] == ["PATCH"] * 3


def test_a_quota_that_nobody_books_on_is_not_remembered() -> None:
    bed = Bed(quota())
    bed.messages(pod(), pod(), pod(name="gone"))
    assert not bed.evaluator._locks


def test_a_refusal_lists_what_is_exceeded() -> None:
    bed = Bed(quota(child_request={"cpu": "7"}))
    assert bed.messages(pod("4", memory="11Gi")) == [
        "exceeded quota: teams/team, requested: cpu=4,memory=11Gi, used: cpu=7,memory=0, "
        "limited: cpu=10,memory=10Gi"
    ]


def test_what_was_booked_before_counts() -> None:
    bed = Bed(quota(child_request={"cpu": "7", "memory": "1Gi"}))
    assert bed.messages(pod("3", memory="2Gi")) == [""]
    assert bed.booked == {"cpu": "10", "memory": "3Gi"}
    assert "used: cpu=10" in bed.messages(pod("100m"))[0]


def test_what_ended_since_our_last_booking_is_seen_before_a_refusal() -> None:
    bed = Bed(quota())
    assert bed.messages(pod("10")) == [""]
    # The scheduler rewrites the sum.
    bed.server.put(ELASTIC_QUOTAS, quota(child_request={"cpu": "1"}))
    assert bed.messages(pod("9")) == [""]
    assert bed.booked == {"cpu": "10"}


def test_a_booking_is_retried_after_a_conflict() -> None:
    bed = Bed(quota())
    assert bed.messages(pod("1")) == [""]
    bed.server.put(ELASTIC_QUOTAS, quota(child_request={"cpu": "5"}))
    assert bed.messages(pod("2")) == [""]
    assert bed.booked == {"cpu": "7"}


@pytest.mark.parametrize(("retries", "writes"), [(0, 4), (3, 4), (5, 6)])
def test_too_many_writers_refuse_a_pod(retries: int, writes: int) -> None:
    bed = Bed(quota(), max_retries=retries)
    bed.server.refuse[PATH] = 409
    (verdict,) = asyncio.run(bed.ask(pod("1")))
    assert (verdict.code, verdict.allowed) == (500, False)
    assert "teams/team: too many writers" in verdict.message
    assert len(bed.server.writes) == writes


def test_pauses_between_attempts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr("cluster.webhook.quota_evaluation.asyncio.sleep", noted)
    bed = Bed(quota(), max_retries=20, jitter_seconds=0.4, max_total_jitter_seconds=1.0)
    bed.server.refuse[PATH] = 409
    bed.messages(pod("1"))
    assert all(0.2 <= pause <= 0.4 for pause in pauses)
    assert 0.6 < sum(pauses) <= 1.0


@pytest.mark.parametrize("code", [403, 500])
def test_a_quota_that_cannot_be_written_refuses_a_pod(code: int) -> None:
    bed = Bed(quota())
    bed.server.refuse[PATH] = code
    (verdict,) = asyncio.run(bed.ask(pod("1")))
    assert verdict.code == 500
    assert verdict.message.startswith(f"Pod default/web: elastic quota team: {PATH}: {code}")
    assert len(bed.server.writes) == 1


def test_an_api_server_that_does_not_answer_refuses_a_pod_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.webhook.quota_evaluation._PATIENCE_SECONDS", 0.05)
    bed = Bed(quota())

    async def never(*_: Any) -> Any:
        await asyncio.Event().wait()

    bed.server.handle = never  # type: ignore[method-assign, assignment]
    (verdict,) = asyncio.run(bed.ask(pod("1")))
    assert (verdict.code, verdict.message) == (
        500,
        "Pod default/web: elastic quota evaluation timed out",
    )


def test_a_dry_run_is_evaluated_and_books_nothing() -> None:
    bed = Bed(quota())
    assert bed.messages(pod("1"), dry=True) == [""]
    assert "exceeded quota" in bed.messages(pod("11"), dry=True)[0]
    assert bed.server.writes == []


@pytest.mark.parametrize(
    ("plain", "gates", "booked"),
    [
        (pod("1"), "", None),
        (pod("1", name="koordinator-default-quota"), ON, None),
        (pod("1", name="koordinator-root-quota"), ON, None),
        (pod("1", name="koordinator-system-quota"), ON, None),
        (pod("1", name=""), ON, None),
        (pod("0"), ON, None),
        ({**pod("1"), "spec": {"containers": []}}, ON, None),
        # Renamed first, and only where both gates are on.
        (pod("1", annotation="cpu:x"), ON, {"cpu": "1"}),
        (
            pod("1", annotation="cpu:x"),
            f"{ON},ElasticQuotaEvaluationTransformPod=true,ReplaceResourcesTransformer=true",
            None,
        ),
        (
            pod("1", annotation="cpu:x"),
            f"{ON},ElasticQuotaEvaluationTransformPod=true",
            {"cpu": "1"},
        ),
        (pod("1", annotation="cpu:x"), f"{ON},ReplaceResourcesTransformer=true", {"cpu": "1"}),
        (
            pod("1", **{"example.com/m": "2Gi"}, annotation="example.com/m:memory,cpu:"),
            f"{ON},ElasticQuotaEvaluationTransformPod=true,ReplaceResourcesTransformer=true",
            {"memory": "2Gi"},
        ),
    ],
)
def test_what_a_pod_books(plain: dict[str, Any], gates: str, booked: Any) -> None:
    bed = Bed(quota(), gates=gates)
    assert bed.messages(plain) == [""]
    assert bed.booked == booked


def test_a_review_with_dry_run_false_books() -> None:
    bed = Bed(quota())
    asked = request(pod("1"), dry_run=False)
    assert asyncio.run(settled(bed.evaluator.validate(asked))).allowed
    assert bed.booked == {"cpu": "1"}


def test_a_quota_that_was_just_written_is_not_read_again() -> None:
    bed = Bed(quota())
    methods: list[str] = []
    handle = bed.server.handle

    async def noted(method: str, path: str, data: bytes | None) -> dict[str, Any]:
        methods.append(method)
        return await handle(method, path, data)

    bed.server.handle = noted  # type: ignore[method-assign]
    assert bed.messages(pod("1"), pod("1"), pod("1")) == ["", "", ""]
    assert methods == ["GET", "PATCH", "PATCH", "PATCH"]


def test_an_unknown_quota_refuses_a_pod() -> None:
    bed = Bed(quota())
    assert bed.messages(pod("1", name="gone")) == [
        "Pod default/web: elastic quota gone not found",
    ]


@pytest.mark.parametrize(
    ("gates", "old", "booked"),
    [
        (ON, pod("1", name="other"), None),
        (f"{ON},EnableQuotaAdmissionOnUpdate=true", pod("1", name="other"), {"cpu": "1"}),
        (f"{ON},EnableQuotaAdmissionOnUpdate=true", pod("1"), None),
    ],
)
def test_an_update_books_where_the_quota_changed(gates: str, old: Any, booked: Any) -> None:
    bed = Bed(quota(), gates=gates)
    assert bed.messages(pod("1"), old=old) == [""]
    assert bed.booked == booked


def test_a_pod_that_is_refused_books_nothing() -> None:
    bed = Bed(quota())
    odd = pod("1")
    odd["metadata"]["labels"]["koordinator.sh/qosClass"] = "LSR"
    assert "does not go with priority class" in bed.messages(odd)[0]
    sub = request(pod("1"), sub_resource="resize")
    assert asyncio.run(settled(bed.evaluator.validate(sub))).allowed
    deleted = request(pod("1"), operation="DELETE")
    assert asyncio.run(settled(bed.evaluator.validate(deleted))).allowed
    assert bed.server.writes == []


# --- defaults of a quota -----------------------------------------------------------------------


def defaulted(plain: dict[str, Any], *stored: dict[str, Any]) -> Any:
    tree = QuotaTree([convert(one, ElasticQuota) for one in stored])
    pods = filled(PODS, Pod)
    metrics = ManagerMetrics()
    judge = QuotaAdmission(
        lambda: tree, pods.index(by_quota), pods.index(unlabelled), parse_gates(""), metrics
    )
    verdict = judge.mutate(request(plain, kind="ElasticQuota", resource="elasticquotas"))
    if not verdict.allowed:
        return verdict.message
    shown = "".join(metrics.registry.slices())
    return patched(plain, verdict), "elasticquota_name=" in shown


WEIGHT = f"{PREFIX}shared-weight"
PARENT = f"{PREFIX}parent"
TREE = f"{PREFIX}tree-id"


def test_a_new_quota_hangs_below_the_root_with_its_maximum_as_weight() -> None:
    got, counted = defaulted(quota())
    assert got["metadata"]["labels"] == {PARENT: "koordinator-root-quota"}
    weight = json.loads(got["metadata"]["annotations"][WEIGHT])
    assert weight == {"cpu": "10", "memory": "10Gi"}
    assert counted


@pytest.mark.parametrize(
    ("given", "weight", "counted"),
    [
        ({"cpu": "3", "memory": "1Gi"}, {"cpu": "3", "memory": "1Gi"}, False),
        ({"cpu": "3"}, {"cpu": "3", "memory": "10Gi"}, True),
        ({"cpu": "3", "gpu": "1"}, {"cpu": "3", "memory": "10Gi"}, True),
        ({}, {"cpu": "10", "memory": "10Gi"}, True),
    ],
)
def test_a_weight_has_the_keys_of_the_maximum(given: Any, weight: Any, counted: bool) -> None:
    got, was_counted = defaulted(quota(shared_weight=given))
    assert json.loads(got["metadata"]["annotations"][WEIGHT]) == weight
    assert was_counted is counted


def test_a_child_inherits_its_parents_tree() -> None:
    above = quota("above")
    above["metadata"]["labels"] = {TREE: "7"}
    child = quota("child")
    child["metadata"]["labels"] = {PARENT: "above"}
    assert defaulted(child, above)[0]["metadata"]["labels"] == {PARENT: "above", TREE: "7"}
    child["metadata"]["labels"] = {PARENT: "above", TREE: "8"}
    assert defaulted(child, above)[0]["metadata"]["labels"] == {PARENT: "above", TREE: "8"}
    del above["metadata"]["labels"]
    child["metadata"]["labels"] = {PARENT: "above"}
    assert defaulted(child, above)[0]["metadata"]["labels"] == {PARENT: "above"}
    assert defaulted(child) == "ElasticQuota teams/child: parent above does not exist"
    # With a tree of its own it may come before its parent; the rules are checked later.
    child["metadata"]["labels"] = {PARENT: "above", TREE: "8"}
    assert defaulted(child)[0]["metadata"]["labels"] == {PARENT: "above", TREE: "8"}


def test_the_root_and_other_requests_are_left_alone() -> None:
    root = quota("koordinator-root-quota")
    assert defaulted(root)[0] == root
    judge = Bed(quota())
    assert judge.booked is None
    pods = filled(PODS, Pod)
    webhook = QuotaAdmission(
        lambda: QuotaTree(()),
        pods.index(by_quota),
        pods.index(unlabelled),
        parse_gates(""),
        ManagerMetrics(),
    )
    for asked in (
        request(quota(), resource="elasticquotas", operation="UPDATE"),
        request(quota(), resource="pods"),
    ):
        assert webhook.mutate(asked).patch == ()
    status = request(quota(), resource="elasticquotas", sub_resource="status", operation="DELETE")
    assert webhook.validate(status).allowed


def test_an_api_error_names_its_request() -> None:
    assert str(ApiError(status=500, reason="r", message="m", what="w")) == "w: 500 r: m"
