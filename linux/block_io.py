"""The files of block I/O control: a line for each disk. Pure.

A value belongs to one resource and one disk, whose number "major:minor" is its key. On cgroup v2
the four throttles share a line of `io.max`; a write of one of them leaves the others as they are.
Formats: docs/facts/kernel.md, "Block I/O control".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from linux.cgroup_files import INT64_MAX
from linux.resources import Resource, Value

V1_CONTROLLER: Final = "blkio"
V2_CONTROLLER: Final = "io"

_NUMBER: Final = re.compile(r"[0-9]{1,4}:[0-9]{1,7}")
"""A major number has 12 bits, a minor number 20."""


class Form(Enum):
    """How a line spells its value."""

    THROTTLE = "throttle"  # v1: "8:0 N", 0 removes it; v2: "8:0 rbps=N", max removes it
    WEIGHT = "weight"  # "8:0 N", "default" removes it
    LATENCY = "latency"  # "8:0 target=N", max removes it
    QOS = "qos"  # "8:0 enable=1 ctrl=user rpct=95.00 ..."
    MODEL = "model"  # "8:0 ctrl=user model=linear rbps=..."


OF_ROOT: Final = frozenset({Form.QOS, Form.MODEL})
"""Files that only the root has."""


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A resource's file; v1 or v2 is "" where that version has none.

    field: the key of the value in a line of v2. low, high: the range of a number.
    """

    form: Form
    v1: str
    v2: str
    field: str = ""
    low: int = 0
    high: int = INT64_MAX

    def name(self, version: int) -> str:
        return self.v1 if version == 1 else self.v2


def _throttle(resource: Resource, field: str) -> BlockFile:
    return BlockFile(Form.THROTTLE, resource.value, "io.max", field, low=1)


BLOCK_FILES: Final[Mapping[Resource, BlockFile]] = MappingProxyType(
    {
        Resource.BLKIO_COST_QOS: BlockFile(Form.QOS, "blkio.cost.qos", "io.cost.qos"),
        Resource.BLKIO_COST_MODEL: BlockFile(Form.MODEL, "blkio.cost.model", "io.cost.model"),
        Resource.BLKIO_READ_BPS: _throttle(Resource.BLKIO_READ_BPS, "rbps"),
        Resource.BLKIO_WRITE_BPS: _throttle(Resource.BLKIO_WRITE_BPS, "wbps"),
        Resource.BLKIO_READ_IOPS: _throttle(Resource.BLKIO_READ_IOPS, "riops"),
        Resource.BLKIO_WRITE_IOPS: _throttle(Resource.BLKIO_WRITE_IOPS, "wiops"),
        Resource.BLKIO_COST_WEIGHT: BlockFile(
            Form.WEIGHT, "blkio.cost.weight", "io.weight", low=1, high=10_000
        ),
        Resource.BLKIO_BFQ_WEIGHT: BlockFile(
            Form.WEIGHT, "blkio.bfq.weight_device", "io.bfq.weight", low=1, high=1000
        ),
        Resource.BLKIO_LATENCY: BlockFile(Form.LATENCY, "", "io.latency", "target", low=1),
    }
)
"""By resource, in the order of writing: a weight counts once iocost is on."""

_QOS_FIELDS: Final = ("rpct", "rlat", "wpct", "wlat")
_MODEL_FIELDS: Final = ("rbps", "rseqiops", "rrandiops", "wbps", "wseqiops", "wrandiops")
COST_QOS_OFF: Final = "enable=0 ctrl=auto"
COST_MODEL_AUTO: Final = "ctrl=auto"


def cost_qos(*, rpct: float, rlat: int, wpct: float, wlat: int) -> str:
    """Return the canonical parameters of iocost's QoS, switched on. Percentiles in percent,
    latencies in µs."""
    return f"enable=1 ctrl=user rpct={rpct:.2f} rlat={rlat} wpct={wpct:.2f} wlat={wlat}"


def cost_model(numbers: Mapping[str, int]) -> str:
    """Return the canonical parameters of a linear cost model, from its six coefficients."""
    return "ctrl=user " + " ".join(f"{field}={numbers[field]}" for field in _MODEL_FIELDS)


def check_block_value(resource: Resource, key: str, value: Value) -> None:
    """Raise ValueError or TypeError for a key or value that the file does not take."""
    file = BLOCK_FILES[resource]
    if not _NUMBER.fullmatch(key):
        raise ValueError(f"{key[:32]!r} is not the number of a disk, such as 8:16")
    if file.form in OF_ROOT:
        if not isinstance(value, str):
            raise TypeError(f"expected a text, not {type(value).__name__}")
        if _parameters(file.form, value) != value:
            raise ValueError(f"{value[:64]!r} is not a line of {file.v2}")
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected a number, not {type(value).__name__}")
    if not file.low <= value <= file.high:
        raise ValueError(f"{value} is outside {file.low}..{file.high}")


def read_line(resource: Resource, version: int, key: str, content: str) -> str:
    """Return a disk's value in the file's content, canonical; "" if the file has none for it."""
    file = BLOCK_FILES[resource]
    for line in content.splitlines():
        number, _, rest = line.strip().partition(" ")
        if number != key:
            continue
        if file.form in OF_ROOT:
            return _parameters(file.form, rest)
        if not file.field or (version == 1 and file.form is Form.THROTTLE):
            return rest.strip()
        value = _fields(rest).get(file.field, "max")
        return "" if value == "max" else value
    return ""


def line_to_write(resource: Resource, version: int, key: str, value: str) -> str:
    """Return what is written so that the disk has the value; "" removes it."""
    file = BLOCK_FILES[resource]
    match file.form:
        case Form.QOS:
            return f"{key} {value or COST_QOS_OFF}"
        case Form.MODEL:
            return f"{key} {value or COST_MODEL_AUTO}"
        case Form.WEIGHT:
            return f"{key} {value or 'default'}"
        case Form.THROTTLE if version == 1:
            return f"{key} {value or 0}"
        case _:
            return f"{key} {file.field}={value or 'max'}"


def same_as_none(resource: Resource, value: str) -> bool:
    """Return whether a value is what a disk has after its value was removed: iocost keeps a line
    for every disk that it was ever set for."""
    form = BLOCK_FILES[resource].form
    return value == "" or value == {Form.QOS: COST_QOS_OFF, Form.MODEL: COST_MODEL_AUTO}.get(form)


def _fields(text: str) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in text.split() if "=" in word)


def _parameters(form: Form, text: str) -> str:
    """Return iocost's parameters that are set here, in one order and notation.

    Under ctrl=auto the kernel chooses all others. The bounds of the rate (min, max) are not
    written, so they stay. Raises ValueError for a line of another form.
    """
    given = _fields(text)
    ctrl = given.get("ctrl", "auto")
    shown = [f"enable={given.get('enable', '0')}"] if form is Form.QOS else []
    shown.append(f"ctrl={ctrl}")
    if ctrl == "user":
        for field in _QOS_FIELDS if form is Form.QOS else _MODEL_FIELDS:
            number = given.get(field, "")
            if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", number):
                raise ValueError(f"no number {field} in {text[:128]!r}")
            value = f"{float(number):.2f}" if field.endswith("pct") else number
            shown.append(f"{field}={value}")
    return " ".join(shown)
