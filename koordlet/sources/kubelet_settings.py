"""Kubelet's configuration as `/configz` shows it, and the state file of its CPU manager.

Facts: docs/facts/koordlet.md, "Kubelet's configuration".
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Final

import msgspec

from apis.cpuset import NO_CPUS, CpuSet
from apis.quantity import parse_quantity

CPU_MANAGER_STATE: Final = "cpu_manager_state"
_MAX_STATE_BYTES: Final = 4 << 20
"""Bytes of the state file that are read. Chosen: a thousand times the file of a full node."""


class KubeletSettings(msgspec.Struct, frozen=True):
    """The part of kubelet's configuration that is read here. Texts as kubelet has them.

    reserved_milli_cpu: the sum of systemReserved and kubeReserved.
    """

    cpu_manager_policy: str = "none"
    cpu_manager_options: Mapping[str, str] = {}
    reserved_cpus: CpuSet = NO_CPUS
    reserved_milli_cpu: int = 0
    topology_policy: str = "none"
    topology_scope: str = "container"

    @property
    def static(self) -> bool:
        """Whether containers may get CPUs of their own from kubelet."""
        return self.cpu_manager_policy == "static"


class _Configuration(msgspec.Struct, rename="camel"):
    cpu_manager_policy: str | None = None
    cpu_manager_policy_options: dict[str, str] | None = None
    reserved_system_cpus: str | None = msgspec.field(name="reservedSystemCPUs", default=None)
    system_reserved: dict[str, str] | None = None
    kube_reserved: dict[str, str] | None = None
    topology_manager_policy: str | None = None
    topology_manager_scope: str | None = None


class _Configz(msgspec.Struct):
    kubeletconfig: _Configuration


class _State(msgspec.Struct, rename="camel"):
    entries: dict[str, dict[str, str]] | None = None


_decode_configz: Final = msgspec.json.Decoder(_Configz).decode
_decode_state: Final = msgspec.json.Decoder(_State).decode


def parse_settings(body: bytes) -> KubeletSettings:
    """Return what `/configz` says. Raises ValueError with a sentence."""
    try:
        found = _decode_configz(body).kubeletconfig
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a kubelet configuration: {error}") from None
    reserved = 0
    for amounts in (found.system_reserved, found.kube_reserved):
        if amounts and "cpu" in amounts:
            reserved += max(parse_quantity(amounts["cpu"]).milli_value(), 0)
    return KubeletSettings(
        cpu_manager_policy=found.cpu_manager_policy or "none",
        cpu_manager_options=found.cpu_manager_policy_options or {},
        reserved_cpus=CpuSet.parse(found.reserved_system_cpus or ""),
        reserved_milli_cpu=reserved,
        topology_policy=found.topology_manager_policy or "none",
        topology_scope=found.topology_manager_scope or "container",
    )


def read_exclusive_cpus(directory: str) -> dict[str, CpuSet]:
    """Return the CPUs that the static policy gave to pods, by uid; nothing where there is no file.

    Raises OSError, and ValueError for a file that cannot be understood: kubelet replaces the file
    as a whole, so it is not read in the middle of a write.
    """
    path = f"{directory}/{CPU_MANAGER_STATE}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return {}
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is not a regular file")
        data = file.read(_MAX_STATE_BYTES)
    if not data.strip():
        return {}
    try:
        entries = _decode_state(data).entries or {}
        return {
            uid: CpuSet.union(CpuSet.parse(text) for text in containers.values())
            for uid, containers in entries.items()
        }
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
