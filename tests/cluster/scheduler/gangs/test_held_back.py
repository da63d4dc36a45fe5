"""A gang that something other than room holds back: what its members hold meanwhile, and when it
is tried again."""

from __future__ import annotations

import json

import pytest

from cluster.scheduler.binding.placement import Refused, Why
from cluster.scheduler.cycle.waiting import QueueState
from tests.cluster.scheduler.beds.core import Bed

_CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: koord-scheduler
  plugins:
    preEnqueue: {enabled: [{name: Coscheduling}]}
    preFilter: {enabled: [{name: ElasticQuota}]}
    filter: {enabled: [{name: LoadAwareScheduling}]}
    reserve: {enabled: [{name: ElasticQuota}]}
    permit: {enabled: [{name: Coscheduling}]}
  pluginConfig:
  - name: Coscheduling
    args: {awareNetworkTopology: true}
"""
_RACK = json.dumps({"gatherStrategy": [{"layer": "rack", "strategy": "MustGather"}]})
_QUOTA = "quota.scheduling.koordinator.sh/name"


def _rack(nodes: int) -> Bed:
    """Return nodes of 4 CPUs in one rack."""
    bed = Bed(_CONFIGURATION)
    bed.network("rack")
    for number in range(nodes):
        bed.node(f"n{number}", 4, rack="s1")
    return bed


@pytest.mark.parametrize("gather", [_RACK, ""], ids=["gathered", "anywhere"])
def test_a_gang_beyond_its_quota_is_refused_as_a_whole_until_the_quota_grows(gather: str) -> None:
    bed = _rack(4)
    quota = {
        "metadata": {"name": "q", "namespace": "default", "uid": "q"},
        "spec": {"min": {"cpu": "4"}, "max": {"cpu": "8"}},
    }
    bed.show(bed.core.quotas, "ADDED", quota)
    names = ["g0", "g1", "g2"]
    for name in names:
        bed.pod(name, 4, 10, gang=3, gather=gather)
        bed.pods[name]["metadata"]["labels"][_QUOTA] = "q"
        bed.change(name)
    bed.run()
    for _ in range(3):
        bed.run(15.0)
        # Neither nodes nor the quota are kept from others.
        assert {bed.core.queue.state_of(f"u-{name}") for name in names} == {
            QueueState.UNSCHEDULABLE
        }
        assert len(bed.core.tables.bookings) == 0
    assert "Insufficient quotas" in bed.messages["g2"]
    quota["spec"] = {"min": {"cpu": "4"}, "max": {"cpu": "12"}}
    bed.show(bed.core.quotas, "MODIFIED", quota)
    bed.run(15.0)
    assert all(bed.node_of(name) for name in names)


def test_a_gang_that_a_trial_shows_not_to_fit_waits_for_what_took_pods_from_the_nodes() -> None:
    bed = _rack(1)
    reports = next(each for each in bed.core.caches if each.resource.kind == "NodeMetric")

    def report(kind: str, cpu: str) -> None:
        used = {"nodeUsage": {"resources": {"cpu": cpu, "memory": "0"}}}
        status = {"updateTime": "2027-01-15T08:00:00Z", "nodeMetric": used}
        bed.show(reports, kind, {"metadata": {"name": "n0"}, "status": status})

    # Each pod counts as 0.85 of 4 CPUs: the first passes the threshold of 65 %, and both do not.
    report("ADDED", "1200m")
    names = ["g0", "g1"]
    for name in names:
        bed.pod(name, 1, 10, gang=2, gather=_RACK)
    bed.run()
    bed.run(15.0)
    assert "desiredOfferSlot: 2, rack: s1 1" in bed.messages["g0"]
    report("MODIFIED", "0")
    bed.run()
    assert [bed.node_of(name) for name in names] == ["n0", "n0"]


@pytest.mark.parametrize("ends", ["deleted", "given away", "bound by another"])
def test_a_gang_is_tried_again_without_the_member_that_held_it_up(ends: str) -> None:
    bed = Bed()
    bed.node("n", 4)
    bed.pod("huge", 50, 0, gang=2)
    for name in ("a", "b"):
        bed.pod(name, 1, 0, gang=2)
    bed.run()
    bed.run(30.0)
    assert {bed.core.queue.state_of(f"u-{name}") for name in bed.pods} == {QueueState.UNSCHEDULABLE}
    assert "default/huge" in bed.messages["a"]
    if ends == "deleted":
        bed.gone("huge")
    elif ends == "given away":
        bed.pods["huge"]["spec"]["schedulerName"] = "another"
        bed.change("huge")
    else:
        bed.pods["huge"]["spec"]["nodeName"] = "n"
        bed.pods["huge"]["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "1"
        bed.change("huge")
    bed.run(15.0)
    assert [bed.node_of(name) for name in ("a", "b")] == ["n", "n"]


def test_members_that_are_too_few_without_the_one_that_held_them_up_say_so() -> None:
    bed = Bed()
    bed.node("n", 4)
    for name, cpu in (("huge", 50), ("a", 1)):
        bed.pod(name, cpu, 0, gang=2)
    bed.run()
    bed.gone("huge")
    bed.run(15.0)
    assert bed.core.queue.state_of("u-a") is QueueState.GATED
    assert "waits until gang default/g has at least 2 pods" in bed.messages["a"]


def test_members_whose_bindings_are_refused_say_why_each_once() -> None:
    """A thousand of them that said so of each other would write half a million statuses."""
    bed = Bed()
    bed.node("n", 40)
    names = [f"g{number}" for number in range(20)]
    for name in names:
        bed.pod(name, 1, 0, gang=len(names))
    assert not bed.core.schedule_for(10.0)
    assert len(bed.placements) == len(names)
    bed.events.clear()
    for placement in bed.placements:
        bed.core.attempts.bound(placement, Refused(Why.FORBIDDEN, f"no {placement.name}"))
    assert bed.messages == {name: f"no {name}" for name in names}
    assert len(bed.events) == len(names)
    assert not bed.core.tables.bookings
    bed.placements.clear()
    bed.run(15.0)
    assert all(bed.node_of(name) for name in names)


@pytest.mark.parametrize(("gather", "count"), [(_RACK, 3), ("", 0)])
def test_what_members_of_a_planned_gang_take_is_measured(gather: str, count: int) -> None:
    bed = _rack(3)
    for number in range(3):
        bed.pod(f"g{number}", 4, 10, gang=3, gather=gather)
    bed.run()
    assert all(bed.node_of(f"g{number}") for number in range(3))
    text = "".join(bed.core.metrics.registry.slices())
    name = "scheduler_batch_algorithm_by_pod_duration_seconds"
    assert f"# TYPE {name} histogram\n" in text
    assert (f"\n{name}_count {count}\n" in text) == bool(count)
