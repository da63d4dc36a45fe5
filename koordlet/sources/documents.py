"""Decodes one document of a manifest: its identity, and its typed value as far as it is usable.

A bad document leaves the last good object of its name in force. A bad field of a NodeSLO keeps its
last good value, or takes its default. Every message names object, field and value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from apis.core import Node, Pod
from apis.decode import decode_object
from apis.device import Device
from apis.effective_nodeslo import decode_nodeslo
from apis.errors import InputError, InputErrors, printable
from apis.fields import Path, copy_tree, get_field, parse_dotted, remove_field, set_field
from apis.keys import ANNOTATION_POD_CPU_ALLOCS, CPU
from apis.nodeslo import (
    NodeSLOSpec,
)
from apis.quantity import Quantity
from apis.topology import NodeResourceTopology, parse_node_cpu_facts, parse_pod_cpu_allocs
from hooks.facts import NodeMeta
from koordlet.state.podspec import known_pod
from service.manifest import DEEPEST, NotYaml, documents

_MAX_VALUES: Final = 400_000
"""Values in one file, counted with each use of a YAML alias. Chosen: more than 8 MiB of ordinary
manifests have, and few enough that alias bombs cannot fill the memory. Twice the value doubles that
memory and the time to decode."""
_MOST_REPAIRS: Final = 8
"""Rounds in which bad fields of a NodeSLO are replaced. Chosen: a round replaces all fields that
are reported, and a replaced field can reveal further errors only a few levels deep. After the last
round the document counts as bad."""
_LONGEST_NAME: Final = 253
"""The longest name of a Kubernetes object (a DNS subdomain)."""

Identity = tuple[str, str, str]
"""kind, namespace ("" for cluster-scoped kinds), name."""


class Good(msgspec.Struct, frozen=True):
    """A usable object, and the tree from which it was decoded."""

    value: Any
    tree: Any


def load_documents(data: bytes) -> list[Any]:
    """Return the documents of a manifest file, with the items of Lists; raises InputError."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _unreadable(f"not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        trees = documents(text, most_values=_MAX_VALUES)
    except NotYaml as error:
        raise _unreadable(str(error)) from None
    found: list[Any] = []
    for tree in trees:
        if isinstance(tree, dict) and tree.get("kind") == "List":
            items = tree.get("items")
            found += items if isinstance(items, list) else []
        elif tree is not None:
            found.append(tree)
    return found


def check_size(tree: Any) -> None:
    """Raise InputError for a tree that is too deep or too large to decode."""
    _count(tree, _MAX_VALUES, 0)


def _count(tree: Any, budget: int, depth: int) -> int:
    if depth > DEEPEST:
        raise _unreadable("nested too deep")
    budget -= 1
    if budget < 0:
        raise _unreadable(f"more than {_MAX_VALUES} values")
    if isinstance(tree, dict):
        for value in tree.values():
            budget = _count(value, budget, depth + 1)
    elif isinstance(tree, list):
        for value in tree:
            budget = _count(value, budget, depth + 1)
    return budget


def _unreadable(problem: str) -> InputError:
    return InputError(obj="file", field="", value="", problem=problem)


_GROUPS: Final[Mapping[str, str]] = {
    "NodeSLO": "slo.koordinator.sh",
    "NodeResourceTopology": "topology.node.k8s.io",
    "Device": "scheduling.koordinator.sh",
    "Node": "",
    "Pod": "",
}


def identity_of(tree: Any, node_name: str, where: str) -> Identity | None:
    """Return the identity of a document's object; None for an object of another node."""
    if not isinstance(tree, dict):
        raise InputError(obj=where, field="(whole document)", value=tree, problem="not an object")
    kind = tree.get("kind")
    version = tree.get("apiVersion")
    metadata = tree.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    if not isinstance(kind, str) or kind not in _GROUPS:
        raise InputError(
            obj=where,
            field="kind",
            value=kind,
            problem="not a kind that is read here",
            hint=f"known kinds: {', '.join(_GROUPS)}, List",
        )
    group = version.rpartition("/")[0] if isinstance(version, str) else None
    if group != _GROUPS[kind]:
        expected = f"{_GROUPS[kind]}/..." if _GROUPS[kind] else "v1"
        raise InputError(
            obj=f"{where}, {kind}",
            field="apiVersion",
            value=version,
            problem="not the API of this kind",
            hint=f"expected {expected}",
        )
    name = metadata.get("name", "" if kind == "Pod" else node_name)
    namespace = metadata.get("namespace", "default") if kind == "Pod" else ""
    for field, value in (("metadata.name", name), ("metadata.namespace", namespace)):
        if not isinstance(value, str) or len(value) > _LONGEST_NAME:
            raise InputError(obj=f"{where}, {kind}", field=field, value=value, problem="not a name")
    if kind == "Pod":
        if not name:
            raise InputError(
                obj=f"{where}, {kind}", field="metadata.name", value=name, problem="missing"
            )
        spec = tree.get("spec")
        placed = spec.get("nodeName", "") if isinstance(spec, dict) else ""
        return (kind, namespace, name) if placed in ("", node_name) else None
    return (kind, "", name) if name == node_name else None


