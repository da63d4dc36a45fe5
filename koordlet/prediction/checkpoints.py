"""Keeps the models over a restart: one file, replaced as a whole.

The file has a header line and a line for each model; each line begins with the CRC-32 of its body
(`service.append_log` has the format). The body is the JSON of one of upstream's checkpoints, with
the count of samples added. A damaged line costs its model; the others hold. The file is synced to
the disk before the rename, so that a crash of the machine leaves the old or the new one.

Upstream keeps a file for each model in the same directory, named by the model. Those are read once,
where our own file is missing, so that a node that changes over keeps what it learned.
Format: docs/facts/koordlet.md, "Prediction".
"""

from __future__ import annotations

import logging
import math
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import msgspec
import numpy as np

from apis.meta import format_time, parse_time
from koordlet.prediction.histogram import Floats
from koordlet.prediction.models import CPU_BUCKETS, MEMORY_BUCKETS, Saved
from service import append_log
from service.files import replacing

_LOG = logging.getLogger("koordlet.prediction")

FILE: Final = "models.log"
_HEADER: Final = b'{"format":"koordlet prediction models","version":1}'
_LARGEST_WEIGHT: Final = 1_000_000_000
"""The integer that stands for a histogram's largest weight. It fits into the 32 bits of upstream's
format, whose own choice of 10,000 loses every weight below 1/20,000 of the largest."""
_MAX_FILE_BYTES: Final = 1 << 20
"""Bytes of one of upstream's files that are read: one model takes at most 8 KiB."""
_MAX_FILES: Final = 10_000
"""Files of upstream's that are looked at; chosen: many times the pods of a node."""
_LATEST_S: Final = 253402300799.0
"""The end of the year 9999, the last moment that RFC 3339 can write."""


class _Histogram(msgspec.Struct, rename="camel"):
    reference_timestamp: str | None = None
    bucket_weights: dict[str, int] = {}
    total_weight: float = 0.0


class _Checkpoint(msgspec.Struct):
    uid: str = msgspec.field(name="UID", default="")
    cpu: _Histogram = msgspec.field(name="CPU", default_factory=_Histogram)
    memory: _Histogram = msgspec.field(name="Memory", default_factory=_Histogram)
    last_updated: str | None = msgspec.field(name="LastUpdated", default=None)
    samples: int | None = msgspec.field(name="Samples", default=None)


