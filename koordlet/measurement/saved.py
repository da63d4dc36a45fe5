"""The store's content on disk, so that a restart does not lose the windows of reports.

A file belongs to one boot: the monotonic clock, in which samples are dated, starts again with the
next. A file that is torn, foreign, of another boot or older than an hour is reported and ignored.

Layout: a line with the format's name, the length of the header (4 bytes, little endian), the header
(MessagePack), the arrays (zlib), and the CRC-32 of all of it (4 bytes).
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import Annotated, Final

import msgspec
import numpy as np

from koordlet.measurement.series import Metric, Series
from koordlet.measurement.store import Store
from service.files import replacing

_FORMAT: Final = b"koordlet measurements 1\n"
YOUNG_S: Final = 3600.0
"""An older file is ignored: no window of a report is as long."""
_MOST_BYTES: Final = 64 * 1024 * 1024
"""Chosen: a larger file is not ours; 110 pods with all series have about 3 MiB, uncompressed."""
_LEVEL: Final = 1
"""zlib's fastest level: halves the file for about 15 ms per MiB, without the interpreter's lock."""
_LENGTH: Final = struct.Struct("<I")


class SavedError(Exception):
    """A file that cannot be used; the message says why."""


class _TableHeader(msgspec.Struct, frozen=True):
    """One table: rows of float32 follow one row of float64 times, `columns` long each.

    asked_s: for how long a reader asked to keep its samples, 0 without one.
    """

    name: str
    columns: Annotated[int, msgspec.Meta(ge=0)]
    series: tuple[tuple[str, str, str], ...]
    asked_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class _Header(msgspec.Struct, frozen=True):
    boot: str
    saved_at: float
    tables: tuple[_TableHeader, ...]


def save(store: Store, path: str, *, boot: str, now: float) -> int:
    """Write the store's samples to `path`; returns the file's bytes. Raises OSError.

    boot: the id of this boot. now: the moment, seconds of the monotonic clock.
    """
    headers: list[_TableHeader] = []
    packed: list[bytes] = []
    compressor = zlib.compressobj(_LEVEL)
    for name in store.tables():
        times, series, values = store.content(name, now=now)
        names = tuple((str(s.metric), s.of, s.detail) for s in series)
        headers.append(_TableHeader(name, len(times), names, store.asked_s(name)))
        packed.append(compressor.compress(times.astype("<f8").tobytes()))
        packed.append(compressor.compress(values.astype("<f4").tobytes()))
    packed.append(compressor.flush())
    header = msgspec.msgpack.encode(_Header(boot, now, tuple(headers)))
    parts = [_FORMAT, _LENGTH.pack(len(header)), header, *packed]
    check = 0
    size = _LENGTH.size
    with replacing(path) as file:
        for part in parts:
            check = zlib.crc32(part, check)
            size += len(part)
            file.write(part)
        file.write(_LENGTH.pack(check))
    return size


def load(store: Store, path: str, *, boot: str, now: float) -> int:
    """Fill the store's empty tables from `path`; returns the number of series.

    A table keeps its samples for as long as a reader asked before: the reader may ask again much
    later, such as the report that waits for the API server, and the samples must be there then.

    Raises SavedError for a file that cannot be used, and OSError; FileNotFoundError if there is
    none. Tables and metrics of another version, which the store does not have, are left out.
    """
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size > _MOST_BYTES:
            raise SavedError(f"{path} has more than {_MOST_BYTES} bytes")
        content = file.read()
    header, arrays = _parse(path, content)
    if not boot or header.boot != boot:
        raise SavedError(f"{path} is of another boot of this machine")
    if not 0 <= now - header.saved_at <= YOUNG_S:
        raise SavedError(f"{path} is {now - header.saved_at:.0f} s old; at most {YOUNG_S:.0f} s")
    tables = frozenset(store.tables())
    offset = 0
    count = 0
    for table in header.tables:
        rows, columns = len(table.series), table.columns
        times = np.frombuffer(arrays, "<f8", columns, offset)
        offset += times.nbytes
        values = np.frombuffer(arrays, "<f4", rows * columns, offset).reshape(rows, columns)
        offset += values.nbytes
        if not (np.isfinite(times).all() and (np.diff(times) > 0).all()):
            raise SavedError(f"{path}: the times of table {table.name} are not ascending")
        known = [index for index, one in enumerate(table.series) if one[0] in _METRICS]
        series = [
            Series(Metric(metric), of, detail)
            for metric, of, detail in (table.series[index] for index in known)
        ]
        if table.name in tables and table.asked_s:
            store.keep(table.name, min(table.asked_s, YOUNG_S))
        count += store.restore(
            table.name,
            times.astype(np.float64),
            series,
            values[known].astype(np.float64),
            now=now,
        )
    return count


_METRICS: Final = frozenset(str(metric) for metric in Metric)


def _parse(path: str, content: bytes) -> tuple[_Header, bytes]:
    """Return the header and the arrays of a whole file."""
    start = len(_FORMAT) + _LENGTH.size
    if not content.startswith(_FORMAT):
        raise SavedError(f"{path} is not a file of measurements in this version's format")
    if len(content) < start + _LENGTH.size:
        raise SavedError(f"{path} is torn: {len(content)} bytes")
    (check,) = _LENGTH.unpack(content[-_LENGTH.size :])
    if zlib.crc32(memoryview(content)[: -_LENGTH.size]) != check:
        raise SavedError(f"{path} is torn: its checksum does not fit")
    (length,) = _LENGTH.unpack_from(content, len(_FORMAT))
    try:
        header = msgspec.msgpack.decode(content[start : start + length], type=_Header)
        unpacker = zlib.decompressobj()
        arrays = unpacker.decompress(content[start + length : -_LENGTH.size], _MOST_BYTES)
    except (msgspec.MsgspecError, zlib.error) as error:
        raise SavedError(f"{path} is not readable: {error}") from error
    expected = sum(table.columns * (8 + 4 * len(table.series)) for table in header.tables)
    if len(arrays) != expected:
        raise SavedError(f"{path} has {len(arrays)} bytes of samples; its header says {expected}")
    return header, arrays
