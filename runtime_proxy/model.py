"""What the proxy knows of sandboxes and containers: values, immutable, without I/O.

They hold what hooks of later stages are sent (docs/facts/runtime-proxy.md, "What a hook is sent"),
read once from the CRI request or from the runtime's status. A change is a new value. `Resources`
has the ten fields that CRI's and the hook service's LinuxContainerResources share.
"""

from collections.abc import Mapping

import msgspec

from protos.cri.v1 import api_pb2 as cri
from protos.runtimehook.v1alpha1 import api_pb2 as hook


class Resources(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """cpu_period and cpu_quota in microseconds, limits in bytes, hugepages as (size, bytes)."""

    cpu_period: int = 0
    cpu_quota: int = 0
    cpu_shares: int = 0
    memory_limit_in_bytes: int = 0
    oom_score_adj: int = 0
    cpuset_cpus: str = ""
    cpuset_mems: str = ""
    hugepage_limits: tuple[tuple[str, int], ...] = ()
    unified: dict[str, str] = {}
    memory_swap_limit_in_bytes: int = 0


SCALAR_FIELDS = (
    "cpu_period",
    "cpu_quota",
    "cpu_shares",
    "memory_limit_in_bytes",
    "oom_score_adj",
    "cpuset_cpus",
    "cpuset_mems",
    "memory_swap_limit_in_bytes",
)


class PodMeta(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    name: str = ""
    uid: str = ""
    namespace: str = ""
    attempt: int = 0


class PodChanges(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What hooks changed in a sandbox when it was made. Its containers get the same changes."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    cgroup_parent: str = ""


class Pod(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    id: str = ""
    meta: PodMeta = PodMeta()
    runtime_handler: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    cgroup_parent: str = ""
    overhead: Resources | None = None
    resources: Resources | None = None
    changes: PodChanges = PodChanges()
    stopped: bool = False


class Container(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """`envs` stays in memory: it may hold secrets and is never written or logged."""

    id: str = ""
    pod_id: str = ""
    name: str = ""
    attempt: int = 0
    annotations: dict[str, str] = {}
    resources: Resources | None = None
    cgroup_parent: str = ""
    envs: dict[str, str] = {}
    stopped: bool = False


def read_resources(
    message: cri.LinuxContainerResources | hook.LinuxContainerResources,
) -> Resources:
    return Resources(
        cpu_period=message.cpu_period,
        cpu_quota=message.cpu_quota,
        cpu_shares=message.cpu_shares,
        memory_limit_in_bytes=message.memory_limit_in_bytes,
        oom_score_adj=message.oom_score_adj,
        cpuset_cpus=message.cpuset_cpus,
        cpuset_mems=message.cpuset_mems,
        hugepage_limits=tuple((h.page_size, h.limit) for h in message.hugepage_limits),
        unified=dict(message.unified),
        memory_swap_limit_in_bytes=message.memory_swap_limit_in_bytes,
    )


def write_resources(resources: Resources) -> hook.LinuxContainerResources:
    message = hook.LinuxContainerResources(
        **{name: getattr(resources, name) for name in SCALAR_FIELDS}
    )
    message.unified.update(resources.unified)
    for page_size, limit in resources.hugepage_limits:
        message.hugepage_limits.add(page_size=page_size, limit=limit)
    return message


def read_meta(message: cri.PodSandboxMetadata) -> PodMeta:
    return PodMeta(
        name=message.name, uid=message.uid, namespace=message.namespace, attempt=message.attempt
    )


def _write_meta(meta: PodMeta) -> hook.PodSandboxMetadata:
    return hook.PodSandboxMetadata(
        name=meta.name, uid=meta.uid, namespace=meta.namespace, attempt=meta.attempt
    )


def read_pod(config: cri.PodSandboxConfig, runtime_handler: str) -> Pod:
    """Return a sandbox as its configuration describes it. The runtime names it later."""
    linux = config.linux if config.HasField("linux") else None
    has_overhead = linux is not None and linux.HasField("overhead")
    has_resources = linux is not None and linux.HasField("resources")
    return Pod(
        meta=read_meta(config.metadata),
        runtime_handler=runtime_handler,
        labels=dict(config.labels),
        annotations=dict(config.annotations),
        cgroup_parent=linux.cgroup_parent if linux is not None else "",
        overhead=read_resources(config.linux.overhead) if has_overhead else None,
        resources=read_resources(config.linux.resources) if has_resources else None,
    )


def read_envs(envs: list[tuple[str, bytes]]) -> dict[str, str]:
    """Return the variables for a hook: the last of a name counts.

    A value that is not UTF-8 cannot be sent: the hook service's map holds text.
    """
    known: dict[str, str] = {}
    for key, value in envs:
        try:
            known[key] = value.decode()
        except UnicodeDecodeError:
            known.pop(key, None)
    return known


def read_container(pod_id: str, config: cri.ContainerConfig, cgroup_parent: str) -> Container:
    """Return a container as its configuration describes it. Missing resources are all zero."""
    return Container(
        pod_id=pod_id,
        name=config.metadata.name,
        attempt=config.metadata.attempt,
        annotations=dict(config.annotations),
        resources=read_resources(config.linux.resources),
        cgroup_parent=cgroup_parent,
        envs=read_envs([(env.key, env.value) for env in config.envs]),
    )


def pod_request(pod: Pod) -> hook.PodSandboxHookRequest:
    return hook.PodSandboxHookRequest(
        pod_meta=_write_meta(pod.meta),
        runtime_handler=pod.runtime_handler,
        labels=pod.labels,
        annotations=pod.annotations,
        cgroup_parent=pod.cgroup_parent,
        overhead=write_resources(pod.overhead) if pod.overhead is not None else None,
        resources=write_resources(pod.resources) if pod.resources is not None else None,
    )


def container_request(container: Container, pod: Pod) -> hook.ContainerResourceHookRequest:
    resources = container.resources
    return hook.ContainerResourceHookRequest(
        pod_meta=_write_meta(pod.meta),
        container_meta=hook.ContainerMetadata(
            name=container.name, attempt=container.attempt, id=container.id
        ),
        container_annotations=container.annotations,
        container_resources=write_resources(resources) if resources is not None else None,
        pod_resources=write_resources(pod.resources) if pod.resources is not None else None,
        pod_annotations=pod.annotations,
        pod_labels=pod.labels,
        pod_cgroup_parent=container.cgroup_parent or pod.cgroup_parent,
        container_envs=container.envs,
    )


def changed_entries(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of `after` that are new or different."""
    return {k: v for k, v in after.items() if before.get(k) != v or k not in before}
