"""Pods that extenders are asked about: what becomes of them when the answer comes, or does not."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.scheduler.cycle.opinions import Opinion
from cluster.scheduler.cycle.waiting import QueueState
from cluster.scheduler.plugins.contract import Reason
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from tests.cluster.scheduler.beds.core import Bed

_BOTH = frozenset({"n0", "n1"})


class _Consultant:
    """Extenders that are asked about every pod; the test answers for them."""

    def __init__(self, *, binds: bool = False) -> None:
        self.asked: list[str] = []
        self._binds = binds

    def concerns(self, pod: PodShape) -> bool:
        return True

    def binds(self, pod: PodShape) -> bool:
        return self._binds

    def ask(self, pod: PendingPod[PodShape]) -> None:
        self.asked.append(pod.uid)

    def preempts(self, pod: PodShape) -> bool:
        return False

    def ask_victims(self, pod: PendingPod[PodShape]) -> None:
        raise AssertionError


@pytest.fixture
def bed() -> Bed:
    """Two nodes, and a pod about which extenders are asked."""
    bed = Bed()
    bed.core.attempts.consultant = _Consultant()
    for name in ("n0", "n1"):
        bed.node(name, 4)
    bed.pod("p", 1, 0)
    assert not bed.core.schedule_for(1.0)
    return bed


def _state(bed: Bed) -> QueueState | None:
    return bed.core.queue.state_of("u-p")


def _attempts(bed: Bed, result: str) -> int:
    counted = bed.core.metrics.attempts.labels(result, "koord-scheduler")
    return int(counted.value)


def test_nothing_is_decided_before_the_answer(bed: Bed) -> None:
    attempts = bed.core.attempts
    assert isinstance(attempts.consultant, _Consultant)
    assert attempts.consultant.asked == ["u-p"]
    assert attempts.candidates("u-p") == ("n0", "n1")
    assert attempts.candidates("u-other") is None
    assert _state(bed) is QueueState.IN_FLIGHT
    assert not bed.placements
    attempts.consulted("u-other", Opinion(_BOTH))
    assert not bed.placements


@pytest.mark.parametrize("node", sorted(_BOTH))
@pytest.mark.parametrize("delegated", [False, True])
def test_an_extender_s_rejections_and_scores_choose_the_node(
    bed: Bed, node: str, delegated: bool
) -> None:
    (other,) = _BOTH - {node}
    for number, opinion in enumerate(
        (Opinion(_BOTH, failed={other: Reason("no")}), Opinion(_BOTH, scores={node: 1000}))
    ):
        bed.core.attempts.consultant = _Consultant(binds=delegated)
        bed.pod(f"p{number}", 1, 0)
        bed.core.schedule_for(1.0)
        bed.core.attempts.consulted(f"u-p{number}", opinion)
        placement = bed.placements[-1]
        assert (placement.name, placement.node) == (f"p{number}", node)
        assert placement.delegated is delegated
    # The answer was taken: another one has no effect.
    bed.core.attempts.consulted("u-p1", Opinion(_BOTH))
    assert len(bed.placements) == 2


def test_a_node_that_no_extender_was_asked_about_is_not_taken(bed: Bed) -> None:
    bed.core.attempts.consulted("u-p", Opinion(frozenset({"n0"}), {"n0": Reason("it is odd")}))
    assert not bed.placements
    assert "1 it is odd" in bed.messages["p"]
    assert "1 node(s) that extenders were not asked about yet" in bed.messages["p"]
    # Any change may help, as what an extender looks at is not known.
    assert _state(bed) is QueueState.UNSCHEDULABLE
    bed.node("n2", 4)
    assert _state(bed) is QueueState.BACKOFF


def test_a_pod_that_extenders_cannot_be_asked_about_is_tried_again(bed: Bed) -> None:
    bed.core.attempts.consulted("u-p", None, "extender e: it is away")
    assert bed.messages["p"] == "extender e: it is away"
    assert _state(bed) is QueueState.BACKOFF
    assert (_attempts(bed, "error"), _attempts(bed, "unschedulable")) == (1, 0)
    assert not bed.placements
    bed.now += 2
    bed.core.schedule_for(1.0)
    bed.core.attempts.consulted("u-p", Opinion(_BOTH))
    assert len(bed.placements) == 1


def test_a_fault_after_the_answer_is_shown_and_the_pod_tried_again(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("as the test wants it")

    with monkeypatch.context() as patch:
        patch.setattr(bed.core.scheduling, "schedule", fails)
        bed.core.attempts.consulted("u-p", Opinion(_BOTH))
    assert bed.core.attempts.faults.count == 1
    assert bed.messages["p"] == "RuntimeError: as the test wants it"
    assert _attempts(bed, "error") == 1
    assert _state(bed) is QueueState.BACKOFF


def test_an_answer_about_a_pod_that_is_gone_changes_nothing(bed: Bed) -> None:
    bed.gone("p")
    assert bed.core.attempts.candidates("u-p") is None
    bed.core.attempts.consulted("u-p", Opinion(_BOTH))
    assert not bed.placements
    assert not bed.core.tables.bookings
