"""ImageLocality: prefers nodes that have the pod's images already.

Each image that a node has counts int(size * nodes with the image / all nodes). The sum, cut to
23 MiB .. 1,000 MiB a container, is scaled to 0..100. Images of containers and of volumes count. One
without a tag means `:latest`.
Source: kube-scheduler; docs/facts/scheduler.md, "Image locality".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster.scheduler.plugins.contract import MAX_SCORE, OfNodeAlone, ScoredAsIs, Scores, zeros
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_MIB: Final = 1024 * 1024
_SMALLEST: Final = 23 * _MIB
_LARGEST: Final = 1000 * _MIB


def _full_names(pod: PodShape) -> tuple[str, ...]:
    return tuple(
        image if ":" in image.rsplit("/", 1)[-1] else f"{image}:latest"
        for image in (*pod.images, *pod.image_volumes)
    )


@dataclass(frozen=True, slots=True)
class ImageLocality(OfNodeAlone, ScoredAsIs):
    name: str = "ImageLocality"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return any(tables.images.rows(image) for image in pod.derived(_full_names))

    def cluster_version(self, pod: PodShape, tables: Tables) -> int:
        # The share of nodes that have an image counts on each of them.
        return tables.images.version + (tables.nodes.count << 40)

    def score(self, pod: PodShape, tables: Tables, rows: Rows) -> Scores:
        total = zeros(len(tables.nodes))
        for image in pod.derived(_full_names):
            where = tables.images.rows(image)
            for row, size in where.items():
                total[row] += int(size * (len(where) / tables.nodes.count))
        largest = _LARGEST * max(len(pod.images), 1)
        within = np.clip(total[rows], _SMALLEST, largest)
        return MAX_SCORE * (within - _SMALLEST) // (largest - _SMALLEST)
