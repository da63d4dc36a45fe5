"""Layout, topology, resctrl and devices, found out on simulated machines."""

from __future__ import annotations

import pytest

from apis.cpuset import CpuSet
from linux import procfs
from linux.cgroup_paths import Driver
from linux.device_nodes import read_gpus
from linux.discovery import DiscoveryError, discover, kubepods_of
from linux.rdma import read_rdma
from linux.resctrl_groups import read_offer
from linux.resources import DeviceNode
from linux.topology import read_topology
from tests.simulated import (
    AMD_CCD_SMBA,
    DEBIAN_12_V1,
    DEBIAN_12_V2,
    INTEL_RDT,
    PROFILES,
    Kubelet,
    Profile,
    SimulatedKernel,
)

MACHINES = pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)


@MACHINES
def test_the_layout_is_found_out(profile: Profile) -> None:
    kernel = SimulatedKernel(profile)
    before = discover(kernel)
    assert (before.version, before.kubepods) == (profile.cgroup, "")
    kubelet = Kubelet(kernel)
    layout = discover(kernel)
    assert layout.driver.value == profile.driver.value
    assert layout.kubepods == kubelet.root
    assert kernel.is_dir(layout.directory("cpu", layout.kubepods))
    if layout.version == 1:
        assert {"cpu", "cpuset", "memory"} <= set(layout.mounts)


def test_a_nested_root_is_found_by_name_and_from_live_containers() -> None:
    kernel = SimulatedKernel(DEBIAN_12_V2)
    kernel.make("/sys/fs/cgroup/kubelet.slice/kubelet-kubepods.slice")
    assert discover(kernel).kubepods == "kubelet.slice/kubelet-kubepods.slice"
    pod = "a.slice/a-kubepods.slice/a-kubepods-podx.slice"
    assert kubepods_of(["x/y", f"{pod}/cri-containerd-1.scope"]) == "a.slice/a-kubepods.slice"
    given = discover(kernel, kubepods="/kubepods/")
    assert (given.kubepods, given.driver) == ("kubepods", Driver.CGROUPFS)


def test_the_error_without_a_cgroup_tree_names_the_setting() -> None:
    with pytest.raises(DiscoveryError, match="cgroupRoot"):
        discover(SimulatedKernel(DEBIAN_12_V1), cgroup_root="/nowhere")


@MACHINES
def test_cores_are_numbered_machine_wide(profile: Profile) -> None:
    kernel = SimulatedKernel(profile)
    topology = read_topology(kernel)
    made = profile.topology
    assert len(topology.cpus) == made.cpus
    assert {cpu.core for cpu in topology.cpus} == set(range(made.cores))
    assert len(topology.cpus) == made.cores * made.threads
    for cpu in topology.cpus:
        assert cpu.core == made.core_of(cpu.cpu)
        assert (cpu.node, cpu.socket) == (made.node_of(cpu.cpu), made.socket_of(cpu.cpu))
        assert cpu.l3 == made.l3_of(cpu.cpu)


def test_offline_cpus_are_left_out() -> None:
    kernel = SimulatedKernel(INTEL_RDT)
    kernel.set_online(3, online=False)
    topology = read_topology(kernel)
    assert 3 not in topology.online and 3 not in topology.nodes[0]
    assert topology.online | CpuSet([3]) == CpuSet(range(64))


def test_what_resctrl_offers() -> None:
    intel = read_offer(SimulatedKernel(INTEL_RDT))
    assert intel is not None
    assert (intel.cbm_mask, intel.vendor, intel.l3_domains) == (0xFFF, "GenuineIntel", (0, 1))
    assert intel.num_closids == 8
    amd = read_offer(SimulatedKernel(AMD_CCD_SMBA))
    assert amd is not None and amd.sparse_masks and len(amd.mb_domains) == 8
    assert read_offer(SimulatedKernel(DEBIAN_12_V2)) is None


def test_machines_without_rdma_have_none() -> None:
    assert read_rdma(SimulatedKernel(DEBIAN_12_V2)) == ({}, None)


def test_gpus_are_named_by_minor_number_and_the_rest_of_the_driver_by_name() -> None:
    kernel = SimulatedKernel(DEBIAN_12_V2)
    assert read_gpus(kernel) == ({}, ())
    for name, major, minor in (
        ("nvidia0", 195, 0), ("nvidia12", 195, 12), ("nvidiactl", 195, 255), ("nvidia-uvm", 511, 0),
        ("nvidia-caps", 1, 1), ("nvidiax", 1, 1),
    ):  # fmt: skip
        kernel.add_device(f"/dev/{name}", "c", major, minor)
    gpus, control = read_gpus(kernel)
    assert gpus == {n: DeviceNode(f"/dev/nvidia{n}", "c", 195, n, 0o666) for n in (0, 12)}
    assert [(node.path, node.major, node.minor) for node in control] == [
        ("/dev/nvidiactl", 195, 255),
        ("/dev/nvidia-uvm", 511, 0),
    ]


def test_mount_tables_and_cpuinfo_take_what_machines_write() -> None:
    (mount,) = procfs.parse_mounts(b"cgroup /a\\040b cgroup rw,cpu,cpuacct 0 0\nshort line\n")
    assert mount.path == "/a b" and "cpuacct" in mount.options
    assert procfs.cpu_vendor(b"processor : 0\nvendor_id : GenuineIntel\n\n") == "GenuineIntel"
    assert procfs.cpu_vendor(b"processor : 0\nBogoMIPS : 1\n") == ""
    assert procfs.cgroup_paths(b"4:cpu,cpuacct:/k/p\n0::/u\n") == {
        "cpu": "k/p", "cpuacct": "k/p", "": "u",
    }  # fmt: skip
    assert procfs.parse_ids(b"1\n0\n22\n") == [1, 22]
