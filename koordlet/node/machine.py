"""Access to this machine as configured: the kernel's files, and the cgroup layout."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final, Protocol

from linux import discovery
from linux.cgroup_paths import Layout
from linux.host import Host
from linux.local import LocalHost
from service.histogram import Histogram

CGROUP_ROOT: Final = "/sys/fs/cgroup"
"""The node's own path of its cgroup tree; `LocalHost` maps it to a path of this process."""


WRITE_BOUNDS_MS: Final = tuple(0.01 * 4**power for power in range(8))
"""Upstream's buckets of write durations: docs/facts/koordlet.md, "Metrics"."""


class Roots(Protocol):
    """Where the node's file systems are mounted in this process. The configuration has these.

    kubepods_root: kubelet's `--cgroup-root`, or "" to look for it.
    """

    @property
    def cgroup_root(self) -> str: ...
    @property
    def kubepods_root(self) -> str: ...
    @property
    def sys_root(self) -> str: ...
    @property
    def sys_fs_root(self) -> str: ...
    @property
    def proc_root(self) -> str: ...


class TimedHost(LocalHost):
    """The kernel, with a histogram of write durations for upstream's metric."""

    write_durations: dict[tuple[str, str], Histogram]
    """By the labels of upstream's metric: type of the updater, "success" or "failed"."""

    def write(self, path: str, data: bytes) -> None:
        started = time.perf_counter()
        status = "failed"
        try:
            super().write(path, data)
            status = "success"
        finally:
            key = (_updater(path), status)
            histogram = self.write_durations.get(key)
            if histogram is None:
                histogram = self.write_durations[key] = Histogram(WRITE_BOUNDS_MS)
            histogram.observe((time.perf_counter() - started) * 1000)


def _updater(path: str) -> str:
    if path.startswith(f"{CGROUP_ROOT}/"):
        return "cgroup"
    return "resctrl-schema" if path.endswith("/schemata") else "default"


def local_host(roots: Roots) -> TimedHost:
    """Return the kernel, with the node's own paths mapped to the configured ones."""
    host = TimedHost(
        {
            CGROUP_ROOT: roots.cgroup_root,
            "/sys/fs": roots.sys_fs_root,
            "/sys": roots.sys_root,
            "/proc": roots.proc_root,
        },
        kept_root=CGROUP_ROOT,
    )
    host.write_durations = {}
    return host


def layout_of(roots: Roots, host: Host, *, live: Iterable[str] = ()) -> Layout:
    """Return the layout of the cgroup tree; raises DiscoveryError. live: pods' directories."""
    try:
        return discovery.discover(
            host, cgroup_root=CGROUP_ROOT, kubepods=roots.kubepods_root, live=live
        )
    except discovery.DiscoveryError as error:
        # The message names the configured path, where an operator would look.
        raise discovery.DiscoveryError(str(error).replace(CGROUP_ROOT, roots.cgroup_root)) from None


def in_nodes_view(roots: Roots, path: str) -> str:
    """Return the node's own path of a cgroup file; `path` may be the path in this process."""
    below = path.removeprefix(f"{roots.cgroup_root}/")
    return path if below == path else f"{CGROUP_ROOT}/{below}"
