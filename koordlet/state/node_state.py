"""`NodeState`: the store that sources feed and all other parts read.

One thread (the event loop) owns it. A report is only recorded; a pod is merged when it is read, or
for the next snapshot, and only if one of its parts changed since. A `Snapshot` is immutable and may
be used by any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from apis.qos import KubeQoS
from hooks.engine import Engine
from hooks.observed import Container, Sandbox
from hooks.subject import (
    NOTHING_REQUESTED,
    ContainerSubject,
    HostAppSubject,
    NodeSubject,
    Pod,
    PodSubject,
    QosSubject,
    Requested,
    Subject,
)
from koordlet.state.merging import PodView, container_of, merge_pod, qos_subjects
from koordlet.state.pod_objects import PodObjects, Source
from koordlet.state.podspec import KnownPod
from koordlet.state.proxy_requests import ProxyRequests
from koordlet.state.records import ContainerRecord, PodRecords
from koordlet.state.requests_log import Remembered
from koordlet.state.runtime_records import RuntimeRecords
from koordlet.state.snapshot import Snapshot
from linux.cgroup_paths import Layout

_NODE: Final = NodeSubject()


class Unprotected(msgspec.Struct, frozen=True):
    """A container that koordlet did not see created, or that lacks what only creation can set."""

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
        sources whose first list must arrive before the state counts as complete."""
        self._touched: set[str] = set()
        """Uids of pods to merge again. The records share this set."""
        self.proxy_requests = ProxyRequests(remembered or {})
        """Kubelet's requests that came through the proxy."""
        self._records = RuntimeRecords(
            touched=self._touched,
            remembered=remembered or {},
            of_proxy=self.proxy_requests,
            monotonic=monotonic,
        )
        self._created: dict[str, Container] = {}
        """Containers that are being created and not in the records yet; see `create_container`."""
        self._delivered: dict[str, Requested] = {}
        """What replies deliver to these in place of kubelet's values."""
        self._objects = PodObjects()
        self._layout = layout
        self._awaited = set(awaited)
        self._views: dict[str, PodView] = {}
        self._qos: dict[KubeQoS, QosSubject] = {}
        self._pods_changed = True
        self._host_apps: tuple[HostAppSubject, ...] = ()
        self._requests = 0

    def copy(self) -> NodeState:
        """Return an independent state with the same content, for plans in another thread."""
        self.record_created()
        made = NodeState(layout=self._layout, awaited=self._awaited)
        made._touched |= self._touched
        made._records = self._runtime.copy(made._touched)
        made._objects = self._objects.copy()
        made._views = dict(self._views)
        made._qos = dict(self._qos)
        made._host_apps = self._host_apps
        made._requests = self._requests
        return made

    # --- reports of the runtime: `RuntimeRecords` has the rules ----------------------------------

    def now(self) -> int:
        """Return a mark; take it before a source's list is fetched. See `runtime_list`."""
        return self._runtime.now()

    def run_sandbox(self, sandbox: Sandbox) -> None:
        """Record that a sandbox runs. An event does not bring back a removed sandbox."""
        self._runtime.run_sandbox(sandbox)

    def stop_sandbox(self, sandbox_id: str) -> None:
        """Record that a sandbox and all its containers have ended."""
        self._runtime.stop_sandbox(sandbox_id)

    def remove_sandbox(self, sandbox_id: str) -> None:
        """Record that a sandbox is gone for good."""
        self._runtime.remove_sandbox(sandbox_id)

    def create_container(self, container: Container) -> ContainerSubject | None:
        """Record a container that is about to be created; return its subject, None if removed.

        The runtime waits for the reply. So a new container of a merged pod, which is the usual
        case, is recorded when the state is used next.
        """
        subject = container.subject
        view = None if subject.pod.uid in self._touched else self._views.get(subject.pod.uid)
        if (
            view is None
            or subject.requested == NOTHING_REQUESTED
            or subject.id in self._created
            or not self._records.would_be_new(subject.id, container.sandbox_id)
        ):
            return self._note_request(container, at_creation=True)
        self._created[subject.id] = container
        if view.pod is subject.pod:
            return subject
        return ContainerSubject(
            pod=view.pod,
            name=subject.name,
            id=subject.id,
            cgroup=subject.cgroup,
            requested=subject.requested,
        )

    @property
    def _runtime(self) -> RuntimeRecords:
        """The records of everything that the runtime reported."""
        if self._created:
            self.record_created()
        return self._records

    def record_created(self) -> None:
        """Record the containers whose recording was deferred."""
        created, self._created = self._created, {}
        delivered, self._delivered = self._delivered, {}
        for container in created.values():
            self._records.note_request(container, at_creation=True)
        for container_id, values in delivered.items():
            self._records.note_delivered(container_id, values)

    def update_container(self, container: Container) -> ContainerSubject | None:
        """Record the new values that kubelet requests; values that it does not name stay."""
        self._requests += 1
        return self._note_request(container, at_creation=False)

    def _note_request(self, container: Container, *, at_creation: bool) -> ContainerSubject | None:
        uid = container.subject.pod.uid
        # A new container of a known sandbox does not change its pod.
        view = None if uid in self._touched else self._views.get(uid)
        if view is not None and self._runtime.sandbox(container.sandbox_id) is None:
            view = None
        record = self._runtime.note_request(container, at_creation=at_creation)
        if record is None:
            return None
        if view is not None and record.uid == uid:
            # The runtime waits for the reply, so the pod is merged later, for the next snapshot.
            return container_of(view.pod, record, self._objects.find(uid, view.pod))
        return self.container(record.id)

    def start_container(self, container: Container) -> bool:
        """Record that a container's process runs: its group exists and has the runtime's values.

        Returns whether its values differ from what was requested and delivered.
        """
        return self._runtime.start_container(container)

    def observe_container(self, container: Container) -> None:
        """Record a container that an event reported, started or not."""
        self._runtime.observe_container(container)

    def start_overdue(self, older_than_s: float) -> bool:
        """Count containers as started whose start was not reported; return whether any were."""
        return self._runtime.start_overdue(older_than_s)

    def remove_container(self, container_id: str) -> None:
        """Record that a container has ended or was never created. No event brings it back."""
        self._runtime.remove_container(container_id)

    def runtime_list(
        self,
        sandboxes: Sequence[Sandbox],
        containers: Sequence[Container],
        *,
        taken_at: int | None = None,
    ) -> tuple[str, ...]:
        """Take a runtime's full list: whatever it does not name is gone.

        taken_at: the mark from before the list was fetched; None: the list is current.
        Returns the ids of containers that are new and were not created through a hook.
        """
        return self._runtime.take_list(sandboxes, containers, taken_at=taken_at)

    def note_delivered(self, container_id: str, values: Requested) -> bool:
        """Record the values that a reply delivers in place of kubelet's.

        Returns whether a hook is creating the container, and no earlier report named it.
        """
        if container_id in self._created:
            self._delivered[container_id] = values
            return True
        self._runtime.note_delivered(container_id, values)
        return False

    def take_unseen_requests(self) -> dict[str, Requested]:
        """Return requests of which only the last full lists gave evidence, by container."""
        return self._runtime.take_unseen_requests()

    def lacks(self, container_id: str, what: Sequence[str]) -> None:
        """Record what a running container lacks and only its creation could have set."""
        if found := self._runtime.container(container_id):
            found.lacks = tuple(what)

    def forget_sandboxes(self, sandbox_ids: Iterable[str]) -> None:
        """Drop sandboxes whose directories are gone. A later report may name them again."""
        for sandbox_id in sandbox_ids:
            self._runtime.forget_sandbox(sandbox_id)

    # --- other sources ---------------------------------------------------------------------------

    def pods_list(self, source: Source, pods: Iterable[KnownPod]) -> bool:
        """Take a source's full list of Pod objects; returns whether anything changed."""
        uids, names = self._objects.take(source, pods)
        self._touched |= uids
        if names:
            known = [
                *((uid, view.pod) for uid, view in self._views.items()),
                *((sandbox.pod.uid, sandbox.pod) for sandbox in self._runtime.sandboxes()),
            ]
            self._touched |= {uid for uid, pod in known if (pod.namespace, pod.name) in names}
        return bool(uids or names)

    def update_through_proxy(
        self, uid: str, name: str, container_id: str, update: Requested
    ) -> str:
        """Record new values of a running container that kubelet requests through the proxy.

        Returns the container's cgroup; "" while no source has the container.
        """
        self._requests += 1
        found = self.container_of(uid, container_id)
        cgroup = "" if found is None else found.cgroup
        if not self._runtime.note_update(container_id, update):
            self._objects.note_update(uid, name, container_id, update)
        self._touched.add(uid)
        return cgroup

    def set_layout(self, layout: Layout) -> None:
        """Take the node's cgroup layout, which became known or changed."""
        if layout != self._layout:
            self._layout = layout
            self._qos = {}
            self._touched |= {*self._runtime.pods, *self._views, *self._objects.uids()}

    def set_host_apps(self, apps: Sequence[HostAppSubject]) -> None:
        """Take the host applications that the NodeSLO declares."""
        if tuple(apps) != self._host_apps:
            self._host_apps = tuple(apps)

    def mark_synced(self, source: str) -> None:
        """Note that the first full list of a source has arrived."""
        self._awaited.discard(source)

    # --- reading ---------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether the first list of every configured source has arrived."""
        return not self._awaited

    @property
    def awaited(self) -> tuple[str, ...]:
        """The sources whose first list has not arrived yet."""
        return tuple(sorted(self._awaited))

    @property
    def requests(self) -> int:
        """How often kubelet has requested other values of running containers."""
        return self._requests

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of (pods, containers) that the runtime reports."""
        return self._runtime.counts

    def pod(self, uid: str) -> Pod | None:
        """Return what is known of a pod, from all sources."""
        view = self._view(uid)
        return None if view is None else view.pod

    def pod_subjects(self) -> list[PodSubject]:
        """Return all pods, merged."""
        return [view.subject for view in self._all_views()]

    def pod_views(self) -> Collection[PodView]:
        """Return all pods, merged, with their containers. An unchanged pod is the same object."""
        return self._all_views()

    @property
    def host_apps(self) -> tuple[HostAppSubject, ...]:
        """The host applications that the NodeSLO declares."""
        return self._host_apps

    def container(self, container_id: str) -> ContainerSubject | None:
        """Return a container that the runtime reported, merged with the Pod object."""
        found = self._runtime.container(container_id)
        return None if found is None else self.container_of(found.uid, container_id)

    def container_of(self, uid: str, container_id: str) -> ContainerSubject | None:
        """Return a pod's container, whichever source has it."""
        view = self._view(uid)
        if view is None:
            return None
        return next((each for each in view.containers if each.id == container_id), None)

    def waiting_containers(self) -> list[ContainerSubject]:
        """Return containers that are created and do not run yet: they are not subjects so far.

        The runtime creates a container's group at its start and sets its values one by one. A
        reader in between would take the kernel's defaults for the original values.
        """
        return [
            subject
            for record in self._runtime.containers()
            if not record.started and (subject := self.container(record.id)) is not None
        ]

    def unprotected(self) -> list[Unprotected]:
        """Return containers that no hook saw at creation, or that lack what creation sets."""
        return [
            Unprotected(self._pod_name(record), record.name, record.id, record.lacks)
            for record in self._runtime.containers()
            if record.lacks or not record.hooked
        ]

    def remembered(self, container_id: str) -> Remembered | None:
        """Return what the requests log keeps of a container over a restart."""
        found = self._runtime.container(container_id)
        return None if found is None else found.remembered

    def all_remembered(self) -> dict[str, Remembered]:
        """Return what the requests log keeps of each container over a restart."""
        found = ((record.id, record.remembered) for record in self._runtime.containers())
        return {
            **{id_: remembered for id_, remembered in found if remembered is not None},
            **dict(self.proxy_requests.remembered()),
        }

    def known_to_kubelet(self, uid: str) -> bool:
        """Return whether kubelet's latest list has the pod."""
        return self._objects.lists(Source.KUBELET, uid)

    def stale_candidates(self) -> dict[str, str]:
        """Return sandbox id -> pod cgroup of sandboxes without containers.

        A runtime may not report that a pod ended (containerd after a restart). The caller checks
        whether the directories still exist.
        """
        return {
            sandbox.id: sandbox.pod.cgroup
            for sandbox in self._runtime.without_containers()
            if sandbox.pod.cgroup
        }

    def subjects_of(self, uid: str) -> tuple[Subject, ...]:
        """Return a pod with its sandboxes and running containers; () when it is not on the node."""
        view = self._view(uid)
        return () if view is None else (view.subject, *view.sandboxes, *view.started)

    def qos_subjects(self) -> tuple[QosSubject, ...]:
        """Return the QoS directories with their pods."""
        self._all_views()
        return tuple(self._qos_subjects())

    def snapshot(self, engine: Engine) -> Snapshot:
        """Return everything as one immutable value."""
        views = self._all_views()
        subjects: list[Subject] = [_NODE, *self._qos_subjects()]
        subjects += [view.subject for view in views]
        for view in views:
            subjects += view.sandboxes
            subjects += view.started
        subjects += self._host_apps
        return Snapshot(
            engine=engine,
            subjects=tuple(subjects),
            complete=self.complete,
            requests=self._requests,
        )

    # --- merging ---------------------------------------------------------------------------------

    def _view(self, uid: str) -> PodView | None:
        self.record_created()
        if uid in self._touched:
            self._touched.discard(uid)
            before = self._views.get(uid)
            view = merge_pod(
                uid,
                self._runtime.pods.get(uid) or PodRecords(),
                self._objects,
                layout=self._layout,
                gone=self._runtime.gone,
                before=before,
            )
            if view is None:
                self._views.pop(uid, None)
            else:
                self._views[uid] = view
            if (before and before.pod) is not (view and view.pod):
                self._pods_changed = True
        return self._views.get(uid)

    def _all_views(self) -> Collection[PodView]:
        self.record_created()
        for uid in tuple(self._touched):
            self._view(uid)
        return self._views.values()

    def _qos_subjects(self) -> Iterable[QosSubject]:
        if self._pods_changed or not self._qos:
            self._qos = qos_subjects(
                (view.pod for view in self._views.values()), self._layout, self._qos
            )
            self._pods_changed = False
        return self._qos.values()

    def _pod_name(self, record: ContainerRecord) -> str:
        pod = self.pod(record.uid)
        return f"{pod.namespace}/{pod.name}" if pod is not None else record.uid
