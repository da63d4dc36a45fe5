"""The node as strategies see it: its pods and amounts, as immutable values.

The event loop publishes the state's pods when they change, and the sampling thread converts the
newest without a lock. An unchanged pod stays the same object.
"""

from __future__ import annotations

from collections.abc import Collection

from apis.keys import CPU, MEMORY
from hooks.facts import NodeMeta
from koordlet.node.hardware import Machine
from koordlet.qos.strategy import NodeAmounts, PodOnNode
from koordlet.state.merging import PodView


class PodsOnNode:
    """Converts the state's pods. Belongs to the sampling thread."""

    def __init__(self) -> None:
        self._views: Collection[PodView] = ()
        self._pods: tuple[PodOnNode, ...] = ()
        self._made: dict[str, tuple[PodView, PodOnNode]] = {}

    def of(self, views: Collection[PodView]) -> tuple[PodOnNode, ...]:
        """Return the pods that have a cgroup; the same tuple for the same views."""
        if views is not self._views:
            before, self._made = self._made, {}
            for view in views:
                if view.pod.cgroup:
                    known = before.get(view.pod.uid)
                    made = known[1] if known and known[0] is view else _pod_on_node(view)
                    self._made[view.pod.uid] = view, made
            self._views = views
            self._pods = tuple(made for _, made in self._made.values())
        return self._pods


def _pod_on_node(view: PodView) -> PodOnNode:
    return PodOnNode(
        pod=view.pod,
        containers=tuple(each for each in view.started if each.cgroup),
        terminating=view.deleting,
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
