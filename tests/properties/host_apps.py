"""Host applications of a random life: what the NodeSLO declares, and the groups that an operator
makes and takes away without asking anybody.

Declared and running are two things: an application may be declared before it runs, run before it is
declared, end while it is declared, come back in a new group of the same name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tests.simulated import Kubelet, SimulatedKernel
from tests.simulated.cpuset import configured
from tests.simulated.kubelet import KubeQos
from tests.simulated.tree import Task
from tests.simulated.values import list_text

OPERATOR = "operator"
_CONTROLLERS = "+cpuset +cpu +memory"
_MADE_OF_V1 = ("cpu", "cpuset", "memory")


@dataclass(frozen=True, slots=True)
class HostApp:
    """below: the class's directory that `path` lies in; "": it lies at the root."""

    name: str
    qos: str
    path: str
    below: KubeQos | None = None
    declares_path: bool = True

    def declaration(self) -> dict[str, Any]:
        said: dict[str, Any] = {"name": self.name, "qos": self.qos}
        if self.declares_path:
            base = "CgroupRoot" if self.below is None else f"Kubepods{self.below.capitalize()}"
            parent, _, last = self.path.rpartition("/")
            said["cgroupPath"] = {"base": base, "parentDir": parent, "relativePath": last}
        return said

    def cgroup(self, kubelet: Kubelet) -> str:
        above = "" if self.below is None else f"{kubelet.qos_dir(self.below)}/"
        return f"{above}{self.path}"


APPS = {
    app.name: app
    for app in (
        HostApp("database", "LS", "host-latency-sensitive/database", declares_path=False),
        HostApp("scan", "BE", "host-best-effort/scan", declares_path=False),
        HostApp("agent", "LS", "site/agent"),
        HostApp("backup", "BE", "backup", below="BestEffort"),
    )
}


def declarations(names: Collection[str]) -> list[dict[str, Any]]:
    """What the NodeSLO says of the named ones."""
    return [APPS[name].declaration() for name in sorted(names)]


def start(kernel: SimulatedKernel, kubelet: Kubelet, app: HostApp) -> Task:
    """Make the application's group with values of the operator's, and a process in it."""
    cgroup = app.cgroup(kubelet)
    parts = cgroup.split("/")
    if kernel.profile.cgroup == 2:
        for end in range(len(parts)):
            above = "/".join(["/sys/fs/cgroup", *parts[:end]])
            kernel.write_as(OPERATOR, f"{above}/cgroup.subtree_control", _CONTROLLERS)
            kernel.make(f"{above}/{parts[end]}")
        kernel.write_as(OPERATOR, kubelet.path(cgroup, "cpu.weight"), "70")
    else:
        for controller in _MADE_OF_V1:
            kernel.make(f"/sys/fs/cgroup/{controller}/{cgroup}")
        for end in range(1, len(parts) + 1):
            _copy_cpuset(kernel, "/".join(parts[:end]))
        kernel.write_as(OPERATOR, kubelet.path(cgroup, "cpu.shares"), "700")
    return kernel.spawn_process(app.name, cgroup=cgroup, threads=2)


def _copy_cpuset(kernel: SimulatedKernel, cgroup: str) -> None:
    group = kernel.group(cgroup, "cpuset")
    assert group.parent is not None
    for kind in ("cpus", "mems"):
        if not configured(group, kind):
            text = list_text(configured(group.parent, kind))
            kernel.write_as(OPERATOR, f"/sys/fs/cgroup/cpuset/{cgroup}/cpuset.{kind}", text)
