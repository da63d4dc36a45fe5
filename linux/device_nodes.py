"""Device nodes below /dev, and those of NVIDIA's driver.

A GPU's node is named after its minor number, which is what the scheduler allocates. Every user of
any GPU needs the control nodes too, which the driver makes on first use: docs/facts/kernel.md,
"Devices".
"""

from __future__ import annotations

import re
from typing import Final

from linux.host import Host
from linux.resources import DeviceNode

_FILE_MODE: Final = 0o666  # upstream's: every user of the container may use its devices
_GPU: Final = re.compile(r"nvidia(\d{1,3})", re.ASCII)
_CONTROL: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")


def device_node(host: Host, path: str) -> DeviceNode | None:
    """Return the device node at `path`, usable by every user of a container; None without one."""
    try:
        kind, major, minor = host.device_number(path)
    except OSError:
        return None
    return DeviceNode(path=path, type=kind, major=major, minor=minor, file_mode=_FILE_MODE)


def read_gpus(
    host: Host, *, dev_root: str = "/dev"
) -> tuple[dict[int, DeviceNode], tuple[DeviceNode, ...]]:
    """Return (minor number -> the GPU's node, the control nodes that there are)."""
    gpus: dict[int, DeviceNode] = {}
    try:
        names = host.listdir(dev_root)
    except OSError:
        names = []
    for name in sorted(names):
        match = _GPU.fullmatch(name)
        node = device_node(host, f"{dev_root}/{name}") if match else None
        if match and node is not None:
            gpus[int(match[1])] = node
    control = (device_node(host, f"{dev_root}/{name}") for name in _CONTROL)
    return gpus, tuple(node for node in control if node is not None)
