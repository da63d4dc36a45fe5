"""Merges hooks' answers and kubelet's updates into what is held, and patches CRI messages.

There are two rules for resources (docs/facts/runtime-proxy.md, "How answers and updates are
merged"): R takes a hook's answer into the held value, U takes kubelet's UpdateContainerResources
into it. Hooks written for upstream's proxy echo what they do not change, so under R an empty cpuset
in an answer means "do not pin" and an unset oom_score_adj means 0. The patches carry only what
differs into the CRI message, field by field, so that all other fields, known or not, reach the
runtime as kubelet sent them.
"""

import logging
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TypeVar

import msgspec

from protos.cri.v1 import api_pb2 as cri
from protos.runtimehook.v1alpha1 import api_pb2 as hook
from runtime_proxy.model import (
    SCALAR_FIELDS,
    Container,
    Pod,
    PodChanges,
    Resources,
    changed_entries,
    read_resources,
)

log = logging.getLogger(__name__)

# Labels by which kubelet finds its own pods and containers again; a hook that changed one would
# make kubelet lose or kill the pod.
_KUBELET_LABEL_PREFIX = "io.kubernetes."
_MAX_CGROUP_PARENT = 4096  # PATH_MAX of Linux
_MAX_TEXT = 256 * 1024
"""Kubernetes' own limit for all annotations of an object. With 400 containers of this size the
proxy has 100 MiB more than with small ones, and stays below its unit's MemoryMax of 384 MiB."""

_Value = TypeVar("_Value", bound=msgspec.Struct)


def rule_r(held: Resources | None, answer: Resources | None) -> Resources | None:
    """Return the held resources with a hook's answer in them. Absent ones stay absent."""
    if held is None or answer is None:
        return held
    return msgspec.structs.replace(
        _with_limits(held, answer),
        oom_score_adj=answer.oom_score_adj
        if -1000 <= answer.oom_score_adj <= 1000
        else held.oom_score_adj,
        cpuset_cpus=answer.cpuset_cpus,
        cpuset_mems=answer.cpuset_mems,
    )


def rule_u(held: Resources | None, request: Resources | None) -> Resources | None:
    """Return the held resources with an UpdateContainerResources request in them."""
    if held is None or request is None:
        return held
    return msgspec.structs.replace(
        _with_limits(held, request),
        cpuset_cpus=request.cpuset_cpus or held.cpuset_cpus,
        cpuset_mems=request.cpuset_mems or held.cpuset_mems,
    )


_ABOVE_0 = ("cpu_period", "cpu_shares", "memory_limit_in_bytes", "memory_swap_limit_in_bytes")


def _with_limits(held: Resources, new: Resources) -> Resources:
    """Merge what both rules treat alike: limits above 0, a quota other than 0, `unified`."""
    limits = {name: value for name in _ABOVE_0 if (value := getattr(new, name)) > 0}
    return msgspec.structs.replace(
        held,
        **limits,
        cpu_quota=new.cpu_quota or held.cpu_quota,
        unified={**held.unified, **new.unified},
    )


def answered_pod(pod: Pod, answer: hook.PodSandboxHookResponse) -> Pod:
    """PreRunPodSandbox: labels, annotations and the cgroup parent; `resources` is not for here."""
    labels = {
        **pod.labels,
        **{
            key: value
            for key, value in answer.labels.items()
            if not key.startswith(_KUBELET_LABEL_PREFIX)
        },
    }
    return msgspec.structs.replace(
        pod,
        labels=labels,
        annotations={**pod.annotations, **answer.annotations},
        cgroup_parent=_cgroup_parent(pod.cgroup_parent, answer.cgroup_parent),
    )


def answered_pod_resources(pod: Pod, answer: hook.PodSandboxHookResponse) -> Pod:
    """PreUpdatePodSandboxResources: the resources, by rule R."""
    if not answer.HasField("resources"):
        return pod
    return msgspec.structs.replace(
        pod, resources=rule_r(pod.resources, read_resources(answer.resources))
    )


def answered_docker_pod(pod: Pod, answer: hook.PodSandboxHookResponse) -> Pod:
    """A sandbox that dockerd creates: resources and cgroup parent. Its labels cannot change."""
    resized = answered_pod_resources(pod, answer)
    return msgspec.structs.replace(
        resized, cgroup_parent=_cgroup_parent(pod.cgroup_parent, answer.cgroup_parent)
    )


