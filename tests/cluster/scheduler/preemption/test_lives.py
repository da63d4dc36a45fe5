"""Random lives with pods of several priorities: evictions that are late, refused, or lost.

Whatever happens, only less important pods are evicted, nothing is bound beyond what a node has, and
in the end no pod waits that eviction could have helped, and no nomination is left over.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from cluster.scheduler.binding.placement import Refused, Why
from cluster.scheduler.binding.statuses import PodStatus
from cluster.scheduler.binding.victims import PREEMPTED, Victim
from cluster.scheduler.cycle.proposals import Proposals
from tests.cluster.scheduler.beds.extender import Extender
from tests.cluster.scheduler.beds.lives import NODES, Lives, milli

_LOWEST = -(2**31)


class PreemptionLives(Lives):
    def _start(self) -> None:
        super()._start()
        self.victims: deque[Victim] = deque()
        self.process.evictor = self  # type: ignore[assignment]
        self.process.statuses = self  # type: ignore[assignment]

    # --- what the scheduler writes -------------------------------------------------------------

    def submit(self, what: Victim | PodStatus, *_: Any) -> None:
        """Take a victim, or the status of a pod."""
        if isinstance(what, PodStatus):
            pod = self.pods.get(what.name)
            same = pod is not None and pod["metadata"]["uid"] == what.uid
            if pod is not None and same and what.nominated_node is not None:
                pod["status"] = {"nominatedNodeName": what.nominated_node}
                self.late_pods.append(self._line("MODIFIED", pod))
            return
        booking = self.process.tables.bookings[what.uid]
        nominated = self.process.scheduling.nominator.at_least(booking.node, _LOWEST)
        assert any(pod.priority > booking.shape.priority for pod in nominated)
        assert not any(victim.uid == what.uid for victim in self.victims)
        self.victims.append(what)

    def forget(self, *_: Any) -> None: ...

    # --- users and the API server --------------------------------------------------------------

    @rule(
        name=st.integers(0, 9),
        milli=st.sampled_from([0, 500, 1500, 2500, 9000]),
        scheduler=st.sampled_from(["koord-scheduler", "koord-scheduler", "other", "nobody"]),
        gated=st.sampled_from([False, False, False, True]),
        gang=st.sampled_from(["", "", "a", "b"]),
        priority=st.sampled_from([0, 0, 5, 9]),
    )
    def create(
        self,
        name: int,
        milli: int,
        scheduler: str,
        gated: bool,
        gang: str = "",
        priority: int = 0,
    ) -> None:
        self.priority = priority
        super().create(name, milli, scheduler, gated, gang)

    @precondition(lambda self: self.victims)
    @rule(fails=st.sampled_from([None, None, None, Why.FORBIDDEN, Why.FAILING]))
    def carry_out_eviction(self, fails: Why | None) -> None:
        victim = self.victims.popleft()
        pod = self.pods.get(victim.name)
        if fails is not None:
            refused = Refused(fails, "as the test wants it")
            self.process.attempts.preemptions.evicted(victim, refused)
            return
        if pod is not None and pod["metadata"]["uid"] == victim.uid:
            condition = {"type": "DisruptionTarget", "status": "True", "reason": PREEMPTED}
            pod["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
            pod["status"] = {**pod.get("status", {}), "conditions": [condition]}
            self.late_pods.append(self._line("MODIFIED", pod))
        self.process.attempts.preemptions.evicted(victim, None)

    @rule()
    def end_what_is_deleted(self) -> None:
        for name, pod in list(self.pods.items()):
            if "deletionTimestamp" in pod["metadata"]:
                del self.pods[name]
                self.late_pods.append(self._line("DELETED", pod))

    # --- the end -------------------------------------------------------------------------------

    def _see_all(self) -> None:
        while self.victims:
            self.carry_out_eviction(None)
        self.end_what_is_deleted()
        super()._see_all()

    def teardown(self) -> None:
        super().teardown()
        assert len(self.process.attempts.evictions) == 0
        nominator = self.process.scheduling.nominator
        for node in nominator.nodes():
            # Only gangs wait that are not complete, or that preemption did not help as a whole.
            assert all(pod.gang for pod in nominator.at_least(node, _LOWEST))
        for pod in self.pods.values():
            spec = pod["spec"]
            alone = not pod["metadata"]["annotations"] or spec["schedulerName"] == "other"
            if spec.get("nodeName") or spec["schedulingGates"] or not alone:
                continue
            if spec["schedulerName"] == "nobody":
                continue
            for name in self.nodes:
                cpu, most = NODES[name]
                stay = [each for each in self._on(name) if _priority(each) >= _priority(pod)]
                full = len(stay) >= most
                assert full or sum(map(milli, stay)) + milli(pod) > cpu, (pod, name)


def _priority(pod: dict[str, Any]) -> int:
    found: int = pod["spec"]["priority"]
    return found


PreemptionLives.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestPreemptionLives = PreemptionLives.TestCase


class ExtendedPreemptionLives(PreemptionLives):
    """An extender agrees to nodes, to some of them, or fails; late, and on what is old by then."""

    def _start(self) -> None:
        super()._start()
        self.extender = Extender(asks_victims="koord-scheduler")
        self.process.attempts.consultant = self.extender
        self.answers: deque[tuple[str, Proposals]] = deque()

    @rule(milli=st.sampled_from([500, 1500, 2500]), priority=st.sampled_from([5, 9]))
    def fill_and_add_an_important_pod(self, milli: int, priority: int) -> None:
        """Most steps of a life would else be spent until the first question."""
        for number, size in enumerate((2500, 2500, 2500, 1500, 1500, 500, 500)):
            self.create(number, size, "koord-scheduler", False)
        self._see_all()
        self.schedule(15.0)
        while self.binder.waiting:
            self.carry_out(None)
        self.create(9, milli, "koord-scheduler", False, "", priority)
        self._see_all()
        self.schedule(15.0)
        while self.extender.questions:
            self.send()

    @precondition(lambda self: self.extender.questions)
    @rule()
    def send(self) -> None:
        uid = self.extender.questions.popleft()
        proposed = self.process.attempts.preemptions.proposed(uid)
        if proposed is not None:
            assert proposed
            self.answers.append((uid, proposed))

    @precondition(lambda self: self.answers)
    @rule(
        dropped=st.frozensets(st.sampled_from(["n0", "n1", "n2"])),
        fails=st.sampled_from([False, False, False, True]),
    )
    def answer_about_victims(self, dropped: frozenset[str], fails: bool) -> None:
        uid, proposed = self.answers.popleft()
        before = len(self.victims)
        if fails:
            self.process.attempts.preemptions.agreed(uid, None, "as the test wants it")
            assert len(self.victims) == before
            return
        agreed = {node: each for node, each in proposed.items() if node not in dropped}
        self.process.attempts.preemptions.agreed(uid, agreed)
        evicted = {victim.uid for victim in list(self.victims)[before:]}
        nodes = [set(each.victims) for each in agreed.values()]
        assert not evicted or any(evicted <= victims for victims in nodes)

    def teardown(self) -> None:
        for _ in range(12):
            self._see_all()
            self.schedule(400.0)
            while self.extender.questions or self.answers:
                if self.extender.questions:
                    self.send()
                else:
                    self.answer_about_victims(frozenset(), False)
                self.schedule(0.0)
            while self.binder.waiting:
                self.carry_out(None)
        # Nothing waits for an answer any more: the last looks find what is left as it is.
        assert not self.process.attempts.preemptions._needing
        self.process.attempts.consultant = None
        super().teardown()


ExtendedPreemptionLives.TestCase.settings = settings(
    max_examples=20, stateful_step_count=50, deadline=None
)
TestExtendedPreemptionLives = ExtendedPreemptionLives.TestCase
