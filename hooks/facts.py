"""The inputs of a node's policies besides the subject: objects, kernel facts, settings.

`NodeInputs` is one immutable value. A new one is made when an object or a fact changes; the engine
then parses every policy's rule again and is swapped as a whole: the hook path never parses rules.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from apis.cpuset import CpuSet
from apis.effective_nodeslo import default_nodeslo
from apis.nodeslo import (
    NodeSLOSpec,
)
from apis.topology import NodeCPUFacts
from linux.resources import DeviceNode, Resource


class ResctrlFacts(msgspec.Struct, frozen=True):
    """What the resctrl file system offers."""

    l3_domains: tuple[int, ...] = ()
    mb_domains: tuple[int, ...] = ()
    cbm_mask: int = 0
    min_cbm_bits: int = 1
    sparse_masks: bool = False
    bandwidth_gran: int = 10  # every Intel machine's
    min_bandwidth: int = 10
    num_closids: int = 0
    vendor: str = ""  # "GenuineIntel", "AuthenticAMD", "" when unknown
    mba_mbps: bool = False  # mounted with mba_MBps: values are MB/s
    cdp: bool = False  # L3CODE / L3DATA instead of L3


class Disk(msgspec.Struct, frozen=True):
    """A whole disk. number: "major:minor". bfq: the BFQ scheduler is active on it."""

    number: str
    bfq: bool = False


class KernelFacts(msgspec.Struct, frozen=True):
    """What this kernel can do, as probed.

    supported: the resources whose files were written with success in a scratch cgroup, or that are
        supported by other evidence. A policy whose resource is missing is unsupported or degraded.
    pods_cpus: the CPUs that a container may be given: on cgroup v1 those of the pods' root, on v2
        those that the machine can have. The kernel refuses another one, and the runtime then fails
        to create the container. None: unknown.
    rdma: PCI address -> verbs device node, for RDMA injection.
    rdma_cm: the connection manager's device node, if there is one.
    gpus: minor number -> device node of NVIDIA's driver.
    disks: path of a block device, as a person writes it (/dev/sdb1, /dev/mapper/data, /dev/vg/lv)
        -> the whole disks that it lies on.
    volume_groups: LVM volume group -> the whole disks of its active volumes.
    pod_volumes: uid of a pod -> name of a mounted CSI volume -> the whole disks that it lies on, ()
        for none. Pods whose mounts were not looked at are missing.
    gpu_control: the nodes that every user of a GPU needs.
    """

    cgroup_version: int = 1
    kernel_release: str = ""
    supported: frozenset[Resource] = frozenset()
    group_identity_sysctl: bool = False
    sched_core_sysctl: bool = False
    core_sched: bool = False
    resctrl: ResctrlFacts | None = None
    page_size_bytes: int = 4096
    memory_bytes: int = 0  # MemTotal; 0 when it is not known
    pods_cpus: CpuSet | None = None
    rdma: Mapping[str, DeviceNode] = {}
    rdma_cm: DeviceNode | None = None
    gpus: Mapping[int, DeviceNode] = {}
    gpu_control: tuple[DeviceNode, ...] = ()
    disks: Mapping[str, tuple[Disk, ...]] = {}
    volume_groups: Mapping[str, tuple[Disk, ...]] = {}
    pod_volumes: Mapping[str, Mapping[str, tuple[Disk, ...]]] = {}


class NodeMeta(msgspec.Struct, frozen=True):
    """The part of the Node object that policies and strategies read.

    allocatable, capacity: by resource name; CPU in milli-cores (batch-cpu and mid-cpu too), memory
        and others in their units. Only strategies and reports see these: the manager changes
        batch resources every minute, and no policy's rule depends on them.
    pressures: kubelet's conditions MemoryPressure, DiskPressure and PIDPressure that are true now:
        kubelet then evicts pods itself.
    """

    name: str = ""
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    allocatable_memory_bytes: int | None = None
    allocatable_cpu_milli: int | None = None
    allocatable: Mapping[str, int] = {}
    capacity: Mapping[str, int] = {}
    pressures: frozenset[str] = frozenset()


class Settings(msgspec.Struct, frozen=True):
    """The daemon's configuration as far as policies read it. Names follow upstream's flags."""

    feature_gates: Mapping[str, bool] = {}
    disable_unset_cpu_quota: bool = False
    hami_core_library: str = "/usr/local/vgpu/libvgpu.so"
    memory_bandwidth_mbps: int = 0
    """MB/s that the memory of one resctrl domain carries; 0: not known."""
    compat: frozenset[str] = frozenset()
    """Compatibility switches that are on: names listed in docs/compatibility.md."""

    def gate(self, name: str, *, default: bool) -> bool:
        """Return whether a feature gate is on."""
        return self.feature_gates.get(name, default)


class NodeInputs(msgspec.Struct, frozen=True):
    """Everything that rules are parsed from."""

    slo: NodeSLOSpec = msgspec.field(default_factory=default_nodeslo)
    topology: NodeCPUFacts | None = None
    node: NodeMeta = NodeMeta()
    kernel: KernelFacts = KernelFacts()
    settings: Settings = Settings()
