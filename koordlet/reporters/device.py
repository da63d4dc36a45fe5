"""The Device object of this node: what koordlet wants in it, merged into what is there.

The devices are koordlet's alone. Of labels and annotations only those that it writes are touched;
others stay. A condition keeps the time of its last change as long as its status does, so that an
unhealthy device is not a change each time. A node without devices gets no object.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from apis import keys
from apis.decode import encode
from koordlet.reporters.device_spec import DeviceContent
from koordlet.reporters.stored import Plain
from koordlet.reporters.topology import owner_of

_LABELS: Final = frozenset(
    {
        keys.LABEL_GPU_VENDOR,
        keys.LABEL_GPU_MODEL,
        keys.LABEL_GPU_DRIVER_VERSION,
        keys.LABEL_GPU_PARTITION_POLICY,
    }
)
_ANNOTATIONS: Final = frozenset({keys.ANNOTATION_GPU_PARTITIONS})


class KeptDevice(msgspec.Struct, frozen=True):
    """The Device as `koordlet.reporters.keeping` keeps it.

    at: the time of a condition that is new, RFC 3339: when `wanted` was first seen.
    """

    wanted: DeviceContent
    at: str
    problems: tuple[str, ...] = ()

    @property
    def absent(self) -> bool:
        return not self.wanted.devices

    def create(self, name: str, node_uid: str) -> Plain:
        return {"metadata": {"name": name, "ownerReferences": [owner_of(name, node_uid)]}}

    def merge(self, stored: Plain) -> Plain:
        metadata = dict(stored.get("metadata") or {})
        for field, own, wanted in (
            ("labels", _LABELS, self.wanted.labels),
            ("annotations", _ANNOTATIONS, self.wanted.annotations),
        ):
            others = {k: v for k, v in (metadata.get(field) or {}).items() if k not in own}
            both = {**others, **wanted}
            if both or field in metadata:
                metadata[field] = both
        spec = dict(stored.get("spec") or {})
        spec["devices"] = self._devices(spec.get("devices"))
        return {**stored, "metadata": metadata, "spec": spec}

    def _devices(self, stored: Any) -> list[Plain]:
        """Return the devices as plain data, with the times of the conditions."""
        known: dict[tuple[str, str, str], str] = {}
        for device in stored if isinstance(stored, list) else ():
            for condition in device.get("conditions") or ():
                time = condition.get("lastTransitionTime")
                if time:
                    key = (device.get("id"), condition.get("type"), condition.get("status"))
                    known[key] = time
        devices: list[Plain] = msgspec.json.decode(encode(self.wanted.devices))
        for device in devices:
            for condition in device.get("conditions") or ():
                key = (device["id"], condition["type"], condition["status"])
                condition["lastTransitionTime"] = known.get(key, self.at)
        return devices
