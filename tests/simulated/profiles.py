"""Machines to simulate: a kernel version, a cgroup layout, a topology, and what is built in.

A profile is data; what a version or a feature means stands beside the file that it concerns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

GIB = 1 << 30


class Feature(StrEnum):
    """What a kernel may have whatever its version."""

    ALIBABA = "alibaba"  # group identity, watermarks, page cache limit, kidled, PSI on v1
    GROUP_IDENTITY_SWITCH = "group-identity-switch"  # kernel.sched_group_identity_enabled
    CORE_SCHED = "core-sched"  # CONFIG_SCHED_CORE
    PSI = "psi"
    SWAP_ACCOUNTING = "swap-accounting"  # memory.memsw.* on v1


class Runtime(StrEnum):
    """Who makes container groups, hence their names and their weights."""

    CONTAINERD = "containerd"
    CRIO = "cri-o"
    DOCKER = "docker"


class Driver(StrEnum):
    SYSTEMD = "systemd"
    CGROUPFS = "cgroupfs"


class WeightFormula(StrEnum):
    """How a runtime turns shares into `cpu.weight`."""

    LINEAR = "linear"  # runc before 1.3.2, crun before 1.23, kubelet
    QUADRATIC = "quadratic"  # later ones


@dataclass(frozen=True, slots=True)
class Topology:
    """Sockets x NUMA nodes per socket x cores per node x threads per core.

    CPUs are numbered as Linux does on such machines: first thread of every core, then the second.
    `cores_per_l3` splits a node into several L3 domains (AMD CCDs); 0 is one L3 per socket.
    """

    sockets: int = 1
    nodes_per_socket: int = 1
    cores_per_node: int = 2
    threads: int = 1
    cores_per_l3: int = 0
    memory_bytes_per_node: int = 8 * GIB

    @property
    def nodes(self) -> int:
        return self.sockets * self.nodes_per_socket

    @property
    def cores(self) -> int:
        return self.nodes * self.cores_per_node

    @property
    def cpus(self) -> int:
        return self.cores * self.threads

    def core_of(self, cpu: int) -> int:
        return cpu % self.cores

    def node_of(self, cpu: int) -> int:
        return self.core_of(cpu) // self.cores_per_node

    def socket_of(self, cpu: int) -> int:
        return self.node_of(cpu) // self.nodes_per_socket

    def core_id_of(self, cpu: int) -> int:
        """The number in sysfs: it starts anew in each package."""
        return self.core_of(cpu) % (self.cores // self.sockets)

    def l3_of(self, cpu: int) -> int:
        if self.cores_per_l3:
            return self.core_of(cpu) // self.cores_per_l3
        return self.socket_of(cpu)

    @property
    def l3_domains(self) -> int:
        return self.cores // self.cores_per_l3 if self.cores_per_l3 else self.sockets

    def cpus_where(self, of: str, number: int) -> frozenset[int]:
        """CPUs whose `core`, `node`, `socket` or `l3` is `number`."""
        pick = {
            "core": self.core_of,
            "node": self.node_of,
            "socket": self.socket_of,
            "l3": self.l3_of,
        }[of]
        return frozenset(cpu for cpu in range(self.cpus) if pick(cpu) == number)


@dataclass(frozen=True, slots=True)
class Rdt:
    """What resctrl offers. 0 ways or no bandwidth: the resource is absent."""

    l3_ways: int = 12
    l3_closids: int = 16
    l3_min_bits: int = 1
    l3_shareable: int = 0
    l3_sparse: bool = False
    mb: str = "percent"  # "percent" (Intel), "amd" (1/8 GB/s, 2048 is unlimited), "" none
    mb_min: int = 10
    mb_step: int = 10
    mb_closids: int = 8
    mba_mbps: bool = False  # the mount option mba_MBps
    smba: bool = False
    monitoring: bool = True


@dataclass(frozen=True, slots=True)
class Profile:
    """One machine. `kernel` is (major, minor); `possible_cpus` 0 means as many as exist."""

    name: str
    kernel: tuple[int, int]
    cgroup: int  # 1 or 2
    driver: Driver
    topology: Topology
    runtime: Runtime = Runtime.CONTAINERD
    weights: WeightFormula = WeightFormula.LINEAR
    features: frozenset[Feature] = frozenset()
    rdt: Rdt | None = None
    machine: str = "x86_64"
    vendor: str = "GenuineIntel"
    model: str = "Simulated Xeon"

    def has(self, feature: Feature) -> bool:
        return feature in self.features

    def having(self, *features: Feature) -> Profile:
        """The same machine with further features."""
        return replace(self, features=self.features | set(features))

    def lacking(self, *features: Feature) -> Profile:
        """The same machine without some features."""
        return replace(self, features=self.features - set(features))


MODERN = frozenset({Feature.PSI, Feature.CORE_SCHED, Feature.SWAP_ACCOUNTING})

DEBIAN_12_V2 = Profile(
    "debian-12-v2",
    (6, 1),
    2,
    Driver.SYSTEMD,
    Topology(sockets=1, cores_per_node=4),
    # Debian 12's kernel is built without CONFIG_SCHED_CORE, and with PSI.
    features=frozenset({Feature.PSI, Feature.SWAP_ACCOUNTING}),
)
DEBIAN_12_V1 = Profile(
    "debian-12-v1",
    (6, 1),
    1,
    Driver.CGROUPFS,
    Topology(sockets=1, cores_per_node=4),
    features=frozenset({Feature.PSI, Feature.SWAP_ACCOUNTING}),
)
UBUNTU_24_04 = Profile(
    "ubuntu-24.04",
    (6, 8),
    2,
    Driver.SYSTEMD,
    Topology(sockets=1, cores_per_node=4, threads=2),
    weights=WeightFormula.QUADRATIC,
    features=MODERN,
)
RHEL_9 = Profile(
    "rhel-9",
    (5, 14),
    2,
    Driver.SYSTEMD,
    Topology(sockets=2, cores_per_node=4, threads=2),
    runtime=Runtime.CRIO,
    # RHEL 9 has PSI compiled in but off unless psi=1 is given.
    features=frozenset({Feature.CORE_SCHED, Feature.SWAP_ACCOUNTING}),
)
ANOLIS_8 = Profile(
    "anolis-8",
    (5, 10),
    1,
    Driver.CGROUPFS,
    Topology(sockets=2, cores_per_node=8, threads=2),
    features=frozenset(
        {
            Feature.ALIBABA,
            Feature.GROUP_IDENTITY_SWITCH,
            Feature.CORE_SCHED,
            Feature.PSI,
            Feature.SWAP_ACCOUNTING,
        }
    ),
)
INTEL_RDT = Profile(
    "intel-rdt",
    (6, 8),
    2,
    Driver.SYSTEMD,
    Topology(sockets=2, cores_per_node=16, threads=2, memory_bytes_per_node=64 * GIB),
    features=MODERN,
    rdt=Rdt(),
)
AMD_CCD_SMBA = Profile(
    "amd-ccd-smba",
    (6, 8),
    2,
    Driver.SYSTEMD,
    Topology(
        sockets=1,
        nodes_per_socket=4,
        cores_per_node=16,
        threads=2,
        cores_per_l3=8,
        memory_bytes_per_node=32 * GIB,
    ),
    features=MODERN,
    rdt=Rdt(l3_ways=16, l3_sparse=True, mb="amd", mb_min=0, mb_step=1, mb_closids=16, smba=True),
    vendor="AuthenticAMD",
    model="Simulated EPYC",
)
ARM64 = Profile(
    "arm64",
    (6, 1),
    2,
    Driver.SYSTEMD,
    Topology(sockets=1, cores_per_node=8),
    features=frozenset({Feature.PSI, Feature.SWAP_ACCOUNTING}),
    machine="aarch64",
    vendor="",
    model="",
)

PROFILES: tuple[Profile, ...] = (
    DEBIAN_12_V1,
    DEBIAN_12_V2,
    UBUNTU_24_04,
    RHEL_9,
    ANOLIS_8,
    INTEL_RDT,
    AMD_CCD_SMBA,
    ARM64,
)
