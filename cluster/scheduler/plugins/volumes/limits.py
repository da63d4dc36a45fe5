"""NodeVolumeLimits: a CSI driver attaches no more volumes to a node than its CSINode says.

Each volume counts once on a node, however many pods there use it; an attachment that the API
server shows counts although its pod is gone. A volume that is not made yet counts with the driver
of its class. Source: kube-scheduler; docs/facts/scheduler.md, "Volumes".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cluster.scheduler.plugins.contract import Mask, Reason
from cluster.scheduler.plugins.volumes.claims import claim_key
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables
from cluster.scheduler.tables.volumes.objects import Attached

_REASONS: Final = (Reason("node(s) exceed max volume count"),)


@dataclass(frozen=True, slots=True)
class NodeVolumeLimits:
    name: str = "NodeVolumeLimits"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        if not pod.claims:
            return False
        return any(tables.attachments.has_limit(each.driver) for each in _attached(pod, tables))

    def cluster_version(self, pod: PodShape, tables: Tables) -> int:
        return tables.attachments.version + tables.volumes.version

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        return _REASONS

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        mask: Mask = tables.attachments.exceeded(_attached(pod, tables)).astype("int64")[rows]
        return mask


def _attached(pod: PodShape, tables: Tables) -> list[Attached]:
    found = (tables.volumes.attached(claim_key(pod, each)) for each in pod.claims)
    return [each for each in found if each is not None]
