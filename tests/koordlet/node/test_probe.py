"""Probing: what machines can do, found by writing, with nothing left behind."""

from __future__ import annotations

import errno

import pytest

from hooks.facts import Disk
from koordlet.node.probe import SCRATCH, Probed, pods_cpus, probe_kernel
from linux.discovery import discover
from linux.resources import Resource
from tests.simulated import (
    ANOLIS_8,
    DEBIAN_12_V1,
    DEBIAN_12_V2,
    INTEL_RDT,
    PROFILES,
    RHEL_9,
    Kubelet,
    Profile,
    SimulatedKernel,
)
from tests.simulated.devices import put_disk
from tests.simulated.vfs import text

ALWAYS = {
    Resource.CPU_SHARES,
    Resource.CPU_CFS_QUOTA,
    Resource.CPU_CFS_BURST,
    Resource.CPUSET_CPUS,
    Resource.MEMORY_LIMIT,
    Resource.OOM_SCORE_ADJ,
}


def probed(profile: Profile) -> tuple[SimulatedKernel, Probed]:
    kernel = SimulatedKernel(profile)
    Kubelet(kernel)
    kernel.writes.clear()
    return kernel, probe_kernel(kernel, discover(kernel))


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_every_machine_is_probed_inside_the_scratch_group_only(profile: Profile) -> None:
    kernel, result = probed(profile)
    below_ours = [write.path for write in kernel.writes_of() if f"/{SCRATCH}/" not in write.path]
    assert set(below_ours) <= {"/proc/self/oom_score_adj"}
    layout = discover(kernel)
    for controller in layout.mounts:
        assert SCRATCH not in kernel.listdir(layout.directory(controller, layout.kubepods))
    missing = ALWAYS - result.facts.supported
    # Bursts came to mainline with 5.14.
    assert missing <= ({Resource.CPU_CFS_BURST} if profile.kernel < (5, 14) else set())
    assert result.facts.cgroup_version == profile.cgroup


