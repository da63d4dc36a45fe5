"""The tables of the sandboxes and containers that the runtime reported, in events and full lists.

Events may be repeated, late or lost. So an event never brings back an id that was removed, a
container's state only moves forward, and every full list repairs the rest. The tables are bounded:
what a faulty runtime reports beyond that is ignored.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from hooks.observed import Container, ContainerState, Sandbox
from hooks.subject import NOTHING_REQUESTED, Requested, SandboxSubject
from koordlet.state.proxy_requests import ProxyRequests
from koordlet.state.records import ContainerRecord, PodRecords, SandboxRecord
from koordlet.state.requests_log import Remembered

_LOG = logging.getLogger("koordlet.state")

MAX_SANDBOXES: Final = 8192
MAX_CONTAINERS: Final = 32768
"""Bounds of the two tables. Chosen: many times what a node runs (kubelet: 110 pods by default), and
few enough that a faulty runtime cannot exhaust the memory. Twice the value doubles that memory."""
_MAX_TOMBSTONES: Final = 8192
"""Removed ids that are remembered, so that a late event does not bring them back. Chosen: late
events come within seconds, and no node removes thousands of containers in that time."""

_RUNS: Final = frozenset({ContainerState.RUNNING, ContainerState.PAUSED})


class RuntimeRecords:
    """The records. Belongs to the event loop."""

    def __init__(
        self,
        *,
        touched: set[str],
        remembered: Mapping[str, Remembered],
        of_proxy: ProxyRequests,
        monotonic: Callable[[], float],
    ) -> None:
        """touched: receives the uid of every pod whose records change. remembered: requested values
        of containers from before a restart. of_proxy: requests that came through the proxy."""
        self._touched = touched
        self._remembered = dict(remembered)
        self._of_proxy = of_proxy
        self._monotonic = monotonic
        self._sandboxes: dict[str, SandboxRecord] = {}
        self._containers: dict[str, ContainerRecord] = {}
        self._pods: dict[str, PodRecords] = {}
        self._gone: OrderedDict[str, int] = OrderedDict()
        self._unseen_requests: dict[str, Requested] = {}
        self._clock = 0
        self._full = False

    def copy(self, touched: set[str]) -> RuntimeRecords:
        """Return a copy of all records, which marks changed pods in another set."""
        made = RuntimeRecords(
            touched=touched, remembered={}, of_proxy=ProxyRequests({}), monotonic=self._monotonic
        )
        made._sandboxes = {id_: copy.copy(each) for id_, each in self._sandboxes.items()}
        made._containers = {id_: copy.copy(each) for id_, each in self._containers.items()}
        made._pods = {
            uid: PodRecords(
                {id_: made._sandboxes[id_] for id_ in pod.sandboxes},
                {id_: made._containers[id_] for id_ in pod.containers},
            )
            for uid, pod in self._pods.items()
        }
        made._gone = self._gone.copy()
        made._clock = self._clock
        return made

    # --- reading -------------------------------------------------------------------------------

    @property
    def pods(self) -> Mapping[str, PodRecords]:
        """Uid -> records."""
        return self._pods

    @property
    def gone(self) -> Collection[str]:
        """The removed ids, which no event brings back."""
        return self._gone.keys()

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of (pods, containers)."""
        return len(self._pods), len(self._containers)

    def sandbox(self, sandbox_id: str) -> SandboxRecord | None:
        return self._sandboxes.get(sandbox_id)

    def container(self, container_id: str) -> ContainerRecord | None:
        return self._containers.get(container_id)

    def sandboxes(self) -> Iterable[SandboxRecord]:
        return self._sandboxes.values()

    def containers(self) -> Iterable[ContainerRecord]:
        return self._containers.values()

    def without_containers(self) -> Iterator[SandboxRecord]:
        """Return the sandboxes without containers."""
        busy = {container.sandbox_id for container in self._containers.values()}
        return (sandbox for id_, sandbox in self._sandboxes.items() if id_ not in busy)

    # --- events --------------------------------------------------------------------------------

    def now(self) -> int:
        """Return a mark; take it before a list is fetched. See `take_list`."""
        self._clock += 1
        return self._clock

    def run_sandbox(self, sandbox: Sandbox) -> None:
        """Record that a sandbox runs. An event does not bring back a removed sandbox."""
        if sandbox.subject.id not in self._gone:
            self._put_sandbox(sandbox)

    def stop_sandbox(self, sandbox_id: str) -> None:
        """Record that a sandbox and all its containers have ended."""
        found = self._sandboxes.get(sandbox_id)
        if found is None:
            self._bury(sandbox_id)
            return
        found.stopped = True
        for container in tuple(self._pod(found.pod.uid).containers.values()):
            if container.sandbox_id == sandbox_id:
                self.remove_container(container.id)
        self._touched.add(found.pod.uid)

    def remove_sandbox(self, sandbox_id: str) -> None:
        """Record that a sandbox is gone for good."""
        self.stop_sandbox(sandbox_id)
        self._bury(sandbox_id)
        self.forget_sandbox(sandbox_id)

    def forget_sandbox(self, sandbox_id: str) -> None:
        """Drop a sandbox whose end may not have been reported. A later report may name it again."""
        found = self._sandboxes.pop(sandbox_id, None)
        if found is not None:
            self._pod(found.pod.uid).sandboxes.pop(sandbox_id, None)
            self._prune(found.pod.uid)

    def would_be_new(self, container_id: str, sandbox_id: str) -> bool:
        """Return whether the container is unknown and its sandbox is known."""
        return (
            sandbox_id in self._sandboxes
            and container_id not in self._containers
            and container_id not in self._gone
            and container_id not in self._remembered
            and sandbox_id not in self._gone
            and len(self._containers) < MAX_CONTAINERS
        )

    def note_request(self, container: Container, *, at_creation: bool) -> ContainerRecord | None:
        """Record values that kubelet requests; values that it does not name stay as they were.

        Returns None for a container that was removed, or whose pod was not reported.
        """
        record = self._put_container(container)
        if record is None:
            return None
        if at_creation:
            record.hooked = True
        if container.subject.requested != NOTHING_REQUESTED:
            record.add_request(container.subject.requested)
            record.forget_reported(container.subject.requested)
        return record

    def note_update(self, container_id: str, update: Requested) -> bool:
        """Record other values that kubelet requests; return whether the container is known."""
        record = self._containers.get(container_id)
        if record is None:
            return False
        record.add_request(update)
        return True

    def note_delivered(self, container_id: str, values: Requested) -> None:
        """Record the values that a reply delivered in place of kubelet's."""
        record = self._containers.get(container_id)
        if record is not None:
            record.delivered = values

    def take_unseen_requests(self) -> dict[str, Requested]:
        """Return requests of which only the last full lists gave evidence, by container."""
        unseen, self._unseen_requests = self._unseen_requests, {}
        return unseen

    def start_container(self, container: Container) -> bool:
        """Record that a container's process runs: its group exists and has the runtime's values.

        Returns whether its values differ from what was requested and delivered.
        """
        if container.state is ContainerState.STOPPED:
            return False
        new = container.subject.id not in self._containers
        record = self._put_container(container)
        if record is None:
            return False
        record.started = True
        record.reported = container.current
        return new or record.differs_from(container.current)

    def observe_container(self, container: Container) -> None:
        """Record a container that an event reported, started or not."""
        if container.state is not ContainerState.STOPPED:
            self._put_container(container)

    def start_overdue(self, older_than_s: float) -> bool:
        """Count containers as started whose start was not reported; return whether any were."""
        now, found = self._monotonic(), False
        for container in self._containers.values():
            if not container.started and now - container.created_at > older_than_s:
                container.started = found = True
                self._touched.add(container.uid)
        return found

    def remove_container(self, container_id: str) -> None:
        """Record that a container has ended or was never created. No event brings it back."""
        self._bury(container_id)
        self._drop_container(container_id)

    # --- full lists ----------------------------------------------------------------------------

    def take_list(
        self,
        sandboxes: Sequence[Sandbox],
        containers: Sequence[Container],
        *,
        taken_at: int | None = None,
    ) -> tuple[str, ...]:
        """Take a runtime's full list: whatever it does not name is gone.

        taken_at: the mark from before the list was fetched: what was reported since then stays, and
        what was removed since then is not brought back. None: the list is current.
        Returns the ids of containers that are new and were not created through a hook.
        """
        late = {id_ for id_, at in self._gone.items() if taken_at is not None and at > taken_at}
        listed = {sandbox.subject.id for sandbox in sandboxes} - late
        alive = {
            container.subject.id
            for container in containers
            if container.state is not ContainerState.STOPPED
        } - late

        def outdated(seen: int) -> bool:
            return taken_at is None or seen <= taken_at

        for sandbox_id, known in tuple(self._sandboxes.items()):
            if sandbox_id not in listed and outdated(known.seen):
                self.forget_sandbox(sandbox_id)
        for container_id, running in tuple(self._containers.items()):
            if container_id not in alive and outdated(running.seen):
                self._drop_container(container_id)
        with_containers = {container.sandbox_id for container in containers}
        for sandbox in sandboxes:
            sandbox_id = sandbox.subject.id
            if sandbox_id not in listed:
                continue
            self._gone.pop(sandbox_id, None)
            self._put_sandbox(sandbox)
            # A list shows a stopped sandbox only by its pause process, which has ended.
            if known_sandbox := self._sandboxes.get(sandbox_id):
                known_sandbox.stopped = sandbox.pid == 0 and sandbox_id not in with_containers
        unhooked: list[str] = []
        for container in containers:
            container_id = container.subject.id
            if container_id not in alive:
                continue
            self._gone.pop(container_id, None)
            new = container_id not in self._containers
            record = self._put_container(container)
            if record is not None and taken_at is None:
                unseen = record.take_listed(container.current)
                if unseen != NOTHING_REQUESTED:
                    self._unseen_requests[container_id] = unseen
            if new and record is not None and not record.hooked:
                unhooked.append(container_id)
        self._remembered = {
            id_: kept for id_, kept in self._remembered.items() if id_ in self._containers
        }
        return tuple(unhooked)

    # --- the tables ----------------------------------------------------------------------------

    def _pod(self, uid: str) -> PodRecords:
        records = self._pods.get(uid)
        if records is None:
            records = self._pods[uid] = PodRecords()
        return records

    def _put_sandbox(self, sandbox: Sandbox) -> None:
        subject = sandbox.subject
        pod = subject.pod
        record = self._sandboxes.get(subject.id)
        if not subject.id or (not pod.uid and record is None):
            return
        if record is None:
            if len(self._sandboxes) >= MAX_SANDBOXES:
                self._log_full(f"{MAX_SANDBOXES} sandboxes")
                return
            record = self._sandboxes[subject.id] = SandboxRecord(
                subject.id, pod, subject.cgroup, sandbox.resources, self.now()
            )
        else:
            record.seen = self.now()
            # Messages about a leftover have an empty pod: what is known stays.
            if pod.uid:
                if pod.uid != record.pod.uid:
                    self.forget_sandbox(subject.id)
                    self._put_sandbox(sandbox)
                    return
                if not pod.cgroup:  # the runtime does not report it now: what is known stays
                    pod = msgspec.structs.replace(
                        pod, cgroup=record.pod.cgroup, kube_qos=record.pod.kube_qos
                    )
                record.pod = pod
                record.cgroup = subject.cgroup or record.cgroup
                if sandbox.resources != NOTHING_REQUESTED:
                    record.resources = sandbox.resources
        self._pod(record.pod.uid).sandboxes[subject.id] = record
        self._touched.add(record.pod.uid)

    def _put_container(self, container: Container) -> ContainerRecord | None:
        subject = container.subject
        if not subject.id or subject.id in self._gone or container.sandbox_id in self._gone:
            return None
        uid = subject.pod.uid
        if not uid and (sandbox := self._sandboxes.get(container.sandbox_id)):
            uid = sandbox.pod.uid
        record = self._containers.get(subject.id)
        if record is None:
            if not uid:
                return None
            if len(self._containers) >= MAX_CONTAINERS:
                self._log_full(f"{MAX_CONTAINERS} containers")
                return None
            before = self._remembered.get(subject.id)
            from_events = before.requested if before is not None and before.hooked else None
            record = self._containers[subject.id] = ContainerRecord(
                id=subject.id,
                sandbox_id=container.sandbox_id,
                uid=uid,
                name=subject.name,
                cgroup=subject.cgroup,
                seen=self.now(),
                created_at=self._monotonic(),
                first_reported=self._first_reported(uid, container)
                if before is None
                else before.requested,
                from_events=from_events,
                delivered=None if before is None else before.delivered,
                reported=NOTHING_REQUESTED if before is None else before.reported,
                hooked=from_events is not None,
            )
            if (
                container.sandbox_id
                and container.sandbox_id not in self._sandboxes
                and subject.pod.uid
            ):
                self._put_sandbox(Sandbox(SandboxSubject(pod=subject.pod, id=container.sandbox_id)))
        else:
            record.seen = self.now()
            record.cgroup = subject.cgroup or record.cgroup
            record.name = subject.name or record.name
            if record.first_reported == NOTHING_REQUESTED:
                record.first_reported = self._first_reported(record.uid, container)
        if container.state in _RUNS or (
            container.state is ContainerState.UNKNOWN and container.pid > 0
        ):
            record.started = True
        self._pod(record.uid).containers[subject.id] = record
        self._touched.add(record.uid)
        return record

    def _first_reported(self, uid: str, container: Container) -> Requested:
        """Return what the first report of a container says of kubelet's request."""
        return self._of_proxy.requested(uid, container.subject.name, container.current)

    def _drop_container(self, container_id: str) -> None:
        found = self._containers.pop(container_id, None)
        self._remembered.pop(container_id, None)
        if found is not None:
            self._pod(found.uid).containers.pop(container_id, None)
            self._prune(found.uid)

    def _prune(self, uid: str) -> None:
        records = self._pods.get(uid)
        if records is not None and not records.sandboxes and not records.containers:
            del self._pods[uid]
        self._touched.add(uid)

    def _bury(self, id_: str) -> None:
        if id_:
            self._gone[id_] = self.now()
            self._gone.move_to_end(id_)
            while len(self._gone) > _MAX_TOMBSTONES:
                self._gone.popitem(last=False)

    def _log_full(self, what: str) -> None:
        if not self._full:
            self._full = True
            _LOG.error("the runtime reports more than %s: the rest is ignored", what)
