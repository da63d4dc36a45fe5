"""This machine as the configuration describes it: the kernel's files, and the cgroup layout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from koordlet.config import Config
from linux import discovery
from linux.cgroup_paths import Layout
from linux.host import Host
from linux.local import LocalHost

CGROUP_ROOT: Final = "/sys/fs/cgroup"
"""Where the node's cgroup tree is, in the node's own view; `LocalHost` maps it."""


def local_host(config: Config) -> LocalHost:
    """Return the kernel with the node's own paths mapped to where the configuration has them."""
    return LocalHost(
        {
            CGROUP_ROOT: config.cgroup_root,
            "/sys/fs": config.sys_fs_root,
            "/sys": config.sys_root,
            "/proc": config.proc_root,
        },
        kept_root=CGROUP_ROOT,
    )


def layout_of(config: Config, host: Host, *, live: Iterable[str] = ()) -> Layout:
    """Return how the cgroup tree is laid out; raises DiscoveryError. live: pods' directories."""
    return discovery.discover(
        host, cgroup_root=CGROUP_ROOT, kubepods=config.kubepods_root, live=live
    )
