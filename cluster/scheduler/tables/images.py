"""Container images by node, for the score of image locality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from apis.scheduling_pod import ContainerImage

_NOWHERE: Final[Mapping[int, int]] = MappingProxyType({})


class ImageTable:
    """Which rows have an image, and its size there. `version` grows when that changes."""

    def __init__(self) -> None:
        self.version = 0
        self._images: dict[int, tuple[ContainerImage, ...]] = {}
        self._rows: dict[str, dict[int, int]] = {}

    def set(self, row: int, images: Sequence[ContainerImage]) -> None:
        """Replace the images of a row."""
        old = self._images.get(row, ())
        new = tuple(images)
        if new == old:
            return
        self.version += 1
        for image in old:
            for name in image.names:
                rows = self._rows.get(name, {})
                rows.pop(row, None)
                if not rows:
                    self._rows.pop(name, None)
        for image in new:
            for name in image.names:
                self._rows.setdefault(name, {})[row] = image.size_bytes
        if new:
            self._images[row] = new
        else:
            self._images.pop(row, None)

    def rows(self, image: str) -> Mapping[int, int]:
        """Return row -> size in bytes for the nodes that have an image of this full name."""
        return self._rows.get(image, _NOWHERE)
