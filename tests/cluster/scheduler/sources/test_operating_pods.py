"""Pods that are reservations themselves: who may use them, and when."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from apis.keys import ANNOTATION_RESERVE_POD
from apis.scheduling_pod import SchedulingPod, decode_scheduling_pod
from cluster.scheduler.sources.operating_pods import OperatingPods
from cluster.scheduler.tables.reservations.facts import AllocatePolicy
from cluster.scheduler.tables.shapes import Shapes
from cluster.scheduler.tables.tables import Tables

OWNERS = "scheduling.koordinator.sh/reservation-owners"
MODE = {"scheduling.koordinator.sh/operating-mode": "Reservation"}
READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
WEB = '[{"labelSelector":{"matchLabels":{"app":"web"}}}]'


def pod(
    *,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    status: dict[str, Any] | None = None,
    **metadata: Any,
) -> SchedulingPod:
    return decode_scheduling_pod(
        msgspec.json.encode(
            {
                "metadata": {
                    "name": "p",
                    "namespace": "default",
                    "uid": "u",
                    "labels": MODE if labels is None else labels,
                    "annotations": {OWNERS: WEB} if annotations is None else annotations,
                    **metadata,
                },
                "spec": {
                    "nodeName": "n",
                    "containers": [{"name": "c", "resources": {"requests": {"cpu": "2"}}}],
                },
                "status": READY if status is None else status,
            }
        )
    )


class Bed:
    def __init__(self) -> None:
        self.table = Tables().reservations
        self.pods = OperatingPods(self.table)
        self._shapes = Shapes()

    def follow(self, pod: SchedulingPod) -> bool:
        return self.pods.follow(pod, self._shapes.of(pod).requests)


def test_a_pod_that_runs_and_is_ready_may_be_used_by_one_owner() -> None:
    bed = Bed()
    assert bed.follow(pod())
    facts = bed.table.get("u")
    assert facts is not None
    assert (facts.name, facts.available, facts.once) == ("p", True, True)
    assert facts.policy is AllocatePolicy.ALIGNED
    assert facts.allocatable == {"cpu": 2000}
    assert facts.owners[0].label_selector is not None
    assert not bed.follow(pod())
    assert bed.pods.forget("u")
    assert bed.table.get("u") is None


@pytest.mark.parametrize(
    ("given", "available", "unschedulable"),
    [
        ({"status": {"phase": "Pending"}}, False, False),
        ({"status": {"phase": "Running"}}, False, False),
        ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, True, True),
    ],
)
def test_only_while_it_runs_and_stays(
    given: dict[str, Any], available: bool, unschedulable: bool
) -> None:
    bed = Bed()
    bed.follow(pod(**given))
    facts = bed.table.get("u")
    assert facts is not None
    assert (facts.available, facts.unschedulable) == (available, unschedulable)


def test_a_label_that_goes_ends_it() -> None:
    bed = Bed()
    bed.follow(pod())
    assert bed.follow(pod(labels={}))
    assert bed.table.get("u") is None


def test_a_reserve_pod_is_followed_as_a_reservation_alone() -> None:
    bed = Bed()
    assert not bed.follow(pod(annotations={ANNOTATION_RESERVE_POD: "true", OWNERS: WEB}))
    assert bed.table.get("u") is None


@pytest.mark.parametrize(
    "text",
    ["{}", "[", "[1]", "[" * 5000, '[{"labelSelector":{"matchLabels":{"a b":"c"}}}]'],
)
def test_owners_that_cannot_be_read_are_named_and_cost_the_pod_alone(text: str) -> None:
    bed = Bed()
    assert not bed.follow(pod(annotations={OWNERS: text}))
    assert bed.table.get("u") is None
    assert OWNERS in bed.pods.problems["u"]
    assert bed.follow(pod())
    assert not bed.pods.problems


@pytest.mark.parametrize("ends", ["gone", "no reservation any more"])
def test_problems_of_a_pod_end_with_it(ends: str) -> None:
    bed = Bed()
    bed.follow(pod(annotations={OWNERS: "["}))
    assert bed.pods.problems
    if ends == "gone":
        bed.pods.forget("u")
    else:
        bed.follow(pod(labels={}))
    assert not bed.pods.problems


@pytest.mark.parametrize(("text", "order"), [(None, 0), ("", 0), ("7", 7), ("-7", -7)])
def test_a_label_orders_such_pods(text: str | None, order: int) -> None:
    bed = Bed()
    label = {} if text is None else {"scheduling.koordinator.sh/reservation-order": text}
    assert bed.follow(pod(labels=MODE | label))
    facts = bed.table.get("u")
    assert facts is not None
    assert (facts.order, facts.labels) == (order, MODE | label)


def test_an_order_that_cannot_be_read_is_named_with_its_pod() -> None:
    bed = Bed()
    bed.follow(pod(labels=MODE | {"scheduling.koordinator.sh/reservation-order": "first"}))
    assert bed.pods.problems["u"].startswith("Pod default/p: ")
    assert bed.table.get("u") is None
