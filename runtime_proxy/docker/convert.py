"""Converts Docker's names, labels, resources and cgroup parents to a hook's, and back.

The conventions are in docs/facts/runtime-proxy.md, "Docker". Decoded JSON objects are changed in
place, so unknown members stay as they are.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime_proxy.model import Container, Pod, PodMeta, Resources, changed_entries, read_envs

_TYPE_LABEL = "io.kubernetes.docker.type"
_SANDBOX_TYPE = "podsandbox"
_SANDBOX_ID_LABEL = "io.kubernetes.sandbox.id"
_ANNOTATION_PREFIX = "annotation."

# Docker's member -> ours. OomScoreAdj exists at creation only.
_SCALARS = {
    "CpuPeriod": "cpu_period",
    "CpuQuota": "cpu_quota",
    "CpuShares": "cpu_shares",
    "Memory": "memory_limit_in_bytes",
    "MemorySwap": "memory_swap_limit_in_bytes",
    "OomScoreAdj": "oom_score_adj",
    "CpusetCpus": "cpuset_cpus",
    "CpusetMems": "cpuset_mems",
}
UPDATABLE = frozenset(_SCALARS) - {"OomScoreAdj"}


@dataclass(frozen=True, slots=True)
class KubernetesName:
    """A container's name as dockershim gives it: k8s_container_pod_namespace_uid_attempt."""

    container: str
    pod: str
    namespace: str
    uid: str
    attempt: int


def parse_name(name: str) -> KubernetesName | None:
    """None for what is not Kubernetes': six parts, or seven after a retry on a name conflict."""
    parts = name.removeprefix("/").split("_")
    if len(parts) not in (6, 7) or parts[0] != "k8s":
        return None
    attempt = int(parts[5]) if re.fullmatch(r"[0-9]{1,9}", parts[5]) else 0
    return KubernetesName(parts[1], parts[2], parts[3], parts[4], attempt)


def table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def text(value: object) -> str:
    return value if isinstance(value, str) else ""


def is_sandbox(config: Mapping[str, Any]) -> bool:
    return table(config.get("Labels")).get(_TYPE_LABEL) == _SANDBOX_TYPE


def sandbox_id(config: Mapping[str, Any]) -> str:
    return text(table(config.get("Labels")).get(_SANDBOX_ID_LABEL))


def labels_and_annotations(config: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    for key, value in table(config.get("Labels")).items():
        if key.startswith(_ANNOTATION_PREFIX):
            annotations[key.removeprefix(_ANNOTATION_PREFIX)] = text(value)
        else:
            labels[key] = text(value)
    return labels, annotations


def read_resources(host: Mapping[str, Any]) -> Resources:
    fields: dict[str, Any] = {}
    for member, name in _SCALARS.items():
        value = host.get(member)
        if isinstance(value, str if member.startswith("Cpuset") else int):
            fields[name] = value
    return Resources(**fields)


def patch_resources(
    host: dict[str, Any], before: Resources, after: Resources, members: frozenset[str]
) -> bool:
    """Carry what changed between `before` and `after` into `host`; whether anything did."""
    changed = False
    for member, name in _SCALARS.items():
        value = getattr(after, name)
        if member in members and value != getattr(before, name):
            host[member] = value
            changed = True
    return changed


CREATABLE = frozenset(_SCALARS)


def parse_env(values: object) -> list[tuple[str, bytes]]:
    """Docker's list of KEY=VALUE; an entry without "=" takes the value from elsewhere: not ours."""
    entries = [text(value) for value in values] if isinstance(values, list) else []
    return [
        (key, value.encode("utf-8", "surrogatepass"))
        for key, equals, value in (entry.partition("=") for entry in entries)
        if equals
    ]


def merge_env(values: object, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The list with what hooks changed, order kept; entries without "=" stay."""
    entries = [text(value) for value in values] if isinstance(values, list) else []
    changed = changed_entries(before, after)
    last = {entry.partition("=")[0]: at for at, entry in enumerate(entries)}
    merged = []
    for at, entry in enumerate(entries):
        key, equals, _ = entry.partition("=")
        if equals and key in before and key not in after:
            continue
        merged.append(f"{key}={changed[key]}" if key in changed and at == last[key] else entry)
    return merged + [f"{key}={after[key]}" for key in sorted(changed.keys() - last.keys())]


def slice_to_path(parent: str) -> str:
    """systemd: the slice's name as the path of its cgroup; each "-" is a level."""
    name = parent.removesuffix(".slice")
    if not name or name == "-":
        return "/"
    parts = name.split("-")
    return "".join("/" + "-".join(parts[: depth + 1]) + ".slice" for depth in range(len(parts)))


def read_parent(host: Mapping[str, Any], driver: str) -> str:
    parent = text(host.get("CgroupParent"))
    return slice_to_path(parent) if driver == "systemd" else parent


def write_parent(parent: str, driver: str) -> str:
    return parent.rstrip("/").rpartition("/")[2] if driver == "systemd" else parent


def read_pod(
    identifier: str,
    name: KubernetesName,
    config: Mapping[str, Any],
    host: Mapping[str, Any],
    driver: str,
) -> Pod:
    labels, annotations = labels_and_annotations(config)
    return Pod(
        id=identifier,
        meta=PodMeta(name=name.pod, namespace=name.namespace, uid=name.uid, attempt=name.attempt),
        runtime_handler="docker",
        labels=labels,
        annotations=annotations,
        cgroup_parent=read_parent(host, driver),
        resources=read_resources(host),
    )


def read_container(
    identifier: str,
    name: KubernetesName,
    config: Mapping[str, Any],
    host: Mapping[str, Any],
    driver: str,
) -> Container:
    _, annotations = labels_and_annotations(config)
    return Container(
        id=identifier,
        pod_id=sandbox_id(config),
        name=name.container,
        attempt=name.attempt,
        annotations=annotations,
        resources=read_resources(host),
        cgroup_parent=read_parent(host, driver),
        envs=read_envs(parse_env(config.get("Env"))),
    )


def names(values: Sequence[object]) -> list[str]:
    return [text(value).removeprefix("/") for value in values]
