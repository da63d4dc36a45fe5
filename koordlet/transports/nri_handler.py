"""Answers a runtime's NRI events from memory, and defers other work until after the reply.

Every method runs on the event loop while the runtime holds its node-wide lock. It updates the
state, has the engine decide, and returns. The reconciler, triggered soon after the reply, writes
files; only a directory that the runtime is about to mount is made before the reply. The contract is
in `nri_plugin.handler`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final, Protocol

from hooks.decision import Decision, ResourceKey
from hooks.engine import Engine
from hooks.observed import Container, Sandbox
from hooks.requested import requested_value, value_in_request
from hooks.stage import Stage
from hooks.subject import ContainerSubject
from koordlet.decisions.decider import Decider
from koordlet.state import NodeState
from koordlet.state.requests_log import RequestsLog
from koordlet.transports.creations import Consequences, KnownConsequences
from linux.cgroup_files import FILES
from linux.resources import DELIVERED_AT_CREATION, Resource, Value
from nri_plugin.capabilities import RuntimeProfile
from service.events import Events, Severity

_LOG = logging.getLogger("koordlet.nri")

RUNTIME = "runtime"
"""The name of the runtime's lists as a source of the state."""
_NOTED: Final = frozenset(FILES)
_NOTED_AT_CREATION: Final = _NOTED | DELIVERED_AT_CREATION
_MOST_CREATED: Final = 1024
"""Containers between creation and start whose decisions are remembered. Chosen: far more than are
started at a time; the end of one that failed to start may not be reported. Beyond it the oldest
are looked at soon after their start, as those that no hook created."""


class Surroundings(Protocol):
    """What the handler needs of the daemon."""

    @property
    def engine(self) -> Engine:
        """The engine in force."""
        ...

    def after_reply(self, work: Callable[[], None]) -> None:
        """Run `work` on the event loop right after the reply: the next hook needs it."""
        ...

    def later(self, work: Callable[[], None]) -> None:
        """Run `work` on the event loop once the runtime has had the time to receive the reply.

        It keeps its order, and is done before the reconciler sees the change.
        """
        ...

    def state_changed(self, reason: str) -> None:
        """The state changed: have a pass run after the reply."""
        ...

    def pod_changed(self, uid: str, *, can_wait: bool = False) -> None:
        """One pod changed: have the reconciler look at it soon, after the reply.

        can_wait: until another pod changes, or the next pass.
        """
        ...

    def pod_appeared(self, uid: str) -> None:
        """A pod is about to run, or has other resources: what is its own is wanted at once."""
        ...

    def container_complete(self, uid: str) -> None:
        """A container of this pod runs, with all its values from the runtime.

        What is left is to look whether the runtime wrote them, which is not urgent.
        """
        ...

    def delivered(
        self,
        container_id: str,
        resource: Resource,
        requested: Value | None,
        value: Value,
        policy: str,
    ) -> None:
        """A value was delivered to the runtime; its original is what kubelet requested."""
        ...

    def requested(self, cgroup: str) -> None:
        """Kubelet requests other values of a running container, which the state has already.

        Until the reconciler has them too, it leaves the container's files alone.
        """
        ...

    def superseded(self, container_id: str, resources: Collection[Resource]) -> None:
        """kubelet requested other values: earlier deliveries of these resources do not count."""
        ...

    def make_host_directory(self, path: str, mode: int) -> None:
        """Make a directory that the runtime mounts after the reply."""
        ...

    def ended(self, container_id: str) -> None:
        """A container has ended or was never created: forget its deliveries."""
        ...

    def resctrl_groups(self) -> Collection[str]:
        """The resctrl groups that exist now."""
        ...


