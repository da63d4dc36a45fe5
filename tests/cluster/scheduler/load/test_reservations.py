"""Reservations count as load that is to come, once, and not against the pods that may use them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from apis.keys import ANNOTATION_RESERVE_POD
from apis.meta import LabelSelector
from apis.scheduling import ReservationOwner
from cluster.scheduler.plugins.reservations.restoring import Restoring
from cluster.scheduler.tables.load import LoadSettings
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.reservations.pre_allocation import (
    ANNOTATION,
    PreAllocation,
    text_of,
)
from cluster.scheduler.tables.reservations.table import Slots
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.load.making import NOW, LoadNode, make_metric
from tests.cluster.scheduler.making import make_node

_EXCEEDED = ["node(s) cpu usage exceed threshold"]
_OWNER = {"labels": {"app": "a"}}
_IGNORES = {"labels": {"scheduling.koordinator.sh/reservation-ignored": "true"}}


def _cpu(node: LoadNode, column: str = "delta") -> int:
    return int(getattr(node.load, column)[node.row, 0])


def test_a_reservation_counts_with_what_its_pods_do_not_count_with() -> None:
    node = LoadNode()
    node.reserve("r", {"cpu": "10"})
    node.load.set_report(node.row, make_metric("1"))
    assert [_cpu(node, c) for c in ("delta", "prod_delta", "estimated")] == [8500, 8500, 8500]
    node.place("p", requests={"cpu": "4"}, reservation="r")
    assert [_cpu(node, c) for c in ("delta", "prod_delta", "estimated")] == [8500, 8500, 8500]
    # The report shows the pod: its usage counts, and of the reservation what is left.
    pods = {"p": ("3", "koord-prod")}
    node.load.set_report(node.row, make_metric("4", pods=pods))
    node.place("p", start=NOW - 3600, requests={"cpu": "4"}, reservation="r")
    assert [_cpu(node, c) for c in ("delta", "prod_delta", "estimated")] == [5100, 5100, 8500]
    node.place("q", requests={"cpu": "20"}, reservation="r")
    assert [_cpu(node, c) for c in ("delta", "estimated")] == [17000, 20400]
    node.tables.remove("q")
    node.tables.remove("p")
    assert _cpu(node) == 8500
    node.tables.remove("uid-r")
    assert [_cpu(node, c) for c in ("delta", "prod_delta", "estimated")] == [0, 0, 0]


def test_a_reservation_for_batch_pods_is_no_load_of_prod_pods() -> None:
    node = LoadNode()
    node.reserve("r", {"kubernetes.io/batch-cpu": "4000"}, priority=5500)
    assert [_cpu(node, c) for c in ("delta", "prod_delta", "estimated")] == [3400, 0, 3400]


@pytest.mark.parametrize("prod", [False, True])
def test_room_that_is_reserved_is_there_for_its_owners_alone(prod: bool) -> None:
    node = LoadNode(LoadSettings(prod_thresholds={"cpu": 65} if prod else {}))
    node.reserve("r", {"cpu": "20"})  # 17,000 m of 20,800 that pass
    node.load.set_report(node.row, make_metric("0" if prod else "3"))
    five: dict[str, Any] = {"requests": {"cpu": "5"}}
    assert node.reasons(**five) == _EXCEEDED
    assert node.reasons(**five, **_OWNER) == []
    assert node.reasons(requests={"cpu": "20"}, **_OWNER) == []
    # Beyond what is reserved, an owner counts as every pod does.
    assert node.reasons(requests={"cpu": "26"}, **_OWNER) == _EXCEEDED
    # A pod that ignores reservations takes the room of all of them.
    assert node.reasons(requests={"cpu": "20"}, **_IGNORES) == []
    node.plugin = replace(node.plugin, restored=None)
    assert node.reasons(**five, **_OWNER) == _EXCEEDED


def test_the_reservation_that_gives_most_counts_and_not_all_together() -> None:
    node = LoadNode()
    node.reserve("r", {"cpu": "10"})
    node.reserve("s", {"cpu": "8"})
    node.load.set_report(node.row, make_metric("4"))  # with 15,300 m reserved
    assert node.reasons(requests={"cpu": "10"}, **_OWNER) == []
    assert node.reasons(requests={"cpu": "11"}, **_OWNER) == []  # 850 more: 20,150
    assert node.reasons(requests={"cpu": "12"}, **_OWNER) == _EXCEEDED  # 21,000


@pytest.mark.parametrize("state", ["reported", "expired", "none"])
def test_an_owner_is_scored_as_if_the_reservation_had_its_load_already(state: str) -> None:
    node = LoadNode()
    node.reserve("r", {"cpu": "16", "memory": "64Gi"})
    if state != "none":
        node.load.set_report(node.row, make_metric("2", "4Gi"))
    if state == "expired":
        node.load.advance(NOW + 3600)
    four: dict[str, Any] = {"requests": {"cpu": "4", "memory": "16Gi"}}
    other, owner = node.score(**four), node.score(**four, **_OWNER)
    node.tables.remove("uid-r")
    node.place("load", requests={"cpu": "16", "memory": "64Gi"})
    assert node.score(**four) == other
    used_cpu, used_gib = (2 + 13.6, 4 + 44.8) if state == "reported" else (13.6, 44.8)
    parts = [int((32 - used_cpu) * 100 / 32), int((128 - used_gib) * 100 / 128)]
    assert owner == sum(parts) // 2 > other


def _pre_allocating(requests: dict[str, str], priority: int = 9500) -> dict[str, Any]:
    """Return a reserve pod that takes over pods with the label app: a."""
    owner = ReservationOwner(label_selector=LabelSelector(match_labels={"app": "a"}))
    demand = PreAllocation(name="r", owners=(owner,))
    annotations = {ANNOTATION_RESERVE_POD: "true", ANNOTATION: text_of(demand)}
    return {"requests": requests, "annotations": annotations, "priority": priority}


@pytest.mark.parametrize("prod", [False, True])
def test_a_reservation_that_takes_a_pod_over_adds_only_what_the_pod_does_not_count_with(
    prod: bool,
) -> None:
    node = LoadNode(LoadSettings(prod_thresholds={"cpu": 65} if prod else {}))
    node.place("p", start=NOW - 3600, requests={"cpu": "20"}, labels={"app": "a"})
    node.load.set_report(node.row, make_metric("18", pods={"p": ("18", "koord-prod")}))
    # 18,000 m are in use and 20,800 m pass; the pod's estimate is 17,000 m.
    assert node.reasons(requests={"cpu": "20"}) == _EXCEEDED
    assert node.reasons(**_pre_allocating({"cpu": "20"})) == []
    assert node.reasons(**_pre_allocating({"cpu": "23"})) == []  # 2,550 more
    assert node.reasons(**_pre_allocating({"cpu": "24"})) == _EXCEEDED  # 3,400 more
    scores = [node.score(**_pre_allocating({"cpu": cpu})) for cpu in ("20", "24")]
    assert scores == [(43 + 100) // 2, (33 + 100) // 2]
    shape = node.shape(**_pre_allocating({"cpu": "24"}))
    rows = np.array([node.row])
    assert (
        node.plugin.filter_row(shape, node.tables, node.row)
        == (node.plugin.filter(shape, node.tables, rows)[0])
    )
    assert node.plugin.score_row(shape, node.tables, node.row) == scores[1]
    # It counts in full where it takes no pod over.
    other = replace(node.plugin, restored=None)
    mine, node.plugin = node.plugin, other
    assert node.reasons(**_pre_allocating({"cpu": "20"})) == _EXCEEDED
    node.plugin = mine
    node.place("p", start=NOW - 3600, requests={"cpu": "20"}, labels={"app": "b"})
    assert node.reasons(**_pre_allocating({"cpu": "20"})) == _EXCEEDED


def test_a_reservation_that_was_deleted_gives_nothing_to_the_pods_that_wait_for_it() -> None:
    node = LoadNode()
    node.reserve("r", {"cpu": "20"})
    node.load.set_report(node.row, make_metric("3"))
    assert node.reasons(requests={"cpu": "5"}, **_OWNER) == []
    node.tables.reservations.delete("uid-r")
    assert node.reasons(requests={"cpu": "5"}, **_OWNER) == _EXCEEDED


@dataclass(frozen=True)
class _Counted(Restoring):
    """Notes each question for slots and for the Reservations of one node."""

    asked: list[str] = field(default_factory=list)

    def slots(self, pod: PodShape, tables: Tables, rows: Rows) -> Slots:
        self.asked.append("slots")
        return super().slots(pod, tables, rows)

    def on(self, pod: PodShape, tables: Tables, row: int) -> tuple[str, ...]:
        self.asked.append("on")
        return super().on(pod, tables, row)


@pytest.mark.parametrize("labels", [_OWNER, _IGNORES])
def test_all_rows_are_worked_out_with_one_question_and_as_each_row_alone(
    labels: dict[str, Any],
) -> None:
    node = LoadNode()
    amounts = {"cpu": "32", "memory": "128Gi"}
    rows = [node.tables.upsert_node(make_node(f"n{n}", allocatable=amounts)) for n in range(4)]
    for number, row in enumerate(rows):
        node.load.set_report(row, make_metric("12"))
        for name in range(number):
            node.reserve(f"r{number}-{name}", {"cpu": "4"}, on=f"n{number}")
    restored = _Counted()
    node.plugin = replace(node.plugin, restored=restored)
    pod = node.shape(requests={"cpu": "4"}, **labels)
    every = slice(0, len(node.tables.nodes))
    masks, scores = (f(pod, node.tables, every) for f in (node.plugin.filter, node.plugin.score))
    assert restored.asked == ["slots", "slots"]
    few = np.array(rows[::-1])
    assert (node.plugin.filter(pod, node.tables, few) == masks[few]).all()
    assert (node.plugin.score(pod, node.tables, few) == scores[few]).all()
    for row in rows:
        assert node.plugin.filter_row(pod, node.tables, row) == masks[row]
        assert node.plugin.score_row(pod, node.tables, row) == scores[row]
    # Owners have one Reservation's room, and three reserve too much here; others have all of it.
    assert (masks[rows] != 0).tolist() == [False, False, False, labels is _OWNER]
    assert len(set(scores[rows].tolist())) == (3 if labels is _OWNER else 1)
