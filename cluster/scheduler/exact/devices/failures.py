"""Why a node cannot give the devices that a pod requests, in upstream's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from apis.device import DeviceType
from cluster.scheduler.tables.devices.request import DEVICE_RESOURCES


@dataclass(frozen=True, slots=True)
class Failure:
    """resolvable: evicting pods of the node could help."""

    text: str
    resolvable: bool = True


def _of_each_type(text: str, *, resolvable: bool = True) -> Mapping[str, Failure]:
    return {
        type_: Failure(text.format(type=type_), resolvable) for type_ in map(str, DEVICE_RESOURCES)
    }


NO_DEVICES: Final = _of_each_type("Insufficient {type} devices", resolvable=False)
INSUFFICIENT: Final = _of_each_type("Insufficient {type} devices")
NO_FUNCTIONS: Final = _of_each_type("Insufficient {type} VirtualFunctions")
NOT_IN_SCOPE: Final[Mapping[str, Failure]] = {
    **_of_each_type("Insufficient Topology Scoped {type} Devices"),
    DeviceType.GPU: Failure("Insufficient Topology Scoped GPU Devices"),
}
NO_TOPOLOGY: Final[Mapping[str, Failure]] = {
    **_of_each_type("node(s) missing {type} Device Topology Tree", resolvable=False),
    DeviceType.GPU: Failure("node(s) missing GPU Device Topology Tree", resolvable=False),
}
NOT_ON_NUMA_NODES: Final = Failure("Insufficient NUMA Scoped Devices")
NO_PARTITION: Final = Failure("Insufficient Partitioned GPU Devices")
NO_PARTITION_TABLE: Final = Failure("node(s) missing GPU Partition Table", resolvable=False)
UNSUPPORTED_COUNT: Final = Failure("node(s) Unsupported number of GPU requests", resolvable=False)
SEVERAL_SHARES: Final = Failure("node(s) Unsupported Multi-Shared GPU", resolvable=False)
NO_TEMPLATE: Final = Failure("no matched GPU shared resource template", resolvable=False)
NOT_JOINT: Final = Failure("node(s) Device Joint-Allocate rules violation")

ALL: Final = (
    *NO_DEVICES.values(),
    *INSUFFICIENT.values(),
    *NO_FUNCTIONS.values(),
    *NOT_IN_SCOPE.values(),
    *NO_TOPOLOGY.values(),
    NOT_ON_NUMA_NODES,
    NO_PARTITION,
    NO_PARTITION_TABLE,
    UNSUPPORTED_COUNT,
    SEVERAL_SHARES,
    NO_TEMPLATE,
    NOT_JOINT,
)
