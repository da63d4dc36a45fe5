"""Finds how this node's cgroup tree is laid out.

The version follows from the file system's type, the hierarchies from the mount table. The pods'
root is the configured one, else the one that holds running containers, else a directory with the
right name. Evidence: docs/facts/kernel.md, "Finding the layout".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from linux.cgroup_paths import Driver, Layout, check_relative, parse
from linux.host import Host
from linux.procfs import host_mounts

CGROUP2_MAGIC: Final = 0x63677270
"""CGROUP2_SUPER_MAGIC of linux/magic.h."""
CONTROLLERS: Final = ("cpu", "cpuset", "cpuacct", "memory", "blkio", "net_cls", "perf_event")
_SEARCH_DEPTH: Final = 3
"""Chosen: two more levels than `kubepods` itself needs, for a kubelet with --cgroup-root. A deeper
root has to be configured."""
_SEARCH_LIMIT: Final = 2000
"""Chosen: directories that a search looks at, each one system call. A node without a pod has a few
hundred."""


class DiscoveryError(Exception):
    """The cgroup tree cannot be found; the message names the setting to correct."""


def discover(
    host: Host,
    *,
    cgroup_root: str = "/sys/fs/cgroup",
    kubepods: str = "",
    live: Iterable[str] = (),
) -> Layout:
    """Return the layout of the tree at `cgroup_root`.

    kubepods: the pods' root when configuration gives it, relative to a hierarchy's root.
    live: cgroup paths of running containers, which are better evidence than directory names.
    Raises DiscoveryError when there is no cgroup tree; OSError as the host raises it.
    """
    root = cgroup_root.rstrip("/") or "/"
    try:
        version = 2 if host.filesystem_magic(root) == CGROUP2_MAGIC else 1
    except OSError as error:
        raise DiscoveryError(
            f"no cgroup tree at {root}: {error.strerror}; set cgroupRoot to where it is mounted"
        ) from error
    mounts = {"": root} if version == 2 else _v1_mounts(host, root)
    if not mounts:
        raise DiscoveryError(
            f"{root} holds neither cgroup v2 nor v1 hierarchies; set cgroupRoot to where they are"
        )
    base = mounts[""] if version == 2 else mounts.get("cpu") or next(iter(mounts.values()))
    found = check_relative(kubepods) or kubepods_of(live) or _find(host, base)
    return Layout(version, MappingProxyType(mounts), _driver(host, base, found), found)


def kubepods_of(live: Iterable[str]) -> str:
    """Return the pods' root that most of the containers' paths lie in; "" if none does."""
    roots = Counter(parsed.kubepods for path in live if (parsed := parse(path)) is not None)
    return roots.most_common(1)[0][0] if roots else ""


def _v1_mounts(host: Host, root: str) -> Mapping[str, str]:
    mounts: dict[str, str] = {}
    for mount in host_mounts(host):
        if mount.type == "cgroup" and (mount.path == root or mount.path.startswith(f"{root}/")):
            for controller in CONTROLLERS:
                if controller in mount.options:
                    mounts.setdefault(controller, mount.path)
    if not mounts:
        # A bind mount does not show in the table; the directories' names are left as evidence.
        for controller in CONTROLLERS:
            if host.is_dir(f"{root}/{controller}"):
                mounts[controller] = f"{root}/{controller}"
    return mounts


def _find(host: Host, base: str) -> str:
    """Return a pods' root found by its name, breadth first; "" without one."""
    level, looked_at = [""], 0
    for _ in range(_SEARCH_DEPTH):
        below: list[str] = []
        for directory in level:
            try:
                names = sorted(host.listdir(f"{base}/{directory}" if directory else base))
            except OSError:
                continue
            for name in names:
                if "." in name and not name.endswith(".slice"):
                    continue  # a file of the controller, or a unit that holds no pods
                looked_at += 1
                if looked_at > _SEARCH_LIMIT:
                    return ""
                path = f"{directory}/{name}" if directory else name
                if not host.is_dir(f"{base}/{path}"):
                    continue
                parsed = parse(path)
                if parsed is not None and parsed.kubepods == path:
                    return path
                below.append(path)
        level = below
    return ""


def _driver(host: Host, base: str, kubepods: str) -> Driver:
    if kubepods:
        return Driver.SYSTEMD if kubepods.endswith(".slice") else Driver.CGROUPFS
    # No pod has run yet. Where systemd manages the tree, Kubernetes asks for its driver.
    return Driver.SYSTEMD if host.is_dir(f"{base}/system.slice") else Driver.CGROUPFS
