"""Pods of a file as the API server would store them: with defaults, from workloads too.

The API server fills fields in when a pod is created (requests from limits, the priority of its
class, selectors with `matchLabelKeys`) and controllers make pods from templates. Both are done here
as far as scheduling reads the result. What admission webhooks would change, such as a
ClusterColocationProfile, is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from apis.decode import to_plain
from apis.errors import InputError
from apis.scheduling_pod import decode_scheduling_pod
from cluster.scheduler.simulation.claims import ephemeral_claims, replica_volumes, with_class
from cluster.scheduler.simulation.objects import FileObject, tree_of
from cluster.scheduler.sources.label_keys import with_label_keys
from kube.resources import PERSISTENT_VOLUME_CLAIMS


@dataclass(frozen=True, slots=True)
class Priority:
    """What a PriorityClass gives its pods. policy: their preemptionPolicy."""

    value: int
    policy: str = "PreemptLowerPriority"


_POLICIES: Final = ("PreemptLowerPriority", "Never")
_BUILT_IN: Final = {
    "system-node-critical": Priority(2_000_001_000),
    "system-cluster-critical": Priority(2_000_000_000),
}
"""PriorityClasses that every cluster has, with Kubernetes' values."""
_REPLICAS_FIELD: Final = {
    "Deployment": "replicas",
    "ReplicaSet": "replicas",
    "StatefulSet": "replicas",
    "ReplicationController": "replicas",
    "Job": "parallelism",
}
"""Kinds with a pod template -> the field of the spec that says how many pods it makes."""
_MOST_PODS: Final = 200_000
"""Of one simulation. Chosen: more than Kubernetes supports in a cluster (150,000)."""


@dataclass(frozen=True, slots=True)
class PodFile:
    """What a file of pods asks for. pods: JSON as the API server would store them. others: objects
    that belong to them, such as PodGroups. notes: what was assumed.

    from_templates: pod -> the claims of its StatefulSet's templates, which are made where none of
    that name exists. ephemeral: pod -> the claims that are made along with it.
    """

    pods: tuple[FileObject, ...]
    others: tuple[FileObject, ...]
    notes: tuple[str, ...]
    from_templates: Mapping[str, tuple[FileObject, ...]]
    ephemeral: Mapping[str, tuple[FileObject, ...]]


@dataclass(frozen=True, slots=True)
class Defaults:
    """What pods get where their manifest is silent.

    scheduler_names: of the profiles, the first one is used where a pod names none. priorities: by
    the name of the PriorityClass; `""` is the default of the cluster. created: RFC 3339.
    """

    scheduler_names: tuple[str, ...]
    priorities: Mapping[str, Priority]
    created: str
    scheduler_name: str = ""
    """Replaces what the pods name."""
    storage_class: str = ""
    """Of claims that name none."""


def priorities_of(classes: Iterable[FileObject]) -> dict[str, Priority]:
    """Return what PriorityClasses give, by name, the default one also under "".

    Raises InputError."""
    result = dict(_BUILT_IN)
    for each in classes:
        tree = tree_of(each)
        value = tree.get("value", 0)
        if not isinstance(value, int):
            raise InputError(obj=each.ref, field="value", value=value, problem="is not a number")
        policy = tree.get("preemptionPolicy") or _POLICIES[0]
        if policy not in _POLICIES:
            raise InputError(
                obj=each.ref,
                field="preemptionPolicy",
                value=policy,
                problem=f"expected {' or '.join(_POLICIES)}",
            )
        result[each.name] = Priority(value, policy)
        if tree.get("globalDefault") is True:
            result[""] = result[each.name]
    return result


def pods_of(objects: Iterable[FileObject], defaults: Defaults) -> PodFile:
    """Return the pods to schedule. Raises InputError."""
    pods: list[FileObject] = []
    others: list[FileObject] = []
    from_templates: dict[str, tuple[FileObject, ...]] = {}
    ephemeral: dict[str, tuple[FileObject, ...]] = {}
    unnamed = 0
    numbers = itertools.count(1)
    for each in objects:
        if each.kind == "Pod" and each.group == "":
            found: Iterable[tuple[str, dict[str, Any]]] = ((each.name, tree_of(each)),)
        elif each.kind in _REPLICAS_FIELD:
            found, owner, claims = _from_template(each, defaults.storage_class)
            others += owner
            from_templates |= claims
        else:
            is_claim = each.kind == PERSISTENT_VOLUME_CLAIMS.kind and each.group == ""
            others.append(with_class(each, defaults.storage_class) if is_claim else each)
            continue
        for name, tree in found:
            spec = _checked(tree, each)
            unnamed += not spec.get("schedulerName")
            pods.append(_complete(each, name, tree, spec, defaults, f"simulated-{next(numbers)}"))
            if made := ephemeral_claims(pods[-1], defaults.storage_class):
                ephemeral[pods[-1].key] = tuple(made)
            if len(pods) > _MOST_PODS:
                raise InputError(
                    obj=each.ref, field="", value="", problem=f"more than {_MOST_PODS} pods"
                )
    notes = []
    if (
        unnamed
        and not defaults.scheduler_name
        and "default-scheduler" not in (defaults.scheduler_names)
    ):
        notes.append(f"{unnamed} pods name no scheduler; taken as {defaults.scheduler_names[0]}'s")
    return PodFile(tuple(pods), tuple(others), tuple(notes), from_templates, ephemeral)


