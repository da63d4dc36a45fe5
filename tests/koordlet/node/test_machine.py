"""The kernel's tree at the configured path, and messages that name this path."""

from __future__ import annotations

from pathlib import Path

import pytest

from koordlet.node.machine import in_nodes_view, layout_of, local_host
from linux.discovery import DiscoveryError
from tests.koordlet.configured import configured


def test_a_missing_tree_is_named_as_the_configuration_has_it(tmp_path: Path) -> None:
    config = configured(cgroupRoot=str(tmp_path / "host-cgroup"))
    with pytest.raises(DiscoveryError, match=f"no cgroup tree at {tmp_path}/host-cgroup: "):
        layout_of(config, local_host(config))


@pytest.mark.parametrize(
    ("root", "path", "nodes"),
    [
        ("/host-cgroup", "/host-cgroup/cpu/a/cpu.shares", "/sys/fs/cgroup/cpu/a/cpu.shares"),
        ("/host-cgroup", "/sys/fs/cgroup/cpu/a/cpu.shares", "/sys/fs/cgroup/cpu/a/cpu.shares"),
        ("/host-cgroup", "/host-cgroups/x", "/host-cgroups/x"),
        ("/sys/fs/cgroup", "/sys/fs/cgroup/a", "/sys/fs/cgroup/a"),
    ],
)
def test_a_file_may_be_named_as_it_is_mounted_here(root: str, path: str, nodes: str) -> None:
    assert in_nodes_view(configured(cgroupRoot=root), path) == nodes
