"""The objects directory: plain Kubernetes manifests that stand for an API server on a bare node.

Read are NodeSLO, NodeResourceTopology, Node, Device (of this node) and Pod; a file may hold several
documents, or a List. What cannot be read costs as little as possible: a bad file keeps its last
good objects, a bad document keeps the last good object of its name, and a bad field of a NodeSLO
keeps that field's last good value, or its default. Every problem names file, object, field and
value. Reading happens in `Directory.scan`, a plain function; `koordlet.inotify` says when.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from apis.core import Node, Pod
from apis.decode import decode_object
from apis.device import Device
from apis.errors import InputError, InputErrors, printable
from apis.nodeslo import NodeSLOSpec, decode_nodeslo
from apis.topology import NodeCPUFacts, NodeResourceTopology, parse_node_cpu_facts
from hooks.facts import NodeMeta
from koordlet.podspec import known_pod
from koordlet.strict import copy_tree, get_field, parse_dotted, remove_field, set_field
from service.manifest import NotYaml, documents

MAX_FILES: Final = 4096
MAX_FILE_BYTES: Final = 8 << 20
MAX_NODES: Final = 400_000
"""Values in one file, counted as often as YAML aliases show them."""
_SUFFIXES: Final = (".yaml", ".yml", ".json")
_MAX_DEPTH: Final = 64

Identity = tuple[str, str, str]
"""kind, namespace ("" for cluster-scoped kinds), name."""


class Problem(msgspec.Struct, frozen=True):
    """Something in the directory that could not be used; what is in force instead is said."""

    file: str
    obj: str
    message: str


class NodeObjects(msgspec.Struct, frozen=True):
    """What the directory says now. None: no such object."""

    slo: NodeSLOSpec | None = None
    topology: NodeCPUFacts | None = None
    node: NodeMeta | None = None
    device: Device | None = None
    pods: tuple[Pod, ...] = ()
    problems: tuple[Problem, ...] = ()


class _Stamp(msgspec.Struct, frozen=True):
    """What tells that a file changed, as far as stat(2) tells."""

    inode: int
    size: int
    modified_ns: int


class _Good(msgspec.Struct, frozen=True):
    """A usable object with the tree that it was read from."""

    value: Any
    tree: Any


class _File(msgspec.Struct, frozen=True):
    """What is in force of one file."""

    stamp: _Stamp | None
    objects: Mapping[Identity, _Good]
    problems: tuple[Problem, ...]


class Directory:
    """The directory and the last good object of everything in it."""

    def __init__(self, path: str, node_name: str) -> None:
        self._path = path
        self._node_name = node_name
        self._files: dict[str, _File] = {}
        self._objects: NodeObjects | None = None
        self._unlisted: NodeObjects | None = None

    @property
    def path(self) -> str:
        return self._path

    def scan(self) -> NodeObjects:
        """Read what changed; returns the same value as before when nothing did."""
        try:
            names = sorted(
                name
                for name in os.listdir(self._path)
                if name.endswith(_SUFFIXES) and not name.startswith(".")
            )
        except FileNotFoundError:
            if self._files:
                # A share that is not mounted, a tool that replaces the directory: no word of ours.
                return self._without_list("is gone; an empty one would withdraw its objects")
            names = []
        except OSError as error:
            return self._without_list(f"cannot be listed: {error.strerror}")
        self._unlisted = None
        files = {name: self._read(name) for name in names[:MAX_FILES]}
        changed = self._objects is None or any(
            files.get(name) is not self._files.get(name) for name in {*files, *self._files}
        )
        self._files = files
        if changed or self._objects is None:
            self._objects = self._merge(len(names))
        return self._objects

    def _without_list(self, problem: str) -> NodeObjects:
        """Return what was last read, with the reason why it is not newer."""
        kept = self._objects or NodeObjects()
        told = Problem(self._path, "", f"{problem}; what was read last stays in force")
        if self._unlisted is None or told not in self._unlisted.problems:
            self._unlisted = msgspec.structs.replace(kept, problems=(*kept.problems, told))
        return self._unlisted

    def _read(self, name: str) -> _File:
        before = self._files.get(name)
        path = f"{self._path}/{name}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(fd, "rb") as file:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    return _broken(before, path, None, "not a regular file")
                stamp = _Stamp(status.st_ino, status.st_size, status.st_mtime_ns)
                if before is not None and before.stamp == stamp:
                    return before
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            return _broken(before, path, None, f"cannot be read: {error.strerror}")
        if not data and before is not None and before.objects:
            # Most likely it is being written.
            return _broken(before, path, stamp, "is empty; deleting it would withdraw its objects")
        if len(data) > MAX_FILE_BYTES:
            return _broken(before, path, stamp, f"larger than {MAX_FILE_BYTES >> 20} MiB")
        return self._parse(before, path, stamp, data)

    def take(self, files: Mapping[str, bytes]) -> NodeObjects:
        """Read files that are given by name and content, in place of the directory's."""
        stamp = _Stamp(0, 0, 0)
        self._files = {
            name: self._parse(None, name, stamp, data) for name, data in sorted(files.items())
        }
        self._objects = self._merge(len(files))
        return self._objects

    def _parse(self, before: _File | None, path: str, stamp: _Stamp, data: bytes) -> _File:
        try:
            return _documents(before, path, stamp, load_documents(data), self._node_name)
        except InputError as error:
            return _broken(before, path, stamp, error.problem)
        except Exception as error:  # noqa: BLE001 - a defect must cost the file, not the daemon
            return _broken(before, path, stamp, f"{type(error).__name__}: {error}")

    def _merge(self, count: int) -> NodeObjects:
        made = _merge(self._files, f"{self._path}/" if self._path else "")
        if count <= MAX_FILES:
            return made
        problem = Problem(self._path, "", f"{count} files; only the first {MAX_FILES} are read")
        return msgspec.structs.replace(made, problems=(problem, *made.problems))


