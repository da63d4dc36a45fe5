"""RDMA devices: which verbs device node belongs to a PCI address, and the connection manager's.

An address without a verbs device is left out. Paths: docs/facts/kernel.md, "Devices".
"""

from __future__ import annotations

import re

from linux.device_nodes import device_node
from linux.host import Host
from linux.resources import DeviceNode

_ADDRESS = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")


def read_rdma(
    host: Host, *, sys_root: str = "/sys", dev_root: str = "/dev"
) -> tuple[dict[str, DeviceNode], DeviceNode | None]:
    """Return (PCI address -> its verbs device node, the connection manager's node if any)."""
    found: dict[str, DeviceNode] = {}
    verbs_class = f"{sys_root}/class/infiniband_verbs"
    try:
        names = host.listdir(verbs_class)
    except OSError:
        names = []
    for name in sorted(names):
        if not name.startswith("uverbs"):
            continue
        try:
            address = host.readlink(f"{verbs_class}/{name}/device").rpartition("/")[2]
        except OSError:
            continue
        node = device_node(host, f"{dev_root}/infiniband/{name}")
        if node is not None and _ADDRESS.fullmatch(address):
            found.setdefault(address, node)
    return found, device_node(host, f"{dev_root}/infiniband/rdma_cm")
