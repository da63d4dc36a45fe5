"""VolumeRestrictions: claims for one pod only, and disks that cannot be shared.

No node takes a pod with a claim of access mode ReadWriteOncePod that a pod with a node uses. A
node does not take a pod with a disk that a pod there uses, unless both only read it; an AWS disk
never. Source: kube-scheduler; docs/facts/scheduler.md, "Volumes".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from apis.storage import READ_WRITE_ONCE_POD
from cluster.scheduler.plugins.contract import Mask, Reason, Refusal
from cluster.scheduler.plugins.volumes.claims import claim_key, missing
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_REASONS: Final = (
    Reason("node(s) had no available disk"),
    Reason(
        "node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode "
        "already in-use by another pod"
    ),
)


@dataclass(frozen=True, slots=True)
class VolumeRestrictions:
    name: str = "VolumeRestrictions"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        if not pod.claims and not pod.disks:
            return False
        for each in pod.claims:
            if not each.pod and tables.volumes.claim(claim_key(pod, each)) is None:
                raise Refusal(self.name, missing(each))
        return bool(pod.disks) or _in_use(pod, tables)

    def cluster_version(self, pod: PodShape, tables: Tables) -> int:
        return tables.attachments.version + tables.volumes.version

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        return _REASONS

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        mask = np.full(len(tables.nodes), 2 if _in_use(pod, tables) else 0)
        for disk in pod.disks:
            # kube-scheduler looks at disks first and names only them.
            mask[list(tables.attachments.rows_in_conflict(disk))] = 1
        return mask[rows]


def _in_use(pod: PodShape, tables: Tables) -> bool:
    for each in pod.claims:
        key = claim_key(pod, each)
        claim = tables.volumes.claim(key)
        once = claim is not None and READ_WRITE_ONCE_POD in claim.modes
        if once and not each.pod and tables.attachments.in_use(key):
            return True
    return False
