"""Quotas that were admitted a moment ago and that the cache does not show yet.

Several children of one parent can be created in the milliseconds before the first of them comes
back through the watch. Each fits alone, together they may exceed the parent's `spec.min`. What was
admitted counts from then on: as a child with the larger of the stored and the admitted amount, as a
parent with the smaller one, so that it does not matter which of the two the API server keeps.

Replicas do not know of each other's; the sum of two creations through two replicas in the same
moment is found by the next review only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from apis.quantity import ZERO, ResourceList
from cluster.quota_tree import QuotaNode, QuotaTree

PENDING_SECONDS: Final = 10.0
"""How long an admitted quota counts without being seen: what an API server spends on a webhook at
most (timeoutSeconds). A quota that it refused after us blocks its siblings for as long."""


class PendingQuotas:
    """The admitted quotas by namespace and name, until the cache shows them or time is up."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._admitted: dict[tuple[str, str], tuple[QuotaNode, float]] = {}

    def note(self, node: QuotaNode) -> None:
        """Count a quota that was admitted."""
        self._admitted[node.namespace, node.name] = node, self._now() + PENDING_SECONDS

    def besides(self, tree: QuotaTree, *, namespace: str, name: str) -> list[QuotaNode]:
        """Return the admitted quotas that `tree` does not show, without the one of that name.

        The API server itself keeps two changes of one object apart.
        """
        for key, (node, until) in list(self._admitted.items()):
            if self._now() >= until or tree.nodes.get(node.name) == node:
                self._admitted.pop(key, None)
        return [node for key, (node, _) in list(self._admitted.items()) if key != (namespace, name)]


def with_pending(tree: QuotaTree, pending: list[QuotaNode]) -> QuotaTree:
    """Return a tree in which admitted quotas count too; `tree` does not change."""
    if not pending:
        return tree
    result = QuotaTree(())
    result.nodes = dict(tree.nodes)
    result.children = {parent: list(children) for parent, children in tree.children.items()}
    result.of_namespace = dict(tree.of_namespace)
    result.ambiguous = set(tree.ambiguous)
    for node in pending:
        known = tree.nodes.get(node.name)
        as_child = node
        if known is not None:
            result.nodes[node.name] = replace(known, min=_smaller(known.min, node.min))
            as_child = replace(node, min=_larger(known.min, node.min))
        siblings = result.children.setdefault(node.parent, [])
        siblings[:] = [other for other in siblings if other.name != node.name] + [as_child]
        for namespace in node.namespaces:
            result.of_namespace.setdefault(namespace, node.name)
    return result


def _smaller(one: ResourceList, other: ResourceList) -> ResourceList:
    """Return the smaller amount of each resource; a missing one counts as 0."""
    return {name: min(one.get(name, ZERO), other.get(name, ZERO)) for name in {*one, *other}}


def _larger(one: ResourceList, other: ResourceList) -> ResourceList:
    return {name: max(one.get(name, ZERO), other.get(name, ZERO)) for name in {*one, *other}}
