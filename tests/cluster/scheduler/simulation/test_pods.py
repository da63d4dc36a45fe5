"""Pods of a file as the API server would store them: what is filled in, and what is made of
templates."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from apis.errors import InputError
from apis.meta import LabelSelector, LabelSelectorRequirement
from apis.scheduling_pod import decode_scheduling_pod
from cluster.scheduler.simulation.objects import FileObject, tree_of
from cluster.scheduler.simulation.pods import Defaults, PodFile, Priority, pods_of, priorities_of

CREATED = "2026-01-01T00:00:00Z"


def _object(kind: str, name: str, body: dict[str, Any], *, group: str = "") -> FileObject:
    metadata = {"name": name, **body.pop("metadata", {})}
    namespace = metadata.get("namespace", "")
    raw = msgspec.json.encode({"metadata": metadata, **body})
    return FileObject(group, kind, namespace, name, raw, "pods.yaml")


def _read(
    *objects: FileObject, names: tuple[str, ...] = ("koord", "other"), **more: Any
) -> PodFile:
    priorities = {"": Priority(5), "high": Priority(9, "Never")}
    return pods_of(objects, Defaults(names, more.pop("priorities", priorities), CREATED, **more))


def _container(**resources: dict[str, str]) -> dict[str, Any]:
    return {"name": "c", "resources": resources}


def test_a_pod_is_stored_as_a_new_one_with_all_that_the_api_server_fills_in() -> None:
    given = _object(
        "Pod",
        "p",
        {
            "metadata": {"uid": "old", "deletionTimestamp": CREATED, "labels": {"app": "a"}},
            "spec": {
                "nodeName": "n1",
                "containers": [
                    _container(limits={"cpu": "2", "memory": "1Gi"}, requests={"cpu": "1"}),
                    _container(requests={"cpu": "3"}),
                    {"name": "without"},
                ],
                "initContainers": [_container(limits={"cpu": "4"})],
            },
            "status": {"phase": "Running"},
        },
    )
    (pod,) = _read(given).pods
    assert (pod.group, pod.kind, pod.key, pod.where) == ("", "Pod", "default/p", "pods.yaml")
    assert tree_of(pod) == {
        "metadata": {
            "name": "p",
            "namespace": "default",
            "uid": "simulated-1",
            "creationTimestamp": CREATED,
            "deletionTimestamp": None,
            "labels": {"app": "a"},
        },
        "spec": {
            "schedulerName": "koord",
            "priority": 5,
            "preemptionPolicy": "PreemptLowerPriority",
            "containers": [
                _container(
                    limits={"cpu": "2", "memory": "1Gi"}, requests={"cpu": "1", "memory": "1Gi"}
                ),
                _container(requests={"cpu": "3"}),
                {"name": "without"},
            ],
            "initContainers": [_container(limits={"cpu": "4"}, requests={"cpu": "4"})],
        },
        "status": {},
    }


@pytest.mark.parametrize(
    ("spec", "priority", "policy"),
    [
        ({}, 5, "PreemptLowerPriority"),
        ({"priorityClassName": "high"}, 9, "Never"),
        ({"priorityClassName": "high", "preemptionPolicy": "PreemptLowerPriority"}, 9,
         "PreemptLowerPriority"),
        ({"priority": 0, "priorityClassName": "high"}, 0, None),
        ({"priority": 7, "preemptionPolicy": "Never"}, 7, "Never"),
    ],
)  # fmt: skip
def test_importance_is_the_class_unless_the_pod_has_a_number(
    spec: dict[str, Any], priority: int, policy: str | None
) -> None:
    (pod,) = _read(_object("Pod", "p", {"spec": spec})).pods
    stored = tree_of(pod)["spec"]
    assert (stored["priority"], stored.get("preemptionPolicy")) == (priority, policy)


def test_a_cluster_without_a_default_class_gives_0() -> None:
    (pod,) = _read(_object("Pod", "p", {"spec": {}}), priorities={}).pods
    assert tree_of(pod)["spec"]["priority"] == 0


@pytest.mark.parametrize(
    ("named", "names", "replaced", "expected", "noted"),
    [
        (None, ("koord", "other"), "", "koord", True),
        ("", ("koord",), "", "koord", True),
        (None, ("koord", "default-scheduler"), "", "default-scheduler", False),
        ("other", ("koord", "other"), "", "other", False),
        ("absent", ("koord", "other"), "other", "other", False),
        (None, ("koord", "other"), "other", "other", False),
    ],
)
def test_a_pod_is_taken_as_a_profile_s(
    named: str | None, names: tuple[str, ...], replaced: str, expected: str, noted: bool
) -> None:
    spec = {} if named is None else {"schedulerName": named}
    found = _read(_object("Pod", "p", {"spec": spec}), names=names, scheduler_name=replaced)
    assert tree_of(found.pods[0])["spec"]["schedulerName"] == expected
    assert found.notes == (("1 pods name no scheduler; taken as koord's",) if noted else ())


def test_the_note_counts_pods_of_templates_too() -> None:
    template = {"spec": {"replicas": 3, "template": {"spec": {}}}}
    pods = [_object("Pod", "p", {"spec": {}}), _object("Deployment", "d", template, group="apps")]
    assert _read(*pods).notes == ("4 pods name no scheduler; taken as koord's",)


@pytest.mark.parametrize(
    ("kind", "field", "owner", "group"),
    [
        ("Deployment", "replicas", "ReplicaSet", "apps"),
        ("ReplicaSet", "replicas", "ReplicaSet", "apps"),
        ("StatefulSet", "replicas", "StatefulSet", "apps"),
        ("ReplicationController", "replicas", "ReplicationController", ""),
        ("Job", "parallelism", "Job", None),
    ],
)
def test_a_workload_makes_its_pods_and_what_selects_them(
    kind: str, field: str, owner: str, group: str | None
) -> None:
    """group: of the object that the default spread of pods reads, None if it reads none."""
    selector = {"matchLabels": {"app": "a"}}
    template = {"metadata": {"labels": {"app": "a"}, "namespace": "ignored"}, "spec": {}}
    body = {
        "metadata": {"namespace": "team"},
        "spec": {field: 2, "selector": selector, "template": template},
    }
    found = _read(_object(kind, "w", body))
    assert [pod.key for pod in found.pods] == ["team/w-0", "team/w-1"]
    metas = [tree_of(pod)["metadata"] for pod in found.pods]
    assert [meta["uid"] for meta in metas] == ["simulated-1", "simulated-2"]
    for meta in metas:
        assert meta["labels"] == {"app": "a"}
        assert meta["ownerReferences"] == [
            {"kind": owner, "name": "w", "uid": "simulated-w", "controller": True}
        ]
    shown = [(other.group, other.kind, other.key, other.where) for other in found.others]
    assert shown == ([] if group is None else [(group, owner, "team/w", "pods.yaml")])
    for other in found.others:
        assert tree_of(other) == {
            "metadata": {"name": "w", "namespace": "team"},
            "spec": {"selector": selector},
        }


@pytest.mark.parametrize(("given", "made"), [({}, 1), ({"replicas": 0}, 0), ({"replicas": 2}, 2)])
def test_a_workload_makes_one_pod_unless_it_says_how_many(given: dict[str, Any], made: int) -> None:
    spec = {**given, "template": {"spec": {}}}
    assert len(_read(_object("Deployment", "d", {"spec": spec})).pods) == made


def test_replicas_of_a_stateful_set_have_the_volumes_of_its_templates() -> None:
    template = {"spec": {"volumes": [{"name": "own", "emptyDir": {}}]}}
    claim = {"metadata": {"name": "data", "labels": {"app": "a"}}, "spec": {"volumeName": "v"}}
    spec = {"replicas": 2, "template": template, "volumeClaimTemplates": [claim]}
    found = _read(_object("StatefulSet", "s", {"spec": spec}), storage_class="fast")
    assert [tree_of(pod)["spec"]["volumes"] for pod in found.pods] == [
        [
            {"name": "own", "emptyDir": {}},
            {"name": "data", "persistentVolumeClaim": {"claimName": f"data-s-{number}"}},
        ]
        for number in range(2)
    ]
    assert list(found.from_templates) == ["default/s-0", "default/s-1"]
    (made,) = found.from_templates["default/s-1"]
    assert (made.kind, made.key, made.where) == (
        "PersistentVolumeClaim",
        "default/data-s-1",
        "pods.yaml",
    )
    assert tree_of(made) == {
        "metadata": {
            "name": "data-s-1",
            "namespace": "default",
            "uid": "simulated-default-data-s-1",
            "labels": {"app": "a"},
        },
        "spec": {"volumeName": "v", "storageClassName": "fast"},
    }
    assert not found.ephemeral
    # Only the templates of a StatefulSet make claims.
    deployment = _read(_object("Deployment", "d", {"spec": spec}))
    assert not deployment.from_templates
    assert tree_of(deployment.pods[0])["spec"]["volumes"] == [{"name": "own", "emptyDir": {}}]


def test_an_ephemeral_volume_makes_a_claim_that_the_pod_owns() -> None:
    volumes = [
        {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": {"volumeName": "v"}}}},
        {"name": "own", "emptyDir": {}},
    ]
    given = _object("Pod", "p", {"metadata": {"namespace": "team"}, "spec": {"volumes": volumes}})
    found = _read(given, _object("Pod", "q", {"spec": {}}))
    assert list(found.ephemeral) == ["team/p"]
    (made,) = found.ephemeral["team/p"]
    assert made.key == "team/p-scratch"
    assert tree_of(made) == {
        "metadata": {
            "name": "p-scratch",
            "namespace": "team",
            "uid": "simulated-team-p-scratch",
            "ownerReferences": [
                {"kind": "Pod", "name": "p", "uid": "simulated-1", "controller": True}
            ],
        },
        "spec": {"volumeName": "v"},
    }


def test_other_objects_are_kept_and_claims_get_the_default_class() -> None:
    """A Pod of another API group is another object, and so is a claim."""
    claim = _object("PersistentVolumeClaim", "c", {"spec": {}})
    group = _object("PodGroup", "g", {"spec": {}}, group="scheduling.sigs.k8s.io")
    foreign = [
        _object("Pod", "p", {"spec": {}}, group="example.com"),
        _object("PersistentVolumeClaim", "c", {"spec": {}}, group="example.com"),
    ]
    found = _read(claim, group, *foreign, storage_class="fast")
    assert not found.pods
    assert found.others[1:] == (group, *foreign)
    assert tree_of(found.others[0])["spec"] == {"storageClassName": "fast"}


def test_priority_classes_by_name_and_the_default_one() -> None:
    classes = [
        _object("PriorityClass", "low", {"value": -3}),
        _object("PriorityClass", "usual", {"value": 4, "globalDefault": True}),
        _object("PriorityClass", "meek", {"preemptionPolicy": "Never", "globalDefault": False}),
    ]
    assert priorities_of(classes) == {
        "system-node-critical": Priority(2_000_001_000, "PreemptLowerPriority"),
        "system-cluster-critical": Priority(2_000_000_000, "PreemptLowerPriority"),
        "low": Priority(-3, "PreemptLowerPriority"),
        "usual": Priority(4, "PreemptLowerPriority"),
        "": Priority(4, "PreemptLowerPriority"),
        "meek": Priority(0, "Never"),
    }


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        ("Pod", {}, "spec"),
        ("Pod", {"spec": {"schedulerName": "absent"}}, "spec.schedulerName"),
        ("Pod", {"spec": {"priorityClassName": "absent"}}, "spec.priorityClassName"),
        ("Pod", {"spec": {"containers": 1}}, ""),
        ("Job", {"spec": {"parallelism": "2", "template": {"spec": {}}}}, "spec.parallelism"),
        ("Job", {"spec": {"parallelism": -1, "template": {"spec": {}}}}, "spec.parallelism"),
        ("Job", {"spec": {"parallelism": 200_001, "template": {"spec": {}}}}, "spec.parallelism"),
        ("Job", {"spec": {"template": []}}, "spec.template"),
        ("Job", {"spec": {"template": {"metadata": 1}}}, "spec.template.metadata"),
        ("Job", {"spec": {"template": {}}}, "spec"),
        (
            "StatefulSet",
            {"spec": {"template": {"spec": {}}, "volumeClaimTemplates": [{"metadata": {}}]}},
            "spec.volumeClaimTemplates[0].metadata.name",
        ),
        (
            "StatefulSet",
            {
                "spec": {
                    "template": {"spec": {}},
                    "volumeClaimTemplates": [{"metadata": {"name": "d"}, "spec": 1}],
                }
            },
            "spec",
        ),
    ],
)
def test_a_mistake_is_named_with_its_field(kind: str, body: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        _read(_object(kind, "w", body))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("body", "field"),
    [({"value": "9"}, "value"), ({"preemptionPolicy": "Sometimes"}, "preemptionPolicy")],
)
def test_a_mistake_in_a_priority_class_is_named(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        priorities_of([_object("PriorityClass", "c", body)])
    assert caught.value.field == field


@pytest.mark.parametrize("rule", ["podAffinity", "podAntiAffinity"])
def test_terms_with_label_keys_ask_for_the_pods_own_labels(rule: str) -> None:
    """As the API server writes them into the selectors when it creates the pod."""
    term = {
        "topologyKey": "zone",
        "labelSelector": {"matchLabels": {"app": "a"}},
        "namespaceSelector": {},
        "matchLabelKeys": ["version", "missing"],
        "mismatchLabelKeys": ["team"],
    }
    weighted = {"weight": 3, "podAffinityTerm": term}
    terms = {
        "requiredDuringSchedulingIgnoredDuringExecution": [term],
        "preferredDuringSchedulingIgnoredDuringExecution": [weighted],
    }
    labels = {"app": "a", "version": "1", "team": "t"}
    spec = {"containers": [{"name": "c"}], "affinity": {rule: terms, "nodeAffinity": None}}
    (pod,) = _read(_object("Pod", "p", {"metadata": {"labels": labels}, "spec": spec})).pods
    read = decode_scheduling_pod(pod.raw).spec.affinity
    assert read is not None
    affinity = read.pod_affinity if rule == "podAffinity" else read.pod_anti_affinity
    assert affinity is not None
    (required,), (preferred,) = affinity.required, affinity.preferred
    assert preferred.pod_affinity_term == required
    assert required.namespace_selector == LabelSelector()
    assert required.label_selector == LabelSelector(
        match_labels={"app": "a"},
        match_expressions=(
            LabelSelectorRequirement(key="version", operator="In", values=("1",)),
            LabelSelectorRequirement(key="team", operator="NotIn", values=("t",)),
        ),
    )
