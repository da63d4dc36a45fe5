"""A runtime's list of sandboxes and containers (Synchronize), taken within the runtime's deadline.

The list may come in slices, and the runtime allows one time-out (2 s) for all of them together. A
reply that is late costs the registration, so the work is a row of small steps: convert a message,
give the list to the handler, decide a container. Steps run until the time is up; then the reply
goes out with the updates made so far, and the other steps run afterwards, a few at a time between
the runtime's requests. The reconciler repairs containers that were decided too late for the reply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from apis.qos import KubeQoS
from hooks.decision import Decision
from hooks.observed import Container, Sandbox
from hooks.subject import make_pod
from nri_plugin import replies, subjects
from nri_plugin.capabilities import RuntimeProfile
from nri_plugin.handler import Handler
from protos.nri.v1alpha1 import nri_pb2 as nri

MOST_LISTED: Final = 200_000
"""Sandboxes and containers that one list may hold, over all its slices: ten times the largest list
that was measured. It bounds memory (some 20 KB each), not time."""

_CONVERT_WITHIN: Final = 0.25
"""The part of the time-out in which the list must be converted, so that the handler gets it before
the reply. That is one step, half as long as the conversion: 0.25 leaves twice what it needs.
Converting 10,000 containers takes 0.2 s of a free CPU (measured)."""

_ANSWER_WITHIN: Final = 0.5
"""The part of the time-out that decisions may use. The rest is for what is not seen from here: the
way of up to 20 MB to this process before its first step, encoding, and the way back."""

_TURN_S: Final = 0.002
"""How long steps after the reply run before the event loop may serve a request. At twice the value
a request waits twice as long, and the list is taken no sooner."""

_NO_POD: Final = make_pod(
    namespace="", name="", uid="", labels={}, annotations={}, kube_qos=KubeQoS.GUARANTEED
)


class Listing:
    """One list, from its first slice to the last step.

    report(container, problems): gets the decided values that no update can carry.
    most_updates: how many updates the reply may ask for.
    """

    def __init__(
        self,
        handler: Handler,
        profile: RuntimeProfile,
        *,
        report: Callable[[Container, tuple[str, ...]], None],
        most_updates: int,
        clock: Callable[[], float],
    ) -> None:
        self._handler = handler
        self._profile = profile
        self._report = report
        self._most_updates = most_updates
        self._clock = clock
        self._taken_at = handler.now()
        self._pods: list[nri.PodSandbox] = []
        self._containers: list[nri.Container] = []
        self._started: float | None = None
        self._deadline = 0.0
        self._answered = False
        self._limit = 0.0
        self._steps = self._work()
        self.response = nri.SynchronizeResponse()
        self.left_out = 0
        """Decided containers whose update is not in the reply."""

    def add(self, request: nri.SynchronizeRequest, started: float, deadline: float) -> bool:
        """Take a slice that arrived at `started`; False when the list becomes too long.

        The earliest deadline of all slices counts, and the time is counted from the first slice.
        """
        if self._started is None:
            self._started, self._deadline = started, deadline
        self._deadline = min(self._deadline, deadline)
        self._pods.extend(request.pods)
        self._containers.extend(request.containers)
        return len(self._pods) + len(self._containers) <= MOST_LISTED

    @property
    def container_ids(self) -> set[str]:
        return {message.id for message in self._containers}

    def answer(self) -> bool:
        """Fill `response` while there is time; return whether all steps are done."""
        started = self._started or 0.0
        self._limit = started + (self._deadline - started) * _CONVERT_WITHIN
        done = self._run()
        self._answered = True
        return done

    def resume(self) -> bool:
        """Run steps for a short while, after the reply; return whether all are done."""
        self._limit = self._clock() + _TURN_S
        return self._run()

    def _run(self) -> bool:
        return all(self._clock() <= self._limit for _ in self._steps)

    def _work(self) -> Iterator[None]:
        sandboxes: list[Sandbox] = []
        for pod_message in self._pods:
            sandboxes.append(subjects.sandbox(pod_message))
            yield
        pods = {each.subject.id: each.subject.pod for each in sandboxes}
        listed: dict[str, tuple[nri.Container, Container]] = {}
        for message in self._containers:
            pod = pods.get(message.pod_sandbox_id, _NO_POD)
            container = subjects.container_of_pod(pod, message, self._profile.kind)
            listed[message.id] = message, container
            yield
        decisions = self._handler.synchronize(
            sandboxes,
            [container for _, container in listed.values()],
            taken_at=self._taken_at if self._answered else None,
        )
        if not self._answered:
            started = self._started or 0.0
            self._limit = started + (self._deadline - started) * _ANSWER_WITHIN
        for container_id, decision in decisions:
            if container_id in listed:
                self._decided(*listed[container_id], decision)
            yield

    def _decided(self, message: nri.Container, container: Container, decision: Decision) -> None:
        if lacks := replies.lacks_at_creation(message, decision):
            self._handler.unrepairable(container, lacks)
        if self._answered or len(self.response.update) >= self._most_updates:
            self.left_out += 1
            return
        # Some runtimes fail the whole synchronization when one update fails.
        made = replies.update(
            message, container.current, decision, self._profile, ignore_failure=True
        )
        self._report(container, made.problems)
        if made.message is not None:
            self.response.update.append(made.message)
