"""Random lives of a scheduler with an extender that answers late, refuses nodes, or fails.

Between the question and the answer anything may happen to the pod, the nodes and other pods.
"""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from cluster.scheduler.cycle.opinions import Opinion
from cluster.scheduler.plugins.contract import Reason
from tests.cluster.scheduler.beds.extender import Extender
from tests.cluster.scheduler.beds.lives import Lives


class ExtendedLives(Lives):
    def _start(self) -> None:
        super()._start()
        self.extender = Extender(asks_nodes="koord-scheduler")
        self.process.attempts.consultant = self.extender
        self.answers: deque[tuple[str, tuple[str, ...]]] = deque()
        """Pods, and the nodes that the extender was sent."""

    @rule()
    def look_and_send(self) -> None:
        """Most steps of a life would else be spent until the first question."""
        self._see_all()
        self.schedule(15.0)
        while self.extender.questions:
            self.send()

    @precondition(lambda self: self.extender.questions)
    @rule()
    def send(self) -> None:
        """The question leaves, with the nodes that are feasible at that moment."""
        uid = self.extender.questions.popleft()
        names = self.process.attempts.candidates(uid)
        if names is not None:
            self.answers.append((uid, names))

    @precondition(lambda self: self.answers)
    @rule(
        count=st.integers(1, 4),
        rejected=st.frozensets(st.sampled_from(["n0", "n1", "n2"])),
        best=st.sampled_from(["n0", "n1", "n2"]),
        fails=st.sampled_from([False, False, False, True]),
    )
    def answer_several(self, count: int, rejected: frozenset[str], best: str, fails: bool) -> None:
        for _ in range(min(count, len(self.answers))):
            self.answer(rejected, best, fails)

    def answer(self, rejected: frozenset[str], best: str, fails: bool) -> None:
        uid, names = self.answers.popleft()
        if fails:
            self.process.attempts.consulted(uid, None, "as the test wants it")
            return
        opinion = None
        if names:
            failed = {name: Reason("rejected") for name in names if name in rejected}
            opinion = Opinion(frozenset(names), failed, {best: 1000})
        before = set(self.process.tables.bookings)
        self.process.attempts.consulted(uid, opinion)
        for new in set(self.process.tables.bookings) - before:
            node = self.process.tables.bookings[new].node
            assert new == uid
            assert node in names
            assert node not in rejected

    def _settle(self) -> None:
        """Answer all questions, also those that follow from answers."""
        while self.extender.questions or self.answers:
            if self.extender.questions:
                self.send()
            else:
                self.answer(frozenset(), "n0", False)
            self.schedule(0.0)

    def teardown(self) -> None:
        for _ in range(12):
            self._see_all()
            self.schedule(400.0)
            self._settle()
            while self.binder.waiting:
                self.carry_out(None)
        # Nothing waits for an answer any more: the last looks find what is left as it is.
        self.process.attempts.consultant = None
        super().teardown()


TestExtendedLives = ExtendedLives.TestCase
TestExtendedLives.settings = settings(max_examples=20, stateful_step_count=50, deadline=None)
