"""The node as kubelet and containerd make it with the systemd driver.

Slices of QoS classes and pods are transient units, as kubelet starts them over D-Bus; sandboxes and
containers come from the machine's containerd over CRI.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.beds.cri import Cri, connected
from tests.beds.image import IMAGE
from tests.beds.kubelet import (
    CFS_PERIOD_US,
    container_config,
    cpu_shares,
    memory_bytes,
    milli_cpu,
    qos_class,
    sandbox_config,
)
from tests.waiting import wait_until

CGROUPS = Path("/sys/fs/cgroup")
SOCKET = Path("/run/containerd/containerd.sock")
BFQ_DISK = "vde"
"""The disk that has the BFQ scheduler before koordlet starts and looks at the disks."""
_LOGS = Path("/run/koord-pods")


def run(*command: str, check: bool = True, timeout_s: float = 60) -> str:
    """Run a command; its output. A failure shows what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    if check and done.returncode != 0:
        raise AssertionError(f"{' '.join(command)} failed: {done.stdout}{done.stderr}")
    return done.stdout


def start_slice(name: str, *, weight: int = 0, quota_us: int = -1, memory: int = 0) -> None:
    """Start a transient slice as kubelet does; 0 and -1 leave a property out."""
    properties: list[tuple[str, str, str]] = [
        ("DefaultDependencies", "b", "false"),
        ("MemoryAccounting", "b", "true"),
        ("CPUAccounting", "b", "true"),
        ("TasksAccounting", "b", "true"),
        ("IOAccounting", "b", "true"),
    ]
    if weight:
        properties.append(("CPUWeight", "t", str(weight)))
    if quota_us > 0:
        per_second = quota_us * 1_000_000 // CFS_PERIOD_US
        properties.append(("CPUQuotaPerSecUSec", "t", str(per_second)))
    if memory:
        properties.append(("MemoryMax", "t", str(memory)))
    arguments = [word for each in properties for word in each]
    run(
        "busctl", "call", "org.freedesktop.systemd1", "/org/freedesktop/systemd1",
        "org.freedesktop.systemd1.Manager", "StartTransientUnit", "ssa(sv)a(sa(sv))",
        name, "replace", str(len(properties)), *arguments, "0",
    )  # fmt: skip
    folder = CGROUPS / slice_path(name)
    wait_until(folder.is_dir, f"{folder} exists")
    # kubelet turns on what the units did not ask systemd for.
    for parent in reversed(folder.relative_to(CGROUPS).parents):
        (CGROUPS / parent / "cgroup.subtree_control").write_text("+cpuset +cpu +io +memory +pids")


def slice_path(name: str) -> str:
    words = name.removesuffix(".slice").split("-")
    return "/".join("-".join(words[: end + 1]) + ".slice" for end in range(len(words)))


def linear_weight(shares: int) -> int:
    """kubelet's conversion."""
    return 1 + (shares - 2) * 9999 // 262142


@dataclass(frozen=True, slots=True)
class Pod:
    """A running pod. Paths are relative to the cgroup root."""

    uid: str
    slice: str
    cgroup: str
    sandbox_id: str
    containers: Mapping[str, str]

    def container_cgroup(self, name: str) -> str:
        return f"{self.cgroup}/cri-containerd-{self.containers[name]}.scope"

    def read(self, name: str, file: str) -> str:
        """A file of a container's group."""
        return (CGROUPS / self.container_cgroup(name) / file).read_text().strip()

    def pids(self, name: str) -> list[int]:
        return [int(pid) for pid in self.read(name, "cgroup.procs").split()]


class Node:
    """Makes pods on this machine. See `node` for its life."""

    def __init__(self, connection: ExitStack) -> None:
        self._connection = connection
        self.cri: Cri = connection.enter_context(connected(SOCKET, timeout_s=60))
        self.pods: list[Pod] = []
        self._milli: dict[str, int] = {}

    def run_pod(self, manifest: Mapping[str, Any]) -> Pod:
        """Start a pod from its manifest, with kubelet's values."""
        uid = manifest["metadata"]["uid"]
        qos = qos_class(manifest)
        stem = "kubepods" if qos == "guaranteed" else f"kubepods-{qos}"
        name = f"{stem}-pod{uid.replace('-', '_')}.slice"
        resources = [each.get("resources", {}) for each in manifest["spec"]["containers"]]
        milli = sum(
            milli_cpu(each.get("requests", each.get("limits", {})).get("cpu", 0))
            for each in resources
        )
        limits = [each.get("limits", {}) for each in resources]
        quota = -1
        if all("cpu" in each for each in limits):
            quota = sum(milli_cpu(each["cpu"]) for each in limits) * CFS_PERIOD_US // 1000
        memory = 0
        if all("memory" in each for each in limits):
            memory = sum(memory_bytes(each["memory"]) for each in limits)
        start_slice(name, weight=linear_weight(cpu_shares(milli)), quota_us=quota, memory=memory)
        cgroup = slice_path(name)
        sandbox = sandbox_config(manifest, f"/{cgroup}", _LOGS)
        sandbox_id = self.cri.run_sandbox(sandbox)
        ids: dict[str, str] = {}
        for container in manifest["spec"]["containers"]:
            config = container_config(manifest, container, qos)
            container_id = self.cri.create_container(sandbox_id, config, sandbox)
            self.cri.start_container(container_id)
            ids[container["name"]] = container_id
        pod = Pod(uid, name, cgroup, sandbox_id, ids)
        self.pods.append(pod)
        self._milli[pod.uid] = milli if qos == "burstable" else 0
        self.weigh_burstable()
        return pod

    def weigh_burstable(self) -> None:
        """kubelet keeps the Burstable slice at the sum of its pods' requests.

        With each pod it has systemd set the weight, also when that stays the same.
        """
        shares = cpu_shares(sum(self._milli.values()))
        weight = f"CPUWeight={linear_weight(shares)}"
        run("systemctl", "set-property", "--runtime", "kubepods-burstable.slice", weight)

    def reconnect(self) -> None:
        """Dial the containerd that was started anew."""
        self._connection.close()
        self.cri = self._connection.enter_context(connected(SOCKET, timeout_s=60))

    def remove(self, pod: Pod) -> None:
        """End a pod as kubelet does."""
        self.cri.remove_sandbox(pod.sandbox_id)
        run("systemctl", "stop", pod.slice, check=False)
        self.pods.remove(pod)
        del self._milli[pod.uid]
        self.weigh_burstable()


def import_image() -> None:
    run(
        "ctr", "-a", str(SOCKET), "-n", "k8s.io", "images", "import", "/opt/image.tar",
        timeout_s=120,
    )  # fmt: skip


@contextmanager
def node() -> Iterator[Node]:
    """The node with its QoS slices; pods that are left are removed at the end."""
    Path(f"/sys/class/block/{BFQ_DISK}/queue/scheduler").write_text("bfq")
    with ExitStack() as connection:
        made = Node(connection)
        if not made.cri.has_image(IMAGE):
            import_image()
        for name, shares in (
            ("kubepods.slice", 8192),
            ("kubepods-burstable.slice", 2),
            ("kubepods-besteffort.slice", 2),
        ):
            start_slice(name, weight=linear_weight(shares))
        try:
            yield made
        finally:
            for pod in list(made.pods):
                made.remove(pod)