def answered_container(
    container: Container, answer: hook.ContainerResourceHookResponse
) -> Container:
    """Any container stage: annotations, resources by rule R, cgroup parent, environment."""
    resources = container.resources
    if answer.HasField("container_resources"):
        resources = rule_r(resources, read_resources(answer.container_resources))
    return msgspec.structs.replace(
        container,
        annotations={**container.annotations, **answer.container_annotations},
        resources=resources,
        cgroup_parent=_cgroup_parent(container.cgroup_parent, answer.pod_cgroup_parent),
        # A map that is present replaces the environment; on the wire empty is absent.
        envs=dict(answer.container_envs) or container.envs,
    )


class TooLarge(Exception):
    """A hook's answer adds too much text; the text of the exception completes "the answer is"."""


def check_size(before: Pod | Container, after: Pod | Container) -> None:
    """Raise TooLarge if a hook has made an object larger, and too large to be kept in memory.

    What kubelet itself sends is never too large.
    """
    size = _text_size(after)
    if size > _MAX_TEXT and size > _text_size(before):
        raise TooLarge(
            f"too large: names and values would have {size} characters, more than {_MAX_TEXT}"
        )


def _text_size(value: Pod | Container) -> int:
    """Characters in names and values of maps, which are what hooks can make large."""
    maps = [value.annotations, value.envs if isinstance(value, Container) else value.labels]
    if value.resources is not None:
        maps.append(value.resources.unified)
    return sum(len(key) + len(text) for entries in maps for key, text in entries.items())


def _cgroup_parent(held: str, answer: str) -> str:
    if not answer:
        return held
    if len(answer) > _MAX_CGROUP_PARENT or "\0" in answer or ".." in answer.split("/"):
        log.warning("a hook's cgroup parent is not applied: not a path below the root")
        return held
    return answer


def pod_changes(before: Pod, after: Pod) -> PodChanges:
    return PodChanges(
        labels=changed_entries(before.labels, after.labels),
        annotations=changed_entries(before.annotations, after.annotations),
        cgroup_parent=after.cgroup_parent if after.cgroup_parent != before.cgroup_parent else "",
    )


def carry_over(current: _Value, before: _Value, after: _Value) -> _Value:
    """Return `current` with what changed between `before` and `after`.

    Calls may overtake each other: `current` may be newer than `before`.
    """
    fields = {}
    for name in current.__struct_fields__:
        old, new, now = (getattr(value, name) for value in (before, after, current))
        if old == new:
            continue
        if all(isinstance(value, Resources) for value in (old, new, now)):
            new = carry_over(now, old, new)
        fields[name] = new
    return msgspec.structs.replace(current, **fields)


# -- patches: from values back into the CRI message ---------------------------------------------


def patch_sandbox_config(config: cri.PodSandboxConfig, changes: PodChanges) -> bool:
    """Put a pod's changes into its configuration, and return whether it changed."""
    changed = patch_map(config.labels, changes.labels)
    changed = patch_map(config.annotations, changes.annotations) or changed
    if changes.cgroup_parent and config.linux.cgroup_parent != changes.cgroup_parent:
        config.linux.cgroup_parent = changes.cgroup_parent
        changed = True
    return changed


def patch_map(target: MutableMapping[str, str], entries: Mapping[str, str]) -> bool:
    changed = changed_entries(target, entries)
    for key, value in changed.items():
        target[key] = value
    return bool(changed)


def differs(before: Resources | None, after: Resources | None) -> bool:
    """Return whether `patch_resources` would carry anything."""
    return before is not None and after is not None and before != after


def patch_resources(
    message: cri.LinuxContainerResources, before: Resources, after: Resources
) -> None:
    """Carry what hooks changed between `before` and `after` into the message, and nothing else.

    Hugepage limits are never carried: the runtime appends each one it is sent to the container's
    spec, so a repeated list would grow without bound.
    """
    for name in SCALAR_FIELDS:
        value = getattr(after, name)
        if value != getattr(before, name):
            setattr(message, name, value)
    patch_map(message.unified, changed_entries(before.unified, after.unified))


def merge_envs(
    envs: Sequence[tuple[str, bytes]], before: Mapping[str, str], after: Mapping[str, str]
) -> list[tuple[str, bytes]]:
    """Return the environment with what hooks changed between `before` and `after`, order kept.

    A changed variable changes at its last place, which is the one that counts. A variable that is
    missing in `after` is removed with all its duplicates. New ones follow in the order of names.
    Variables that no hook was sent (values that are not UTF-8) stay.
    """
    last = {key: at for at, (key, _) in enumerate(envs)}
    merged: list[tuple[str, bytes]] = []
    for at, (key, value) in enumerate(envs):
        if key in before and key not in after:
            continue
        if at == last[key] and key in after and after[key] != before.get(key):
            merged.append((key, after[key].encode()))
        else:
            merged.append((key, value))
    merged += [(key, after[key].encode()) for key in sorted(after.keys() - last.keys())]
    return merged
