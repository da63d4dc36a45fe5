"""Claims that a simulation makes and changes; clusters whose pods are taken off their nodes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from apis.errors import InputError
from cluster.scheduler.simulation.claims import (
    claims_of,
    default_class,
    ephemeral_claims,
    kept_of_cluster,
    replica_volumes,
    with_class,
    without_attachments,
)
from cluster.scheduler.simulation.objects import FileObject, tree_of
from cluster.scheduler.simulation.simulation import emptied, moment_of

Tree = dict[str, Any]
_CLAIM, _VOLUME = "PersistentVolumeClaim", "PersistentVolume"


def _object(
    kind: str, name: str, tree: Tree | None = None, *, group: str = "", namespace: str = ""
) -> FileObject:
    body = {"metadata": {"name": name}, **(tree or {})}
    return FileObject(group, kind, namespace, name, msgspec.json.encode(body), "f")


def _class(name: str, created: object, default: object = "true") -> FileObject:
    annotations = {"storageclass.kubernetes.io/is-default-class": default}
    metadata = {"name": name, "creationTimestamp": created, "annotations": annotations}
    return _object("StorageClass", name, {"metadata": metadata}, group="storage.k8s.io")


_OLD, _NEW = "2025-01-01T00:00:00Z", "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        ([], ""),
        ([_class("a", _NEW, "false"), _class("b", _NEW, None)], ""),
        ([_object("StorageClass", "a"), _object("Pod", "p")], ""),
        ([_class("a", _OLD), _class("b", _NEW), _class("c", _OLD)], "b"),
        ([_class("b", _NEW), _class("a", _NEW)], "a"),
        ([_class("b", None), _class("c", _OLD), _class("a", 7)], "c"),
    ],
)
def test_the_newest_default_class_is_that_of_claims_without_one(
    classes: list[FileObject], expected: str
) -> None:
    assert default_class(classes) == expected


def test_claims_and_volumes_that_the_cluster_has_stay_as_they_are_there() -> None:
    known = [
        _object(_CLAIM, "c", namespace="ns"),
        _object(_VOLUME, "v"),
        _object("Service", "s", namespace="ns"),
    ]
    given = [
        _object(_CLAIM, "c", namespace="ns"),
        _object(_CLAIM, "c", namespace="other"),
        _object(_VOLUME, "v"),
        _object(_VOLUME, "c"),
        _object(_VOLUME, "v", group="example.com"),
        _object("Service", "s", namespace="ns"),
    ]
    taken, kept = kept_of_cluster(given, known)
    assert kept == [given[0], given[2]]
    assert taken == [given[1], *given[3:]]


_OLD_CLASS = {"volume.beta.kubernetes.io/storage-class": ""}


@pytest.mark.parametrize(
    ("claim", "storage_class", "expected"),
    [
        ({"spec": {}}, "disk", "disk"),
        ({"spec": {"storageClassName": None}}, "disk", "disk"),
        ({"spec": {"storageClassName": ""}}, "disk", ""),
        ({"spec": {"storageClassName": "fast"}}, "disk", "fast"),
        ({"spec": {}}, "", None),
        ({"metadata": {"name": "c", "annotations": _OLD_CLASS}, "spec": {}}, "disk", None),
        ({"metadata": {"name": "c", "annotations": {"a": "b"}}, "spec": {}}, "disk", "disk"),
        ({"metadata": {"name": "c", "annotations": 1}, "spec": {}}, "disk", "disk"),
    ],
)
def test_a_claim_gets_the_default_class_if_it_names_none(
    claim: Tree, storage_class: str, expected: str | None
) -> None:
    given = _object(_CLAIM, "c", claim, namespace="ns")
    stored = with_class(given, storage_class)
    assert tree_of(stored)["spec"].get("storageClassName") == expected
    assert (stored.key, stored.kind, stored.where) == ("ns/c", _CLAIM, "f")


def test_a_claim_that_is_malformed_is_left_for_the_loading_to_name() -> None:
    for spec in ({}, {"spec": 1}):
        given = _object(_CLAIM, "c", spec)
        assert with_class(given, "disk") == given


def test_the_claims_of_a_pod_are_those_that_it_names_and_those_of_its_ephemeral_volumes() -> None:
    volumes = [
        {"name": "data", "persistentVolumeClaim": {"claimName": "c"}},
        {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {}}},
        {"name": "empty", "emptyDir": {}},
    ]
    pod = _object("Pod", "p", namespace="ns")
    assert claims_of(pod, {"volumes": volumes}) == {"ns/c", "ns/p-scratch"}
    assert claims_of(pod, {"volumes": None}) == claims_of(pod, {}) == set()


def _attachment(name: str, volume: str | None) -> FileObject:
    spec = {"source": {"persistentVolumeName": volume}}
    return _object("VolumeAttachment", name, {"spec": spec}, group="storage.k8s.io")


def test_volumes_of_some_claims_are_attached_to_no_node() -> None:
    claims = [
        _object(_CLAIM, "a", {"spec": {"volumeName": "v"}}, namespace="ns"),
        _object(_CLAIM, "b", {"spec": {"volumeName": "w"}}, namespace="ns"),
        _object(_CLAIM, "c", {"spec": {}}, namespace="ns"),
        _object(_CLAIM, "d", {}, namespace="ns"),
        _object("Other", "e", {"spec": {"volumeName": "w"}}, namespace="ns"),
    ]
    attachments = [
        _attachment("1", "v"), _attachment("2", "w"), _attachment("3", None), _attachment("4", "x")
    ]  # fmt: skip
    found = without_attachments(
        (*claims, *attachments), {"ns/a", "ns/c", "ns/d", "ns/e", "other/b"}
    )
    assert found == (*claims, *attachments[1:])


_TEMPLATE = {"metadata": {"name": "data", "labels": {"a": "b"}}, "spec": {"resources": {}}}


@pytest.mark.parametrize(("namespace", "stored"), [("ns", "ns"), ("", "default")])
def test_a_replica_has_a_claim_for_each_template(namespace: str, stored: str) -> None:
    workload = _object("StatefulSet", "web", group="apps", namespace=namespace)
    other = {"metadata": {"name": "log"}, "spec": {"storageClassName": "fast"}}
    volumes, claims = replica_volumes(workload, [_TEMPLATE, other], "web-3", "disk")
    assert volumes == [
        {"name": name, "persistentVolumeClaim": {"claimName": f"{name}-web-3"}}
        for name in ("data", "log")
    ]
    assert [(each.group, each.kind, each.key, each.where) for each in claims] == [
        ("", _CLAIM, f"{stored}/{name}-web-3", "f") for name in ("data", "log")
    ]
    assert tree_of(claims[0]) == {
        "metadata": {
            "name": "data-web-3",
            "namespace": stored,
            "labels": {"a": "b"},
            "uid": f"simulated-{stored}-data-web-3",
        },
        "spec": {"resources": {}, "storageClassName": "disk"},
    }
    assert tree_of(claims[1])["spec"] == {"storageClassName": "fast"}


@pytest.mark.parametrize(
    ("templates", "text"),
    [
        ([_TEMPLATE, 1], r"spec.volumeClaimTemplates\[1\].metadata.name.*: is missing"),
        ([{}], r"spec.volumeClaimTemplates\[0\].metadata.name"),
        ([{"metadata": {"name": 7}}], r"spec.volumeClaimTemplates\[0\].metadata.name"),
        ([{"metadata": {"name": ""}}], r"spec.volumeClaimTemplates\[0\].metadata.name"),
        (
            [{"metadata": {"name": "data"}, "spec": 1}],
            "f: the claim ns/data-web-0 of a template: spec = '1': expected an object",
        ),
    ],
)
def test_a_template_of_claims_that_cannot_be_used_is_named(templates: list[Any], text: str) -> None:
    workload = _object("StatefulSet", "web", group="apps", namespace="ns")
    with pytest.raises(InputError, match=text):
        replica_volumes(workload, templates, "web-0", "")
    assert replica_volumes(workload, "none", "web-0", "") == ([], [])


def test_an_ephemeral_volume_has_a_claim_that_its_pod_owns() -> None:
    volumes = [
        {"name": "data", "persistentVolumeClaim": {"claimName": "c"}},
        {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": {"resources": {}}}}},
        {"name": "bare", "ephemeral": {"volumeClaimTemplate": {}}},
        {"name": "bad", "ephemeral": 1},
        7,
    ]
    tree = {"metadata": {"name": "p", "uid": "u"}, "spec": {"volumes": volumes}}
    pod = _object("Pod", "p", tree, namespace="ns")
    first, second = ephemeral_claims(pod, "disk")
    assert tree_of(first) == {
        "metadata": {
            "name": "p-scratch",
            "namespace": "ns",
            "uid": "simulated-ns-p-scratch",
            "ownerReferences": [{"kind": "Pod", "name": "p", "uid": "u", "controller": True}],
        },
        "spec": {"resources": {}, "storageClassName": "disk"},
    }
    assert (first.key, first.where) == ("ns/p-scratch", "f")
    assert tree_of(second)["spec"] == {"storageClassName": "disk"}
    tree["spec"] = {}
    assert ephemeral_claims(_object("Pod", "p", tree), "disk") == []


def _stamped(kind: str, created: object, report: object = None) -> FileObject:
    tree: Tree = {"metadata": {"name": "x", "creationTimestamp": created}}
    if report is not None:
        tree["status"] = {"updateTime": report} if report != "bare" else 1
    return _object(kind, "x", tree)


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        ([], 0),
        ([_stamped("Service", "1970-01-01T00:00:09Z")], 0),
        ([_stamped("Pod", "1970-01-01T00:00:01Z"), _stamped("Pod", "1970-01-01T00:00:02Z")], 2),
        ([_stamped("Node", "1970-01-01T00:00:03Z"), _stamped("Pod", "1970-01-01T00:00:02Z")], 3),
        ([_stamped("Node", None), _stamped("Pod", 5)], 0),
        (
            [
                _stamped("NodeMetric", "1970-01-01T00:00:09Z", "1970-01-01T00:00:05Z"),
                _stamped("NodeMetric", "1970-01-01T00:00:09Z", "1970-01-01T00:00:04Z"),
                _stamped("Pod", "1970-01-01T00:00:08Z"),
            ],
            5,
        ),
        (
            [
                _stamped("NodeMetric", None, "bare"),
                _stamped("NodeMetric", None, 7),
                _stamped("Pod", "1970-01-01T00:00:08Z"),
            ],
            8,
        ),
    ],
)
def test_a_dump_is_of_its_newest_report_else_of_its_newest_pod_or_node(
    objects: list[FileObject], expected: float
) -> None:
    assert moment_of(objects) == expected


def _pod(name: str, *, metadata: Tree | None = None, phase: str = "", **spec: Any) -> FileObject:
    tree = {
        "metadata": {"name": name, "namespace": "ns", **(metadata or {})},
        "spec": {"nodeName": "n", "schedulerName": "ours", "containers": [], **spec},
        "status": {"phase": phase} if phase else {},
    }
    return _object("Pod", name, tree, namespace="ns")


_ALLOCATED = {
    f"scheduling.koordinator.sh/{name}": "{}"
    for name in ("resource-status", "device-allocated", "reservation-allocated")
}


def test_pods_of_the_schedulers_are_taken_off_their_nodes() -> None:
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "c"}}
    stay = [
        _pod("of-another", schedulerName="theirs"),
        _pod("ended", phase="Succeeded"),
        _pod("failed", phase="Failed"),
        _pod("deleted", metadata={"deletionTimestamp": _NEW}),
        _pod("static", metadata={"annotations": {"kubernetes.io/config.mirror": "x"}}),
        _pod("daemon", metadata={"ownerReferences": [{"kind": "DaemonSet", "name": "d"}]}),
        _pod("unreadable", containers=7),
        _object("Pod", "of-another-group", group="example.com", namespace="ns"),
        _object("Node", "n"),
    ]
    moving = [
        _pod("a", metadata={"annotations": {**_ALLOCATED, "other": "x"}}, volumes=[volume]),
        _pod("b", nodeName="", phase="Running"),
        _pod("c", metadata={"ownerReferences": [{"kind": "ReplicaSet", "name": "d"}]}),
    ]
    claim = _object(_CLAIM, "c", {"spec": {"volumeName": "v"}}, namespace="ns")
    found = emptied((*stay, *moving, claim, _attachment("1", "v")), ["ours"])
    assert dict(found.moved) == {"ns/a": "n", "ns/b": "", "ns/c": "n"}
    assert list(found.objects[: len(stay)]) == stay
    assert found.objects[-1] == claim
    first, second, _ = (tree_of(each) for each in found.objects[len(stay) : -1])
    assert first == {
        "metadata": {"name": "a", "namespace": "ns", "annotations": {"other": "x"}},
        "spec": {"schedulerName": "ours", "containers": [], "volumes": [volume]},
        "status": {},
    }
    assert second["status"] == {}
    assert (found.objects[-2].key, found.objects[-2].where) == ("ns/c", "f")


@pytest.mark.parametrize(("named", "moves"), [("", False), ("ours", True)])
def test_a_name_for_all_pods_moves_those_of_other_schedulers_too(named: str, moves: bool) -> None:
    pod = _pod("of-another", schedulerName="theirs")
    found = emptied([pod], ["ours"], scheduler_name=named)
    assert list(found.moved) == (["ns/of-another"] if moves else [])
    assert tree_of(found.objects[0])["spec"]["schedulerName"] == (named or "theirs")


def test_a_pod_that_names_no_scheduler_is_that_of_the_default_one() -> None:
    pod = _pod("a", schedulerName="")
    assert list(emptied([pod], ["default-scheduler"]).moved) == ["ns/a"]
    assert list(emptied([pod], ["ours"]).moved) == []
