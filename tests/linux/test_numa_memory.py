"""Memory of NUMA nodes and what the CPUs are, from files."""

from __future__ import annotations

import pytest

from linux.numa_memory import CpuKind, NumaMemory, read_cpu_kind, read_numa_memory
from tests.simulated import UBUNTU_24_04, SimulatedKernel

NODES = "/sys/devices/system/node"
CPU = "/sys/devices/system/cpu"


class Files(SimulatedKernel):
    """A kernel with these files alone."""

    def __init__(self, files: dict[str, str]) -> None:
        super().__init__(UBUNTU_24_04)
        self.texts = files

    def read(self, path: str) -> bytes:
        try:
            return self.texts[path].encode()
        except KeyError:
            raise FileNotFoundError(path) from None


def test_numa_nodes_with_their_huge_pages() -> None:
    host = Files(
        {
            f"{NODES}/node0/meminfo": "Node 0 MemTotal:       1024 kB\nNode 0 MemFree: 1 kB\n",
            f"{NODES}/node0/hugepages/hugepages-2048kB/nr_hugepages": "3\n",
            f"{NODES}/node2/meminfo": "Node 2 MemTotal:       2048 kB\n",
            f"{NODES}/node2/hugepages/hugepages-1048576kB/nr_hugepages": "1\n",
        }
    )
    assert read_numa_memory(host, {0: None, 2: None}) == {
        0: NumaMemory(1 << 20, {"2Mi": 6 << 20, "1Gi": 0}),
        2: NumaMemory(2 << 20, {"2Mi": 0, "1Gi": 1 << 30}),
    }


def test_a_kernel_without_numa_has_one_node() -> None:
    host = Files(
        {
            "/proc/meminfo": "MemTotal:       1024 kB\n",
            "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "1\n",
        }
    )
    assert read_numa_memory(host, {0: None}) == {0: NumaMemory(1 << 20, {"2Mi": 2 << 20, "1Gi": 0})}


def test_a_numa_node_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        read_numa_memory(Files({}), {1: None})
    with pytest.raises(ValueError, match="MemTotal"):
        read_numa_memory(Files({f"{NODES}/node1/meminfo": "x"}), {1: None})


def test_what_the_cpus_are() -> None:
    host = Files(
        {
            "/proc/cpuinfo": "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: A: B\n",
            f"{CPU}/smt/active": "1\n",
            f"{CPU}/intel_pstate/no_turbo": "0\n",
            "/sys/fs/resctrl/info/L3/cbm_mask": "7ff\n",
        }
    )
    assert read_cpu_kind(host) == CpuKind("A: B", "GenuineIntel", True, True, "7ff")
    assert read_cpu_kind(Files({})) == CpuKind()
