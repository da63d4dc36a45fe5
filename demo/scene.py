"""The objects and pods of the demo: the examples, fitted to the CPUs of this machine.

The requested value is read from a container's manifest, the observed one from the kernel's files
and the container's environment. Neither comes from the daemon.
"""

from __future__ import annotations

import copy
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.beds.containerd import Containerd
from tests.beds.kubelet import RunningPod

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NORMALIZATION = "node.koordinator.sh/cpu-normalization-ratio"
GATES = {"CPUNormalization": True, "GPUEnvInject": True, "OOMScoreAdj": True}

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shown:
    """One value that the table shows. level: of the container's cgroup, or of its pod's."""

    pod: str
    level: str  # "container" | "pod"
    resource: str  # as koordctl names it
    key: str = ""  # the variable's name for resource "env"
    original: str = ""  # what it is without Koordinator, where the demo restores it

    @property
    def whose(self) -> str:
        return f"{self.pod}/main" if self.level == "container" else f"{self.pod} (pod)"


SHOWN = (
    Shown("search", "container", "cpuset.cpus"),
    Shown("search", "container", "cpu.cfs_quota_us"),
    Shown("web", "container", "cpuset.cpus"),
    Shown("web", "container", "cpu.cfs_quota_us"),
    Shown("batch", "container", "cpu.shares"),
    Shown("batch", "container", "cpu.cfs_quota_us"),
    Shown("batch", "container", "memory.limit_in_bytes"),
    Shown("batch", "pod", "cpu.idle"),
    Shown("train", "container", "env", "NVIDIA_VISIBLE_DEVICES"),
)

RESTORED = (
    Shown("web", "container", "cpu.cfs_quota_us", original="100000"),
    Shown("web", "pod", "cpu.cfs_quota_us", original="100000"),
    Shown("batch", "container", "cpu.cfs_quota_us", original="100000"),
    Shown("batch", "pod", "cpu.idle", original="0"),
    Shown("batch", "pod", "cpu.shares", original="512"),
)


def load(folder: str) -> list[Manifest]:
    files = sorted((EXAMPLES / folder).glob("*.yaml"))
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def objects() -> list[Manifest]:
    """Return the node's objects, with a share pool of all CPUs but the first."""
    cpus = sorted(os.sched_getaffinity(0))
    manifests = load("objects")
    for manifest in manifests:
        if manifest["kind"] == "NodeResourceTopology":
            annotations = manifest["metadata"]["annotations"]
            shared = cpus[1:] or cpus
            annotations["node.koordinator.sh/cpu-shared-pools"] = _pool(shared)
            annotations["node.koordinator.sh/be-cpu-shared-pools"] = _pool(cpus)
    return manifests


def pods() -> list[Manifest]:
    """Return the pods, each with a new uid; the pod with an allocated CPU gets the first."""
    first = min(os.sched_getaffinity(0))
    order = [shown.pod for shown in SHOWN]
    manifests = sorted(load("pods"), key=lambda pod: order.index(pod["metadata"]["name"]))
    for manifest in manifests:
        metadata = manifest["metadata"]
        metadata["uid"] = str(uuid.uuid4())
        manifest["spec"]["nodeName"] = "example-node"
        status = metadata.get("annotations", {})
        if "scheduling.koordinator.sh/resource-status" in status:
            status["scheduling.koordinator.sh/resource-status"] = json.dumps({"cpuset": str(first)})
    return manifests


def _pool(cpus: list[int]) -> str:
    return json.dumps([{"socket": 0, "node": 0, "cpuset": ",".join(map(str, cpus))}])


def requested(pod: Manifest, shown: Shown) -> str:
    """Return what the manifest requests that leads to the value, as the manifest writes it."""
    annotations = pod["metadata"].get("annotations", {})
    resources = pod["spec"]["containers"][0]["resources"]
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    qos = pod["metadata"]["labels"].get("koordinator.sh/qosClass", "none")
    match shown.resource:
        case "cpuset.cpus" if text := annotations.get("scheduling.koordinator.sh/resource-status"):
            return f"CPU {json.loads(text)['cpuset']} allocated"
        case "cpu.cfs_quota_us":
            return _amount(limits, "cpu", "limit")
        case "cpu.shares":
            return _amount(requests, "cpu", "request")
        case "memory.limit_in_bytes":
            return _amount(limits, "memory", "limit")
        case "env" if text := annotations.get("scheduling.koordinator.sh/device-allocated"):
            minors = [str(device["minor"]) for device in json.loads(text)["gpu"]]
            return f"GPU {', '.join(minors)}"
    return f"class {qos}"


def _amount(amounts: Mapping[str, Any], resource: str, kind: str) -> str:
    batch = f"kubernetes.io/batch-{resource}"
    if batch in amounts:
        unit = "m" if resource == "cpu" else ""
        return f"batch-{resource} {kind} {amounts[batch]}{unit}"
    return f"{resource} {kind} {amounts[resource]}" if resource in amounts else "nothing"


def observed(bed: Containerd, pod: RunningPod, shown: Shown) -> str:
    """Return the value as the kernel or the container has it now."""
    if shown.resource == "env":
        environment = bed.cri.execute(pod.containers["main"], ["env"]).stdout.splitlines()
        values = dict(line.partition("=")[::2] for line in environment)
        return values.get(shown.key, "(unset)")
    group = pod.cgroup if shown.level == "pod" else pod.container_cgroup("main")
    return bed.groups.read(group, shown.resource)


def label(bed: Containerd, shown: Shown) -> str:
    return shown.key or bed.groups.name(shown.resource)


def original(bed: Containerd, shown: Shown) -> str:
    """Return the value without Koordinator, as `observed` reads it."""
    if shown.resource == "cpu.shares":
        return str(bed.groups.weight(int(shown.original)))
    return shown.original


def switched_off(objects: list[Manifest]) -> list[Manifest]:
    """Return the Node without its ratio, and the NodeSLO with class BE's identity disabled."""
    changed = copy.deepcopy(objects)
    by_kind = {manifest["kind"]: manifest for manifest in changed}
    del by_kind["Node"]["metadata"]["annotations"][NORMALIZATION]
    classes = by_kind["NodeSLO"]["spec"]["resourceQOSStrategy"]
    classes["beClass"]["cpuQOS"]["enable"] = False
    return [by_kind["Node"], by_kind["NodeSLO"]]
