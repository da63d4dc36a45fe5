"""Memory of the NUMA nodes and their reserved huge pages, and what the CPUs are, from sysfs.

Files: docs/facts/kernel.md, "CPU topology".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from linux.host import Host

MIB: Final = 1 << 20
HUGE_PAGES_BYTES: Final[Mapping[str, int]] = {"2Mi": 2 * MIB, "1Gi": 1024 * MIB}
"""The sizes of huge pages that are reported, by the suffix of their resource."""

_MEM_TOTAL: Final = re.compile(rb"MemTotal:\s+(\d+) kB")


@dataclass(frozen=True, slots=True)
class NumaMemory:
    """total_bytes: with huge pages. huge_pages_bytes: reserved ones, by the suffix of the size."""

    total_bytes: int
    huge_pages_bytes: Mapping[str, int]


def read_numa_memory(host: Host, nodes: Mapping[int, object]) -> dict[int, NumaMemory]:
    """Return the memory of these NUMA nodes. Raises OSError or ValueError.

    A kernel without NUMA has no directory of the node: then /proc/meminfo is read.
    """
    return {number: _of_node(host, number) for number in nodes}


def _of_node(host: Host, number: int) -> NumaMemory:
    base = f"/sys/devices/system/node/node{number}"
    try:
        content = host.read(f"{base}/meminfo")
    except FileNotFoundError:
        if number:
            raise
        base, content = "/sys/kernel/mm", host.read("/proc/meminfo")
    found = _MEM_TOTAL.search(content)
    if found is None:
        raise ValueError(f"{base}/meminfo has no MemTotal")
    pages = {suffix: _huge_pages(host, base, size) for suffix, size in HUGE_PAGES_BYTES.items()}
    return NumaMemory(int(found[1]) << 10, pages)


def _huge_pages(host: Host, base: str, size: int) -> int:
    try:
        text = host.read(f"{base}/hugepages/hugepages-{size >> 10}kB/nr_hugepages")
    except FileNotFoundError:
        return 0  # the machine has no pages of this size
    return int(text) * size


@dataclass(frozen=True, slots=True)
class CpuKind:
    """What the CPUs are. cat_mask: the mask of all cache ways, hexadecimal; "" without CAT."""

    model: str = ""
    vendor: str = ""
    hyper_threads: bool = False
    turbo: bool = False
    cat_mask: str = ""


def read_cpu_kind(host: Host, *, sys_fs_root: str = "/sys/fs") -> CpuKind:
    """Return what can be read; a file that is missing leaves its part empty."""
    cpuinfo = _text(host, "/proc/cpuinfo")
    return CpuKind(
        model=_field(cpuinfo, "model name"),
        vendor=_field(cpuinfo, "vendor_id"),
        hyper_threads=_text(host, "/sys/devices/system/cpu/smt/active") == "1",
        turbo=_text(host, "/sys/devices/system/cpu/intel_pstate/no_turbo") == "0",
        cat_mask=_text(host, f"{sys_fs_root}/resctrl/info/L3/cbm_mask"),
    )


def _text(host: Host, path: str) -> str:
    try:
        return host.read(path).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _field(cpuinfo: str, name: str) -> str:
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return ""
