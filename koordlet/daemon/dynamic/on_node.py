"""The node as strategies see it and as collectors measure it, as immutable values.

The event loop publishes the state's pods when they change, and the sampling thread converts the
newest without a lock. An unchanged pod stays the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

from apis.keys import CPU, MEMORY
from apis.qos import QoSClass
from hooks.facts import NodeMeta
from hooks.subject import HostAppSubject
from koordlet.measurement.collecting import ContainerTarget, HostAppTarget, PodTarget, Targets
from koordlet.node.hardware import Machine
from koordlet.qos.strategies.candidates import batch_cpu_request
from koordlet.qos.strategy import NodeAmounts, PodOnNode
from koordlet.state.merging import PodView
from linux.cgroup_paths import Layout

_T = TypeVar("_T")


class Converted(Generic[_T]):
    """The state's pods that have a cgroup, each converted once. Belongs to one thread."""

    def __init__(self, convert: Callable[[PodView], _T]) -> None:
        self._convert = convert
        self._views: Collection[PodView] = ()
        self._converted: tuple[_T, ...] = ()
        self._by_uid: dict[str, tuple[PodView, _T]] = {}

    def of(self, views: Collection[PodView]) -> tuple[_T, ...]:
        """Return the pods; the same tuple for the same views, the same value for the same view."""
        if views is not self._views:
            before, self._by_uid = self._by_uid, {}
            for view in views:
                if view.pod.cgroup:
                    known = before.get(view.pod.uid)
                    made = known[1] if known and known[0] is view else self._convert(view)
                    self._by_uid[view.pod.uid] = view, made
            self._views = views
            self._converted = tuple(made for _, made in self._by_uid.values())
        return self._converted


def pod_on_node(view: PodView, *, listed: bool) -> PodOnNode:
    """Return a pod as strategies see it. listed: whether kubelet or the API server lists pods."""
    return PodOnNode(
        pod=view.pod,
        containers=tuple(each for each in view.started if each.cgroup),
        terminating=view.deleting,
        requested=view.subject.requested,
        unlisted=listed and not view.described,
    )


def node_amounts(machine: Machine, node: NodeMeta | None) -> NodeAmounts:
    """Return what the node has: the Node object's capacity, else the machine's."""
    capacity = {} if node is None else node.capacity
    return NodeAmounts(
        cpu_milli=capacity.get(CPU) or machine.cpu_milli,
        memory_bytes=capacity.get(MEMORY) or machine.memory_bytes,
        allocatable={} if node is None else node.allocatable,
        cpus=machine.cpus,
    )


class NodesTargets:
    """Converts what the event loop published. Belongs to the sampling thread."""

    def __init__(self) -> None:
        self._made_of: tuple[object, ...] = ()
        self._targets = Targets()
        self._pods = Converted(pod_target)

    def of(
        self,
        layout: Layout | None,
        views: Collection[PodView],
        host_apps: Sequence[HostAppSubject],
    ) -> Targets:
        """Return what is measured; the same value for the same arguments."""
        made_of = (layout, views, host_apps)
        if len(self._made_of) != 3 or any(
            one is not other for one, other in zip(made_of, self._made_of, strict=True)
        ):
            self._made_of = made_of
            self._targets = Targets(
                layout=layout,
                pods=self._pods.of(views),
                host_apps=tuple(HostAppTarget(each.name, each.cgroup) for each in host_apps),
            )
        return self._targets


def pod_target(view: PodView) -> PodTarget:
    """Return what is measured of a pod."""
    pod = view.pod
    return PodTarget(
        uid=pod.uid,
        cgroup=pod.cgroup,
        containers=tuple(
            ContainerTarget(each.id, each.cgroup) for each in view.started if each.cgroup
        ),
        best_effort=pod.qos is QoSClass.BE,
        batch_cpu_request_milli=0 if pod.ended else batch_cpu_request(pod),
    )
