"""What the runtime told: records of its sandboxes and containers, from events and full lists.

Events may repeat, come late or not at all: an id that was removed never comes back except in a full
list, a container's state only moves forward, and every full list repairs the rest. Tables are
bounded, so a runtime that runs wild costs what comes last, not the daemon.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from hooks.observed import Container, ContainerState, Sandbox
from hooks.requested import overlay
from hooks.subject import NOTHING_REQUESTED, Pod, Requested, SandboxSubject
from koordlet.state.requests_log import Remembered

_LOG = logging.getLogger("koordlet.state")

MAX_SANDBOXES: Final = 8192
MAX_CONTAINERS: Final = 32768
_MAX_TOMBSTONES: Final = 8192

_ASKED_AGAIN: Final = frozenset(Requested.__struct_fields__) - {"oom_score_adj"}
"""What an update of kubelet's may name."""
_RUNS: Final = frozenset({ContainerState.RUNNING, ContainerState.PAUSED})


class SandboxRecord(msgspec.Struct):
    """A sandbox. seen: the mark (`RuntimeRecords.now`) of the last message that named it."""

    id: str
    pod: Pod
    cgroup: str
    resources: Requested
    seen: int
    stopped: bool = False


class ContainerRecord(msgspec.Struct):
    """A container.

    first: the values at first sight; asked: what kubelet asked of us, in updates only the values
    that change, None where no hook saw any.
    given: what we last answered in place of these, None where that is not known; told: what the
    runtime's specification held when it was told last, for as long as kubelet asked for nothing
    else. A value in a full list that is none of these was asked for while nobody listened.
    hooked: a hook saw the creation. lacks: what only its creation could have given.
    """

    id: str
    sandbox_id: str
    uid: str
    name: str
    cgroup: str
    seen: int
    created_at: float
    first: Requested
    asked: Requested | None = None
    given: Requested | None = None
    told: Requested = NOTHING_REQUESTED
    hooked: bool = False
    started: bool = False
    lacks: tuple[str, ...] = ()

    @property
    def remembered(self) -> Remembered | None:
        """Return what is to be remembered of it over a restart."""
        if self.hooked and self.asked is not None:
            return Remembered(self.asked, hooked=True, given=self.given, told=self.told)
        known = self.request
        if known == NOTHING_REQUESTED:
            return None
        return Remembered(known, hooked=False, given=self.given, told=self.told)

    @property
    def request(self) -> Requested:
        """Return what kubelet asked for, as far as the runtime told."""
        if self.asked is None:
            return self.first
        return self.asked if self.hooked else overlay(self.asked, self.first)


@dataclass(slots=True)
class PodRecords:
    """What the runtime knows of one pod, by id."""

    sandboxes: dict[str, SandboxRecord] = field(default_factory=dict)
    containers: dict[str, ContainerRecord] = field(default_factory=dict)


