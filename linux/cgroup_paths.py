"""The directories of pods, containers and host applications: from names to paths and back.

Pure. Two drivers name directories: systemd (slices and scopes, a dash is a path separator in a
slice's name) and cgroupfs. A path here is always relative to a hierarchy's root, without leading
or trailing slash. Everything that comes from outside (UIDs, ids, host application paths) is checked
before it becomes part of a path. The names: docs/facts/kernel.md, "Cgroup directories".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Final

from apis.qos import KubeQoS

MAX_PATH: Final = 4096
"""The kernel's PATH_MAX."""
MAX_DEPTH: Final = 32
"""Chosen: a container of a cluster nested in a container lies about ten directories deep."""
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.-]{0,252}")
# 253 characters, as many as Kubernetes allows a name. UIDs have 36, container ids 64.
_COMPONENT_LIMIT: Final = 255
"""The kernel's NAME_MAX."""


class PathError(ValueError):
    """A name or path from outside that must not become part of a cgroup path."""


class Driver(StrEnum):
    """Who names the directories."""

    SYSTEMD = "systemd"
    CGROUPFS = "cgroupfs"


class Runtime(StrEnum):
    """Which runtime made a container, as container ids spell it (`containerd://…`)."""

    CONTAINERD = "containerd"
    CRIO = "cri-o"
    DOCKER = "docker"


