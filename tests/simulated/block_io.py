"""Block I/O control: io on cgroup v2, blkio on v1, iocost and BFQ.

A line belongs to a whole disk; a partition or an unknown number is ENODEV. Weights are refused with
EOPNOTSUPP while the disk has no iocost, or another scheduler than BFQ.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass, field
from functools import partial

from tests.simulated.profiles import Feature
from tests.simulated.tree import Cgroup, CgroupFile, Controller
from tests.simulated.values import U64_MAX, refuse, unsigned


@dataclass
class BlockState:
    """Values of one group, by the disk's number."""

    limits: dict[str, dict[str, int]] = field(default_factory=dict)
    """By the field of io.max: disk -> limit."""
    weights: dict[str, int] = field(default_factory=lambda: {"default": 100})
    bfq: dict[str, int] = field(default_factory=lambda: {"default": 100})
    latency: dict[str, int] = field(default_factory=dict)


@dataclass
class IOCost:
    """iocost of one disk, made by the first write about it."""

    enable: int = 0
    qos: dict[str, str] | None = None  # None: ctrl=auto
    model: dict[str, str] | None = None


AUTO_QOS = {
    "rpct": "95.00", "rlat": "75000", "wpct": "95.00", "wlat": "150000",
    "min": "50.00", "max": "150.00",
}  # fmt: skip
AUTO_MODEL = {
    "rbps": "174019176", "rseqiops": "41708", "rrandiops": "370", "wbps": "178075866",
    "wseqiops": "42705", "wrandiops": "378",
}  # fmt: skip
_LIMITS = ("rbps", "wbps", "riops", "wiops")


def _words(group: Cgroup, text: str) -> tuple[str, list[str]]:
    """The disk's number and the words after it."""
    words = text.split()
    if not words or not re.fullmatch(r"[0-9]+:[0-9]+", words[0]):
        refuse(errno.EINVAL, f"{text!r} begins with no device number")
    if words[0] not in group.kernel.disks:
        refuse(errno.ENODEV, f"no whole disk {words[0]}")
    return words[0], words[1:]


def _write_io_max(group: Cgroup, text: str) -> None:
    disk, words = _words(group, text)
    changed: dict[str, int] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in _LIMITS:
            refuse(errno.EINVAL, f"{key!r} is not a limit of io.max")
        changed[key] = U64_MAX if value == "max" else unsigned(value)
        if changed[key] == 0:
            refuse(errno.ERANGE)
    limits = group.state(BlockState).limits
    for key, number in changed.items():
        if number == U64_MAX:
            limits.setdefault(key, {}).pop(disk, None)
        else:
            limits.setdefault(key, {})[disk] = number


def _read_io_max(group: Cgroup) -> str:
    limits = group.state(BlockState).limits
    disks = sorted({disk for of in limits.values() for disk in of})
    text = ""
    for disk in disks:
        parts = [f"{key}={limits.get(key, {}).get(disk, 'max')}" for key in _LIMITS]
        text += f"{disk} {' '.join(parts)}\n"
    return text


def _throttle(name: str, key: str) -> CgroupFile:
    def write(group: Cgroup, text: str) -> None:
        disk, words = _words(group, text)
        if len(words) != 1:
            refuse(errno.EINVAL)
        limits = group.state(BlockState).limits.setdefault(key, {})
        if number := unsigned(words[0]):
            limits[disk] = number
        else:
            limits.pop(disk, None)

    def read(group: Cgroup) -> str:
        limits = group.state(BlockState).limits.get(key, {})
        return "".join(f"{disk} {number}\n" for disk, number in limits.items())

    return CgroupFile(f"blkio.throttle.{name}_device", read, write)


def _set_weight(weights: dict[str, int], target: str, word: str, high: int) -> None:
    if word == "default" and target != "default":
        weights.pop(target, None)
        return
    weight = unsigned(word)
    if not 1 <= weight <= high:
        refuse(errno.EINVAL)
    weights[target] = weight


def _write_weight(group: Cgroup, text: str) -> None:
    weights = group.state(BlockState).weights
    if ":" not in text:
        _set_weight(weights, "default", text.removeprefix("default").strip(), 10_000)
        return
    disk, words = _words(group, text)
    if disk not in group.kernel.iocost:
        refuse(errno.EOPNOTSUPP, f"no iocost on {disk}")
    _set_weight(weights, disk, "".join(words), 10_000)


