"""Preemption inside a quota: which pods go for a pod that its quota, or no node, takes."""

from __future__ import annotations

from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.cycle.post_filter import NotFound
from cluster.scheduler.cycle.scheduling import Placed, Scheduling, Unplaced
from cluster.scheduler.cycle.victims import Candidate
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.quotas.making import PREFIX, make_quota


def _configuration(arguments: str = "{}") -> str:
    return f"""
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: s
  plugins:
    preFilter: {{enabled: [{{name: ElasticQuota}}]}}
    postFilter: {{enabled: [{{name: ElasticQuota}}], disabled: [{{name: "*"}}]}}
  pluginConfig: [{{name: ElasticQuota, args: {arguments}}}]
"""


class _Cluster:
    def __init__(self, arguments: str = "{}", *, nodes: int = 2, cpu: str = "10") -> None:
        self.tables = Tables()
        plugins = make_plugins(
            read_configuration(_configuration(arguments), obj="test"), self.tables
        )
        assert plugins.quotas is not None
        self.quotas = plugins.quotas
        self.scheduling = Scheduling(
            self.tables, plugins.profiles, seed=1, quota_preemption=plugins.quota_preemption
        )
        for number in range(nodes):
            self.tables.upsert_node(make_node(f"n{number}", allocatable={"cpu": cpu}))
        self.shapes = Shapes()

    def quota(self, name: str, least: str, most: str) -> None:
        amounts = {"cpu": most, "memory": "1Ti"}
        assert self.quotas.set_quota(make_quota(name, {"cpu": least}, amounts)) == ""

    def _pod(
        self, name: str, quota: str, cpu: str, priority: int, labels: dict[str, str]
    ) -> SchedulingPod:
        named = {PREFIX + "name": quota} if quota else {}
        return make_pod(
            name,
            requests={"cpu": cpu},
            labels=named | labels,
            priority=priority,
            schedulerName="s",
        )

    def place(
        self, name: str, quota: str, cpu: str, priority: int, node: str, **labels: str
    ) -> None:
        shape = self.shapes.of(self._pod(name, quota, cpu, priority, labels))
        self.tables.place(Booking(f"default/{name}", name, shape, node))

    def preempt(self, quota: str, cpu: str, priority: int) -> Candidate | NotFound:
        shape = self.shapes.of(self._pod("new", quota, cpu, priority, {}))
        self.quotas.want("new", shape)
        outcome = self.scheduling.schedule(
            key="default/new", uid="new", shape=shape, profile="s", now=0.0
        )
        assert isinstance(outcome, Unplaced)
        pod = PendingPod("default/new", "new", priority, shape, created=0.0)
        before = self.quotas.quotas[quota].all.used.copy() if quota else None
        found = self.scheduling.post_filter(pod, outcome.diagnosis, lambda booking: False)
        assert before is None or self.quotas.quotas[quota].all.used == before
        if isinstance(found, Candidate):
            for victim in found.victims:
                self.tables.remove(victim.uid)
            again = self.scheduling.schedule(
                key="default/new", uid="new", shape=shape, profile="s", now=0.0
            )
            assert isinstance(again, Placed)
        return found


def _victims(found: Candidate | NotFound) -> list[str]:
    assert isinstance(found, Candidate)
    return sorted(victim.uid for victim in found.victims)


def test_the_least_important_pods_of_the_quota_go_wherever_they_are() -> None:
    cluster = _Cluster()
    cluster.quota("a", "0", "6")
    cluster.quota("b", "0", "6")
    cluster.place("low", "a", "2", 1, "n0")
    cluster.place("lower", "a", "2", 0, "n1")
    cluster.place("high", "a", "2", 9, "n0")
    cluster.place("other", "b", "4", 0, "n0")
    assert _victims(cluster.preempt("a", "2", 5)) == ["lower"]


def test_several_nodes_may_give_victims_for_one_quota() -> None:
    cluster = _Cluster()
    cluster.quota("a", "0", "6")
    cluster.place("one", "a", "3", 0, "n0")
    cluster.place("two", "a", "3", 0, "n1")
    assert _victims(cluster.preempt("a", "6", 5)) == ["one", "two"]


def test_a_pod_that_turns_out_not_to_be_in_the_way_stays() -> None:
    cluster = _Cluster()
    cluster.quota("a", "0", "6")
    cluster.place("small", "a", "1", 0, "n0")
    cluster.place("large", "a", "5", 1, "n1")
    assert _victims(cluster.preempt("a", "5", 5)) == ["large"]


def test_pods_of_other_quotas_and_more_important_ones_stay() -> None:
    cluster = _Cluster()
    cluster.quota("a", "0", "6")
    cluster.quota("b", "0", "6")
    cluster.place("high", "a", "5", 9, "n0")
    cluster.place("other", "b", "5", 0, "n1")
    found = cluster.preempt("a", "3", 5)
    assert isinstance(found, NotFound)
    assert "same quota" in found.remark


def test_a_pod_whose_victims_end_waits_for_them() -> None:
    cluster = _Cluster()
    cluster.quota("a", "0", "6")
    cluster.place("low", "a", "6", 0, "n0")
    shape = cluster.shapes.of(cluster._pod("new", "a", "3", 5, {}))
    pod = PendingPod("default/new", "new", 5, shape, created=0.0)
    outcome = cluster.scheduling.schedule(
        key="default/new", uid="new", shape=shape, profile="s", now=0.0
    )
    assert isinstance(outcome, Unplaced)
    # Victims on its own node are looked at first.
    cluster.scheduling.nominator.nominate(pod, "n1")
    found = cluster.scheduling.post_filter(pod, outcome.diagnosis, lambda booking: True)
    assert found == NotFound(
        "preemption: not eligible due to terminating pods of the same quota.", waits=True
    )


def test_pods_that_are_not_preemptible_stay() -> None:
    for label in (PREFIX + "preemptible", "scheduling.koordinator.sh/disable-preemptible"):
        cluster = _Cluster()
        cluster.quota("a", "5", "6")
        value = "false" if label.startswith(PREFIX) else "true"
        cluster.place("firm", "a", "5", 0, "n0", **{label: value})
        assert isinstance(cluster.preempt("a", "3", 5), NotFound)


def test_one_node_is_freed_where_no_node_takes_the_pod() -> None:
    cluster = _Cluster()
    cluster.quota("a", "0", "20")
    cluster.quota("b", "0", "20")
    cluster.place("mine", "a", "6", 0, "n0")
    cluster.place("theirs", "b", "6", 0, "n1")
    found = cluster.preempt("a", "8", 5)
    assert _victims(found) == ["mine"]


def test_a_node_is_freed_for_pod_and_quota_together() -> None:
    cluster = _Cluster()
    cluster.quota("a", "0", "12")
    cluster.place("mine", "a", "6", 0, "n0")
    cluster.place("also", "a", "6", 1, "n1")
    assert _victims(cluster.preempt("a", "6", 5)) == ["mine"]
    assert len(cluster.tables.bookings) == 2


def test_pods_of_the_default_quota_preempt_each_other_only_where_they_may() -> None:
    for arguments, may in (("{}", False), ("{disableDefaultQuotaPreemption: false}", True)):
        cluster = _Cluster(arguments, nodes=1)
        cluster.place("low", "", "6", 0, "n0")
        assert isinstance(cluster.preempt("", "6", 5), Candidate) is may
