"""The pods and containers of the NRI benchmarks, as containerd describes them.

A pod has three labels and a batch annotation, a container 30 environment variables. Each number
gives another pod, so no cache of whole objects helps.
"""

from __future__ import annotations

from protos.nri.v1alpha1 import nri_pb2 as nri

VARIANTS = 100
"""Annotations that differ: replicas of 100 deployments."""

_BATCH = (
    '{"containers":{"main":{"requests":{"kubernetes.io/batch-cpu":"500",'
    '"kubernetes.io/batch-memory":"128Mi"},"limits":{"kubernetes.io/batch-cpu":"%d",'
    '"kubernetes.io/batch-memory":"128Mi"}}}}'
)


PARENT = "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{uid}.slice"


def pod(number: int, parent: str = PARENT) -> nri.PodSandbox:
    """A best-effort pod with batch resources. `parent` is its cgroup, with a place for the UID."""
    uid = f"7712555c-ce62-454a-9e18-{number:012d}"
    in_path = uid.replace("-", "_") if parent.endswith(".slice") else uid
    return nri.PodSandbox(
        id=f"{number:064x}",
        name=f"batch-{number}",
        uid=uid,
        namespace="default",
        labels={
            "koordinator.sh/qosClass": "BE",
            "koordinator.sh/priority-class": "koord-batch",
            "app": f"batch-{number % 50}",
        },
        annotations={
            "node.koordinator.sh/extended-resource-spec": _BATCH % (1000 + number % VARIANTS),
        },
        linux=nri.LinuxPodSandbox(cgroup_parent=parent.format(uid=in_path)),
    )


def container(number: int, of: nri.PodSandbox) -> nri.Container:
    """A container of a pod, as kubelet asks for one that has no CPU or memory resources."""
    message = nri.Container(
        id=f"c{number:063x}",  # a runtime draws ids of both kinds from one space
        pod_sandbox_id=of.id,
        name="main",
        env=[f"VARIABLE_{n}=a value of usual length, number {n}" for n in range(30)],
        args=["/bin/app", "--flag"],
    )
    parent = of.linux.cgroup_parent
    if parent.endswith(".slice"):
        slice_name = parent.rpartition("/")[2]
        message.linux.cgroups_path = f"{slice_name}:cri-containerd:{message.id}"
    else:
        message.linux.cgroups_path = f"{parent}/{message.id}"
    message.linux.resources.cpu.shares.value = 2
    message.linux.resources.cpu.period.value = 100000
    message.linux.resources.memory.limit.SetInParent()
    return message