def _write_bfq(group: Cgroup, text: str) -> None:
    weights = group.state(BlockState).bfq
    if ":" not in text:
        _set_weight(weights, "default", text.removeprefix("default").strip(), 1000)
        return
    disk, words = _words(group, text)
    if disk not in group.kernel.bfq_disks:
        refuse(errno.EOPNOTSUPP, f"{disk} has another scheduler")
    _set_weight(weights, disk, "".join(words), 1000)


def _lines(weights: dict[str, int]) -> str:
    return "".join(f"{target} {weight}\n" for target, weight in weights.items())


def _write_latency(group: Cgroup, text: str) -> None:
    disk, words = _words(group, text)
    latency = group.state(BlockState).latency
    for word in words:
        key, _, value = word.partition("=")
        if key != "target":
            refuse(errno.EINVAL)
        number = 0 if value == "max" else unsigned(value)
        if number:
            latency[disk] = number
        else:
            latency.pop(disk, None)


def _read_latency(group: Cgroup) -> str:
    latency = group.state(BlockState).latency
    return "".join(f"{disk} target={number}\n" for disk, number in latency.items())


def _write_cost(part: str, group: Cgroup, text: str) -> None:
    """io.cost.qos and io.cost.model: a number without ctrl=user sets ctrl=user, too."""
    disk, words = _words(group, text)
    cost = group.kernel.iocost.get(disk, IOCost())
    auto = AUTO_QOS if part == "qos" else AUTO_MODEL
    enable, values = cost.enable, getattr(cost, part)
    user, changed = values is not None, dict(values or auto)
    for word in words:
        key, _, value = word.partition("=")
        if key == "enable" and part == "qos":
            enable = unsigned(value)
        elif key == "ctrl" and value in ("auto", "user"):
            user = value == "user"
        elif key == "model" and part == "model" and value == "linear":
            continue
        elif key in auto:
            changed[key] = f"{float(value):.2f}" if "." in auto[key] else str(unsigned(value))
            user = True
        else:
            refuse(errno.EINVAL, f"{word!r}")
    cost.enable = int(bool(enable))
    setattr(cost, part, changed if user else None)
    group.kernel.iocost[disk] = cost


def _read_cost(part: str, group: Cgroup) -> str:
    text = ""
    for disk, cost in group.kernel.iocost.items():
        values = getattr(cost, part)
        ctrl = "auto" if values is None else "user"
        head = f"enable={cost.enable} ctrl={ctrl}" if part == "qos" else f"ctrl={ctrl} model=linear"
        shown = values or (AUTO_QOS if part == "qos" else AUTO_MODEL)
        text += f"{disk} {head} {' '.join(f'{key}={one}' for key, one in shown.items())}\n"
    return text


def _cost_files(prefix: str, feature: Feature | None) -> tuple[CgroupFile, ...]:
    return tuple(
        CgroupFile(
            f"{prefix}.cost.{part}",
            partial(_read_cost, part),
            partial(_write_cost, part),
            only_root=True,
            feature=feature,
        )
        for part in ("qos", "model")
    )


def _weights(name: str, feature: Feature | None = None) -> CgroupFile:
    return CgroupFile(
        name,
        lambda group: _lines(group.state(BlockState).weights),
        _write_weight,
        on_root=False,
        feature=feature,
    )


def _bfq(name: str) -> CgroupFile:
    return CgroupFile(
        name, lambda group: _lines(group.state(BlockState).bfq), _write_bfq, on_root=False
    )


IO = Controller(
    "io",
    v2=(
        CgroupFile("io.max", _read_io_max, _write_io_max, on_root=False),
        _weights("io.weight"),
        _bfq("io.bfq.weight"),
        CgroupFile("io.latency", _read_latency, _write_latency, on_root=False),
        CgroupFile("io.stat", lambda group: ""),
        *_cost_files("io", None),
    ),
)
BLKIO = Controller(
    "blkio",
    v1=(
        _throttle("read_bps", "rbps"),
        _throttle("write_bps", "wbps"),
        _throttle("read_iops", "riops"),
        _throttle("write_iops", "wiops"),
        _bfq("blkio.bfq.weight_device"),
        _weights("blkio.cost.weight", Feature.ALIBABA),
        *_cost_files("blkio", Feature.ALIBABA),
    ),
)