class NriHandler:
    """Implements `nri_plugin.handler.Handler`."""

    def __init__(
        self,
        *,
        state: NodeState,
        decider: Decider,
        events: Events,
        requests: RequestsLog,
        surroundings: Surroundings,
    ) -> None:
        self._state = state
        self._decider = decider
        self._events = events
        self._requests = requests
        self._daemon = surroundings
        self._consequences = KnownConsequences()
        self._created: dict[str, Decision] = {}
        """The decisions about containers that do not run yet."""
        self._left: Callable[[], None] | None = None
        """What the last reply did not need."""
        self.runtime: RuntimeProfile | None = None

    def resctrl_groups(self) -> Collection[str]:
        return self._daemon.resctrl_groups()

    def configured(self, runtime: RuntimeProfile) -> None:
        self.runtime = runtime
        self._events.add(
            "nri-configured",
            "nri",
            f"registered with {runtime.name} {runtime.version_text}",
            severity=Severity.INFO,
        )
        for warning in runtime.warnings:
            self._events.add("nri-warning", "nri", warning)

    def now(self) -> int:
        return self._state.now()

    def synchronize(
        self,
        sandboxes: Sequence[Sandbox],
        containers: Sequence[Container],
        *,
        taken_at: int | None = None,
    ) -> Iterable[tuple[str, Decision]]:
        self._state.runtime_list(sandboxes, containers, taken_at=taken_at)
        self._take_unseen_requests()
        self._state.mark_synced(RUNTIME)
        self._daemon.after_reply(self._requests.rewrite)
        self._daemon.state_changed("synchronize")
        return self._decide_all(containers)

    def _take_unseen_requests(self) -> None:
        """Handle updates that kubelet requested while koordlet was not connected."""
        for container_id, requested in self._state.take_unseen_requests().items():
            named = [one for one in FILES if value_in_request(requested, one) is not None]
            _LOG.info(
                "kubelet requested other values while NRI was not connected",
                extra={"container": container_id, "resources": ",".join(named)},
            )
            self._daemon.later(partial(self._daemon.superseded, container_id, named))

    def _decide_all(self, containers: Sequence[Container]) -> Iterable[tuple[str, Decision]]:
        engine = self._daemon.engine
        for container in containers:
            subject = self._state.container(container.subject.id)
            if subject is not None:
                decision = self._decider.decide(engine, subject, Stage.SYNCHRONIZE)
                self._state.note_delivered(
                    subject.id, self._consequences.of(subject.requested, decision).delivered
                )
                if decision.outcomes:
                    # The runtime writes these, so their originals have to be noted.
                    self._daemon.later(partial(self._note_delivered, subject, decision))
                    yield subject.id, decision

    def unrepairable(self, container: Container, lacks: Sequence[ResourceKey]) -> None:
        what = tuple(f"{resource} {key}".strip() for resource, key in lacks)
        self._state.lacks(container.subject.id, what)
        subject = container.subject
        self._events.add(
            "unrepairable",
            f"{subject.pod.obj} container {subject.name}",
            f"runs without {', '.join(what)}, which only its creation can set;"
            " restart the container to have it",
        )

    def run_sandbox(self, sandbox: Sandbox) -> None:
        uid = sandbox.subject.pod.uid
        self._state.run_sandbox(sandbox)
        # This merges the pod, after the reply: its containers, which come next, find it so.
        self._daemon.pod_appeared(uid)
        self._daemon.after_reply(partial(self._prepare, uid))

    def _prepare(self, uid: str) -> None:
        if (pod := self._state.pod(uid)) is not None:
            self._daemon.engine.prepare(pod)

    def update_sandbox(self, sandbox: Sandbox) -> None:
        self._state.run_sandbox(sandbox)
        self._daemon.pod_appeared(sandbox.subject.pod.uid)

    def stop_sandbox(self, sandbox: Sandbox) -> None:
        self._state.stop_sandbox(sandbox.subject.id)
        self._pod_changed(sandbox.subject.pod.uid, can_wait=True)

    def remove_sandbox(self, sandbox: Sandbox) -> None:
        self._state.remove_sandbox(sandbox.subject.id)
        self._pod_changed(sandbox.subject.pod.uid, can_wait=True)

    def create_container(self, container: Container) -> Decision | None:
        subject = self._state.create_container(container) or container.subject
        decision = self._decider.decide(self._daemon.engine, subject, Stage.CREATE_CONTAINER)
        consequences = self._consequences.of(subject.requested, decision)
        for path, mode in consequences.directories:
            self._daemon.make_host_directory(path, mode)
        self._keep(subject.id, consequences)
        self._left = partial(self._creation_written, subject, decision)
        return decision if decision.outcomes or decision.faults else None

    def start_container(self, container: Container) -> None:
        if self._state.start_container(container):
            self._remember(container.subject.id)
            self._daemon.later(self._requests.write)
        uid = container.subject.pod.uid
        created = self._created.pop(container.subject.id, None)
        if uid and created is not None and self._was_complete(created):
            self._daemon.container_complete(uid)
        else:
            self._pod_changed(uid)

    def update_container(self, container: Container) -> Decision | None:
        subject = self._state.update_container(container) or container.subject
        self._daemon.requested(subject.cgroup)
        decision = self._decider.decide(self._daemon.engine, subject, Stage.UPDATE_CONTAINER)
        self._keep(subject.id, self._consequences.of(subject.requested, decision))
        self._left = partial(self._update_written, container.subject, subject, decision)
        return decision if decision.outcomes or decision.faults else None

    def reply_written(self) -> None:
        left, self._left = self._left, None
        if left is not None:
            left()

    def container_updated(self, container: Container) -> None:
        self._state.observe_container(container)
        self._pod_changed(container.subject.pod.uid)

    def stop_container(self, container: Container) -> None:
        self._end(container)
        self._pod_changed(container.subject.pod.uid, can_wait=True)

    def remove_container(self, container: Container) -> None:
        self._end(container)
        self._pod_changed(container.subject.pod.uid, can_wait=True)

    def list_overdue(self, reason: str) -> None:
        self._events.add(
            "nri-unlisted",
            "nri",
            f"{reason}; until the list comes, only pods that kubelet, the CRI or Pod manifests name"
            " are kept in their state (kubelet.enabled, cri.enabled)",
            severity=Severity.ERROR,
        )

    def disconnected(self, reason: str) -> None:
        if not reason:
            return  # koordlet ended the connection
        self._events.add(
            "nri-disconnected",
            "nri",
            f"the connection to the runtime ended: {reason};"
            " until the next one the reconciler repairs what containers miss",
        )

    def _pod_changed(self, uid: str, *, can_wait: bool = False) -> None:
        if uid:
            self._daemon.pod_changed(uid, can_wait=can_wait)
        else:
            # A leftover of a pod that the runtime does not know any more: it may be any pod's.
            self._daemon.state_changed("leftover")

    def _end(self, container: Container) -> None:
        self._state.remove_container(container.subject.id)
        self._created.pop(container.subject.id, None)
        self._daemon.ended(container.subject.id)

    def _remember(self, container_id: str) -> None:
        remembered = self._state.remembered(container_id)
        if remembered is not None:
            self._requests.keep(container_id, *remembered)

    def _was_complete(self, decision: Decision) -> bool:
        """Return whether the reply to a creation had all values of the decision."""
        return self.runtime is not None and all(
            resource in self.runtime.creation for resource, _ in decision.outcomes
        )

    def _keep(self, container_id: str, consequences: Consequences) -> None:
        """Keep over a crash what kubelet requested, and what is delivered in its place."""
        if self._state.note_delivered(container_id, consequences.delivered):
            self._requests.keep_members(container_id, consequences.kept)
        else:
            self._remember(container_id)

    def _creation_written(self, subject: ContainerSubject, decision: Decision) -> None:
        self._created[subject.id] = decision
        self._daemon.later(partial(self._creation_answered, subject, decision))

    def _update_written(
        self, update: ContainerSubject, subject: ContainerSubject, decision: Decision
    ) -> None:
        self._pod_changed(update.pod.uid)
        self._daemon.later(partial(self._note_update, update, subject, decision))

    def _creation_answered(self, subject: ContainerSubject, decision: Decision) -> None:
        """As `_note_delivered`; at creation also the values of the container's processes."""
        if len(self._created) > _MOST_CREATED:
            del self._created[next(iter(self._created))]
        self._pod_changed(subject.pod.uid, can_wait=True)
        self._requests.write()
        self._state.record_created()
        self._note_delivered(subject, decision, _NOTED_AT_CREATION)

    def _note_update(
        self, update: ContainerSubject, subject: ContainerSubject, decision: Decision
    ) -> None:
        """As `_note_delivered`; update: the container with only the values of this request."""
        named = [one for one in FILES if requested_value(update, one) is not None]
        self._requests.write()
        self._daemon.superseded(subject.id, named)
        self._note_delivered(subject, decision)

    def _note_delivered(
        self,
        subject: ContainerSubject,
        decision: Decision,
        noted: Collection[Resource] = _NOTED,
    ) -> None:
        """Note for the journal what the runtime writes.

        noted: the resources that count; at creation also those of the container's processes.
        """
        if self.runtime is None:
            return
        for (resource, key), outcome in decision.outcomes.items():
            if resource in noted and resource in self.runtime.creation and not key:
                self._daemon.delivered(
                    subject.id,
                    resource,
                    requested_value(subject, resource),
                    outcome.value,
                    outcome.winner.policy,
                )
