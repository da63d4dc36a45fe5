"""The settings of the whole host that a NodeSLO may ask for: a fixed table of files. Pure.

A setting is a number in a file of its own, or one of the scheduler's features, which share a file:
it reads as all features in a row ("GENTLE_FAIR_SLEEPERS NO_HRTICK ..."), and takes one word.
Ranges are upstream's, narrower than the kernel's: docs/facts/kernel.md, "Settings of the host".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class Setting(NamedTuple):
    """A file with one number from low to high."""

    path: str
    low: int
    high: int


MIN_FREE_KBYTES: Final = "vm.min_free_kbytes"
WATERMARK_SCALE_FACTOR: Final = "vm.watermark_scale_factor"
IDLE_SAVER_WMARK: Final = "kernel.sched_idle_saver_wmark"
REAP_BACKGROUND: Final = "memcg_reaper.reap_background"
PAGE_CACHE_LIMIT: Final = "pagecache_limit.enabled"

SETTINGS: Final[Mapping[str, Setting]] = MappingProxyType(
    {
        MIN_FREE_KBYTES: Setting("/proc/sys/vm/min_free_kbytes", 10240, 10485760),
        WATERMARK_SCALE_FACTOR: Setting("/proc/sys/vm/watermark_scale_factor", 10, 400),
        IDLE_SAVER_WMARK: Setting("/proc/sys/kernel/sched_idle_saver_wmark", 0, (1 << 31) - 1),
        REAP_BACKGROUND: Setting("/sys/kernel/mm/memcg_reaper/reap_background", 0, 1),
        PAGE_CACHE_LIMIT: Setting("/sys/kernel/mm/pagecache_limit/enabled", 0, 1),
    }
)
"""By name. The last three exist on Anolis kernels only."""

_FEATURE: Final = "sched_feature."
_FEATURE_NAME: Final = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
FEATURE_FILES: Final = ("/sys/kernel/debug/sched/features", "/sys/kernel/debug/sched_features")
"""Since kernel 5.13, and before."""


def feature(name: str) -> str:
    """Return the setting's name of a scheduler feature. Raises ValueError for no feature's name."""
    if not _FEATURE_NAME.fullmatch(name) or name.startswith("NO_"):
        raise ValueError("not the name of a scheduler feature, such as WAKEUP_PREEMPTION")
    return _FEATURE + name


def paths_of(setting: str) -> tuple[str, ...]:
    """Return the files where a setting may be, the first existing one counts. Raises ValueError
    for a name that is not in the table."""
    if setting.startswith(_FEATURE):
        feature(setting.removeprefix(_FEATURE))
        return FEATURE_FILES
    try:
        return (SETTINGS[setting].path,)
    except KeyError:
        raise ValueError(f"{setting!r} is not a setting that may be written") from None


def read_setting(setting: str, content: str) -> str | None:
    """Return the value in a file's content; None if the file has no such feature."""
    if not setting.startswith(_FEATURE):
        return content.strip()
    name = setting.removeprefix(_FEATURE)
    words = content.split()
    return "1" if name in words else "0" if f"NO_{name}" in words else None


def written(setting: str, value: str) -> str:
    """Return the text that sets the value."""
    if not setting.startswith(_FEATURE):
        return value
    name = setting.removeprefix(_FEATURE)
    return name if value == "1" else f"NO_{name}"


def check_value(setting: str, value: str) -> None:
    """Raise ValueError for a value outside of the setting's range."""
    paths_of(setting)
    low, high = (0, 1) if setting.startswith(_FEATURE) else SETTINGS[setting][1:]
    if not value.isdecimal() or not low <= int(value) <= high:
        raise ValueError(f"{value[:32]!r} is not a number from {low} to {high}")
