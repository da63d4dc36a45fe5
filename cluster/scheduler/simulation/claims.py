"""Claims as the API server stores them, those that Kubernetes makes for pods (of a StatefulSet's
templates, of ephemeral volumes), and the attachments of their volumes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from apis.errors import InputError
from apis.meta import unix_seconds
from apis.storage import ANNOTATION_CLASS
from cluster.scheduler.simulation.objects import FileObject, tree_of
from kube.resources import (
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    STORAGE_CLASSES,
    VOLUME_ATTACHMENTS,
)

_IS_DEFAULT: Final = "storageclass.kubernetes.io/is-default-class"
"""Annotation of the StorageClass of claims that name none."""

_BOUND: Final = (PERSISTENT_VOLUME_CLAIMS.kind, PERSISTENT_VOLUMES.kind)
"""Kinds that are bound to one another."""

Tree = dict[str, Any]


def default_class(objects: Iterable[FileObject]) -> str:
    """Return the name of the StorageClass of claims that name none, or "".

    Of several default ones the newest, of equally old ones the first by name: Kubernetes' rule.
    """
    found: list[tuple[float, str]] = []
    for each in objects:
        if each.kind == STORAGE_CLASSES.kind:
            meta = tree_of(each)["metadata"]
            annotations, created = meta.get("annotations"), meta.get("creationTimestamp")
            if isinstance(annotations, dict) and annotations.get(_IS_DEFAULT) == "true":
                age = unix_seconds(created) if isinstance(created, str) else 0.0
                found.append((-age, each.name))
    return min(found, default=(0.0, ""))[1]


def kept_of_cluster(
    given: Iterable[FileObject], cluster: Iterable[FileObject]
) -> tuple[list[FileObject], list[FileObject]]:
    """Return the given objects apart: those to take, and claims and volumes that the cluster has.

    These stay as the cluster has them, as if the file was applied: which claim and volume are bound
    to each other stands in the objects of the cluster alone.
    """
    known = {(each.kind, each.key) for each in cluster if not each.group and each.kind in _BOUND}
    taken: list[FileObject] = []
    kept: list[FileObject] = []
    for each in given:
        is_known = not each.group and (each.kind, each.key) in known
        (kept if is_known else taken).append(each)
    return taken, kept


def with_class(claim: FileObject, storage_class: str) -> FileObject:
    """Return a claim as the API server stores it: with the default class if it names none.

    storage_class: the default one, "" if there is none.
    """
    tree = tree_of(claim)
    spec = tree.get("spec")
    # What is malformed here is named when the claim is loaded.
    if not storage_class or not isinstance(spec, dict):
        return claim
    annotations = tree["metadata"].get("annotations")
    named = annotations.get(ANNOTATION_CLASS) if isinstance(annotations, dict) else None
    if named is not None or spec.get("storageClassName") is not None:
        return claim
    spec["storageClassName"] = storage_class
    return replace(claim, raw=msgspec.json.encode(tree))


def claims_of(pod: FileObject, spec: Tree) -> set[str]:
    """Return namespace/name of the claims of a pod. spec: its spec, which can be read."""
    result = set()
    for volume in spec.get("volumes") or ():
        if source := volume.get("persistentVolumeClaim"):
            result.add(f"{pod.namespace}/{source.get('claimName')}")
        elif volume.get("ephemeral"):
            result.add(f"{pod.namespace}/{pod.name}-{volume.get('name')}")
    return result


def without_attachments(
    objects: Iterable[FileObject], claims: Container[str]
) -> tuple[FileObject, ...]:
    """Return the objects without the VolumeAttachments of the volumes that these claims have.

    Volumes that pods which stay use too count on their nodes by those pods.
    """
    given = tuple(objects)
    volumes = {
        _text(tree_of(each), "spec", "volumeName")
        for each in given
        if each.kind == PERSISTENT_VOLUME_CLAIMS.kind and each.key in claims
    } - {""}
    return tuple(
        each
        for each in given
        if each.kind != VOLUME_ATTACHMENTS.kind
        or _text(tree_of(each), "spec", "source", "persistentVolumeName") not in volumes
    )


def _text(tree: object, *members: str) -> str:
    """Return the text at a path, "" if there is none."""
    for member in members:
        tree = tree.get(member) if isinstance(tree, dict) else None
    return tree if isinstance(tree, str) else ""


def replica_volumes(
    workload: FileObject, templates: object, name: str, storage_class: str
) -> tuple[list[Tree], list[FileObject]]:
    """Return the volumes of one replica of a StatefulSet, and the claims that are made for it.

    Raises InputError.
    """
    volumes: list[Tree] = []
    claims: list[FileObject] = []
    for number, template in enumerate(templates if isinstance(templates, list) else ()):
        meta = template.get("metadata") if isinstance(template, dict) else None
        volume = meta.get("name") if isinstance(meta, dict) else None
        if not isinstance(volume, str) or not volume:
            raise InputError(
                obj=workload.ref,
                field=f"spec.volumeClaimTemplates[{number}].metadata.name",
                value=volume,
                problem="is missing",
            )
        claim = f"{volume}-{name}"
        volumes.append({"name": volume, "persistentVolumeClaim": {"claimName": claim}})
        namespace = workload.namespace or "default"
        claims.append(_claim(template, namespace, claim, storage_class, workload.where))
    return volumes, claims


def ephemeral_claims(pod: FileObject, storage_class: str) -> list[FileObject]:
    """Return the claims that are made for the generic ephemeral volumes of a pod."""
    tree = tree_of(pod)
    owner = {"kind": "Pod", "name": pod.name, "uid": tree["metadata"]["uid"], "controller": True}
    claims = []
    for volume in tree["spec"].get("volumes") or ():
        # What is malformed here is named when the pod is read.
        source = volume.get("ephemeral") if isinstance(volume, dict) else None
        template = source.get("volumeClaimTemplate") if isinstance(source, dict) else None
        if isinstance(template, dict):
            name = f"{pod.name}-{volume.get('name')}"
            owned: Tree = {"metadata": {"ownerReferences": [owner]}, "spec": template.get("spec")}
            claims.append(_claim(owned, pod.namespace, name, storage_class, pod.where))
    return claims


def _claim(
    template: Mapping[str, Any], namespace: str, name: str, storage_class: str, where: str
) -> FileObject:
    given = template.get("spec") or {}
    if not isinstance(given, dict):
        raise InputError(
            obj=f"{where}: the claim {namespace}/{name} of a template",
            field="spec",
            value=given,
            problem="expected an object",
        )
    metadata = {**template["metadata"], "name": name, "namespace": namespace}
    body = {"metadata": metadata | {"uid": f"simulated-{namespace}-{name}"}, "spec": given}
    raw = msgspec.json.encode(body)
    made = FileObject("", "PersistentVolumeClaim", namespace, name, raw, where)
    return with_class(made, storage_class)