class Received:
    """Objects that arrive one by one, by name, from an API server: the last good one of each."""

    def __init__(self, node_name: str) -> None:
        self._node_name = node_name
        self._files: dict[str, _File] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    @property
    def trees(self) -> dict[str, Any]:
        """The objects in force: where the newest version is bad, what is used in its place."""
        return {
            name: good.tree for name, file in self._files.items() for good in file.objects.values()
        }

    def put(self, name: str, tree: Any) -> None:
        """Take an object's newest version; a bad one leaves the last good one in force."""
        before, stamp = self._files.get(name), _Stamp(0, 0, 0)
        try:
            _count(tree, MAX_NODES, 0)
            taken = _documents(before, name, stamp, [tree], self._node_name)
        except InputError as error:
            taken = _broken(before, name, stamp, error.problem)
        except Exception as error:  # noqa: BLE001 - a defect must cost the object, not the source
            taken = _broken(before, name, stamp, f"{type(error).__name__}: {error}")
        self._files[name] = taken

    def drop(self, name: str) -> None:
        """Forget an object that was deleted."""
        self._files.pop(name, None)

    def objects(self) -> NodeObjects:
        return _merge(self._files, "")


def over(upper: NodeObjects, lower: NodeObjects) -> NodeObjects:
    """Lay the objects of one source over those of another, kind by kind; pods are joined."""
    return NodeObjects(
        slo=lower.slo if upper.slo is None else upper.slo,
        topology=lower.topology if upper.topology is None else upper.topology,
        node=lower.node if upper.node is None else upper.node,
        device=lower.device if upper.device is None else upper.device,
        pods=(*upper.pods, *lower.pods),
        problems=(*upper.problems, *lower.problems),
    )


def _broken(before: _File | None, path: str, stamp: _Stamp | None, problem: str) -> _File:
    kept = before.objects if before else {}
    consequence = "its last good objects stay in force" if kept else "nothing of it is used"
    made = _File(stamp, kept, (Problem(path, "", f"{problem}; {consequence}"),))
    # The same trouble again is no change.
    return before if before is not None and before == made else made


def _documents(
    before: _File | None,
    path: str,
    stamp: _Stamp,
    trees: Iterable[Any],
    node_name: str,
) -> _File:
    last_good = before.objects if before else {}
    objects: dict[Identity, _Good] = {}
    problems: list[Problem] = []
    for index, tree in enumerate(trees):
        try:
            identity = _identity(tree, node_name, f"document {index + 1}")
        except InputError as error:
            problems.append(Problem(path, error.obj, str(error)))
            continue
        if identity is None:
            continue
        obj = _obj(identity)
        if identity in objects:
            problems.append(Problem(path, obj, "stands twice in the file; the first is used"))
            continue
        kept = last_good.get(identity)
        try:
            good, errors = _decode(identity, tree, kept)
        except (InputError, InputErrors) as error:
            consequence = "its last good version stays in force" if kept else "not used"
            problems += [Problem(path, obj, f"{each}; {consequence}") for each in _each(error)]
            if kept is not None:
                objects[identity] = kept
            continue
        objects[identity] = good
        problems += [Problem(path, obj, message) for message in errors]
    return _File(stamp, objects, tuple(problems))


