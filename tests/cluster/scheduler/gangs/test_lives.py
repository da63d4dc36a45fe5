"""Random lives with PodGroups, gathered gangs and gangs that preempt.

PodGroups and the network's topology come, change and go; members are deleted while they wait, are
bound or make room; evictions are late or refused; the process is killed in between.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from cluster.scheduler.binding.placement import Refused, Why
from cluster.scheduler.binding.victims import Victim
from cluster.scheduler.configuration.reading import read_configuration
from tests.cluster.scheduler.beds.lives import Lives

_CONFIGURATION = read_configuration(
    """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: koord-scheduler
  plugins:
    preEnqueue: {enabled: [{name: Coscheduling}]}
    postFilter: {enabled: [{name: Coscheduling}]}
    permit: {enabled: [{name: Coscheduling}]}
  pluginConfig:
  - name: Coscheduling
    args: {enablePreemption: true, awareNetworkTopology: true}
- schedulerName: other
""",
    obj="test",
)
_ONE_NODE = {"gatherStrategy": [{"layer": "NodeTopologyLayer", "strategy": "MustGather"}]}
_IMPORTANT = 5


class _Evictor:
    """Keeps evictions until the machine decides what becomes of them."""

    def __init__(self) -> None:
        self.waiting: deque[Victim] = deque()

    def submit(self, victim: Victim, controller: str) -> None:
        self.waiting.append(victim)


class GangLives(Lives):
    configuration = _CONFIGURATION

    def __init__(self) -> None:
        self.group: dict[str, Any] | None = None
        self.topology: dict[str, Any] | None = None
        super().__init__()
        self.lay(True)
        self.define(2, False)
        # A cluster that is nearly full, so that gangs have to make room.
        for number in range(6, 10):
            self.create(number, 1500, "koord-scheduler", gated=False)
        self._see_all()
        self.schedule(0.0)
        while self.binder.waiting:
            self.carry_out(None)

    def _start(self) -> None:
        super()._start()
        self.evictor = _Evictor()
        self.process.evictor = self.evictor  # type: ignore[assignment]

    def _labels(self, number: int) -> dict[str, str]:
        return {} if number % 3 and number < 12 else {"pod-group.scheduling.sigs.k8s.io": "pg"}

    def _held_back(self, pod: dict[str, Any]) -> bool:
        return bool(pod["metadata"]["labels"]) or len(self.process.scheduling.nominator) > 0

    # --- what users do -------------------------------------------------------------------------

    @rule(
        name=st.integers(10, 13),
        milli=st.sampled_from([300, 1500, 2500]),
        gang=st.sampled_from(["a", "a", "b"]),
    )
    def create_important(self, name: int, milli: int, gang: str) -> None:
        if f"p{name}" in self.pods:
            return
        self.create(name, milli, "koord-scheduler", False, gang)
        self.late_pods.pop()
        pod = self.pods[f"p{name}"]
        pod["spec"]["priority"] = _IMPORTANT
        self.late_pods.append(self._line("ADDED", pod))

    @rule(name=st.integers(10, 13))
    def delete_important(self, name: int) -> None:
        self.delete(name)

    @rule(least=st.sampled_from([0, 2, 2, 3]), gathered=st.booleans())
    def define(self, least: int, gathered: bool) -> None:
        annotations = {}
        if gathered:
            key = "gang.scheduling.koordinator.sh/network-topology-spec"
            annotations[key] = json.dumps(_ONE_NODE)
        kind = "ADDED" if self.group is None else "MODIFIED"
        metadata = {"name": "pg", "namespace": "default", "annotations": annotations}
        self.group = {"metadata": metadata, "spec": {"minMember": least}}
        self.process.pod_groups.take(self._line(kind, self.group))

    @precondition(lambda self: self.group is not None)
    @rule()
    def undefine(self) -> None:
        assert self.group is not None
        self.process.pod_groups.take(self._line("DELETED", self.group))
        self.group = None

    @rule(usable=st.sampled_from([True, True, False]))
    def lay(self, usable: bool) -> None:
        """Give the network a topology, or one that cannot be used."""
        parent = "ClusterTopologyLayer" if usable else "Nowhere"
        layer = {"topologyLayer": "NodeTopologyLayer", "parentTopologyLayer": parent}
        kind = "ADDED" if self.topology is None else "MODIFIED"
        self.topology = {
            "metadata": {"name": "default"},
            "spec": {"networkTopologySpec": [layer]},
        }
        self.process.networks.take(self._line(kind, self.topology))

    # --- evictions -----------------------------------------------------------------------------

    @precondition(lambda self: self.evictor.waiting)
    @rule(refused=st.sampled_from([False, False, True]))
    def evict(self, refused: bool) -> None:
        victim = self.evictor.waiting.popleft()
        pod = self.pods.get(victim.name)
        if refused:
            self.process.attempts.preemptions.evicted(
                victim, Refused(Why.FORBIDDEN, "as the test wants it")
            )
            return
        if pod is not None and pod["metadata"]["uid"] == victim.uid:
            assert pod["spec"].get("priority", 0) < _IMPORTANT
            del self.pods[victim.name]
            self.late_pods.append(self._line("DELETED", pod))
        self.process.attempts.preemptions.evicted(victim, None)

    def _see_all(self) -> None:
        while self.evictor.waiting:
            self.evict(False)
        super()._see_all()

    def _after_restart(self) -> None:
        if self.group is not None:
            self.process.pod_groups.take(self._line("ADDED", self.group))
        if self.topology is not None:
            self.process.networks.take(self._line("ADDED", self.topology))

    def teardown(self) -> None:
        super().teardown()
        assert len(self.process.attempts.evictions) == 0


GangLives.TestCase.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)
TestGangLives = GangLives.TestCase
