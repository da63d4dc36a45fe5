"""A kernel in memory: `SimulatedKernel` is a `Host` that refuses what Linux refuses.

The rules come from the kernel's own behaviour, tried on real ones by tests/behaviours; nothing here
uses the product's codecs, so that the two cannot share a mistake. See docs/testing.md.
"""

from tests.simulated.faults import Crash
from tests.simulated.kernel import SimulatedKernel, Write
from tests.simulated.kubelet import Container, Kubelet, Pod
from tests.simulated.profiles import (
    AMD_CCD_SMBA,
    ANOLIS_8,
    ARM64,
    DEBIAN_12_V1,
    DEBIAN_12_V2,
    INTEL_RDT,
    PROFILES,
    RHEL_9,
    UBUNTU_24_04,
    Profile,
    Topology,
)

__all__ = [
    "AMD_CCD_SMBA",
    "ANOLIS_8",
    "ARM64",
    "DEBIAN_12_V1",
    "DEBIAN_12_V2",
    "INTEL_RDT",
    "PROFILES",
    "RHEL_9",
    "UBUNTU_24_04",
    "Container",
    "Crash",
    "Kubelet",
    "Pod",
    "Profile",
    "SimulatedKernel",
    "Topology",
    "Write",
]
