"""Copies of a pod have claims of their own, as the replicas of a workload have."""

from __future__ import annotations

import msgspec
import pytest

from apis.errors import InputError
from apis.scheduling_pod import SchedulingPod, decode_scheduling_pod
from cluster.scheduler.simulation.copies import claims_by_name, copy_of
from cluster.scheduler.simulation.objects import FileObject

_OWNERS = [
    {"kind": "Pod", "name": "p", "uid": "u", "controller": True},
    {"kind": "Other", "name": "o", "uid": "other"},
]


def _pod(*volumes: dict[str, object]) -> SchedulingPod:
    tree = {
        "metadata": {"name": "p", "namespace": "ns", "uid": "u", "labels": {"app": "a"}},
        "spec": {"containers": [], "volumes": list(volumes)},
    }
    return decode_scheduling_pod(msgspec.json.encode(tree))


def _claim(name: str) -> FileObject:
    metadata = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "ownerReferences": _OWNERS}
    tree = {"metadata": metadata, "spec": {"storageClassName": "disk"}}
    return FileObject("", "PersistentVolumeClaim", "ns", name, msgspec.json.encode(tree), "f")


def test_a_copy_has_a_name_a_uid_and_claims_of_its_own() -> None:
    claims = claims_by_name([_claim("data-p"), _claim("p-scratch"), _claim("unused")])
    pod = _pod(
        {"name": "data", "persistentVolumeClaim": {"claimName": "data-p", "readOnly": True}},
        {"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}},
        {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {}}},
        {"name": "others", "ephemeral": {"volumeClaimTemplate": {}}},
        {"name": "image", "emptyDir": {}},
    )
    copy, made = copy_of(pod, 7, claims)
    meta = copy.metadata
    assert (meta.name, meta.namespace, meta.uid) == ("p#7", "ns", "u-7")
    assert meta.labels == {"app": "a"}
    named = [each.persistent_volume_claim for each in copy.spec.volumes]
    assert [each and each.claim_name for each in named] == [
        "data-p#7", "shared", None, None, None
    ]  # fmt: skip
    assert [each.name for each in copy.spec.volumes] == [each.name for each in pod.spec.volumes]
    # The claim of an ephemeral volume has the name of the copy in front.
    assert [(each.metadata.name, each.metadata.uid) for each in made] == [
        ("data-p#7", "simulated-ns-data-p#7"),
        ("p#7-scratch", "simulated-ns-p#7-scratch"),
    ]
    for each in made:
        assert each.class_name == "disk"
        owners = [(owner.name, owner.uid) for owner in each.metadata.owner_references]
        assert owners == [("p", "u-7"), ("o", "other")]


def test_a_pod_without_claims_is_copied_alone() -> None:
    pod = _pod({"name": "data", "persistentVolumeClaim": {"claimName": "data"}})
    copy, made = copy_of(pod, 0, {})
    assert made == ()
    assert copy.spec == pod.spec


def test_a_claim_that_cannot_be_read_is_named() -> None:
    bad = FileObject("", "PersistentVolumeClaim", "ns", "c", b'{"spec": 1}', "f")
    with pytest.raises(InputError, match="f: PersistentVolumeClaim ns/c"):
        claims_by_name([bad])