def _merge(files: Mapping[str, _File], prefix: str) -> NodeObjects:
    found: dict[Identity, tuple[str, _Good]] = {}
    problems: list[Problem] = []
    for name, file in files.items():
        problems += file.problems
        for identity, good in file.objects.items():
            first = found.setdefault(identity, (name, good))
            if first[0] != name:
                problems.append(
                    Problem(
                        f"{prefix}{name}",
                        _obj(identity),
                        f"stands in {first[0]} too; that one is used",
                    )
                )
    by_kind: dict[str, list[Any]] = {}
    for (kind, _, _), (_, good) in found.items():
        by_kind.setdefault(kind, []).append(good.value)
    return NodeObjects(
        slo=_first(by_kind, "NodeSLO"),
        topology=_first(by_kind, "NodeResourceTopology"),
        node=_first(by_kind, "Node"),
        device=_first(by_kind, "Device"),
        pods=tuple(by_kind.get("Pod", ())),
        problems=tuple(problems),
    )


# --- one file ----------------------------------------------------------------------------------


def load_documents(data: bytes) -> list[Any]:
    """Return the documents of a manifest file, with Lists opened; raises InputError."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _unreadable(f"not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        trees = documents(text, most_values=MAX_NODES, most_depth=_MAX_DEPTH)
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


def _count(tree: Any, budget: int, depth: int) -> int:
    """Walk a received tree as a decoder will, within a budget."""
    if depth > _MAX_DEPTH:
        raise _unreadable("nested too deep")
    budget -= 1
    if budget < 0:
        raise _unreadable(f"more than {MAX_NODES} values")
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


def _identity(tree: Any, node_name: str, where: str) -> Identity | None:
    """Return which object a document is; None for one of another node."""
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
        if not isinstance(value, str) or len(value) > 253:
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


def _obj(identity: Identity) -> str:
    kind, namespace, name = identity
    return printable(f"{kind} {namespace}/{name}" if namespace else f"{kind} {name}")


def _decode(identity: Identity, tree: Any, kept: _Good | None) -> tuple[_Good, list[str]]:
    """Return the usable object and what was left out of it."""
    obj = _obj(identity)
    match identity[0]:
        case "NodeSLO":
            return _node_slo(tree, kept, obj)
        case "NodeResourceTopology":
            topology = decode_object(tree, NodeResourceTopology, obj=obj)
            facts = parse_node_cpu_facts(topology.metadata.annotations, obj=obj)
            return _Good(facts, tree), []
        case "Node":
            return _Good(node_meta(decode_object(tree, Node, obj=obj)), tree), []
        case "Device":
            return _Good(decode_object(tree, Device, obj=obj), tree), []
        case _:
            pod = decode_object(tree, Pod, obj=obj)
            if not pod.metadata.namespace:
                metadata = msgspec.structs.replace(pod.metadata, namespace=identity[1])
                pod = msgspec.structs.replace(pod, metadata=metadata)
            known_pod(pod)  # what would fail later fails here, and costs this document only
            return _Good(pod, tree), []


def _node_slo(tree: Any, kept: _Good | None, obj: str) -> tuple[_Good, list[str]]:
    """Decode a NodeSLO; a bad field takes its last good value, or its default."""
    good, errors = repair_nodeslo(tree, None if kept is None else kept.tree, obj=obj)
    return _Good(*good), errors


def repair_nodeslo(
    tree: Any, last_good: Any, *, obj: str
) -> tuple[tuple[NodeSLOSpec, Any], list[str]]:
    """Return ((spec, the tree it came from), messages); raises when nothing can be saved.

    A bad element of a list costs the element: of a host application, say, a part cannot be
    defaulted without making it another application.
    """
    tree = copy_tree(tree)
    messages: list[str] = []
    for _ in range(8):
        try:
            return (decode_nodeslo(tree, obj=obj), tree), messages
        except InputErrors as error:
            repaired = False
            elements: set[tuple[str | int, ...]] = set()
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
            # From the back, so that the indices of the others stay right.
            for path in sorted(elements, key=_index, reverse=True):
                repaired |= remove_field(tree, path)
            if not repaired:
                raise
    return (decode_nodeslo(tree, obj=obj), tree), messages


def _index(path: tuple[str | int, ...]) -> int:
    last = path[-1]
    return last if isinstance(last, int) else 0


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
    )


def _first(by_kind: Mapping[str, list[Any]], kind: str) -> Any:
    values = by_kind.get(kind)
    return values[0] if values else None


def _each(error: InputError | InputErrors) -> tuple[InputError, ...]:
    return error.errors if isinstance(error, InputErrors) else (error,)