def _from_template(
    each: FileObject, storage_class: str
) -> tuple[
    Iterator[tuple[str, dict[str, Any]]], list[FileObject], dict[str, tuple[FileObject, ...]]
]:
    """Return the pods of a workload, what selects them for the default spread, and their claims
    by pod."""
    tree = tree_of(each)
    spec = _mapping(tree, "spec", each)
    template = _mapping(spec, "template", each, "spec.template")
    member = _REPLICAS_FIELD[each.kind]
    replicas = spec.get(member, 1)
    if not isinstance(replicas, int) or not 0 <= replicas <= _MOST_PODS:
        raise InputError(
            obj=each.ref,
            field=f"spec.{member}",
            value=replicas,
            problem=f"expected a number, 0 to {_MOST_PODS}",
        )
    namespace = each.namespace or "default"
    kind = "ReplicaSet" if each.kind == "Deployment" else each.kind
    owner = {"kind": kind, "name": each.name, "uid": f"simulated-{each.name}", "controller": True}
    owners: list[FileObject] = []
    if kind in ("ReplicaSet", "StatefulSet", "ReplicationController"):
        body = {
            "metadata": {"name": each.name, "namespace": namespace},
            "spec": {"selector": spec.get("selector")},
        }
        owners = [
            FileObject(
                "" if kind == "ReplicationController" else "apps",
                kind,
                namespace,
                each.name,
                msgspec.json.encode(body),
                each.where,
            )
        ]

    templates = spec.get("volumeClaimTemplates") if kind == "StatefulSet" else None
    volumes: list[list[dict[str, Any]]] = []
    claims: dict[str, tuple[FileObject, ...]] = {}
    for number in range(replicas) if templates else ():
        name = f"{each.name}-{number}"
        of_replica, made = replica_volumes(each, templates, name, storage_class)
        volumes.append(of_replica)
        claims[f"{namespace}/{name}"] = tuple(made)

    def pods() -> Iterator[tuple[str, dict[str, Any]]]:
        for number in range(replicas):
            pod = msgspec.json.decode(msgspec.json.encode(template))
            pod.setdefault("metadata", {})
            meta = _mapping(pod, "metadata", each, "spec.template.metadata")
            meta["namespace"] = namespace
            meta["ownerReferences"] = [owner]
            if volumes:
                spec = _checked(pod, each)
                spec["volumes"] = [*(spec.get("volumes") or ()), *volumes[number]]
            yield f"{each.name}-{number}", pod

    return pods(), owners, claims


def _complete(
    each: FileObject,
    name: str,
    tree: dict[str, Any],
    spec: dict[str, Any],
    defaults: Defaults,
    uid: str,
) -> FileObject:
    meta = tree.setdefault("metadata", {})
    namespace = meta.get("namespace") or "default"
    meta.update(
        name=name, namespace=namespace, uid=uid, creationTimestamp=defaults.created,
        deletionTimestamp=None,
    )  # fmt: skip
    ref = f"{each.where}: Pod {namespace}/{name}"
    spec["schedulerName"] = _scheduler_of(spec, ref, defaults)
    spec.pop("nodeName", None)
    tree["status"] = {}
    if spec.get("priority") is None:
        given = _priority_of(spec, ref, defaults.priorities)
        spec["priority"] = given.value
        if spec.get("preemptionPolicy") is None:
            spec["preemptionPolicy"] = given.policy
    pod = decode_scheduling_pod(msgspec.json.encode(tree)) if spec.get("affinity") else None
    if pod is not None and pod.spec.affinity is not None:
        spec["affinity"] = to_plain(with_label_keys(pod.spec.affinity, pod.metadata.labels))
    for member in ("containers", "initContainers"):
        for container in spec.get(member) or ():
            resources = container.get("resources") or {}
            if limits := resources.get("limits"):
                resources["requests"] = limits | (resources.get("requests") or {})
    return FileObject("", "Pod", namespace, name, msgspec.json.encode(tree), each.where)


def _scheduler_of(spec: dict[str, Any], ref: str, defaults: Defaults) -> str:
    if defaults.scheduler_name:
        return defaults.scheduler_name
    names: Container[str] = defaults.scheduler_names
    named = spec.get("schedulerName")
    if not named:
        return "default-scheduler" if "default-scheduler" in names else defaults.scheduler_names[0]
    if named not in names:
        raise InputError(
            obj=ref,
            field="spec.schedulerName",
            value=named,
            problem="the configuration has no profile of this name",
            hint=f"its profiles: {' '.join(defaults.scheduler_names)}; --as replaces the name",
        )
    return str(named)


def _priority_of(spec: dict[str, Any], ref: str, priorities: Mapping[str, Priority]) -> Priority:
    name = spec.get("priorityClassName") or ""
    if name in priorities or not name:
        return priorities.get(name, Priority(0))
    raise InputError(
        obj=ref,
        field="spec.priorityClassName",
        value=name,
        problem="the cluster has no PriorityClass of this name",
        hint="add `kubectl get priorityclasses -o json` to the dump, or set spec.priority",
    )


def _checked(tree: dict[str, Any], each: FileObject) -> dict[str, Any]:
    """Return the spec of a pod after all of it was read once. Raises InputError."""
    spec = _mapping(tree, "spec", each)
    try:
        decode_scheduling_pod(msgspec.json.encode(tree))
    except (msgspec.ValidationError, RecursionError) as error:
        raise InputError(obj=each.ref, field="", value="", problem=str(error)) from None
    return spec


def _mapping(
    tree: dict[str, Any], member: str, each: FileObject, field: str = ""
) -> dict[str, Any]:
    found = tree.get(member)
    if not isinstance(found, dict):
        raise InputError(
            obj=each.ref, field=field or member, value=found, problem="expected an object"
        )
    return found
