"""Which running pods a Reservation may take over, among many nodes."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from apis.keys import ANNOTATION_RESERVE_POD
from apis.meta import LabelSelector
from apis.scheduling import ReservationOwner
from cluster.scheduler.plugins.contract import Given
from cluster.scheduler.plugins.reservations import pre_allocation
from cluster.scheduler.plugins.reservations.pre_allocation import PreAllocating
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.reservations.pre_allocation import (
    ANNOTATION,
    PreAllocation,
    text_of,
)
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node, make_pod

_NODES = 20


def _cluster(draw: Random, shapes: Shapes) -> Tables:
    tables = Tables()
    for number in range(_NODES):
        name = f"n{number}"
        tables.upsert_node(make_node(name, allocatable={"cpu": "8", "pods": "110"}))
        for at in range(draw.randrange(4)):
            uid = f"{name}-{at}"
            labels = {"app": draw.choice("abc")}
            pod = make_pod(uid, requests={"cpu": draw.choice("124")}, labels=labels)
            terminating = draw.random() < 0.2
            tables.place(Booking(uid, uid, shapes.of(pod), name, terminating=terminating))
    return tables


def _reserve_pod(shapes: Shapes, *, multiple: bool, required: bool) -> PodShape:
    owner = ReservationOwner(label_selector=LabelSelector(match_labels={"app": "a"}))
    demand = PreAllocation(name="r", owners=(owner,), multiple=multiple, required=required)
    annotations = {ANNOTATION_RESERVE_POD: "true", ANNOTATION: text_of(demand)}
    return shapes.of(make_pod("r", requests={"cpu": "4"}, annotations=annotations))


def _columns(given: Given | None) -> list[list[object]]:
    return [] if given is None else [each.tolist() for each in (given.rows, given.amounts)]


@pytest.mark.parametrize("multiple", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_nodes_without_a_pod_of_use_need_not_be_looked_at(
    seed: int, multiple: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = Shapes()
    tables = _cluster(Random(seed), shapes)
    plugin = PreAllocating()
    every = slice(0, _NODES)
    some = np.array([17, 3, 4, 11], dtype=np.intp)
    answers = []
    for few in (0, _NODES):
        monkeypatch.setattr(pre_allocation, "_FEW_ROWS", few)
        offered = _reserve_pod(shapes, multiple=multiple, required=False)
        required = _reserve_pod(shapes, multiple=multiple, required=True)
        answers.append(
            (
                _columns(plugin.given(offered, tables, every)),
                _columns(plugin.given(offered, tables, some)),
                plugin.filter(required, tables, every).tolist(),
                plugin.filter(required, tables, some).tolist(),
            )
        )
    assert answers[0] == answers[1]
    rows = set(answers[0][0][0])
    assert 0 < len(rows) < _NODES
    assert {row for row, held in enumerate(answers[0][2]) if not held} == rows
