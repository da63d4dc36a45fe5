"""The node as strategies see it: its pods and amounts, as immutable values.

The event loop publishes the state's pods when they change, and the sampling thread converts the
newest without a lock. An unchanged pod stays the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from apis.keys import CPU, MEMORY
from hooks.facts import NodeMeta
from koordlet.node.hardware import Machine
from koordlet.qos.strategy import NodeAmounts, PodOnNode
from koordlet.state.merging import PodView

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


def pod_on_node(view: PodView, *, kubelet_lists: bool) -> PodOnNode:
    """Return a pod as strategies see it. kubelet_lists: whether kubelet's list is a source."""
    return PodOnNode(
        pod=view.pod,
        containers=tuple(each for each in view.started if each.cgroup),
        terminating=view.deleting,
        requested=view.subject.requested,
        unlisted=kubelet_lists and not view.described,
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
