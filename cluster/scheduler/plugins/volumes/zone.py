"""VolumeZone: a node with zone or region labels has those of the pod's bound volumes.

A volume may name several zones in one label, with "__" between them. A node with none of the
labels passes. Source: kube-scheduler; docs/facts/scheduler.md, "Volumes".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster.scheduler.plugins.contract import Mask, Reason, Refusal
from cluster.scheduler.plugins.volumes.claims import claim_key, missing
from cluster.scheduler.tables.labels import ABSENT
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables
from cluster.scheduler.tables.volumes.objects import ZONE_LABELS, Volume

_REASONS: Final = (Reason("node(s) had no available volume zone", resolvable=False),)


@dataclass(frozen=True, slots=True)
class VolumeZone:
    name: str = "VolumeZone"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        if not pod.claims:
            return False
        # Every volume is looked for, because one that is missing refuses the pod.
        volumes = tuple(self._volumes(pod, tables))
        return any(volume.zones for volume in volumes)

    def cluster_version(self, pod: PodShape, tables: Tables) -> int:
        return tables.volumes.version

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        return _REASONS

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        columns = {key: tables.nodes.labels.column(key) for key in ZONE_LABELS}
        labelled = np.zeros_like(tables.nodes.alive[rows])
        for column in columns.values():
            labelled |= column.ids[rows] != ABSENT
        elsewhere = np.zeros_like(labelled)
        for volume in self._volumes(pod, tables):
            for key, zones in volume.zones:
                own, present = columns[key], columns[ZONE_LABELS[key]]
                inside = own.where(zones.__contains__)[own.ids[rows]]
                inside_present = present.where(zones.__contains__)[present.ids[rows]]
                # The label's present name counts where a node lacks the old one.
                elsewhere |= ~np.where(own.ids[rows] != ABSENT, inside, inside_present)
        return (labelled & elsewhere).astype(np.int64)

    def _volumes(self, pod: PodShape, tables: Tables) -> Iterator[Volume]:
        """Yield the volumes of the pod's bound claims. Raises Refusal."""
        for each in pod.claims:
            if each.pod:
                continue
            claim = tables.volumes.claim(claim_key(pod, each))
            if claim is None:
                raise Refusal(self.name, missing(each))
            if not claim.volume:
                if not claim.class_name:
                    raise Refusal(
                        self.name, "PersistentVolumeClaim had no pv name and storageClass name"
                    )
                storage_class = tables.volumes.class_of(claim)
                if storage_class is None:
                    raise Refusal(
                        self.name, f'storageclass.storage.k8s.io "{claim.class_name}" not found'
                    )
                if not storage_class.waits:
                    raise Refusal(self.name, "PersistentVolume had no name")
                continue
            volume = tables.volumes.volume(claim.volume)
            if volume is None:
                raise Refusal(self.name, f'persistentvolume "{claim.volume}" not found')
            yield volume
