"""Nodes as the API server has them, for extenders that are sent whole nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from apis.core import ObjectMeta
from apis.decode import json_decoder


class _Named(msgspec.Struct):
    metadata: ObjectMeta = ObjectMeta()


@dataclass(frozen=True, slots=True)
class WholeNode:
    """raw: the JSON of the Node."""

    metadata: ObjectMeta
    raw: bytes


_decode: Final = json_decoder(_Named)


def decode_whole_node(raw: bytes) -> WholeNode:
    """Return a node with its JSON. Raises msgspec.ValidationError."""
    return WholeNode(_decode(raw).metadata, bytes(raw))


class WholeNodes(Mapping[str, bytes]):
    """The JSON of each node by its name, as a cache has it."""

    def __init__(self, items: Mapping[str, WholeNode]) -> None:
        self._items = items

    def __getitem__(self, name: str) -> bytes:
        return self._items[name].raw

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
