"""The format of a recording: a header, then frames, each of which stands or falls by itself.

A frame is its length and the CRC-32 of its bytes (4 bytes each, big-endian) and the zlib-compressed
msgpack of one `Frame`. Objects are written when they change, rounds of measurements always:

- `Start`: a daemon's first round follows,
- `Inputs`: what the strategies' rules are made of (NodeSLO, topology, Node, kernel, settings),
- `Pods`: the pods and host applications, `Amounts`: what the node has,
- `Names`: the series whose values the following rounds give, in this order,
- `Round`: the moment, and one float64 (little-endian) for each name.

Every file begins with all of these but the first, so each file of a ring can be replayed alone. A
frame that was cut off ends a file; one whose sum is wrong is left out and counted.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import msgspec

from apis.cpuset import CpuSet
from apis.quantity import Quantity, parse_quantity
from hooks.facts import NodeInputs
from hooks.subject import HostAppSubject
from koordlet.qos.strategy import NodeAmounts, PodOnNode

HEADER: Final = b"koordlet recording 1\n"
_PREFIX: Final = struct.Struct(">II")
_MOST_BYTES: Final = 64 << 20
"""Of one frame, compressed and not. Chosen: the pods of a node with 10,000 containers take some
MiB; a larger length is damage."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The daemon was started: samples, claims and states of before still count, unless the clock
    began again."""


class Inputs(msgspec.Struct, frozen=True, tag="inputs"):
    inputs: NodeInputs


class Pods(msgspec.Struct, frozen=True, tag="pods"):
    pods: tuple[PodOnNode, ...]
    host_apps: tuple[HostAppSubject, ...]


class Amounts(msgspec.Struct, frozen=True, tag="amounts"):
    node: NodeAmounts
    interval_s: float


class Names(msgspec.Struct, frozen=True, tag="names"):
    """names: (metric, of, detail) of each series."""

    names: tuple[tuple[str, str, str], ...]


class Round(msgspec.Struct, frozen=True, tag="round"):
    """now: seconds of the monotonic clock. wall: seconds since the epoch."""

    now: float
    wall: float
    values: bytes


Frame = Start | Inputs | Pods | Amounts | Names | Round


class NotARecording(ValueError):
    """A file that is not a recording, or one of another version."""


def _plain(value: Any) -> Any:
    if isinstance(value, CpuSet | Quantity):
        return str(value)
    raise NotImplementedError(f"a recording cannot hold a {type(value).__name__}")


def _typed(wanted: type, value: Any) -> Any:
    if wanted is CpuSet:
        return CpuSet.parse(value)
    if wanted is Quantity:
        return parse_quantity(value)
    raise NotImplementedError(f"a recording holds no {wanted.__name__}")


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_plain)
_DECODER: Final = msgspec.msgpack.Decoder(Frame, dec_hook=_typed)


def pack(frame: Frame) -> bytes:
    """Return the bytes of one frame."""
    body = zlib.compress(_ENCODER.encode(frame), 1)
    return _PREFIX.pack(len(body), zlib.crc32(body)) + body


def unpack(file: BinaryIO) -> Iterator[Frame | None]:
    """Yield the frames of a file after its header; None for one that is damaged.

    Raises NotARecording, and OSError. A cut-off end is the end.
    """
    if file.read(len(HEADER)) != HEADER:
        raise NotARecording("it does not begin as a recording of this version does")
    while len(prefix := file.read(_PREFIX.size)) == _PREFIX.size:
        length, checksum = _PREFIX.unpack(prefix)
        if length > _MOST_BYTES:
            yield None
            return
        body = file.read(length)
        if len(body) < length:
            return
        yield _frame(body) if zlib.crc32(body) == checksum else None


def _frame(body: bytes) -> Frame | None:
    try:
        inflater = zlib.decompressobj()
        text = inflater.decompress(body, _MOST_BYTES)
        return None if inflater.unconsumed_tail else _DECODER.decode(text)
    except (zlib.error, msgspec.DecodeError, ValueError, NotImplementedError):
        return None
