"""Which nodes stand with which plugin and reason."""

from __future__ import annotations

import numpy as np
import pytest

from apis.schedule_explanation import NodeFailedDetail
from cluster.scheduler.plugins.contract import Reason
from cluster.scheduler.reasons.diagnosis import Diagnosis, diagnose
from cluster.scheduler.reasons.failed_nodes import failed_nodes
from cluster.scheduler.tables.shapes import Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.reasons.masks import GivenReasons, mask

_POD = Shapes().of(make_pod("a"))
_FIRST = GivenReasons("First", (Reason("cold", resolvable=False), Reason("wet")))
_SECOND = GivenReasons("Second", (Reason("loud"),))


def _tables(count: int) -> Tables:
    tables = Tables()
    for number in range(count):
        tables.upsert_node(make_node(f"n{number:03}"))
    return tables


def test_a_node_stands_with_all_reasons_of_the_first_plugin_that_holds_it_back() -> None:
    tables = _tables(4)
    masks = ((_FIRST, mask(0b01, 0b11, 0, 0)), (_SECOND, mask(1, 0, 1, 0)))
    assert failed_nodes(_POD, tables, masks) == (
        NodeFailedDetail(
            failed_plugin="First",
            reason="cold",
            preempt_might_help=False,
            failed_nodes=("n000", "n001"),
        ),
        NodeFailedDetail(
            failed_plugin="First", reason="wet", preempt_might_help=True, failed_nodes=("n001",)
        ),
        NodeFailedDetail(
            failed_plugin="Second", reason="loud", preempt_might_help=True, failed_nodes=("n002",)
        ),
    )
    diagnosis = diagnose(_POD, tables, masks)
    assert diagnosis.counts == {"cold": 2, "wet": 1, "loud": 1}
    assert diagnosis.plugins == {"First", "Second"}
    # One reason that evictions cannot change is enough.
    assert diagnosis.resolvable.tolist() == [2]
    assert diagnosis.message == "0/4 nodes are available: 1 loud, 1 wet, 2 cold."


def test_deleted_nodes_stand_nowhere() -> None:
    tables = _tables(2)
    tables.delete_node("n000")
    masks = ((_FIRST, mask(0b10, 0b10)),)
    assert failed_nodes(_POD, tables, masks) == (
        NodeFailedDetail(
            failed_plugin="First", reason="wet", preempt_might_help=True, failed_nodes=("n001",)
        ),
    )
    assert diagnose(_POD, tables, masks).counts == {"wet": 1}


def test_nodes_that_could_not_give_the_exact_allocation_count_with_their_reason() -> None:
    tables = _tables(3)
    gone = {
        0: ("Devices", Reason("no minor")),
        2: ("Devices", Reason("torn", resolvable=False)),
    }
    diagnosis = diagnose(_POD, tables, ((_FIRST, mask(0, 0b10, 0)),), refused_rows=gone)
    assert diagnosis.counts == {"no minor": 1, "torn": 1, "wet": 1}
    assert diagnosis.plugins == {"First", "Devices"}
    assert diagnosis.resolvable.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("count", "reason"), [(100, "cold"), (101, "cold (100 of 101 nodes named)")]
)
def test_of_one_reason_the_first_hundred_nodes_are_named(count: int, reason: str) -> None:
    masks = ((_FIRST, np.ones(count, dtype=np.int64)),)
    (found,) = failed_nodes(_POD, _tables(count), masks)
    assert found.reason == reason
    assert found.failed_nodes == tuple(f"n{number:03}" for number in range(100))


@pytest.mark.parametrize(
    ("diagnosis", "message"),
    [
        (Diagnosis(0), "no nodes available to schedule pods."),
        (Diagnosis(2, refusal="no quota"), "0/2 nodes are available: no quota."),
        (Diagnosis(2, refusal="No quota is left."), "0/2 nodes are available: No quota is left."),
        (
            Diagnosis(2, {"cold": 2}, remarks=("preemption: none.", "Later.")),
            "0/2 nodes are available: 2 cold. preemption: none. Later.",
        ),
    ],
)
def test_the_message_is_that_of_kube_scheduler(diagnosis: Diagnosis, message: str) -> None:
    assert diagnosis.message == diagnosis.text == message