def name_of(identity: Identity) -> str:
    kind, namespace, name = identity
    return printable(f"{kind} {namespace}/{name}" if namespace else f"{kind} {name}")


def decode(identity: Identity, tree: Any, kept: Good | None) -> tuple[Good, list[str]]:
    """Return the usable object, and messages about the parts that are not used."""
    obj = name_of(identity)
    match identity[0]:
        case "NodeSLO":
            good, errors = repair_nodeslo(tree, None if kept is None else kept.tree, obj=obj)
            return Good(*good), errors
        case "NodeResourceTopology":
            topology = decode_object(tree, NodeResourceTopology, obj=obj)
            annotations = topology.metadata.annotations
            facts = parse_node_cpu_facts(annotations, obj=obj)
            text = annotations.get(ANNOTATION_POD_CPU_ALLOCS) or "null"
            try:
                allocs = parse_pod_cpu_allocs(text, obj=obj)
            except InputError as error:
                # They are only shown: the pools, which decide, stay usable.
                return Good(facts, tree), [f"{error}; kubelet's CPUs of pods are not shown"]
            return Good(msgspec.structs.replace(facts, pod_cpu_allocs=allocs), tree), []
        case "Node":
            return Good(node_meta(decode_object(tree, Node, obj=obj)), tree), []
        case "Device":
            return Good(decode_object(tree, Device, obj=obj), tree), []
        case _:
            pod = decode_object(tree, Pod, obj=obj)
            if not pod.metadata.namespace:
                metadata = msgspec.structs.replace(pod.metadata, namespace=identity[1])
                pod = msgspec.structs.replace(pod, metadata=metadata)
            known_pod(pod)  # an error in it surfaces here, where it affects this document only
            return Good(pod, tree), []


def repair_nodeslo(
    tree: Any, last_good: Any, *, obj: str
) -> tuple[tuple[NodeSLOSpec, Any], list[str]]:
    """Return ((spec, its tree), messages); raises InputErrors when the document is unusable.

    A bad field takes its last good value, or its default. A bad element of a list is left out: a
    host application with a defaulted field, for example, would be another application.
    """
    tree = copy_tree(tree)
    messages: list[str] = []
    for _ in range(_MOST_REPAIRS):
        try:
            return (decode_nodeslo(tree, obj=obj), tree), messages
        except InputErrors as error:
            repaired = False
            elements: set[Path] = set()
            for each in error.errors:
                path = parse_dotted(each.field)
                if not path:
                    continue
                index = next((at for at, step in enumerate(path) if isinstance(step, int)), None)
                if index is not None:
                    elements.add(path[: index + 1])
                    messages.append(f"{each}; the element is left out")
                    continue
                before = get_field(last_good, path)
                if before is not None and before != get_field(tree, path):
                    repaired |= set_field(tree, path, before)
                    messages.append(f"{each}; the last good value {printable(before)} stays")
                elif remove_field(tree, path):
                    repaired = True
                    messages.append(f"{each}; the default is used")
            # From the last to the first, so that the other indices stay valid.
            for path in sorted(elements, key=_index, reverse=True):
                repaired |= remove_field(tree, path)
            if not repaired:
                raise
    return (decode_nodeslo(tree, obj=obj), tree), messages


def _index(path: Path) -> int:
    last = path[-1]
    return last if isinstance(last, int) else 0


PRESSURES: Final = frozenset({"MemoryPressure", "DiskPressure", "PIDPressure"})
"""Kubelet's conditions of a Node under which kubelet evicts pods."""


def node_meta(node: Node) -> NodeMeta:
    """Return the part of a Node that policies read."""
    memory = node.status.allocatable.get("memory")
    cpu = node.status.allocatable.get("cpu")
    return NodeMeta(
        name=node.metadata.name,
        labels=node.metadata.labels,
        annotations=node.metadata.annotations,
        allocatable_memory_bytes=None if memory is None else memory.value(),
        allocatable_cpu_milli=None if cpu is None else cpu.milli_value(),
        allocatable=_amounts(node.status.allocatable),
        capacity=_amounts(node.status.capacity),
        pressures=frozenset(
            condition.type
            for condition in node.status.conditions
            if condition.type in PRESSURES and condition.status == "True"
        ),
    )


def _amounts(resources: Mapping[str, Quantity]) -> dict[str, int]:
    """Return amounts in their units; CPU in milli-cores, which is batch-cpu's unit already."""
    return {
        name: quantity.milli_value() if name == CPU else quantity.value()
        for name, quantity in resources.items()
    }


def each_of(error: InputError | InputErrors) -> tuple[InputError, ...]:
    return error.errors if isinstance(error, InputErrors) else (error,)