_SCOPE_PREFIX: Final[Mapping[Runtime, str]] = {
    Runtime.CONTAINERD: "cri-containerd-",
    Runtime.CRIO: "crio-",
    Runtime.DOCKER: "docker-",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """How this node's cgroup tree is laid out.

    version: 1 or 2. mounts: controller -> mount point; on v2 the key is "".
    kubepods: the pods' root, "" while it is not known (no pod has ever run).
    """

    version: int
    mounts: Mapping[str, str] = field(hash=False)
    driver: Driver
    kubepods: str

    def hierarchy(self, controller: str) -> str:
        """Return the mount point that holds `controller`; KeyError when v1 has none."""
        return self.mounts[controller if self.version == 1 else ""]

    def has(self, controller: str) -> bool:
        """Return whether there is a hierarchy for `controller`."""
        return (controller if self.version == 1 else "") in self.mounts

    def directory(self, controller: str, cgroup: str) -> str:
        """Return the absolute directory of `cgroup` for `controller`."""
        mount = self.hierarchy(controller)
        return f"{mount}/{cgroup}" if cgroup else mount


def check_relative(path: str) -> str:
    """Return `path` without surrounding slashes; PathError if it could leave its root."""
    if len(path) > MAX_PATH:
        raise PathError(f"a cgroup path of {len(path)} characters is too long")
    stripped = path.strip("/")
    if not stripped:
        return ""
    parts = stripped.split("/")
    if len(parts) > MAX_DEPTH:
        raise PathError(f"{path[:64]!r} is more than {MAX_DEPTH} directories deep")
    for part in parts:
        if part in ("", ".", "..") or len(part) > _COMPONENT_LIMIT or not part.isprintable():
            raise PathError(f"{path[:64]!r} is not a plain cgroup path: part {part[:32]!r}")
    return stripped


def _check_name(name: str, what: str) -> str:
    if not _NAME.fullmatch(name):
        raise PathError(f"{name[:64]!r} is not a {what}")
    return name


def _slice_base(kubepods: str) -> str:
    """'a.slice/a-kubepods.slice' -> 'a-kubepods': what the names of inner slices start with."""
    return kubepods.rpartition("/")[2].removesuffix(".slice")


def qos_dir(driver: Driver, kubepods: str, qos: str) -> str:
    """Return the directory of a QoS class; Guaranteed is the pods' root itself."""
    qos = KubeQoS(qos)
    if qos is KubeQoS.GUARANTEED:
        return kubepods
    name = qos.value.lower()
    if driver is Driver.CGROUPFS:
        return f"{kubepods}/{name}"
    return f"{kubepods}/{_slice_base(kubepods)}-{name}.slice"


def pod_dir(driver: Driver, kubepods: str, qos: str, uid: str) -> str:
    """Return a pod's directory. For a static pod `uid` is its configuration hash."""
    _check_name(uid, "pod UID")
    parent = qos_dir(driver, kubepods, qos)
    if driver is Driver.CGROUPFS:
        return f"{parent}/pod{uid}"
    return f"{parent}/{_slice_base(parent)}-pod{uid.replace('-', '_')}.slice"


def container_dir(driver: Driver, runtime: Runtime, pod: str, container_id: str) -> str:
    """Return a container's directory inside its pod's."""
    _check_name(container_id, "container id")
    if driver is Driver.SYSTEMD:
        return f"{pod}/{_SCOPE_PREFIX[runtime]}{container_id}.scope"
    # CRI-O keeps its prefix with cgroupfs; upstream expects the bare id and finds no directory.
    prefix = "crio-" if runtime is Runtime.CRIO else ""
    return f"{pod}/{prefix}{container_id}"


def expand_slice(name: str) -> str:
    """Return the path of a systemd slice: 'a-b.slice' lives in 'a.slice'. '-.slice' is the root."""
    if name in ("", "-.slice"):
        return ""
    if not name.endswith(".slice") or "/" in name:
        raise PathError(f"{name[:64]!r} is not the name of a slice")
    parts = name.removesuffix(".slice").split("-")
    if not all(parts) or len(parts) > MAX_DEPTH:
        raise PathError(f"{name[:64]!r} is not the name of a slice")
    return "/".join(f"{'-'.join(parts[: end + 1])}.slice" for end in range(len(parts)))


def of_runtime_path(cgroups_path: str) -> str:
    """Return the directory that a runtime's `cgroups_path` (OCI, NRI) means.

    Either 'slice:prefix:name' (systemd) or a plain path (cgroupfs). "" stays "".
    """
    slice_name, colon, rest = cgroups_path.partition(":")
    if not colon:
        return check_relative(cgroups_path)
    prefix, colon, name = rest.partition(":")
    if not colon:
        raise PathError(f"{cgroups_path[:64]!r} is not slice:prefix:name")
    parent = expand_slice(slice_name.rpartition("/")[2] or "system.slice")
    leaf = (
        name if name.endswith(".slice") else f"{prefix}-{name}.scope" if prefix else f"{name}.scope"
    )
    return check_relative(f"{parent}/{leaf}")


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a directory's path says; "" or None for what it does not say."""

    kubepods: str
    qos: KubeQoS
    pod_uid: str = ""
    container_id: str = ""
    runtime: Runtime | None = None
    driver: Driver = Driver.SYSTEMD


_SYSTEMD_ROOT = re.compile(r"(?:[^/]+-)?kubepods\.slice")
_SCOPE = re.compile(r"(cri-containerd|crio|docker)-([0-9A-Za-z][0-9A-Za-z_.-]*)\.scope")
_RUNTIME_OF_PREFIX: Final = {
    prefix.removesuffix("-"): runtime for runtime, prefix in _SCOPE_PREFIX.items()
}


# 4096 paths, chosen: a pod's is asked for with each of its events, and a node has far fewer pods.
# Twice the number doubles the memory of a full cache, some 2 MiB.
@lru_cache(maxsize=4096)
def parse(path: str) -> Parsed | None:
    """Return what a directory's path says; None if it is not the pods' root or below it.

    The pods' root may lie deeper than the top (kubelet's --cgroup-root). On systemd the UID's
    underscores are turned back into dashes: a UID itself contains no underscore.
    """
    parts = check_relative(path).split("/")
    for index, part in enumerate(parts):
        root = "/".join(parts[: index + 1])
        if _SYSTEMD_ROOT.fullmatch(part):
            return _parse_systemd(root, part.removesuffix(".slice"), parts[index + 1 :])
        if part == "kubepods":
            return _parse_cgroupfs(root, parts[index + 1 :])
    return None


def _parse_systemd(root: str, base: str, rest: list[str]) -> Parsed:
    qos = KubeQoS.GUARANTEED
    for inner in (KubeQoS.BURSTABLE, KubeQoS.BESTEFFORT):
        if rest and rest[0] == f"{base}-{inner.value.lower()}.slice":
            qos, base, rest = inner, rest[0].removesuffix(".slice"), rest[1:]
            break
    prefix = f"{base}-pod"
    if not rest or not rest[0].startswith(prefix) or not rest[0].endswith(".slice"):
        return Parsed(root, qos)
    uid = rest[0].removeprefix(prefix).removesuffix(".slice").replace("_", "-")
    if len(rest) > 1 and (scope := _SCOPE.fullmatch(rest[1])):
        return Parsed(root, qos, uid, scope[2], _RUNTIME_OF_PREFIX[scope[1]])
    return Parsed(root, qos, uid)


def _parse_cgroupfs(root: str, rest: list[str]) -> Parsed:
    driver, qos = Driver.CGROUPFS, KubeQoS.GUARANTEED
    for inner in (KubeQoS.BURSTABLE, KubeQoS.BESTEFFORT):
        if rest and rest[0] == inner.value.lower():
            qos, rest = inner, rest[1:]
            break
    if not rest or not rest[0].startswith("pod"):
        return Parsed(root, qos, driver=driver)
    uid = rest[0].removeprefix("pod")
    if len(rest) == 1:
        return Parsed(root, qos, uid, driver=driver)
    if rest[1].startswith("crio-"):
        container = rest[1].removeprefix("crio-")
        return Parsed(root, qos, uid, container, Runtime.CRIO, driver)
    return Parsed(root, qos, uid, rest[1], None, driver)


class HostAppBase(StrEnum):
    """What a host application's path is relative to, as the NodeSLO spells it."""

    ROOT = "CgroupRoot"
    KUBEPODS = "Kubepods"
    BURSTABLE = "KubepodsBurstable"
    BESTEFFORT = "KubepodsBesteffort"


_QOS_OF_BASE: Final = {
    HostAppBase.KUBEPODS: KubeQoS.GUARANTEED,
    HostAppBase.BURSTABLE: KubeQoS.BURSTABLE,
    HostAppBase.BESTEFFORT: KubeQoS.BESTEFFORT,
}
_DIR_OF_QOS: Final = {
    "LSE": "host-latency-sensitive",
    "LSR": "host-latency-sensitive",
    "LS": "host-latency-sensitive",
    "BE": "host-best-effort",
}


def host_app_dir(layout: Layout, *, base: str, parent_dir: str, relative_path: str) -> str:
    """Return the directory of a host application that declares a cgroup path.

    Raises PathError for an unknown base, for a path that could leave the base, and for the base
    itself, because an application needs a directory of its own.
    """
    try:
        kind = HostAppBase(base)
    except ValueError:
        known = ", ".join(HostAppBase)
        raise PathError(f"base {base[:64]!r} is unknown: expected one of {known}") from None
    parts = [check_relative(parent_dir), check_relative(relative_path)]
    if not any(parts):
        raise PathError("the path is empty: it would name the base itself")
    if kind is not HostAppBase.ROOT:
        parts.insert(0, qos_dir(layout.driver, layout.kubepods, _QOS_OF_BASE[kind]))
    return check_relative("/".join(part for part in parts if part))


def default_host_app_dir(qos: str, name: str) -> str:
    """Return the directory of a host application that declares no cgroup path."""
    _check_name(name, "host application name")
    parent = _DIR_OF_QOS.get(qos, "")
    return f"{parent}/{name}" if parent else name


def is_below(path: str, root: str) -> bool:
    """Return whether `path` is `root` or lies inside it. Everything lies in the empty root."""
    return not root or path == root or path.startswith(f"{root}/")


def parent_of(path: str) -> str:
    """Return the directory above; "" for a directory of the top level."""
    return path.rpartition("/")[0]
