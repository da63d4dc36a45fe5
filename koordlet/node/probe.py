"""Probes what this kernel supports, by writing into a scratch group of koordlet's own.

A file that exists may still refuse every write, for example while a switch is off. So each resource
is tried with a harmless value, in a group below kubepods that has no tasks and is removed
afterwards. Where no such group can be made, or it lacks a controller, the existence of the file in
the pods' root counts as evidence.

Facts: docs/facts/kernel.md, "Cgroup files" and "What a write does".
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping
from typing import Final

import msgspec

from apis.cpuset import CpuSet
from hooks.facts import KernelFacts, ResctrlFacts
from koordlet.node.disks import read_disks
from linux.block_io import BLOCK_FILES, OF_ROOT, V1_CONTROLLER, V2_CONTROLLER
from linux.cgroup_files import FILES, INT64_MAX, CgroupFile, Codec, field_text
from linux.cgroup_paths import Layout
from linux.device_nodes import read_gpus
from linux.host import Host
from linux.procfs import kernel_release, total_memory_bytes
from linux.rdma import read_rdma
from linux.resctrl import MOUNT
from linux.resctrl_groups import read_offer
from linux.resources import Resource
from linux.sysctls import GROUP_IDENTITY, SCHED_CORE, path_of
from linux.topology import POSSIBLE_CPUS

log = logging.getLogger(__name__)

SCRATCH: Final = "koordlet-probe"
_GROUP_IDENTITY_SWITCH: Final = path_of(GROUP_IDENTITY)
_SCHED_CORE_SWITCH: Final = path_of(SCHED_CORE)
_NO_KERNEL_HELP: Final = frozenset(
    {
        Resource.ENV,
        Resource.MOUNT,
        Resource.DEVICE,
        Resource.SYSCTL,
        Resource.KERNEL_SETTING,
        Resource.HOST_DIRECTORY,
    }
)
_TRIED: Final[Mapping[Resource, str]] = {
    Resource.CPU_SHARES: "512",
    Resource.CPU_CFS_QUOTA: "50000",
    Resource.CPU_CFS_BURST: "10000",
    Resource.CPU_IDLE: "1",
    Resource.MEMORY_LIMIT: str(1 << 30),
    Resource.MEMORY_MIN: "65536",
    Resource.MEMORY_LOW: "65536",
    Resource.MEMORY_HIGH: str(1 << 30),
}
"""Harmless values for a group without tasks. Any value in range serves; the burst is below the
quota. Resources without an entry are tried with their present value."""
_WEIGHT: Final = "50"
"""cgroup v2's `cpu.weight` in place of the shares: any value but the default of 100."""
_BURST_ABOVE_US: Final = 100_000
"""Twice the quota of `_TRIED`: mainline refuses it, Alibaba Cloud Linux accepts it."""


class Probed(msgspec.Struct, frozen=True):
    """The facts, and their reasons.

    burst_above_quota: the kernel accepts a burst above the quota (Alibaba Cloud Linux).
    reasons: why a resource is not supported, or by which evidence alone it counts as supported.
    """

    facts: KernelFacts
    burst_above_quota: bool
    reasons: Mapping[Resource, str]


