"""The cgroup directories of a pod and a container, from what a runtime reports.

A path that could lead out of its hierarchy becomes "", which means unknown.
"""

from __future__ import annotations

from functools import lru_cache

from apis.qos import KubeQoS
from linux import cgroup_paths
from linux.cgroup_paths import Driver, PathError, Runtime


# 4096 paths, chosen: far more than a node has pods. Measured: a full cache holds 1.8 MiB.
@lru_cache(maxsize=4096)
def place_of(cgroup_parent: str) -> tuple[str, KubeQoS]:
    """Return a pod's directory ("" if unknown) and the Kubernetes QoS class that it lies in.

    A bare slice name is expanded the way systemd nests slices.
    """
    try:
        path = cgroup_paths.check_relative(cgroup_parent)
        if path.endswith(".slice") and "/" not in path:
            path = cgroup_paths.expand_slice(path)
    except PathError:
        return "", KubeQoS.GUARANTEED
    parsed = cgroup_paths.parse(path)
    return path, KubeQoS.GUARANTEED if parsed is None else parsed.qos


def directory_of(cgroups_path: str, pod_cgroup: str, container_id: str, runtime: Runtime) -> str:
    """Return a container's directory: from its OCI cgroups path, else by the runtime's rule."""
    # The forms that containerd uses on nearly every node. Parsing the path in full costs more than
    # the rest of the message. 128 characters bound what is put into a path; an id has 64.
    if (
        pod_cgroup
        and container_id.isalnum()
        and container_id.isascii()
        and len(container_id) <= 128
    ):
        if cgroups_path == f"/{pod_cgroup}/{container_id}":
            return f"{pod_cgroup}/{container_id}"
        slice_name = pod_cgroup.rpartition("/")[2]
        if cgroups_path == f"{slice_name}:cri-containerd:{container_id}":
            return f"{pod_cgroup}/cri-containerd-{container_id}.scope"
    try:
        if cgroups_path:
            return cgroup_paths.of_runtime_path(cgroups_path)
        if pod_cgroup and container_id:
            driver = Driver.SYSTEMD if pod_cgroup.endswith(".slice") else Driver.CGROUPFS
            return cgroup_paths.container_dir(driver, runtime, pod_cgroup, container_id)
    except PathError:
        pass
    return ""
