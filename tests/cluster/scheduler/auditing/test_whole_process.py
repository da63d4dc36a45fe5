"""What the auditor learns of a scheduler's decisions."""

from __future__ import annotations

import re

import pytest

from cluster.scheduler.auditing.permit import AuditedPermit
from cluster.scheduler.binding.placement import Refused, Why
from cluster.scheduler.configuration.auditing import AuditorSettings
from cluster.scheduler.cycle.permit import Permit
from tests.cluster.scheduler.beds.core import GANG_PREEMPTION, Bed


def _bed(*configuration: str) -> Bed:
    """Return two nodes of 4 CPUs with two pods of 2 each, of priority 1."""
    bed = Bed(*configuration, auditor=AuditorSettings())
    for node in ("a", "b"):
        bed.node(node, 4)
        for number in range(2):
            bed.pod(f"{node}{number}", 2, 1, node=node)
    return bed


def _text(bed: Bed) -> str:
    return "".join(bed.core.metrics.registry.slices())


def _counts(bed: Bed) -> dict[str, dict[str, int]]:
    """Return outcome -> event -> how often it happened, over all workloads."""
    found: dict[str, dict[str, int]] = {}
    line = r'before_outcome_sum\{.*event_type="(\w+)",outcome="(\w+)"\} (\d+)'
    for event, outcome, count in re.findall(line, _text(bed)):
        found.setdefault(outcome, {})[event] = int(count)
    return found


def _sum(bed: Bed, name: str) -> tuple[int, float]:
    """Return count and sum of a histogram."""
    found = dict(re.findall(rf"scheduler_workload_auditor_{name}_(\w+)\{{.*\}} (\S+)", _text(bed)))
    return int(found.get("count", 0)), float(found.get("sum", 0))


def _followed(bed: Bed) -> tuple[int, int]:
    """Return how many workloads and victims are followed."""
    auditor = bed.core.auditor
    assert auditor is not None
    return len(auditor), auditor.victims


def test_without_the_flag_there_is_no_auditor() -> None:
    bed = Bed()
    assert type(bed.core.permit) is Permit
    bed.node("n", 4)
    bed.pod("p", 1, 1)
    bed.run()
    assert "workload_auditor" not in _text(bed)


def test_a_preemption_from_the_nomination_to_the_binding() -> None:
    bed = _bed()
    bed.pod("new", 3, 10)
    bed.run()
    node = bed.nominated["new"]
    bed.gone(f"{node}0")
    bed.run(30.0)
    bed.gone(f"{node}1")
    bed.run(20.0)
    assert bed.node_of("new") == node
    assert _counts(bed) == {
        "scheduled": {
            "create": 1,
            "preemptNominated": 1,
            "preemptVictimDeleting": 1,
            "victimAllDeleted": 1,
            "scheduled": 1,
        }
    }
    assert _sum(bed, "preemption_to_victim_deleted_seconds") == (1, 30.0)
    assert _sum(bed, "preemption_victim_deleting_retries") == (1, 1.0)
    assert _sum(bed, "victim_reschedule_duration_seconds") == (1, 20.0)
    assert _sum(bed, "preemption_cycle_interrupted_seconds") == (0, 0.0)
    assert _followed(bed) == (0, 0)


def test_a_victim_that_is_not_evicted_invalidates_the_preemption() -> None:
    bed = _bed()
    bed.pod("new", 3, 10)
    bed.run()
    (first, *_) = bed.victims
    bed.core.attempts.preemptions.evicted(first, Refused(Why.CONFLICT, "a budget"))
    bed.run(30.0)
    bed.gone("new")
    assert _counts(bed)["deleted"]["preemptNominated"] == 2
    assert "scheduler_workload_auditor_repeated_preemptions_total" in _text(bed)
    assert 'preemption_invalidations_total{priority=""} 1\n' in _text(bed)
    assert _followed(bed) == (0, 0)


@pytest.mark.parametrize(
    ("policy", "event"),
    [("Never", "scheduleFailure"), ("PreemptLowerPriority", "preemptFailure")],
)
def test_a_failure_is_of_the_search_if_there_was_one(policy: str, event: str) -> None:
    bed = _bed()
    bed.pod("huge", 64, 10, preemptionPolicy=policy)
    bed.run()
    bed.gone("huge")
    assert _counts(bed) == {"deleted": {"create": 1, event: 1}}


def test_a_binding_that_the_api_server_refuses_is_a_failure() -> None:
    bed = Bed(auditor=AuditorSettings())
    bed.node("n", 4)
    bed.pod("p", 1, 1)
    assert not bed.core.schedule_for(10.0)
    bed.core.attempts.bound(bed.placements.pop(), Refused(Why.CONFLICT, "it changed"))
    bed.run(30.0)
    assert bed.node_of("p") == "n"
    assert _counts(bed) == {"scheduled": {"create": 1, "scheduleFailure": 1, "scheduled": 1}}


def test_scheduling_gates() -> None:
    bed = Bed(auditor=AuditorSettings())
    bed.node("n", 4)
    bed.pod("p", 1, 1, schedulingGates=[{"name": "wait"}])
    bed.run(30.0)
    bed.change("p")
    bed.pods["p"]["spec"]["schedulingGates"] = []
    bed.change("p")
    bed.run(5.0)
    assert _counts(bed) == {
        "scheduled": {"create": 1, "gatedByQueueAdmission": 1, "admissionPassed": 1, "scheduled": 1}
    }
    assert _sum(bed, "scheduling_event_interval_seconds") == (1, 5.0)


