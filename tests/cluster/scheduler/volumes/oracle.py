"""What the plugins about volumes decide, node by node, as slow plain code over JSON.

Written from docs/facts/scheduler.md, "Volumes", not from the tables. Sizes are in GiB or MiB.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Tree = dict[str, Any]

SELECTED = "volume.kubernetes.io/selected-node"
_UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}
_ZONE_LABELS = ("topology.kubernetes.io/zone", "topology.kubernetes.io/region")


def size(text: str) -> int:
    return int(text[:-2]) * _UNITS[text[-2:]]


@dataclass
class Storage:
    """Everything about volumes, by name. running: (node, pod)."""

    classes: dict[str, Tree]
    claims: dict[str, Tree]
    volumes: dict[str, Tree]
    csi_nodes: dict[str, Tree]
    drivers: dict[str, Tree]
    capacities: list[Tree]
    running: list[tuple[str, Tree]] = field(default_factory=list)


def claims_of(pod: Tree) -> list[str]:
    return [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    ]


def refusal(pod: Tree, storage: Storage) -> str:
    """Return why no node at all can take a pod, or ""."""
    names = claims_of(pod)
    for name in names:
        if name not in storage.claims:
            return f'persistentvolumeclaim "{name}" not found'
    for name in names:
        meta = storage.claims[name]["metadata"]
        if "deletionTimestamp" in meta:
            return f'persistentvolumeclaim "{name}" is being deleted'
    for name in names:
        claim = storage.claims[name]
        if not _is_bound(claim) and not _waits(claim, storage):
            return "pod has unbound immediate PersistentVolumeClaims"
    for name in names:
        volume = storage.claims[name]["spec"].get("volumeName")
        if volume and volume not in storage.volumes:
            return f'persistentvolume "{volume}" not found'
    return ""


def reasons(pod: Tree, node: Tree, storage: Storage) -> list[str]:
    """Return the reasons of the first plugin that holds a node back."""
    for plugin in (_restrictions, _limits, _binding, _zones):
        found = plugin(pod, node, storage)
        if found:
            return found
    return []


def _is_bound(claim: Tree) -> bool:
    annotations = claim["metadata"]["annotations"]
    return bool(claim["spec"].get("volumeName")) and (
        "pv.kubernetes.io/bind-completed" in annotations
    )


def _waits(claim: Tree, storage: Storage) -> bool:
    found = storage.classes.get(claim["spec"].get("storageClassName", ""))
    return found is not None and found["volumeBindingMode"] == "WaitForFirstConsumer"


def _restrictions(pod: Tree, node: Tree, storage: Storage) -> list[str]:
    for at, other in storage.running:
        if at != node["metadata"]["name"]:
            continue
        for mine in pod["spec"]["volumes"]:
            for theirs in other["spec"]["volumes"]:
                if _conflict(mine, theirs):
                    return ["node(s) had no available disk"]
    used = {name for _, other in storage.running for name in claims_of(other)}
    for name in claims_of(pod):
        if "ReadWriteOncePod" in storage.claims[name]["spec"]["accessModes"] and name in used:
            return [
                "node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access "
                "mode already in-use by another pod"
            ]
    return []


def _conflict(mine: Tree, theirs: Tree) -> bool:
    for kind, name in (
        ("gcePersistentDisk", "pdName"),
        ("awsElasticBlockStore", "volumeID"),
        ("iscsi", "iqn"),
        ("rbd", "image"),
    ):
        if kind in mine and kind in theirs and mine[kind][name] == theirs[kind][name]:
            if kind == "awsElasticBlockStore":
                return True
            if kind == "rbd" and not set(mine[kind]["monitors"]) & set(theirs[kind]["monitors"]):
                return False
            return not (mine[kind].get("readOnly") and theirs[kind].get("readOnly"))
    return False


def _attached(names: Iterable[str], storage: Storage) -> set[tuple[str, str]]:
    found = set()
    for name in names:
        claim = storage.claims.get(name)
        if claim is None:
            continue
        volume = storage.volumes.get(claim["spec"].get("volumeName", ""))
        if volume is not None:
            csi = volume["spec"].get("csi")
            if csi is not None:
                found.add((csi["driver"], csi["volumeHandle"]))
            continue
        made_by = storage.classes.get(claim["spec"].get("storageClassName", ""), {})
        if made_by.get("provisioner", "kubernetes.io/no-provisioner").startswith("csi."):
            found.add((made_by["provisioner"], f"new {name}"))
    return found


def _limits(pod: Tree, node: Tree, storage: Storage) -> list[str]:
    name = node["metadata"]["name"]
    csi_node = storage.csi_nodes.get(name)
    if csi_node is None:
        return []
    there = _attached(
        (claim for at, other in storage.running if at == name for claim in claims_of(other)),
        storage,
    )
    new = _attached(claims_of(pod), storage) - there
    for driver in csi_node["spec"]["drivers"]:
        more = sum(1 for each in new if each[0] == driver["name"])
        taken = sum(1 for each in there if each[0] == driver["name"])
        if more and taken + more > driver["allocatable"]["count"]:
            return ["node(s) exceed max volume count"]
    return []


def _requirement(requirement: Tree, labels: dict[str, str]) -> bool:
    value = labels.get(requirement["key"])
    match requirement["operator"]:
        case "In":
            return value in requirement["values"]
        case "NotIn":
            return value not in requirement["values"]
        case "Gt":
            return value is not None and int(value) > int(requirement["values"][0])
    raise AssertionError(requirement)


def _reaches(volume: Tree, node: Tree) -> bool:
    affinity = volume["spec"].get("nodeAffinity")
    if affinity is None:
        return True
    labels = node["metadata"]["labels"]
    return any(
        all(_requirement(each, labels) for each in term["matchExpressions"])
        for term in affinity["required"]["nodeSelectorTerms"]
    )


def _binding(pod: Tree, node: Tree, storage: Storage) -> list[str]:
    found = []
    names = dict.fromkeys(claims_of(pod))
    for name in names:
        claim = storage.claims[name]
        if _is_bound(claim) and not _reaches(storage.volumes[claim["spec"]["volumeName"]], node):
            found.append("node(s) didn't match PersistentVolume's node affinity")
            break
    waiting = [storage.claims[name] for name in names if not _is_bound(storage.claims[name])]
    selected = [claim for claim in waiting if SELECTED in claim["metadata"]["annotations"]]
    here = node["metadata"]["name"]
    if any(claim["metadata"]["annotations"][SELECTED] != here for claim in selected):
        return [*found, "node(s) didn't find available persistent volumes to bind"]
    taken: set[str] = set()
    to_make = list(selected)
    rest = [claim for claim in waiting if claim not in selected]
    for claim in sorted(rest, key=lambda each: size(_request(each))):
        volume = choice(claim, node, storage, taken)
        if volume is None:
            to_make.append(claim)
        else:
            taken.add(volume)
    for claim in to_make:
        problem = _not_made(claim, node, storage)
        if problem:
            return [*found, problem]
    return found


def _request(claim: Tree) -> str:
    text: str = claim["spec"]["resources"]["requests"]["storage"]
    return text


def choice(claim: Tree, node: Tree, storage: Storage, taken: set[str]) -> str | None:
    """Return the volume that a claim gets on a node after others took theirs, or None."""
    spec = claim["spec"]
    fitting = []
    for name, volume in storage.volumes.items():
        of = volume["spec"]
        reference = of.get("claimRef")
        mine = reference is not None and reference["name"] == claim["metadata"]["name"]
        if (
            of["storageClassName"] != spec["storageClassName"]
            or size(of["capacity"]["storage"]) < size(_request(claim))
            or (reference is not None and not mine)
        ):
            continue
        if mine:
            return name if _reaches(volume, node) else None
        if (
            volume["status"]["phase"] == "Available"
            and set(spec["accessModes"]) <= set(of["accessModes"])
            and name not in taken
            and _reaches(volume, node)
        ):
            fitting.append((size(of["capacity"]["storage"]), name))
    return min(fitting)[1] if fitting else None


def _not_made(claim: Tree, node: Tree, storage: Storage) -> str:
    made_by = storage.classes[claim["spec"]["storageClassName"]]
    labels = node["metadata"]["labels"]
    none = "node(s) didn't find available persistent volumes to bind"
    if made_by["provisioner"] == "kubernetes.io/no-provisioner":
        return none
    terms = made_by.get("allowedTopologies", [])
    allowed = not terms or any(
        all(labels.get(each["key"]) in each["values"] for each in term["matchLabelExpressions"])
        for term in terms
    )
    if not allowed:
        return none
    driver = storage.drivers.get(made_by["provisioner"])
    if driver is None or not driver["spec"]["storageCapacity"]:
        return ""
    for report in storage.capacities:
        selector = report["nodeTopology"]["matchLabels"]
        left: str = report.get("maximumVolumeSize") or report["capacity"]
        if (
            report["storageClassName"] == claim["spec"]["storageClassName"]
            and selector.items() <= labels.items()
            and size(left) >= size(_request(claim))
        ):
            return ""
    return "node(s) did not have enough free storage"


def _zones(pod: Tree, node: Tree, storage: Storage) -> list[str]:
    labels = node["metadata"]["labels"]
    if not any(label in labels for label in _ZONE_LABELS):
        return []
    for name in claims_of(pod):
        volume = storage.volumes.get(storage.claims[name]["spec"].get("volumeName", ""))
        if volume is None:
            continue
        for label in _ZONE_LABELS:
            zones = volume["metadata"]["labels"].get(label)
            if zones is not None and labels.get(label) not in zones.split("__"):
                return ["node(s) had no available volume zone"]
    return []