class RuntimeRecords:
    """The records. Belongs to the event loop."""

    def __init__(
        self,
        *,
        touched: set[str],
        remembered: Mapping[str, Remembered],
        monotonic: Callable[[], float],
    ) -> None:
        """touched: gets the uid of every pod of which a record changes. remembered: requested
        values of containers from before a restart."""
        self._touched = touched
        self._remembered = dict(remembered)
        self._monotonic = monotonic
        self._sandboxes: dict[str, SandboxRecord] = {}
        self._containers: dict[str, ContainerRecord] = {}
        self._pods: dict[str, PodRecords] = {}
        self._gone: OrderedDict[str, int] = OrderedDict()
        self._missed: dict[str, Requested] = {}
        self._clock = 0
        self._full = False

    def copy(self, touched: set[str]) -> RuntimeRecords:
        """Return the same records, none of them shared; it marks pods in another set."""
        made = RuntimeRecords(touched=touched, remembered={}, monotonic=self._monotonic)
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
        """Return uid -> records."""
        return self._pods

    @property
    def gone(self) -> Collection[str]:
        """Return the ids that do not come back by an event."""
        return self._gone.keys()

    @property
    def counts(self) -> tuple[int, int]:
        """Return (pods, containers)."""
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
        """Return the sandboxes that no container belongs to."""
        busy = {container.sandbox_id for container in self._containers.values()}
        return (sandbox for id_, sandbox in self._sandboxes.items() if id_ not in busy)

    # --- events --------------------------------------------------------------------------------

    def now(self) -> int:
        """Return a mark to take before a list is fetched; see `take_list`."""
        self._clock += 1
        return self._clock

    def run_sandbox(self, sandbox: Sandbox) -> None:
        """A sandbox runs. One that was removed does not come back."""
        if sandbox.subject.id not in self._gone:
            self._put_sandbox(sandbox)

    def stop_sandbox(self, sandbox_id: str) -> None:
        """A sandbox and all its containers have ended."""
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
        """A sandbox is gone for good."""
        self.stop_sandbox(sandbox_id)
        self._bury(sandbox_id)
        self.forget_sandbox(sandbox_id)

    def forget_sandbox(self, sandbox_id: str) -> None:
        """Drop a sandbox, of whose end nobody may have told. A later message may name it again."""
        found = self._sandboxes.pop(sandbox_id, None)
        if found is not None:
            self._pod(found.pod.uid).sandboxes.pop(sandbox_id, None)
            self._prune(found.pod.uid)

    def ask(self, container: Container, *, at_creation: bool) -> ContainerRecord | None:
        """Kubelet asks for values; what it does not name stays as it was asked for before.

        Returns None for a container that was removed, or whose pod nobody told of.
        """
        record = self._put_container(container)
        if record is None:
            return None
        if at_creation:
            record.hooked = True
        asked = container.subject.requested
        if asked != NOTHING_REQUESTED:
            record.asked = asked if record.asked is None else overlay(asked, record.asked)
            if record.told != NOTHING_REQUESTED:
                record.told = _only(record.told, lambda name: getattr(asked, name) is None)
        return record

    def asked_again(self, container_id: str, asked: Requested) -> bool:
        """Kubelet asks a known container for other values; returns whether it is known."""
        record = self._containers.get(container_id)
        if record is None:
            return False
        record.asked = asked if record.asked is None else overlay(asked, record.asked)
        return True

    def give(self, container_id: str, values: Requested) -> None:
        """A container's runtime was answered with these values in place of kubelet's."""
        record = self._containers.get(container_id)
        if record is not None:
            record.given = values

    def take_missed(self) -> dict[str, Requested]:
        """Return what the last lists show that kubelet asked for unheard, by container."""
        missed, self._missed = self._missed, {}
        return missed

    def start_container(self, container: Container) -> bool:
        """A container's process runs, so its group exists and has the runtime's values.

        Returns whether that tells more than what was asked for and given.
        """
        if container.state is ContainerState.STOPPED:
            return False
        new = container.subject.id not in self._containers
        record = self._put_container(container)
        if record is None:
            return False
        record.started = True
        record.told = container.current
        return new or _unlike(container.current, record.request, record.given) != NOTHING_REQUESTED

    def observe_container(self, container: Container) -> None:
        """An event told of a container, started or not."""
        if container.state is not ContainerState.STOPPED:
            self._put_container(container)

    def start_overdue(self, older_than_s: float) -> bool:
        """Count containers as started whose start nobody told; returns whether there were any."""
        now, found = self._monotonic(), False
        for container in self._containers.values():
            if not container.started and now - container.created_at > older_than_s:
                container.started = found = True
                self._touched.add(container.uid)
        return found

    def remove_container(self, container_id: str) -> None:
        """A container has ended or was never made. It does not come back."""
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
        """Take a runtime's full list: what it does not name is gone.

        taken_at: the mark from before the list was fetched; what was heard of since then stays,
        and what was removed since then is not brought back. None: the list is of this moment.
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
            # A pause process that ended is all that tells of a stopped sandbox here.
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
                self._compare(record, container.current)
            if new and record is not None and not record.hooked:
                unhooked.append(container_id)
        self._remembered = {
            id_: asked for id_, asked in self._remembered.items() if id_ in self._containers
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
                self._tell_full(f"{MAX_SANDBOXES} sandboxes")
                return
            record = self._sandboxes[subject.id] = SandboxRecord(
                subject.id, pod, subject.cgroup, sandbox.resources, self.now()
            )
        else:
            record.seen = self.now()
            # A leftover's messages have an empty pod: they do not take away what is known.
            if pod.uid:
                if pod.uid != record.pod.uid:
                    self.forget_sandbox(subject.id)
                    self._put_sandbox(sandbox)
                    return
                if not pod.cgroup:  # a runtime that cannot tell now takes nothing back
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
                self._tell_full(f"{MAX_CONTAINERS} containers")
                return None
            before = self._remembered.get(subject.id)
            asked = before.requested if before is not None and before.hooked else None
            record = self._containers[subject.id] = ContainerRecord(
                id=subject.id,
                sandbox_id=container.sandbox_id,
                uid=uid,
                name=subject.name,
                cgroup=subject.cgroup,
                seen=self.now(),
                created_at=self._monotonic(),
                first=container.current if before is None else before.requested,
                asked=asked,
                given=None if before is None else before.given,
                told=NOTHING_REQUESTED if before is None else before.told,
                hooked=asked is not None,
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
            if record.first == NOTHING_REQUESTED:
                record.first = container.current
        if container.state in _RUNS or (
            container.state is ContainerState.UNKNOWN and container.pid > 0
        ):
            record.started = True
        self._pod(record.uid).containers[subject.id] = record
        self._touched.add(record.uid)
        return record

    def _compare(self, record: ContainerRecord, told: Requested) -> None:
        """Take a value that neither kubelet nor we had the runtime set for what kubelet asks now.

        Also one of another plugin of the runtime's: it is the base of what we decide all the same.
        """
        if record.given is not None:
            fresh = _unlike(told, record.request, record.given, record.told)
            if fresh != NOTHING_REQUESTED:
                record.asked = fresh if record.asked is None else overlay(fresh, record.asked)
                self._missed[record.id] = fresh
        record.told = told

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

    def _tell_full(self, what: str) -> None:
        if not self._full:
            self._full = True
            _LOG.error("the runtime tells of more than %s: the rest is not cared for", what)


def _only(requested: Requested, named: Callable[[str], bool]) -> Requested:
    """Return the request with these of its values."""
    return Requested(
        *(getattr(requested, name) if named(name) else None for name in Requested.__struct_fields__)
    )


def _unlike(told: Requested, *known: Requested | None) -> Requested:
    """Return what of `told` kubelet can have asked for and none of `known` has."""
    return _only(
        told,
        lambda name: (
            name in _ASKED_AGAIN
            and all(each is None or getattr(told, name) != getattr(each, name) for each in known)
        ),
    )