def probe_kernel(host: Host, layout: Layout) -> Probed:
    """Return what the kernel supports. Blocks for some milliseconds; raises nothing."""
    reasons: dict[Resource, str] = {}
    supported = set(_NO_KERNEL_HELP)
    scratch = f"{layout.kubepods}/{SCRATCH}" if layout.kubepods else ""
    made = _make(host, layout, scratch) if scratch else set[str]()
    burst_above_quota = False
    try:
        if layout.kubepods:
            for file in _in_order():
                why = _try(host, layout, scratch, file, made)
                if why:
                    reasons[file.resource] = why
                if not why or why.startswith("by evidence"):
                    supported.add(file.resource)
            if Resource.CPU_CFS_BURST in supported and "cpu" in made:
                burst_above_quota = _burst_above_quota(host, layout, scratch)
        else:
            reasons = dict.fromkeys(FILES, "the pods' cgroup root is not known yet")
    finally:
        _remove(host, layout, scratch, made)
    _processes(host, supported, reasons)
    offer = read_offer(host)
    if offer is None:
        why = f"resctrl is not mounted at {MOUNT}"
        reasons |= {Resource.RESCTRL_GROUP: why, Resource.RESCTRL_SCHEMATA: why}
    else:
        supported |= {Resource.RESCTRL_GROUP, Resource.RESCTRL_SCHEMATA}
    rdma, rdma_cm = read_rdma(host)
    gpus, gpu_control = read_gpus(host)
    _block_io(host, layout, supported, reasons)
    disks, volume_groups = read_disks(host)
    facts = KernelFacts(
        cgroup_version=layout.version,
        kernel_release=_release(host),
        supported=frozenset(supported),
        group_identity_sysctl=_readable(host, _GROUP_IDENTITY_SWITCH),
        sched_core_sysctl=_readable(host, _SCHED_CORE_SWITCH),
        core_sched=Resource.CORE_SCHED_COOKIE in supported,
        resctrl=None
        if offer is None
        else ResctrlFacts(
            l3_domains=offer.l3_domains,
            mb_domains=offer.mb_domains,
            cbm_mask=offer.cbm_mask,
            min_cbm_bits=offer.min_cbm_bits,
            sparse_masks=offer.sparse_masks,
            bandwidth_gran=offer.bandwidth_gran,
            min_bandwidth=offer.min_bandwidth,
            num_closids=offer.num_closids,
            vendor=offer.vendor,
            mba_mbps=offer.mba_mbps,
            cdp=offer.cdp,
        ),
        page_size_bytes=os.sysconf("SC_PAGE_SIZE"),
        memory_bytes=total_memory_bytes(host),
        pods_cpus=pods_cpus(host, layout),
        rdma=rdma,
        rdma_cm=rdma_cm,
        gpus=gpus,
        gpu_control=gpu_control,
        disks=disks,
        volume_groups=volume_groups,
    )
    return Probed(facts, burst_above_quota, reasons)


def pods_cpus(host: Host, layout: Layout) -> CpuSet | None:
    """Return the CPUs that the kernel accepts for a group below the pods' root; None: unknown.

    On cgroup v1 a CPU that goes offline leaves the root's set for good. v2 refuses only CPUs that
    the machine cannot have.
    """
    path = POSSIBLE_CPUS
    if layout.version == 1:
        file = FILES[Resource.CPUSET_CPUS]
        if not layout.kubepods or not layout.has(file.controller):
            return None
        path = f"{layout.directory(file.controller, layout.kubepods)}/{file.v1}"
    try:
        return CpuSet.parse(host.read(path).decode("ascii", "replace")) or None
    except (OSError, ValueError):
        return None


def _in_order() -> list[CgroupFile]:
    """Return the files in probing order: the quota before the burst that it bounds, and the weight
    before `cpu.idle`, which fixes it."""
    return sorted(
        FILES.values(),
        key=lambda file: (
            list(_TRIED).index(file.resource) if file.resource in _TRIED else len(_TRIED)
        ),
    )


def _make(host: Host, layout: Layout, scratch: str) -> set[str]:
    """Make the scratch group in every hierarchy; return the controllers for which that worked."""
    made: set[str] = set()
    for controller in sorted({file.controller for file in FILES.values()}):
        if not layout.has(controller):
            continue
        path = layout.directory(controller, scratch)
        try:
            host.mkdir(path)
        except FileExistsError:
            pass  # left by a daemon that was killed while it probed, or v2's single directory
        except OSError as error:
            log.debug("no scratch group %s: %s", path, error)
            continue
        made.add(controller)
    return made


def _remove(host: Host, layout: Layout, scratch: str, made: set[str]) -> None:
    for path in {layout.directory(controller, scratch) for controller in made}:
        try:
            host.rmdir(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("the scratch group %s cannot be removed: %s", path, error)


def _try(host: Host, layout: Layout, scratch: str, file: CgroupFile, made: set[str]) -> str:
    """Return why the resource is not supported; "" if it is, "by evidence..." if not tried."""
    name = file.name(layout.version)
    if not layout.has(file.controller) or not name:
        return f"cgroup v{layout.version} of this node has no file for it"
    if file.controller not in made:
        return _evidence(host, layout, file, "no scratch group could be made")
    directory = layout.directory(file.controller, scratch)
    path = f"{directory}/{name}"
    try:
        present = field_text(file, layout.version, host.read(path))
    except FileNotFoundError:
        return _evidence(host, layout, file, f"the scratch group has no {name}")
    except (OSError, ValueError) as error:
        return f"{name} is not readable: {error}"
    tried = _value(host, layout, file, present)
    if tried is None:
        return f"there is nothing to try {name} with"
    try:
        host.write(path, tried.encode())
        if file.resource is Resource.CPU_IDLE:
            host.write(path, b"0")
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, str(error.errno))
        if file.resource is Resource.CPU_BVT and _readable(host, _GROUP_IDENTITY_SWITCH):
            return f"by evidence: {name} answers {code} as it does while its switch is off"
        return f"{name} refused {tried!r}: {code}"
    return ""


