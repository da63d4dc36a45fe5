"""Objects of a cluster from files, as `kubectl get -o json` and `-o yaml` write them.

A file holds objects, lists of objects, or several YAML documents. JSON is split into objects
without reading them; YAML takes twenty times as long. Nothing is skipped silently: a file or object
that cannot be read is an error that names it, and kinds that scheduling does not read are counted.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from apis.errors import InputError
from service.manifest import NotYaml, documents

_LARGEST_FILE: Final = 2 << 30
"""Bytes. Chosen: 150,000 pods of 10 KiB; the memory for one file."""
_MOST_VALUES: Final = 10_000_000
"""Values of one YAML file. Chosen: 30,000 pods of 300 values, about 2 GB of memory."""
_LARGEST_KUBECONFIG: Final = 1 << 20
"""Bytes. Chosen: kubeconfigs with certificates of a hundred clusters are smaller."""
_ENDINGS: Final = (".json", ".yaml", ".yml")

Progress = Callable[[str], None]
"""Shows what is being done, for people who wait."""


@dataclass(frozen=True, slots=True)
class FileObject:
    """One object of a file. group: of its apiVersion, "" for core. raw: its JSON."""

    group: str
    kind: str
    namespace: str
    name: str
    raw: bytes
    where: str

    @property
    def key(self) -> str:
        """Return namespace/name, or the name of an object without a namespace."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name

    @property
    def ref(self) -> str:
        """Return how errors name the object: "pods.yaml: Pod default/web"."""
        return f"{self.where}: {self.kind} {self.key}"


class _Meta(msgspec.Struct):
    name: str = ""
    generate_name: str = msgspec.field(name="generateName", default="")
    namespace: str = ""


class _Head(msgspec.Struct):
    api_version: str = msgspec.field(name="apiVersion", default="")
    kind: str = ""
    metadata: _Meta = msgspec.field(default_factory=_Meta)


class _ListHead(msgspec.Struct):
    api_version: str = msgspec.field(name="apiVersion", default="")
    kind: str = ""
    items: list[msgspec.Raw] | None = None


def is_kubeconfig(path: str) -> bool:
    """Return whether a file is a kubeconfig; raises InputError if it cannot be read."""
    if os.path.isdir(path):
        return False
    data = _bytes_of(path)
    if len(data) > _LARGEST_KUBECONFIG:
        return False
    try:
        found = documents(data.decode(), most_values=_LARGEST_KUBECONFIG)
    except (UnicodeDecodeError, NotYaml):
        return False
    match found:
        case [{"kind": "Config"}]:
            return True
    return False


def read_objects(path: str, *, progress: Progress = lambda text: None) -> list[FileObject]:
    """Return the objects of a file, or of all *.json, *.yaml and *.yml files of a folder.

    Raises InputError, which names the file, the object and the field.
    """
    try:
        files = [path]
        if os.path.isdir(path):
            files = [
                f"{path.rstrip('/')}/{name}"
                for name in sorted(os.listdir(path))
                if name.endswith(_ENDINGS) and not name.startswith(".")
            ]
    except OSError as error:
        raise InputError(
            obj=path, field="", value="", problem=f"cannot be read: {error.strerror}"
        ) from None
    if not files:
        raise InputError(
            obj=path,
            field="",
            value="",
            problem="holds no *.json, *.yaml or *.yml file",
            hint="kubectl get nodes,pods -A -o json > DIR/cluster.json",
        )
    objects: list[FileObject] = []
    for file in files:
        progress(f"reading {file}")
        objects += _objects_of(file)
    return objects


def _objects_of(path: str) -> Iterator[FileObject]:
    data = _bytes_of(path)
    if not data.strip():
        return
    if data.lstrip()[:1] in (b"{", b"["):
        try:
            head = msgspec.json.decode(data, type=_ListHead)
        except msgspec.DecodeError as error:
            raise InputError(
                obj=path, field="", value="", problem=f"is not an object or list in JSON: {error}"
            ) from None
        yield from _split(path, head, data)
        return
    try:
        trees = documents(data.decode(), most_values=_MOST_VALUES)
    except (NotYaml, UnicodeDecodeError) as error:
        raise InputError(obj=path, field="", value="", problem=str(error)) from None
    for number, tree in enumerate(trees):
        if tree is None:
            continue
        if not isinstance(tree, dict):
            raise InputError(
                obj=path, field=f"document {number + 1}", value=tree, problem="is not an object"
            )
        try:
            raw = msgspec.json.encode(tree)
            head = msgspec.json.decode(raw, type=_ListHead)
        except (TypeError, msgspec.MsgspecError) as error:
            raise InputError(
                obj=path, field=f"document {number + 1}", value="", problem=str(error)
            ) from None
        yield from _split(path, head, raw)


def _split(path: str, head: _ListHead, data: bytes) -> Iterator[FileObject]:
    if head.items is None:
        yield _object(path, data, "", "", "")
        return
    # The API server's own lists name the kind once, in front: NodeList.
    kind = head.kind.removesuffix("List")
    for number, item in enumerate(head.items):
        yield _object(path, bytes(item), head.api_version, kind, f"items[{number}]")


def _object(path: str, raw: bytes, api_version: str, kind: str, field: str) -> FileObject:
    try:
        head = msgspec.json.decode(raw, type=_Head)
    except msgspec.DecodeError as error:
        raise InputError(obj=path, field=field, value="", problem=str(error)) from None
    kind = head.kind or kind
    name = head.metadata.name or head.metadata.generate_name.rstrip("-")
    for member, value in (("kind", kind), ("metadata.name", name)):
        if not value:
            raise InputError(
                obj=path, field=f"{field}.{member}".lstrip("."), value="", problem="is missing"
            )
    group, slash, _ = (head.api_version or api_version).partition("/")
    return FileObject(
        group=group if slash else "",
        kind=kind,
        namespace=head.metadata.namespace,
        name=name,
        raw=raw,
        where=path,
    )


def _bytes_of(path: str) -> bytes:
    """Return the content of a regular file: a FIFO would block, a device might never end."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            problem = ""
            if not stat.S_ISREG(status.st_mode):
                problem = "is not a regular file"
            elif status.st_size > _LARGEST_FILE:
                problem = f"has more than {_LARGEST_FILE >> 30} GiB"
            if problem:
                raise InputError(obj=path, field="", value="", problem=problem)
            return file.read()
    except OSError as error:
        raise InputError(
            obj=path, field="", value="", problem=f"cannot be read: {error.strerror}"
        ) from None


def tree_of(each: FileObject) -> dict[str, Any]:
    """Return an object as mappings and lists."""
    tree: dict[str, Any] = msgspec.json.decode(each.raw)
    return tree
