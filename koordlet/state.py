"""The node's pods and containers: the one mutable store, fed by every source, read as snapshots.

What a runtime tells (NRI events, NRI Synchronize, CRI lists) says which sandboxes and containers
exist and where; what Pod objects tell (kubelet, the objects directory) says what they are. Stated
precedence:

- existence: the runtime's latest full list; events between two lists; where no runtime tells of a
  pod, the running containers of kubelet's or the directory's Pod object, at the node's layout.
- metadata and specification: kubelet, then the objects directory, then what the runtime was told at
  RunPodSandbox, which it never refreshes.
- QoS class: the directory that the pod lives in, then the object.
- cgroup: the runtime, then the node's layout.
- requested values of a container: what kubelet asked the runtime for in an event, then the
  specification, then what the runtime had when the container was first seen (both kept over a
  restart by `koordlet.requests_log`: what it has later may be ours).

Events may repeat, come late or not at all: an id that was removed never comes back except in a full
list, a container's state only moves forward, and every full list repairs the rest. One thread (the
event loop) owns the store; a `Snapshot` is immutable and goes anywhere.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeVar

import msgspec

from apis.qos import KubeQoS
from hooks.engine import Engine
from hooks.subject import (
    NOTHING_REQUESTED,
    ContainerSubject,
    HostAppSubject,
    NodeSubject,
    Pod,
    PodSubject,
    QosSubject,
    Requested,
    SandboxSubject,
    Subject,
)
from koordlet.podspec import KnownPod
from koordlet.requests_log import Remembered
from koordlet.snapshot import Snapshot
from linux import cgroup_paths
from linux.cgroup_paths import Layout, PathError, Runtime
from nri_plugin.handler import Container, ContainerState, Sandbox

MAX_PODS: Final = 8192
MAX_CONTAINERS: Final = 32768
_MAX_TOMBSTONES: Final = 8192

_T = TypeVar("_T")

_NODE: Final = NodeSubject()
_RUNS: Final = frozenset({ContainerState.RUNNING, ContainerState.PAUSED})
_ENDED: Final = frozenset({"Succeeded", "Failed"})
_SCHEMES: Final = {runtime.value: runtime for runtime in Runtime}


class Source(StrEnum):
    """Who told of Pod objects, in order of precedence."""

    KUBELET = "kubelet"
    OBJECTS = "objects"


class _Sandbox(msgspec.Struct):
    id: str
    pod: Pod
    cgroup: str
    resources: Requested
    seen: int
    stopped: bool = False


class _Container(msgspec.Struct):
    id: str
    sandbox_id: str
    uid: str
    name: str
    cgroup: str
    current: Requested
    seen: int
    created_at: float
    first: Requested
    asked: Requested | None = None
    hooked: bool = False
    started: bool = False
    lacks: tuple[str, ...] = ()


@dataclass(slots=True)
class _Entry:
    """What the runtime knows of one pod."""

    sandboxes: set[str] = field(default_factory=set)
    containers: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _View:
    """One pod, merged. Parts that did not change are the same objects as before."""

    pod: Pod
    subject: PodSubject
    sandboxes: tuple[SandboxSubject, ...]
    containers: tuple[ContainerSubject, ...]
    started: tuple[ContainerSubject, ...]


class Unprotected(msgspec.Struct, frozen=True):
    """A container that was created without us, or without something that only creation can give."""

    pod: str
    container: str
    id: str
    lacks: tuple[str, ...]


class NodeState:
    """The store. All methods belong to the event loop's thread and do no I/O."""

    def __init__(
        self,
        *,
        remembered: Mapping[str, Remembered] | None = None,
        layout: Layout | None = None,
        awaited: Iterable[str] = (),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """remembered: requested values of containers from before a restart. awaited: names of the
        sources that must speak once before the state counts as complete."""
        self._monotonic = monotonic
        self._sandboxes: dict[str, _Sandbox] = {}
        self._containers: dict[str, _Container] = {}
        self._entries: dict[str, _Entry] = {}
        self._known: dict[Source, dict[str, KnownPod]] = {source: {} for source in Source}
        self._by_name: dict[Source, dict[tuple[str, str], KnownPod]] = {
            source: {} for source in Source
        }
        self._gone: OrderedDict[str, int] = OrderedDict()
        self._remembered = dict(remembered or {})
        self._layout = layout
        self._awaited = set(awaited)
        self._views: dict[str, _View] = {}
        self._dirty: set[str] = set()
        self._qos: dict[KubeQoS, QosSubject] = {}
        self._pods_changed = True
        self._host_apps: tuple[HostAppSubject, ...] = ()
        self._clock = 0
        self.overflowed = 0

    # --- what sources tell ---------------------------------------------------------------------

    def now(self) -> int:
        """Return a mark to take before a source's list is fetched; see `runtime_list`."""
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
        for container_id in tuple(self._entry(found.pod.uid).containers):
            if self._containers[container_id].sandbox_id == sandbox_id:
                self.remove_container(container_id)
        self._dirty.add(found.pod.uid)

    def remove_sandbox(self, sandbox_id: str) -> None:
        """A sandbox is gone for good."""
        self.stop_sandbox(sandbox_id)
        self._bury(sandbox_id)
        self._drop_sandbox(sandbox_id)

    def create_container(self, container: Container) -> ContainerSubject | None:
        """A container is about to be created; returns its subject, None if it was removed."""
        return self._asked(container, hooked=True)

    def update_container(self, container: Container) -> ContainerSubject | None:
        """Kubelet asks for new values; what it does not name stays as it was asked for before."""
        return self._asked(container, hooked=False)

    def start_container(self, container: Container) -> None:
        """A container's process runs, so its group exists and has the runtime's values."""
        if container.state is not ContainerState.STOPPED:
            entry = self._put_container(container)
            if entry is not None:
                entry.started = True

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
                self._dirty.add(container.uid)
        return found

    def remove_container(self, container_id: str) -> None:
        """A container has ended or was never made. It does not come back."""
        self._bury(container_id)
        self._drop_container(container_id)

    def runtime_list(
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
                self._drop_sandbox(sandbox_id)
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
            entry = self._put_container(container)
            if new and entry is not None and not entry.hooked:
                unhooked.append(container_id)
        self._remembered = {
            id_: asked for id_, asked in self._remembered.items() if id_ in self._containers
        }
        return tuple(unhooked)

    def pods_list(self, source: Source, pods: Iterable[KnownPod]) -> bool:
        """Take a source's full list of Pod objects; returns whether anything changed."""
        listed: dict[str, KnownPod] = {}
        unnamed: dict[tuple[str, str], KnownPod] = {}
        for known in pods:
            for uid in known.uids:
                listed[uid] = known
            if not known.uids:
                unnamed[known.name] = known
            if len(listed) + len(unnamed) > MAX_PODS:
                self.overflowed += 1
                break
        before, before_unnamed = self._known[source], self._by_name[source]
        changed = {uid for uid in {*listed, *before} if listed.get(uid) != before.get(uid)}
        # An object that did not change stays the same object, so what is derived stays too.
        self._known[source] = {
            uid: listed[uid] if uid in changed else before[uid] for uid in listed
        }
        names = {
            name
            for name in {*unnamed, *before_unnamed}
            if unnamed.get(name) != before_unnamed.get(name)
        }
        self._by_name[source] = unnamed
        self._dirty |= changed
        if names:
            self._dirty |= {
                uid
                for uid, view in self._views.items()
                if (view.pod.namespace, view.pod.name) in names
            }
            self._dirty |= {
                known.pod.uid
                for known in self._sandboxes.values()
                if (known.pod.namespace, known.pod.name) in names
            }
        return bool(changed or names)

    def set_layout(self, layout: Layout) -> None:
        """The node's cgroup layout became known, or changed."""
        if layout != self._layout:
            self._layout = layout
            self._qos = {}
            self._dirty |= {*self._entries, *self._views}
            for known in self._known.values():
                self._dirty |= set(known)

    def set_host_apps(self, apps: Sequence[HostAppSubject]) -> None:
        """The NodeSLO declares these host applications."""
        if tuple(apps) != self._host_apps:
            self._host_apps = tuple(apps)

    def spoken(self, source: str) -> None:
        """A source gave its first full list."""
        self._awaited.discard(source)

    def lacks(self, container_id: str, what: Sequence[str]) -> None:
        """A container runs without what only its creation could have given."""
        if found := self._containers.get(container_id):
            found.lacks = tuple(what)

    def copy(self) -> NodeState:
        """Return a state of its own with the same content, for planning: it is not to be fed."""
        made = NodeState(layout=self._layout, awaited=self._awaited)
        made._sandboxes = dict(self._sandboxes)
        made._containers = dict(self._containers)
        made._entries = dict(self._entries)
        made._known = {source: dict(known) for source, known in self._known.items()}
        made._by_name = {source: dict(known) for source, known in self._by_name.items()}
        made._gone = self._gone.copy()
        made._views = dict(self._views)
        made._dirty = set(self._dirty)
        made._qos = dict(self._qos)
        made._host_apps = self._host_apps
        return made

    # --- what others read ----------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Tell whether every configured source has spoken."""
        return not self._awaited

    @property
    def awaited(self) -> tuple[str, ...]:
        """Return the sources that have not spoken yet."""
        return tuple(sorted(self._awaited))

    @property
    def counts(self) -> tuple[int, int]:
        """Return (pods, containers) that the runtime knows."""
        return len(self._entries), len(self._containers)

    def told_pod(self, sandbox_id: str) -> Pod | None:
        """Return the pod of a sandbox as the runtime told of it."""
        found = self._sandboxes.get(sandbox_id)
        return None if found is None else found.pod

    def pod(self, uid: str) -> Pod | None:
        """Return what is known of a pod, from all sources."""
        view = self._view(uid)
        return None if view is None else view.pod

    def container(self, container_id: str) -> ContainerSubject | None:
        """Return a container that the runtime told of, merged."""
        found = self._containers.get(container_id)
        view = self._view(found.uid) if found is not None else None
        if view is None:
            return None
        return next((each for each in view.containers if each.id == container_id), None)

    def pod_subjects(self) -> list[PodSubject]:
        """Return all pods, merged."""
        for uid in tuple(self._dirty):
            self._view(uid)
        return [view.subject for view in self._views.values()]

    def waiting_containers(self) -> list[ContainerSubject]:
        """Return containers that are created and do not run yet: they are no subjects so far.

        The runtime makes a container's group at its start and fills it step by step; who reads it
        meanwhile takes the kernel's defaults for what was there before us.
        """
        return [
            subject
            for id_, container in self._containers.items()
            if not container.started and (subject := self.container(id_)) is not None
        ]

    def remembered(self, container_id: str) -> Remembered | None:
        """Return what is to be remembered of a container over a restart."""
        found = self._containers.get(container_id)
        return None if found is None else _remembered(found)

    def known_to_kubelet(self, uid: str) -> bool:
        """Tell whether kubelet's latest list has the pod."""
        return uid in self._known[Source.KUBELET]

    def all_remembered(self) -> dict[str, Remembered]:
        """Return what is to be remembered of each container over a restart."""
        found = ((id_, _remembered(container)) for id_, container in self._containers.items())
        return {id_: remembered for id_, remembered in found if remembered is not None}

    def unprotected(self) -> list[Unprotected]:
        """Return containers that no hook saw at creation, or that lack what creation gives."""
        return [
            Unprotected(self._pod_name(container), container.name, id_, container.lacks)
            for id_, container in self._containers.items()
            if container.lacks or not container.hooked
        ]

    def snapshot(self, engine: Engine) -> Snapshot:
        """Return everything as one immutable value."""
        for uid in tuple(self._dirty):
            self._view(uid)
        views = self._views.values()
        subjects: list[Subject] = [_NODE, *self._qos_subjects()]
        subjects += [view.subject for view in views]
        for view in views:
            subjects += view.sandboxes
            subjects += view.started
        subjects += self._host_apps
        return Snapshot(engine=engine, subjects=tuple(subjects), complete=self.complete)

    def stale_candidates(self) -> dict[str, str]:
        """Return sandbox id -> pod cgroup of sandboxes without containers.

        Runtimes forget to tell that a pod ended (containerd after a restart): whoever may do I/O
        looks whether the directories are still there.
        """
        busy = {container.sandbox_id for container in self._containers.values()}
        return {
            id_: sandbox.pod.cgroup
            for id_, sandbox in self._sandboxes.items()
            if id_ not in busy and sandbox.pod.cgroup
        }

    def forget_sandboxes(self, sandbox_ids: Iterable[str]) -> None:
        """Drop sandboxes whose directories are gone. A later list may name them again."""
        for sandbox_id in sandbox_ids:
            self._drop_sandbox(sandbox_id)

    # --- the tables ----------------------------------------------------------------------------

    def _entry(self, uid: str) -> _Entry:
        entry = self._entries.get(uid)
        if entry is None:
            entry = self._entries[uid] = _Entry()
        return entry

    def _put_sandbox(self, sandbox: Sandbox) -> None:
        subject = sandbox.subject
        pod = subject.pod
        known = self._sandboxes.get(subject.id)
        if not subject.id or (not pod.uid and known is None):
            return
        if known is None:
            if len(self._sandboxes) >= MAX_PODS:
                self.overflowed += 1
                return
            self._sandboxes[subject.id] = _Sandbox(
                subject.id, pod, subject.cgroup, sandbox.resources, self.now()
            )
        else:
            known.seen = self.now()
            # A leftover's messages have an empty pod: they do not take away what is known.
            if pod.uid:
                if pod.uid != known.pod.uid:
                    self._drop_sandbox(subject.id)
                    self._put_sandbox(sandbox)
                    return
                known.pod = pod
                known.cgroup = subject.cgroup or known.cgroup
                if sandbox.resources != NOTHING_REQUESTED:
                    known.resources = sandbox.resources
        uid = pod.uid or (known.pod.uid if known else "")
        self._entry(uid).sandboxes.add(subject.id)
        self._dirty.add(uid)

    def _put_container(self, container: Container) -> _Container | None:
        subject = container.subject
        if not subject.id or subject.id in self._gone or container.sandbox_id in self._gone:
            return None
        uid = subject.pod.uid
        if not uid and (sandbox := self._sandboxes.get(container.sandbox_id)):
            uid = sandbox.pod.uid
        known = self._containers.get(subject.id)
        if known is None:
            if not uid:
                return None
            if len(self._containers) >= MAX_CONTAINERS:
                self.overflowed += 1
                return None
            before = self._remembered.get(subject.id)
            asked = before.requested if before is not None and before.hooked else None
            known = self._containers[subject.id] = _Container(
                id=subject.id,
                sandbox_id=container.sandbox_id,
                uid=uid,
                name=subject.name,
                cgroup=subject.cgroup,
                current=container.current,
                seen=self.now(),
                created_at=self._monotonic(),
                first=container.current if before is None else before.requested,
                asked=asked,
                hooked=asked is not None,
            )
            if (
                container.sandbox_id
                and container.sandbox_id not in self._sandboxes
                and subject.pod.uid
            ):
                self._put_sandbox(Sandbox(SandboxSubject(pod=subject.pod, id=container.sandbox_id)))
        else:
            known.seen = self.now()
            known.cgroup = subject.cgroup or known.cgroup
            known.name = subject.name or known.name
            if container.current != NOTHING_REQUESTED:
                known.current = container.current
                if known.first == NOTHING_REQUESTED:
                    known.first = container.current
        if container.state in _RUNS or (
            container.state is ContainerState.UNKNOWN and container.pid > 0
        ):
            known.started = True
        self._entry(known.uid).containers.add(subject.id)
        self._dirty.add(known.uid)
        return known

    def _asked(self, container: Container, *, hooked: bool) -> ContainerSubject | None:
        uid = container.subject.pod.uid
        # A new container of a known sandbox changes nothing about its pod.
        view = self._views.get(uid) if container.sandbox_id in self._sandboxes else None
        if uid in self._dirty:
            view = None
        entry = self._put_container(container)
        if entry is None:
            return None
        if hooked:
            entry.hooked = True
        asked = container.subject.requested
        if asked != NOTHING_REQUESTED:
            entry.asked = asked if entry.asked is None else _over(asked, entry.asked)
        if view is not None and entry.uid == uid:
            # The runtime waits: merging all of the pod is for the next snapshot.
            return ContainerSubject(
                pod=view.pod,
                name=entry.name,
                id=entry.id,
                cgroup=entry.cgroup,
                requested=self._requested(entry, self._known_pod(entry.uid, view.pod)),
            )
        return self.container(entry.id)

    def _drop_sandbox(self, sandbox_id: str) -> None:
        found = self._sandboxes.pop(sandbox_id, None)
        if found is not None:
            self._entry(found.pod.uid).sandboxes.discard(sandbox_id)
            self._prune(found.pod.uid)

    def _drop_container(self, container_id: str) -> None:
        found = self._containers.pop(container_id, None)
        self._remembered.pop(container_id, None)
        if found is not None:
            self._entry(found.uid).containers.discard(container_id)
            self._prune(found.uid)

    def _prune(self, uid: str) -> None:
        entry = self._entries.get(uid)
        if entry is not None and not entry.sandboxes and not entry.containers:
            del self._entries[uid]
        self._dirty.add(uid)

    def _bury(self, id_: str) -> None:
        if id_:
            self._gone[id_] = self.now()
            self._gone.move_to_end(id_)
            while len(self._gone) > _MAX_TOMBSTONES:
                self._gone.popitem(last=False)

    # --- merging -------------------------------------------------------------------------------

    def _view(self, uid: str) -> _View | None:
        if uid in self._dirty:
            self._dirty.discard(uid)
            before = self._views.get(uid)
            view = self._merge(uid)
            if view is None:
                self._views.pop(uid, None)
            else:
                self._views[uid] = view
            if (before and before.pod) is not (view and view.pod):
                self._pods_changed = True
        return self._views.get(uid)

    def _merge(self, uid: str) -> _View | None:
        entry = self._entries.get(uid) or _Entry()
        running = [self._containers[id_] for id_ in sorted(entry.containers)]
        used = {container.sandbox_id for container in running}
        live = sorted(
            (
                sandbox
                for id_ in entry.sandboxes
                if not (sandbox := self._sandboxes[id_]).stopped or id_ in used
            ),
            key=lambda sandbox: sandbox.id,
        )
        told = max(live, key=lambda sandbox: sandbox.seen, default=None)
        known = self._known_pod(uid, told.pod if told else None)
        if told is None and (known is None or not self._stands_alone(uid, known)):
            return None
        before = self._views.get(uid)
        pod = self._merged_pod(uid, told.pod if told else None, known)
        if before is not None and before.pod == pod:
            pod = before.pod
        if known is not None:
            requested = known.requested
        else:
            requested = told.resources if told else NOTHING_REQUESTED
        old_sandboxes = {each.id: each for each in before.sandboxes} if before else {}
        old_containers = {each.id: each for each in before.containers} if before else {}
        containers = [
            ContainerSubject(
                pod=pod,
                name=container.name,
                id=container.id,
                cgroup=container.cgroup,
                requested=self._requested(container, known),
            )
            for container in running
        ]
        if known is not None:
            containers += self._told_by_status(pod, known, entry.containers)
        made = tuple(_same(old_containers.get(each.id), each) for each in containers)
        waiting = {container.id for container in running if not container.started}
        return _View(
            pod=pod,
            subject=_same(
                before.subject if before else None, PodSubject(pod=pod, requested=requested)
            ),
            sandboxes=tuple(
                _same(
                    old_sandboxes.get(sandbox.id),
                    SandboxSubject(pod=pod, id=sandbox.id, cgroup=sandbox.cgroup),
                )
                for sandbox in live
                if not sandbox.stopped
            ),
            containers=made,
            started=tuple(each for each in made if each.id not in waiting) if waiting else made,
        )

    def _known_pod(self, uid: str, pod: Pod | None) -> KnownPod | None:
        for source, known in self._known.items():
            if found := known.get(uid):
                return found
            unnamed = self._by_name[source]
            if unnamed and pod is not None and (found := unnamed.get((pod.namespace, pod.name))):
                return found
        return None

    def _stands_alone(self, uid: str, known: KnownPod) -> bool:
        """Tell whether a Pod object alone shows that the pod is on the node, and where."""
        return (
            self._layout is not None
            and bool(self._layout.kubepods)
            and uid == known.uids[-1]
            and not known.terminated
            and (known.pod.phase == "Running" or any(each.running for each in known.containers))
        )

    def _merged_pod(self, uid: str, told: Pod | None, known: KnownPod | None) -> Pod:
        if known is None:
            assert told is not None
            return self._placed(told, told.cgroup)
        pod = known.pod
        return self._placed(
            msgspec.structs.replace(
                pod,
                uid=uid,
                runtime_handler=(told.runtime_handler if told else "") or pod.runtime_handler,
            ),
            told.cgroup if told else "",
        )

    def _placed(self, pod: Pod, cgroup: str) -> Pod:
        """Return the pod with its directory, and the QoS class that the directory shows."""
        if cgroup:
            place = cgroup_paths.parse(cgroup)
            kube_qos = pod.kube_qos if place is None else KubeQoS(place.qos.value)
            if cgroup == pod.cgroup and kube_qos is pod.kube_qos:
                return pod
            return msgspec.structs.replace(pod, cgroup=cgroup, kube_qos=kube_qos)
        layout = self._layout
        if layout is None or not layout.kubepods:
            return pod
        try:
            computed = cgroup_paths.pod_dir(layout.driver, layout.kubepods, pod.kube_qos, pod.uid)
        except PathError:
            return pod
        return msgspec.structs.replace(pod, cgroup=computed)

    def _requested(self, container: _Container, known: KnownPod | None) -> Requested:
        if container.asked is not None:
            return container.asked
        # A CPU set may have been in force for another reason than being asked for.
        first = msgspec.structs.replace(container.first, cpus=None, mems=None)
        specified = known.by_container.get(container.name) if known is not None else None
        return first if specified is None else _over(specified, first)

    def _told_by_status(
        self, pod: Pod, known: KnownPod, listed: set[str]
    ) -> list[ContainerSubject]:
        """Return running containers that only the Pod object's status tells of."""
        layout = self._layout
        if layout is None or not pod.cgroup:
            return []
        found = []
        for each in known.containers:
            runtime = _SCHEMES.get(each.runtime)
            if not each.running or each.id in listed or each.id in self._gone or runtime is None:
                continue
            try:
                cgroup = cgroup_paths.container_dir(layout.driver, runtime, pod.cgroup, each.id)
            except PathError:
                continue
            found.append(
                ContainerSubject(
                    pod=pod,
                    name=each.name,
                    id=each.id,
                    cgroup=cgroup,
                    requested=known.by_container.get(each.name, NOTHING_REQUESTED),
                )
            )
        return found

    def _qos_subjects(self) -> list[QosSubject]:
        layout = self._layout
        if layout is None or not layout.kubepods:
            return []
        if not self._pods_changed and self._qos:
            return list(self._qos.values())
        self._pods_changed = False
        pods = [view.pod for view in self._views.values() if view.pod.phase not in _ENDED]
        made = []
        for qos in KubeQoS:
            of_class = tuple(
                pod for pod in pods if qos is KubeQoS.GUARANTEED or pod.kube_qos is qos
            )
            before = self._qos.get(qos)
            if (
                before is None
                or len(before.pods) != len(of_class)
                or any(old is not new for old, new in zip(before.pods, of_class, strict=True))
            ):
                cgroup = cgroup_paths.qos_dir(layout.driver, layout.kubepods, qos)
                before = self._qos[qos] = QosSubject(kube_qos=qos, cgroup=cgroup, pods=of_class)
            made.append(before)
        return made

    def _pod_name(self, container: _Container) -> str:
        pod = self.pod(container.uid)
        return f"{pod.namespace}/{pod.name}" if pod is not None else container.uid


def _remembered(container: _Container) -> Remembered | None:
    if container.asked is not None:
        return Remembered(container.asked, hooked=True)
    if container.first == NOTHING_REQUESTED:
        return None
    return Remembered(container.first, hooked=False)


def _same(before: _T | None, now: _T) -> _T:
    """Return the object from before when it is equal: decisions are cached by identity."""
    return before if before is not None and before == now else now


def _over(upper: Requested, lower: Requested) -> Requested:
    """Lay what `upper` says over `lower`."""
    return Requested(
        *(
            getattr(lower, name) if (value := getattr(upper, name)) is None else value
            for name in Requested.__struct_fields__
        )
    )