_decode: Final = msgspec.json.Decoder(_Checkpoint).decode


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the directory held. problems: what was left out, one sentence each."""

    models: tuple[Saved, ...] = ()
    problems: tuple[str, ...] = field(default=())


# --- one model -----------------------------------------------------------------------------------


def encode_model(saved: Saved) -> bytes:
    """Return a model as JSON without a newline."""
    return msgspec.json.encode(
        _Checkpoint(
            uid=saved.key,
            cpu=_encode_histogram(saved.cpu, saved.cpu_reference_s),
            memory=_encode_histogram(saved.memory, saved.memory_reference_s),
            last_updated=_time_text(saved.updated_s),
            samples=saved.samples,
        )
    )


def _encode_histogram(weights: Floats, reference_s: float) -> _Histogram:
    largest = float(weights.max(initial=0.0))
    if largest <= 0:
        return _Histogram(reference_timestamp=_time_text(reference_s))
    scaled = np.rint(weights * (_LARGEST_WEIGHT / largest)).astype(np.int64)
    return _Histogram(
        reference_timestamp=_time_text(reference_s),
        bucket_weights={str(index): int(scaled[index]) for index in np.flatnonzero(scaled)},
        total_weight=float(weights.sum()),
    )


def decode_model(data: bytes, *, key: str = "") -> Saved:
    """Return the model of a JSON text; raises ValueError that says what is wrong.

    key: the name of upstream's file, which decides the key there; "" for the text's own.
    """
    try:
        found = _decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a checkpoint: {error}") from None
    key = key or found.uid
    if not key:
        raise ValueError("not a checkpoint: it has no UID")
    updated_s = _seconds(found.last_updated, "LastUpdated")
    cpu_reference_s = _seconds(found.cpu.reference_timestamp, "CPU.referenceTimestamp")
    memory_reference_s = _seconds(found.memory.reference_timestamp, "Memory.referenceTimestamp")
    cpu = _decode_histogram(found.cpu, CPU_BUCKETS.count, "CPU")
    samples = found.samples
    if samples is None:
        # Upstream keeps no count. The weight in samples of the last update's age is a lower bound.
        age = (updated_s - cpu_reference_s) / CPU_BUCKETS.half_life_s
        samples = int(float(cpu.sum()) * 2.0 ** -min(max(age, -1.0), 1000.0))
    if samples < 0:
        raise ValueError(f"Samples: {samples} is negative")
    return Saved(
        key=key,
        cpu=cpu,
        cpu_reference_s=cpu_reference_s,
        memory=_decode_histogram(found.memory, MEMORY_BUCKETS.count, "Memory"),
        memory_reference_s=memory_reference_s,
        samples=samples,
        updated_s=updated_s,
    )


def _decode_histogram(found: _Histogram, count: int, field: str) -> Floats:
    weights = np.zeros(count)
    for text, weight in found.bucket_weights.items():
        if not (text.isascii() and text.isdigit() and len(text) <= 4 and int(text) < count):
            raise ValueError(f"{field}.bucketWeights: {text[:16]!r} is not a bucket of {count}")
        if weight < 0:
            raise ValueError(f"{field}.bucketWeights[{text}]: {weight} is negative")
        weights[int(text)] = weight
    total = float(weights.sum())
    if not (math.isfinite(found.total_weight) and found.total_weight < 1e100):
        raise ValueError(f"{field}.totalWeight: {found.total_weight} is not a weight")
    if total <= 0 or found.total_weight <= 0:
        raise ValueError(f"{field}: it holds no weight")
    scaled: Floats = weights * (found.total_weight / total)
    return scaled


def _time_text(seconds: float) -> str:
    return format_time(datetime.fromtimestamp(min(max(seconds, 0.0), _LATEST_S), UTC))


def _seconds(text: str | None, field: str) -> float:
    if text is None:
        raise ValueError(f"{field} is missing")
    try:
        return parse_time(text).timestamp()
    except ValueError as error:
        raise ValueError(f"{field}: {text[:64]!r} is {error}") from None


# --- the directory -------------------------------------------------------------------------------


def write(directory: str, models: Iterable[Saved]) -> None:
    """Replace the file by one with these models. Raises OSError."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    path = f"{directory}/{FILE}"
    with replacing(path) as file:
        file.write(append_log.encode_line(_HEADER))
        for saved in models:
            file.write(append_log.encode_line(encode_model(saved)))
        file.flush()
        os.fsync(file.fileno())
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(directory: str) -> Loaded:
    """Return the kept models, of our own file or else of upstream's. Never raises OSError."""
    path = f"{directory}/{FILE}"
    if not os.path.lexists(path):
        return _read_upstream(directory)
    try:
        content = append_log.read(path, header=_HEADER)
    except OSError as error:
        return Loaded(problems=(f"{path} cannot be read: {error.strerror or error}",))
    problems = []
    if content.header != _HEADER:
        problems.append(f"{path} is not a file of this version; prediction begins without it")
    if content.damaged or content.torn_bytes:
        count = content.damaged + bool(content.torn_bytes)
        problems.append(f"{path}: {count} damaged lines are left out")
    models = []
    for number, body in enumerate(content.lines):
        try:
            models.append(decode_model(body))
        except ValueError as error:
            problems.append(f"{path}: model {number + 1} is left out: {error}")
    return Loaded(tuple(models), tuple(problems))


def _read_upstream(directory: str) -> Loaded:
    models: list[Saved] = []
    problems: list[str] = []
    for name, data in _upstream_files(directory, problems):
        try:
            models.append(decode_model(data, key=name))
        except ValueError as error:
            problems.append(f"{directory}/{name} is left out: {error}")
    return Loaded(tuple(models), tuple(problems))


def _upstream_files(directory: str, problems: list[str]) -> Iterator[tuple[str, bytes]]:
    try:
        names = sorted(os.listdir(directory))[:_MAX_FILES]
    except FileNotFoundError:
        return
    except OSError as error:
        problems.append(f"{directory} cannot be listed: {error.strerror or error}")
        return
    for name in names:
        if name.endswith((".tmp", ".new")):
            continue
        path = f"{directory}/{name}"
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            with open(os.open(path, flags), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    continue
                data = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror or error}")
            continue
        if len(data) > _MAX_FILE_BYTES:
            problems.append(f"{path} is left out: larger than {_MAX_FILE_BYTES >> 20} MiB")
            continue
        yield name, data
