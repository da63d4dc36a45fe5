"""The merge patches that lead from the observed to the desired state of a Node.

A patch holds only keys that the manager owns and that differ. Changes below a threshold are not
written until a refresh is due: docs/facts/manager.md, "What is written to a Node".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from apis.core import Node
from apis.decode import to_plain
from apis.explanation import ANNOTATION_RESOURCE_EXPLANATION
from apis.keys import (
    BATCH_CPU,
    BATCH_MEMORY,
)
from apis.quantity import Quantity
from apis.topology import NodeResourceTopology, Zone, ZoneResource, numa_id
from cluster.manager.batch import amplified
from cluster.manager.node_offer import BATCH, Wanted


def differs(old: Quantity | None, new: Quantity | None, threshold: float) -> bool:
    """Return whether an offered amount changed enough to be written."""
    if old is None or new is None:
        return (old is None) != (new is None)
    change = abs(new.milli_value() - old.milli_value())
    return change > abs(old.milli_value()) * threshold


def status_patch(node: Node, wanted: Wanted, *, threshold: float, refresh: str) -> dict[str, Any]:
    """Return the merge patch of nodes/status, {} if nothing needs to be written.

    threshold: relative change above which an amount is written. refresh: "due" writes any
    difference, "" only those above the threshold.
    """
    allocatable, capacity = node.status.allocatable, node.status.capacity
    urgent = any(
        differs(
            allocatable.get(name),
            new,
            0.0 if refresh == "due" or name in wanted.exact else threshold,
        )
        or (name in capacity) != (new is not None)
        for name, new in wanted.resources.items()
    )
    if not urgent:
        return {}
    parts: dict[str, dict[str, str | None]] = {"capacity": {}, "allocatable": {}}
    for name, new in wanted.resources.items():
        for part, stored in (("capacity", capacity), ("allocatable", allocatable)):
            if stored.get(name) != new:
                parts[part][name] = None if new is None else str(new)
    patch: dict[str, Any] = {"status": {part: what for part, what in parts.items() if what}}
    annotations = {
        key: text
        for key, text in wanted.along.items()
        if node.metadata.annotations.get(key) != text
    }
    if annotations:
        patch["metadata"] = {"annotations": annotations}
    return patch


def without_explanation(patch: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a patch that removes the explanation instead of writing it; None if it has none.

    For a Node whose annotations have no room for the explanation: the amounts are more important.
    """
    annotations = (patch.get("metadata") or {}).get("annotations") or {}
    if annotations.get(ANNOTATION_RESOURCE_EXPLANATION) is None:
        return None
    left = {**annotations, ANNOTATION_RESOURCE_EXPLANATION: None}
    return {**patch, "metadata": {**patch["metadata"], "annotations": left}}


def metadata_patch(node: Node, wanted: Wanted) -> dict[str, Any]:
    """Return the merge patch of the Node's annotations and labels, {} if none differs."""
    metadata: dict[str, Any] = {}
    annotations = {
        key: text
        for key, text in wanted.annotations.items()
        if node.metadata.annotations.get(key) != text
    }
    labels = {
        key: text for key, text in wanted.labels.items() if node.metadata.labels.get(key) != text
    }
    if annotations:
        metadata["annotations"] = annotations
    if labels:
        metadata["labels"] = labels
    return {"metadata": metadata} if metadata else {}


def zones_patch(
    topology: NodeResourceTopology, wanted: Wanted, *, threshold: float
) -> dict[str, Any]:
    """Return the merge patch of the zones' batch resources, {} if none differs enough.

    It holds the resourceVersion, because a merge patch replaces the whole list of zones.
    """
    if wanted.zones is None:
        return {}
    changed = False
    zones: list[Zone] = []
    for position, zone in enumerate(topology.zones):
        number = numa_id(zone)
        amount = wanted.zones.get(position if number is None else number)
        new: dict[str, Quantity] = {}
        if amount is not None and zone.type == "Node":
            cpu = amplified(amount.cpu, wanted.normalization)
            new = {BATCH_CPU: Quantity.of(cpu), BATCH_MEMORY: Quantity.of_bytes(amount.memory)}
        kept = {resource.name: resource for resource in zone.resources}
        for name in BATCH:
            old = kept.get(name)
            quantity = new.get(name)
            if not differs(old.allocatable if old else None, quantity, threshold):
                continue
            changed = True
            if quantity is None:
                del kept[name]
            else:
                kept[name] = ZoneResource(name, quantity, quantity, quantity)
        ordered = tuple(kept[name] for name in sorted(kept))
        zones.append(msgspec.structs.replace(zone, resources=ordered))
    if not changed:
        return {}
    return {
        "metadata": {"resourceVersion": topology.metadata.resource_version},
        "zones": to_plain(zones),
    }