def _evidence(host: Host, layout: Layout, file: CgroupFile, why: str) -> str:
    name = file.name(layout.version)
    if _readable(host, f"{layout.directory(file.controller, layout.kubepods)}/{name}"):
        return f"by evidence: {name} exists in {layout.kubepods}, though {why}"
    return f"there is no {name} in groups below {layout.kubepods}"


def _value(host: Host, layout: Layout, file: CgroupFile, present: str) -> str | None:
    if file.codec is Codec.CPUS:
        return _inherited(host, layout, file)
    if file.codec is Codec.SHARES and layout.version == 2:
        return _WEIGHT
    if file.codec is Codec.PERIOD and layout.version == 2:
        return f"max {present}"
    tried = _TRIED.get(file.resource, present)
    return str(INT64_MAX) if tried == "max" else tried


def _inherited(host: Host, layout: Layout, file: CgroupFile) -> str | None:
    """Return a CPU set that the scratch group may have: that of the pods' root."""
    directory = layout.directory(file.controller, layout.kubepods)
    name = file.name(layout.version)
    for candidate in (name, f"{name}.effective"):
        try:
            text = host.read(f"{directory}/{candidate}").decode("ascii", "replace").strip()
            if CpuSet.parse(text):
                return text
        except (OSError, ValueError):
            continue
    return None


def _burst_above_quota(host: Host, layout: Layout, scratch: str) -> bool:
    directory = layout.directory("cpu", scratch)
    quota, burst = FILES[Resource.CPU_CFS_QUOTA], FILES[Resource.CPU_CFS_BURST]
    try:
        host.write(f"{directory}/{quota.name(layout.version)}", b"50000")
        host.write(f"{directory}/{burst.name(layout.version)}", str(_BURST_ABOVE_US).encode())
    except OSError:
        return False
    return True


def _processes(host: Host, supported: set[Resource], reasons: dict[Resource, str]) -> None:
    path = "/proc/self/oom_score_adj"
    try:
        host.write(path, host.read(path).strip())
        supported.add(Resource.OOM_SCORE_ADJ)
    except OSError as error:
        reasons[Resource.OOM_SCORE_ADJ] = f"{path}: {error.strerror}"
    try:
        host.core_sched_cookie(0)
        supported.add(Resource.CORE_SCHED_COOKIE)
    except OSError as error:
        if _readable(host, _SCHED_CORE_SWITCH):
            # Alibaba Cloud Linux: cookies work once the switch is on, which the policy turns on.
            supported.add(Resource.CORE_SCHED_COOKIE)
            reasons[Resource.CORE_SCHED_COOKIE] = f"by evidence: {_SCHED_CORE_SWITCH} exists"
        elif error.errno == errno.ENODEV:
            reasons[Resource.CORE_SCHED_COOKIE] = "SMT is off or absent"
        else:
            reasons[Resource.CORE_SCHED_COOKIE] = f"prctl: {error.strerror}"


def _block_io(
    host: Host, layout: Layout, supported: set[Resource], reasons: dict[Resource, str]
) -> None:
    """Look which files of block I/O there are. Nothing is written: a line needs a disk, and iocost
    would be set up for it."""
    controller = V1_CONTROLLER if layout.version == 1 else V2_CONTROLLER
    for resource, file in BLOCK_FILES.items():
        name = file.name(layout.version)
        place = "" if file.form in OF_ROOT else layout.kubepods
        if not name or not layout.has(controller):
            reasons[resource] = f"cgroup v{layout.version} of this node has no file for it"
        elif not _readable(host, f"{layout.directory(controller, place)}/{name}"):
            reasons[resource] = f"there is no {name} in {place or 'the root'}"
        else:
            supported.add(resource)


def _readable(host: Host, path: str) -> bool:
    try:
        host.read(path)
    except OSError:
        return False
    return True


def _release(host: Host) -> str:
    try:
        return kernel_release(host)
    except OSError:
        return ""