@pytest.mark.parametrize(
    ("profile", "resource", "supported"),
    [
        (DEBIAN_12_V1, Resource.CPU_BVT, False),
        (DEBIAN_12_V1, Resource.MEMORY_MIN, False),
        (DEBIAN_12_V2, Resource.MEMORY_MIN, True),
        (DEBIAN_12_V2, Resource.CORE_SCHED_COOKIE, False),
        (RHEL_9, Resource.CORE_SCHED_COOKIE, True),
        (RHEL_9, Resource.CPU_IDLE, False),
        (ANOLIS_8, Resource.CPU_BVT, True),
        (ANOLIS_8, Resource.MEMORY_WMARK_RATIO, True),
        (INTEL_RDT, Resource.RESCTRL_SCHEMATA, True),
        (DEBIAN_12_V2, Resource.RESCTRL_SCHEMATA, False),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_what_machines_can_do(profile: Profile, resource: Resource, supported: bool) -> None:
    _, result = probed(profile)
    assert (resource in result.facts.supported) is supported
    if not supported:
        assert result.reasons[resource]


def test_only_alibaba_kernels_take_a_burst_above_the_quota() -> None:
    assert probed(ANOLIS_8)[1].burst_above_quota
    assert not probed(DEBIAN_12_V1)[1].burst_above_quota
    assert not probed(DEBIAN_12_V2)[1].burst_above_quota


def test_an_identity_behind_a_switch_that_is_off_is_supported() -> None:
    kernel = SimulatedKernel(ANOLIS_8)
    Kubelet(kernel)
    kernel.sysctls["kernel.sched_group_identity_enabled"] = 0
    result = probe_kernel(kernel, discover(kernel))
    assert Resource.CPU_BVT in result.facts.supported
    assert result.facts.group_identity_sysctl


def test_a_file_that_refuses_every_write_is_not_supported() -> None:
    kernel = SimulatedKernel(DEBIAN_12_V2)
    Kubelet(kernel)
    kernel.faults.fail("write", errno.EINVAL, path="*/cpu.idle", nth=0)
    result = probe_kernel(kernel, discover(kernel))
    assert Resource.CPU_IDLE not in result.facts.supported
    assert "EINVAL" in result.reasons[Resource.CPU_IDLE]


def test_leftovers_of_a_killed_probe_are_used_and_removed() -> None:
    kernel = SimulatedKernel(DEBIAN_12_V2)
    kubelet = Kubelet(kernel)
    path = f"/sys/fs/cgroup/{kubelet.root}/{SCRATCH}"
    kernel.make(path)
    result = probe_kernel(kernel, discover(kernel))
    assert result.facts.supported >= ALWAYS
    assert not kernel.is_dir(path)


def test_where_no_group_can_be_made_the_files_are_evidence() -> None:
    kernel = SimulatedKernel(DEBIAN_12_V2)
    Kubelet(kernel)
    kernel.faults.fail("mkdir", errno.EROFS, nth=0)
    result = probe_kernel(kernel, discover(kernel))
    assert Resource.CPU_SHARES in result.facts.supported
    assert result.reasons[Resource.CPU_SHARES].startswith("by evidence")


def test_before_any_pod_nothing_of_the_groups_is_known() -> None:
    kernel = SimulatedKernel(DEBIAN_12_V2)
    result = probe_kernel(kernel, discover(kernel))
    assert Resource.CPU_SHARES not in result.facts.supported
    assert Resource.ENV in result.facts.supported


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_the_cpus_of_pods_are_those_that_the_kernel_lets_them_ask_for(profile: Profile) -> None:
    kernel = SimulatedKernel(profile)
    Kubelet(kernel)
    everything = kernel.online_cpus
    last = max(everything)
    assert set(probe_kernel(kernel, discover(kernel)).facts.pods_cpus or ()) == everything
    kernel.set_online(last, online=False)
    left = everything - {last} if profile.cgroup == 1 else everything
    assert set(pods_cpus(kernel, discover(kernel)) or ()) == left


def test_block_devices_are_resolved_to_whole_disks_with_their_scheduler() -> None:
    kernel = SimulatedKernel(DEBIAN_12_V2)
    Kubelet(kernel)
    put_disk(kernel, "sda", "8:0")
    put_disk(kernel, "sda1", "8:1", disk="sda")
    put_disk(kernel, "sdb", "8:16")
    put_disk(kernel, "dm-0", "252:0", slaves=("sda1", "sdb"), mapper="my--vg-log--1", lvm=True)
    kernel.sysfs.put("devices/virtual/block/sdb/queue/scheduler", text("none [bfq] kyber\n"))
    facts = probe_kernel(kernel, discover(kernel)).facts
    sda, sdb = Disk("8:0"), Disk("8:16", bfq=True)
    assert facts.disks == {
        "/dev/sda": (sda,),
        "/dev/sda1": (sda,),
        "/dev/sdb": (sdb,),
        "/dev/dm-0": (sda, sdb),
        "/dev/mapper/my--vg-log--1": (sda, sdb),
        "/dev/my-vg/log-1": (sda, sdb),
    }
    assert facts.volume_groups == {"my-vg": (sda, sdb)}


@pytest.mark.parametrize(
    ("profile", "resource", "supported"),
    [
        (DEBIAN_12_V1, Resource.BLKIO_READ_BPS, True),
        (DEBIAN_12_V1, Resource.BLKIO_COST_QOS, False),
        (DEBIAN_12_V1, Resource.BLKIO_LATENCY, False),
        (ANOLIS_8, Resource.BLKIO_COST_QOS, True),
        (ANOLIS_8, Resource.BLKIO_COST_WEIGHT, True),
        (DEBIAN_12_V2, Resource.BLKIO_LATENCY, True),
        (DEBIAN_12_V2, Resource.BLKIO_COST_MODEL, True),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_files_of_block_io_count_where_they_are(
    profile: Profile, resource: Resource, supported: bool
) -> None:
    _, result = probed(profile)
    assert (resource in result.facts.supported) is supported
    if not supported:
        assert result.reasons[resource]