def test_a_gang_is_one_workload_through_its_preemption() -> None:
    bed = _bed(GANG_PREEMPTION)
    for name in ("g0", "g1"):
        bed.pod(name, 4, 10, gang=2)
    bed.run()
    assert len(bed.victims) == 4
    assert _followed(bed) == (1, 4)
    for victim in bed.evicted():
        bed.gone(victim)
        bed.run(30.0)
    assert {bed.node_of("g0"), bed.node_of("g1")} == {"a", "b"}
    (counts,) = _counts(bed).items()
    assert counts[0] == "gangScheduled"
    assert counts[1]["create"] == counts[1]["gangMinMemberSatisfied"] == 1
    assert counts[1]["preemptNominated"] == counts[1]["victimAllDeleted"] == 1
    assert counts[1]["scheduled"] == 1
    count, seconds = _sum(bed, "preemption_to_victim_deleted_seconds")
    assert (count, seconds) == (1, 90.0)
    # What is bound is followed no more, and a pod that comes to it later is none of this.
    bed.pod("g2", 1, 10, gang=2)
    assert _followed(bed) == (0, 0)
    for name in ("g0", "g1", "g2"):
        bed.gone(name)
    permit = bed.core.permit
    assert isinstance(permit, AuditedPermit)
    assert not permit._key_of
    assert not permit._sharing


def test_a_gang_of_which_too_few_have_nodes_was_attempted_as_a_whole() -> None:
    bed, unaudited = Bed(auditor=AuditorSettings()), Bed()
    for each in (unaudited, bed):
        each.node("n", 4)
        each.pod("g0", 1, 10, gang=2)
        each.pod("g1", 1, 10, gang=2, schedulingGates=[{"name": "wait"}])
        each.run()
    assert bed.placements == []
    assert bed.messages == unaudited.messages
    for name in ("g0", "g1"):
        bed.gone(name)
    counts = _counts(bed)["gangDeleted"]
    assert counts["gangAllPodsAlreadyAttempted"] >= 1
    assert counts["gatedByQueueAdmission"] == 1
    assert _followed(bed) == (0, 0)


def test_a_pod_that_joins_a_gang_is_followed_with_it() -> None:
    bed = Bed(auditor=AuditorSettings())
    bed.pod("p", 1, 1)
    annotations = {
        "gang.scheduling.koordinator.sh/name": "g",
        "gang.scheduling.koordinator.sh/min-available": "2",
    }
    bed.pods["p"]["metadata"]["annotations"] = annotations
    bed.change("p")
    assert _counts(bed) == {"deleted": {"create": 1}}
    assert _followed(bed) == (1, 0)
    bed.pods["p"]["metadata"]["annotations"] = {}
    bed.change("p")
    assert _counts(bed)["gangDeleted"] == {"create": 1}
    assert _followed(bed) == (1, 0)


def test_gates_of_a_member_hold_its_gang() -> None:
    bed = Bed(auditor=AuditorSettings())
    bed.node("n", 4)
    gates = [{"name": "wait"}]
    bed.pod("g0", 1, 10, gang=2)
    bed.pod("g1", 1, 10, gang=2, schedulingGates=gates)
    bed.change("g1")
    bed.pods["g1"]["spec"]["schedulingGates"] = []
    bed.change("g1")
    bed.run(5.0)
    assert bed.node_of("g1") == "n"
    assert _counts(bed) == {
        "gangScheduled": {
            "create": 1,
            "gatedByQueueAdmission": 1,
            "admissionPassed": 1,
            "gangMinMemberSatisfied": 1,
            "scheduled": 1,
        }
    }


def test_a_gang_may_become_complete_by_its_pod_group() -> None:
    bed = Bed(auditor=AuditorSettings())
    cache = next(each for each in bed.core.caches if each.resource.kind == "PodGroup")

    def pod_group(minimum: int) -> None:
        metadata = {"name": "g", "namespace": "default", "uid": "u-g"}
        bed.show(cache, "MODIFIED", {"metadata": metadata, "spec": {"minMember": minimum}})

    pod_group(3)
    for name in ("g0", "g1"):
        bed.pod(name, 1, 10)
        bed.pods[name]["metadata"]["labels"]["pod-group.scheduling.sigs.k8s.io"] = "g"
        bed.change(name)
    for minimum in (4, 2, 2, 1):
        pod_group(minimum)
    for name in ("g0", "g1"):
        bed.gone(name)
    assert _followed(bed) == (1, 0)
    bed.show(cache, "DELETED", {"metadata": {"name": "g", "namespace": "default"}})
    assert _followed(bed) == (0, 0)
    assert _counts(bed)["gangDeleted"] == {"create": 1, "gangMinMemberSatisfied": 1}


def test_gangs_that_are_bound_together_are_one_workload_until_the_last_is_gone() -> None:
    bed = Bed(auditor=AuditorSettings())
    bed.node("n", 1)
    groups = '["default/a","default/b"]'
    for name in ("a", "b"):
        bed.pod(name, 1, 10)
        bed.pods[name]["metadata"]["annotations"] = {
            "gang.scheduling.koordinator.sh/name": name,
            "gang.scheduling.koordinator.sh/min-available": "1",
            "gang.scheduling.koordinator.sh/groups": groups,
        }
        bed.change(name)
    assert _followed(bed) == (1, 0)
    bed.run(1.0)
    bed.gone("a")
    assert _followed(bed) == (1, 0)
    bed.gone("b")
    assert _followed(bed) == (0, 0)
    counts = _counts(bed)["gangDeleted"]
    assert counts["create"] == 1
    # A member found no node, so its failure is the gangs' and no attempt of all counts beside it.
    assert "gangAllPodsAlreadyAttempted" not in counts
