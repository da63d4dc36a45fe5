"""`koordctl simulate`: what would happen to pods, over dumps and a cluster that is only read."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.scheduler.configuration.reading import default_configuration, read_configuration
from cluster.scheduler.simulation.simulation import collections_read
from koordctl.main import main
from tests.cluster.scheduler.simulation.dumps import (
    KOORDINATOR,
    PACKED,
    Tree,
    node,
    pod,
    workload,
    write,
)
from tests.cluster.scheduler.volumes.making import HOST, claim_json, volume_json
from tests.cluster.scheduler.volumes.making import on as terms_on

_QUOTAS = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: koord-scheduler
  plugins:
    preFilter: {enabled: [{name: ElasticQuota}]}
    reserve: {enabled: [{name: ElasticQuota}]}
"""


class Cluster:
    """A folder with a dump, a file of pods and configurations."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.dump = folder / "dump"
        self.dump.mkdir()
        self._capsys = capsys

    def write(self, *objects: Tree, name: str = "cluster.json") -> None:
        write(self.dump / name, *objects)

    def pods(self, *objects: Tree) -> str:
        path = self.folder / "pods.yaml"
        path.write_text("\n---\n".join(yaml.safe_dump(each) for each in objects))
        return str(path)

    def config(self, text: str, name: str = "config.yaml") -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def run(self, *arguments: str, cluster: str = "") -> tuple[int, str, str]:
        """Return exit status, output and errors."""
        status = main(["simulate", "--cluster", cluster or str(self.dump), *arguments])
        captured = self._capsys.readouterr()
        return status, captured.out, captured.err

    def ask(self, *arguments: str, cluster: str = "") -> dict[str, Any]:
        status, out, err = self.run("-o", "json", *arguments, cluster=cluster)
        assert status in (0, 1), err
        found: dict[str, Any] = json.loads(out)
        return found


@pytest.fixture
def cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cluster:
    return Cluster(tmp_path, capsys)


def _states(found: dict[str, Any]) -> dict[str, str]:
    return {each["pod"]: each["node"] or each["state"] for each in found["pods"]}


# --- pods of a file ------------------------------------------------------------------------------


def test_each_pod_gets_its_node_or_the_reason(cluster: Cluster) -> None:
    cluster.write(node("n1"), node("n2"), pod("old", "6", on="n1"))
    pods = cluster.pods(workload("Deployment", "web", 3), pod("huge", "9"))
    status, out, _ = cluster.run("--pods", pods)
    assert status == 1
    assert "3 of 4 pods get a node" in out
    assert "default/web-0" in out
    assert "4 of" not in out.splitlines()[0]
    assert "0/2 nodes are available: 2 Insufficient cpu." in out
    found = cluster.ask("--pods", pods)
    assert found["nodes"] == 2
    states = _states(found)
    assert states["default/huge"] == "unschedulable"
    assert Counter(states.values())["n2"] >= 2
    huge = next(each for each in found["pods"] if each["pod"] == "default/huge")
    # The nearest node has 6 or more of the 9 CPUs left.
    assert huge["nearest"][0]["nodes"] == 2
    assert cluster.run("--pods", cluster.pods(pod("small")))[0] == 0


def test_requests_come_from_limits_and_importance_from_the_class(cluster: Cluster) -> None:
    high = {"kind": "PriorityClass", "apiVersion": "scheduling.k8s.io/v1", "value": 1000}
    cluster.write(node("n1", cpu=4), {**high, "metadata": {"name": "high"}})
    pods = cluster.pods(
        workload("Job", "low", 1, "4"),
        workload("StatefulSet", "db", 1, "3", priorityClassName="high"),
    )
    # The limit of 4 CPUs is the request, and the important pod goes first.
    assert _states(cluster.ask("--pods", pods)) == {
        "default/low-0": "unschedulable",
        "default/db-0": "n1",
    }


def test_a_pod_of_the_cluster_that_stands_in_the_file_is_placed_again(cluster: Cluster) -> None:
    running = pod("a", "6", on="n1")
    cluster.write(node("n1"), running)
    found = cluster.ask("--pods", cluster.pods(running))
    # Its own request does not stand in its way.
    assert found["pods"][0]["node"] == "n1"
    assert found["pods"][0]["was"] == "n1"


def test_a_more_important_pod_evicts_others_and_gets_their_node(cluster: Cluster) -> None:
    cluster.write(node("n1", 4), pod("old", "3", on="n1", priority=1))
    found = cluster.ask("--pods", cluster.pods(pod("new", "4", priority=9), pod("old", "3")))
    assert _states(found) == {"default/new": "n1", "default/old": "unschedulable"}
    found = cluster.ask("--pods", cluster.pods(pod("new", "4", priority=9)))
    assert _states(found) == {"default/new": "n1"}
    assert found["evicted"] == [{"pod": "default/old", "was": "n1"}]
    _, out, _ = cluster.run("--pods", cluster.pods(pod("new", "4", priority=9)))
    assert "pods that would be evicted for them" in out


@pytest.mark.parametrize(("fields", "name"), [({}, "quiet"), ({"globalDefault": True}, "")])
def test_pods_of_a_class_that_preempts_never_evict_no_pod(
    cluster: Cluster, fields: Tree, name: str
) -> None:
    quiet = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 9}
    quiet |= {"metadata": {"name": "quiet"}, "preemptionPolicy": "Never", **fields}
    cluster.write(node("n1", 4), pod("old", "3", on="n1", priority=1), quiet)
    named: Tree = {"priorityClassName": name} if name else {}
    new = pod("new", "4", **named)
    found = cluster.ask("--pods", cluster.pods(new))
    assert _states(found) == {"default/new": "unschedulable"}
    assert "preemptionPolicy=Never" in found["pods"][0]["message"]
    quiet["preemptionPolicy"] = "Perhaps"
    cluster.write(node("n1", 4), quiet)
    status, _, err = cluster.run("--pods", cluster.pods(new))
    assert (status, "PriorityClass quiet: preemptionPolicy = 'Perhaps'" in err) == (2, True)


def test_replicas_of_a_file_spread_as_those_of_a_cluster_do(cluster: Cluster) -> None:
    zones = [node(f"n{number}") for number in range(4)]
    for number, each in enumerate(zones):
        each["metadata"]["labels"]["topology.kubernetes.io/zone"] = f"z{number % 2}"
    # Without the spread, all replicas would go to the two empty nodes.
    cluster.write(*zones, pod("x", "4", on="n1"), pod("y", "4", on="n3"))
    found = cluster.ask("--pods", cluster.pods(workload("Deployment", "web", 4, "100m")))
    zone_of = {each["metadata"]["name"]: index % 2 for index, each in enumerate(zones)}
    assert Counter(zone_of[each["node"]] for each in found["pods"]) == {0: 2, 1: 2}


def test_gangs_wait_as_they_do_in_a_cluster(cluster: Cluster) -> None:
    cluster.write(node("n1", cpu=2))
    group = {
        "apiVersion": "scheduling.sigs.k8s.io/v1alpha1",
        "kind": "PodGroup",
        "metadata": {"name": "g", "namespace": "default"},
        "spec": {"minMember": 3},
    }
    label = {"labels": {"pod-group.scheduling.sigs.k8s.io": "g"}}
    members = [pod(f"m{n}", metadata=label, schedulerName="koord-scheduler") for n in range(3)]
    config = ("--config", cluster.config(KOORDINATOR))
    found = cluster.ask("--pods", cluster.pods(group, *members), *config)
    assert {each["state"] for each in found["pods"]} == {"unschedulable"}
    assert any("GangGroup" in each["message"] for each in found["pods"])
    cluster.write(node("n1", cpu=3))
    found = cluster.ask("--pods", cluster.pods(group, *members), *config)
    assert set(_states(found).values()) == {"n1"}
    found = cluster.ask("--pods", cluster.pods(group, *members[:2]), *config)
    assert {each["state"] for each in found["pods"]} == {"gated"}


def test_a_pod_beyond_its_quota_learns_that_nodes_would_take_it(cluster: Cluster) -> None:
    quota = {
        "apiVersion": "scheduling.sigs.k8s.io/v1alpha1",
        "kind": "ElasticQuota",
        "metadata": {
            "name": "team",
            "namespace": "default",
            "labels": {"quota.scheduling.koordinator.sh/is-parent": "false"},
        },
        "spec": {"min": {"cpu": "2"}, "max": {"cpu": "2"}},
    }
    cluster.write(node("n1"), node("n2"), quota)
    labels = {"labels": {"quota.scheduling.koordinator.sh/name": "team"}}
    koord = [
        pod(name, "2", metadata=labels, schedulerName="koord-scheduler") for name in ("a", "b")
    ]
    config = KOORDINATOR + "    preFilter: {enabled: [{name: ElasticQuota}]}\n"
    config += "    postFilter: {enabled: [{name: ElasticQuota}]}\n"
    config = config.replace("reserve: {enabled: [", "reserve: {enabled: [{name: ElasticQuota}, ")
    found = cluster.ask("--pods", cluster.pods(*koord), "--config", cluster.config(config))
    refused = [each for each in found["pods"] if each["state"] == "unschedulable"]
    assert len(refused) == 1
    assert "team" in refused[0]["message"]
    assert "Without ElasticQuota 2 of 2 nodes would take the pod." in refused[0]["message"]


def test_devices_are_allocated_once(cluster: Cluster) -> None:
    gpu = {"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory-ratio": "100"}
    devices = [
        {"type": "gpu", "id": str(n), "minor": n, "health": True, "resources": gpu}
        for n in range(2)
    ]
    device = {
        "apiVersion": "scheduling.koordinator.sh/v1alpha1",
        "kind": "Device",
        "metadata": {"name": "n1"},
        "spec": {"devices": devices},
    }
    both = {"koordinator.sh/gpu-core": "200", "koordinator.sh/gpu-memory-ratio": "200"}
    cluster.write(node("n1", more=both), device)
    pods = [
        pod(
            f"p{number}",
            schedulerName="koord-scheduler",
            containers=[{"name": "c", "resources": {"limits": gpu, "requests": gpu}}],
        )
        for number in range(3)
    ]
    arguments = ("--pods", cluster.pods(*pods), "--config", cluster.config(KOORDINATOR))
    assert Counter(_states(cluster.ask(*arguments)).values()) == {"n1": 2, "unschedulable": 1}


def test_a_volume_is_used_once_and_a_provisioned_one_keeps_its_zone(cluster: Cluster) -> None:
    nodes = [node("n1"), node("n2", cpu=4)]
    for number, each in enumerate(nodes):
        each["metadata"]["labels"]["topology.kubernetes.io/zone"] = f"z{number}"

    def claim(name: str, storage_class: str) -> Tree:
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}"},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": storage_class,
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }

    classes = [
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": name},
            "provisioner": provisioner,
            "volumeBindingMode": "WaitForFirstConsumer",
        }
        for name, provisioner in (
            ("local", "kubernetes.io/no-provisioner"),
            ("disk", "disk.example.com"),
        )
    ]
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "pv"},
        "spec": {
            "capacity": {"storage": "2Gi"},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "local",
        },
        "status": {"phase": "Available"},
    }
    claims = [claim("c0", "local"), claim("c1", "local"), claim("shared", "disk")]

    def using(name: str, used: str, cpu: str) -> Tree:
        source = {"name": "v", "persistentVolumeClaim": {"claimName": used}}
        return pod(name, cpu, volumes=[source])

    # One volume for two claims. The shared one is made with its first pod, which fits into the
    # first zone alone; the second pod would go to the emptier node of the other zone.
    pods = (
        using("a", "c0", "1"),
        using("b", "c1", "1"),
        using("first", "shared", "5"),
        using("second", "shared", "1"),
    )
    cluster.write(*nodes, *classes, volume, *claims, pod("x", "1", on="n1"))
    found = cluster.ask("--pods", cluster.pods(*pods))
    states = _states(found)
    assert sorted((states["default/a"], states["default/b"]))[1] == "unschedulable"
    assert states["default/first"] == "n1"
    assert states["default/second"] == "n1"


def test_volumes_are_given_once_and_claims_are_made_from_templates(cluster: Cluster) -> None:
    def volume(name: str, on: str) -> Tree:
        made = volume_json(name, class_name="local", terms=terms_on(HOST, on))
        return {"apiVersion": "v1", "kind": "PersistentVolume", **made}

    storage_class = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": "local",
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
    }
    volumes = (volume("a", "n1"), volume("b", "n2"), volume("c", "n2"))
    cluster.write(node("n1"), node("n2"), node("n3"), storage_class, *volumes)
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    replicas = workload("StatefulSet", "web", 3)
    replicas["spec"]["volumeClaimTemplates"] = [{"metadata": {"name": "data"}, "spec": spec}]
    states = _states(cluster.ask("--pods", cluster.pods(replicas)))
    assert Counter(states.values()) == {"n1": 1, "n2": 2}
    ephemeral = {"name": "tmp", "ephemeral": {"volumeClaimTemplate": {"spec": spec}}}
    found = cluster.ask("--pods", cluster.pods(replicas, pod("late", volumes=[ephemeral])))
    states = _states(found)
    assert Counter(states.values()) == {"n1": 1, "n2": 2, "unschedulable": 1}
    (refused,) = (each for each in found["pods"] if each["state"] == "unschedulable")
    assert "3 node(s) didn't find available persistent volumes to bind" in refused["message"]
    del replicas["spec"]["volumeClaimTemplates"][0]["metadata"]
    status, _, errors = cluster.run("--pods", cluster.pods(replicas))
    assert status == 2
    assert "spec.volumeClaimTemplates[0].metadata.name" in errors


def _claim(name: str, **fields: Any) -> Tree:
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim_json(name, **fields)}


def _volume(name: str, **fields: Any) -> Tree:
    return {"apiVersion": "v1", "kind": "PersistentVolume", **volume_json(name, **fields)}


def _storage_class(name: str, provisioner: str, *, default: bool = False) -> Tree:
    annotations = {"storageclass.kubernetes.io/is-default-class": str(default).lower()}
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name, "annotations": annotations},
        "provisioner": provisioner,
        "volumeBindingMode": "WaitForFirstConsumer",
    }


def _with_data(replicas: int) -> Tree:
    """Return a StatefulSet web whose template has claims data-web-N of the class disk."""
    made = workload("StatefulSet", "web", replicas)
    spec = claim_json("data", class_name="disk")["spec"]
    made["spec"]["volumeClaimTemplates"] = [{"metadata": {"name": "data"}, "spec": spec}]
    return made


def test_a_replica_goes_to_the_volume_that_its_claim_has(cluster: Cluster) -> None:
    cluster.write(
        node("n1"),
        node("n2"),
        pod("x", "6", on="n2"),
        _storage_class("disk", "disk.example.com"),
        _claim("data-web-0", class_name="disk", volume="a"),
        _volume("a", class_name="disk", claim="data-web-0", terms=terms_on(HOST, "n2")),
    )
    states = _states(cluster.ask("--pods", cluster.pods(_with_data(2))))
    # The second replica gets a new claim, and the emptier node.
    assert states == {"default/web-0": "n2", "default/web-1": "n1"}


@pytest.mark.parametrize(
    ("class_name", "annotations", "state"),
    [
        (None, {}, "n1"),
        ("", {}, "unschedulable"),
        (None, {"volume.beta.kubernetes.io/storage-class": ""}, "unschedulable"),
    ],
)
def test_a_claim_of_the_file_that_names_no_class_gets_the_default_one(
    cluster: Cluster, class_name: str | None, annotations: dict[str, str], state: str
) -> None:
    cluster.write(node("n1"), _storage_class("disk", "disk.example.com", default=True))
    claim = _claim("c", class_name=class_name, annotations=annotations)
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]
    found = cluster.ask("--pods", cluster.pods(claim, pod("a", volumes=volumes)))
    assert _states(found) == {"default/a": state}


@pytest.mark.parametrize(
    ("classes", "state"),
    [
        # The newest of several default classes counts.
        ({"a": "2026-01-01T00:00:00Z", "b": "2026-01-02T00:00:00Z"}, "n1"),
        ({"a": "2026-01-03T00:00:00Z", "b": "2026-01-02T00:00:00Z"}, "unschedulable"),
        ({"b": "2026-01-02T00:00:00Z", "a": "2026-01-02T00:00:00Z"}, "unschedulable"),
        ({"b": "2026-01-02T00:00:00Z", "a": None}, "n1"),
    ],
)
def test_of_several_default_classes_the_newest_counts(
    cluster: Cluster, classes: dict[str, str | None], state: str
) -> None:
    made = []
    for name, created in classes.items():
        # Nothing provisions volumes of class a.
        provisioner = "disk.example.com" if name == "b" else "kubernetes.io/no-provisioner"
        made.append(_storage_class(name, provisioner, default=True))
        made[-1]["metadata"]["creationTimestamp"] = created
    cluster.write(node("n1"), *made)
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]
    claim = _claim("c", class_name=None)
    found = cluster.ask("--pods", cluster.pods(claim, pod("a", volumes=volumes)))
    assert _states(found) == {"default/a": state}


def test_a_claim_and_its_volume_that_the_cluster_has_stay_bound(cluster: Cluster) -> None:
    cluster.write(
        node("n1"),
        node("n2"),
        pod("x", "6", on="n2"),
        _storage_class("disk", "disk.example.com"),
        _claim("c", class_name="disk", volume="a"),
        _volume("a", class_name="disk", claim="c", terms=terms_on(HOST, "n2")),
    )
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]
    # The manifests that they were made from, and one that is new.
    pods = cluster.pods(
        _claim("c", class_name="disk"),
        _volume("a", class_name="disk", terms=terms_on(HOST, "n2")),
        _claim("new", class_name="disk"),
        pod("web", volumes=volumes),
        pod("other", volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "new"}}]),
    )
    found = cluster.ask("--pods", pods)
    assert _states(found) == {"default/web": "n2", "default/other": "n1"}
    notes = [note.partition(": ")[2] for note in found["notes"] if "as the cluster has it" in note]
    assert notes == [
        "PersistentVolumeClaim default/c counts as the cluster has it",
        "PersistentVolume a counts as the cluster has it",
    ]


def test_a_simulation_leaves_the_log_levels_as_they_were(cluster: Cluster) -> None:
    cluster.write(node("n1"))
    logger = logging.getLogger("cluster")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        cluster.ask("--pods", cluster.pods(pod("a")))
        assert logger.level == logging.DEBUG
        assert cluster.run("--pods", "missing.yaml")[0] == 2
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(before)


def test_what_one_of_two_configurations_reads_is_read_of_a_cluster() -> None:
    plain, quotas = default_configuration(), read_configuration(_QUOTAS, obj="test")
    paths = [each.path for each in collections_read((plain, quotas))]
    assert len(paths) == len(set(paths))
    kinds = {each.resource.kind for each in collections_read((plain, quotas))}
    assert "ElasticQuota" in kinds
    assert kinds == {each.resource.kind for each in collections_read((quotas, plain))}
    assert kinds > {each.resource.kind for each in collections_read((plain,))}


def test_measured_usage_counts_as_when_the_dump_was_made(cluster: Cluster) -> None:
    def metric(name: str, cpu: str) -> Tree:
        return {
            "apiVersion": "slo.koordinator.sh/v1alpha1",
            "kind": "NodeMetric",
            "metadata": {"name": name},
            "status": {
                "updateTime": "2026-01-01T00:00:00Z",
                "nodeMetric": {"nodeUsage": {"resources": {"cpu": cpu, "memory": "1Gi"}}},
            },
        }

    cluster.write(node("busy"), node("idle"), metric("busy", "7"), metric("idle", "1"))
    pods = cluster.pods(pod("a", schedulerName="koord-scheduler"))
    found = cluster.ask("--pods", pods, "--config", cluster.config(KOORDINATOR), "--scores")
    assert found["at"] == "2026-01-01T00:00:00Z"
    assert found["pods"][0]["node"] == "idle"
    assert found["pods"][0]["scores"]["feasible"] == 1
    _, out, _ = cluster.run("--pods", pods, "--config", cluster.config(KOORDINATOR), "--scores")
    assert "1 of 2 nodes could take it" in out


def test_equal_seeds_give_equal_answers_in_json_and_yaml(cluster: Cluster) -> None:
    nodes = [node(f"n{number}") for number in range(40)]
    cluster.write(*nodes)
    pods = ("--pods", cluster.pods(workload("Job", "j", 20, "100m")))
    first = cluster.ask(*pods)
    assert cluster.ask(*pods) == first
    assert _states(cluster.ask(*pods, "--seed", "7")) != _states(first)
    (cluster.dump / "cluster.json").unlink()
    (cluster.dump / "nodes.yml").write_text(
        yaml.safe_dump({"apiVersion": "v1", "kind": "NodeList", "items": [
            {key: value for key, value in each.items() if key not in ("kind", "apiVersion")}
            for each in nodes
        ]})
    )  # fmt: skip
    assert _states(cluster.ask(*pods)) == _states(first)


def test_the_configuration_may_be_the_config_map_that_holds_it(cluster: Cluster) -> None:
    def config_map(data: Any) -> str:
        return yaml.safe_dump({"apiVersion": "v1", "kind": "ConfigMap", "data": data})

    cluster.write(node("n1"))
    pods = ("--pods", cluster.pods(pod("a", schedulerName="koord-scheduler")))
    held = cluster.config(config_map({"koord-scheduler-config": KOORDINATOR, "other": "x"}))
    assert _states(cluster.ask(*pods, "--config", held)) == {"default/a": "n1"}
    bad = KOORDINATOR.replace("LoadAwareScheduling", "LoadAware")
    status, _, err = cluster.run(*pods, "--config", cluster.config(config_map({"c": bad})))
    assert status == 2
    assert "config.yaml: data.c: profiles[0].plugins.filter.enabled[0].name" in err
    status, _, err = cluster.run(*pods, "--config", cluster.config(config_map({"c": "x"})))
    assert (status, "holds 0 texts with a KubeSchedulerConfiguration" in err) == (2, True)


def test_feature_gates_are_those_of_the_scheduler(cluster: Cluster) -> None:
    cluster.write(node("n1", 4))
    label = {"labels": {"koordinator.sh/priority": "9"}}
    pods = ("--pods", cluster.pods(pod("a", "3", priority=1), pod("b", "3", metadata=label)))
    assert _states(cluster.ask(*pods))["default/a"] == "n1"
    states = _states(cluster.ask(*pods, "--feature-gates", "PriorityTransformer=true"))
    assert states["default/b"] == "n1"
    status, _, err = cluster.run(*pods, "--feature-gates", "MultiQuotaTree=maybe")
    assert (status, "--feature-gates" in err) == (2, True)


# --- how many fit --------------------------------------------------------------------------------


def test_capacity_counts_what_fits_where_and_names_what_stops_the_next(cluster: Cluster) -> None:
    cluster.write(node("n1", cpu=5), node("n2", cpu=8), pod("x", "2", on="n2"))
    pods = cluster.pods(workload("Deployment", "web", 7, "2"), pod("huge", "9"))
    found = cluster.ask("--pods", pods, "--capacity")
    web, huge = found["capacity"]
    # The seven replicas are one question.
    assert (web["pod"], web["count"], web["more"]) == ("default/web-0", 5, False)
    assert web["nodes"] == {"n2": 3, "n1": 2}
    assert web["nearest"][0]["text"] == "2 of 2 nodes lack only cpu (1 of them 1 or less)"
    assert huge["count"] == 0
    status, out, _ = cluster.run("--pods", pods, "--capacity")
    assert status == 0
    assert "default/web-0: 5 more fit" in out
    assert "the next one: 0/2 nodes are available: 2 Insufficient cpu." in out
    limited = cluster.ask("--pods", pods, "--capacity", "--limit", "3")["capacity"][0]
    assert (limited["count"], limited["more"]) == (3, True)


def test_each_of_the_pods_that_are_counted_has_claims_of_its_own(cluster: Cluster) -> None:
    pinned = (
        _volume(f"v{number}", class_name="local", terms=terms_on(HOST, name))
        for number, name in enumerate(("n1", "n2", "n2"))
    )
    cluster.write(
        node("n1", cpu=3),
        node("n2", cpu=2),
        _storage_class("disk", "disk.example.com"),
        _storage_class("local", "kubernetes.io/no-provisioner", default=True),
        # Of the first replica; the pods that are counted have other claims.
        _claim("data-web-0", class_name="disk", volume="a"),
        _volume("a", class_name="disk", claim="data-web-0", terms=terms_on(HOST, "n2")),
        *pinned,
    )
    template = {"spec": claim_json("c", class_name=None)["spec"]}
    ephemeral = {"name": "tmp", "ephemeral": {"volumeClaimTemplate": template}}
    pods = (_with_data(2), pod("late", "100m", volumes=[ephemeral]))
    found = cluster.ask("--pods", cluster.pods(*pods), "--capacity")
    counted = {each["pod"]: each["nodes"] for each in found["capacity"]}
    # The replicas are one question.
    assert counted == {"default/web-0": {"n1": 3, "n2": 2}, "default/late": {"n2": 2, "n1": 1}}


# --- the whole cluster ---------------------------------------------------------------------------


def test_the_cluster_is_placed_again_except_what_a_scheduler_does_not_place(
    cluster: Cluster,
) -> None:
    owner = {"ownerReferences": [{"kind": "DaemonSet", "name": "d", "controller": True}]}
    static = {"annotations": {"kubernetes.io/config.mirror": "x"}}
    cluster.write(
        node("n1"),
        node("n2"),
        node("n3"),
        *(pod(f"p{n}", on=f"n{n % 3 + 1}") for n in range(6)),
        pod("agent", on="n3", metadata=owner),
        pod("static", on="n2", metadata=static),
        pod("other", on="n1", schedulerName="another"),
        {**pod("done", on="n1"), "status": {"phase": "Succeeded"}},
        pod("waits", "99"),
    )
    found = cluster.ask("--config", cluster.config(PACKED))
    states = _states(found)
    assert set(states) == {*(f"default/p{n}" for n in range(6)), "default/waits"}
    # Packed onto one node, the one on which another pod is already.
    assert len({states[f"default/p{n}"] for n in range(6)}) == 1
    assert (found["nodesUsed"], found["nodesUsedNow"]) == (1, 3)
    status, out, _ = cluster.run("--config", cluster.config(PACKED))
    assert status == 1
    assert "6 of 7 pods get a node" in out
    assert "nodes with such pods: 1, now 3" in out


@pytest.mark.parametrize("kind", ["persistentVolumeClaim", "ephemeral"])
def test_volumes_of_pods_that_are_placed_again_are_attached_nowhere(
    cluster: Cluster, kind: str
) -> None:
    driver = "disk.example.com"
    limits = {"drivers": [{"name": driver, "nodeID": "n1", "allocatable": {"count": 1}}]}
    storage = {"apiVersion": "storage.k8s.io/v1"}
    attachment = {
        "attacher": driver,
        "nodeName": "n1",
        "source": {"persistentVolumeName": "a"},
    }
    source: Tree = {"claimName": "old-v"}
    owner = {"kind": "Pod", "name": "old", "uid": "uid-old", "controller": True}
    if kind == "ephemeral":
        source = {"volumeClaimTemplate": {"spec": {}}}
    other = [{"name": "v", "persistentVolumeClaim": {"claimName": "other"}}]
    cluster.write(
        node("n1"),
        node("n2"),
        {**storage, "kind": "CSINode", "metadata": {"name": "n1"}, "spec": limits},
        {
            **storage,
            "kind": "VolumeAttachment",
            "metadata": {"name": "attached"},
            "spec": attachment,
        },
        _storage_class("disk", driver),
        _claim("old-v", class_name="disk", volume="a", metadata={"ownerReferences": [owner]}),
        _volume("a", class_name="disk", claim="old-v", csi=(driver, "a")),
        # The one place on n1 is needed for the other volume, which n1 alone reaches.
        _claim("other", class_name="disk", volume="b"),
        _volume(
            "b", class_name="disk", claim="other", csi=(driver, "b"), terms=terms_on(HOST, "n1")
        ),
        pod("needs", volumes=other, priority=1),
        pod("old", on="n1", volumes=[{"name": "v", kind: source}]),
    )
    assert _states(cluster.ask()) == {"default/needs": "n1", "default/old": "n2"}


def test_two_configurations_are_compared_from_the_same_start(cluster: Cluster) -> None:
    cluster.write(*(node(f"n{n}") for n in range(4)), *(pod(f"p{n}", on="n0") for n in range(4)))
    spread = cluster.config(PACKED.replace("MostAllocated", "LeastAllocated"), "spread.yaml")
    packed = cluster.config(PACKED)
    found = cluster.ask("--config", packed, "--against", spread)
    assert (found["nodesUsed"], found["nodesUsedAgainst"]) == (1, 4)
    assert len(found["differences"]) == 3
    for each in found["differences"]:
        assert each["node"] != each["againstNode"]
    same = cluster.ask("--config", packed, "--against", packed)
    assert same["differences"] == []
    _, out, _ = cluster.run("--config", packed, "--against", spread)
    assert "3 pods differ from the other configuration, which uses 4 nodes" in out


def test_pods_may_be_taken_as_those_of_a_profile(cluster: Cluster) -> None:
    cluster.write(node("n1"), pod("a", on="n1"))
    config = ("--config", cluster.config(KOORDINATOR))
    status, _, err = cluster.run(*config)
    assert status == 2
    assert "no pod names a scheduler of the configuration" in err
    assert _states(cluster.ask(*config, "--as", "koord-scheduler")) == {"default/a": "n1"}
    status, _, err = cluster.run(*config, "--as", "nobody")
    assert status == 2
    assert "its profiles: koord-scheduler" in err


# --- mistakes ------------------------------------------------------------------------------------


def _mistakes() -> list[tuple[str, Any, str]]:
    unnamed = pod("a")
    unnamed["metadata"].pop("name")
    return [
        ("no pod", [node("n9")], "has no Pod and no workload"),
        ("scheduler", [pod("a", schedulerName="x")], "Pod default/a: spec.schedulerName = 'x'"),
        (
            "class",
            [pod("a", priorityClassName="gold")],
            "Pod default/a: spec.priorityClassName = 'gold'",
        ),
        ("name", [unnamed], "metadata.name = '': is missing"),
        ("replicas", [workload("Deployment", "w", -1)], "Deployment w: spec.replicas = '-1'"),
        ("type", [pod("a", containers="x")], "Pod default/a: Expected `array`"),
        ("spec", [{**pod("a"), "spec": None}], "Pod default/a: spec = 'None'"),
    ]


@pytest.mark.parametrize(
    ("objects", "text"), [each[1:] for each in _mistakes()], ids=[each[0] for each in _mistakes()]
)
def test_mistakes_in_pods_name_file_object_and_field(
    cluster: Cluster, objects: list[Tree], text: str
) -> None:
    cluster.write(node("n1"))
    status, _, err = cluster.run("--pods", cluster.pods(*objects))
    assert status == 2
    assert text in err
    if text != "has no Pod and no workload":
        assert "pods.yaml" in err


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"items": [{"kind": ', "bad.json: is no object or list in JSON"),
        ('{"items": [{"kind": "Node"}]}', "bad.json: items[0].metadata.name"),
        ('{"items": [{"metadata": {"name": "x"}}]}', "bad.json: items[0].kind"),
        ('{"kind": "Pod", "metadata": {"name": "x"}}', "Pod x: metadata.namespace"),
    ],
)
def test_mistakes_in_a_dump_name_file_and_place(cluster: Cluster, content: str, text: str) -> None:
    cluster.write(node("n1"))
    (cluster.dump / "bad.json").write_text(content)
    status, _, err = cluster.run("--pods", cluster.pods(pod("a")))
    assert status == 2
    assert text in err


def test_an_object_that_cannot_be_read_is_left_out_and_named(cluster: Cluster) -> None:
    bad = node("bad")
    bad["spec"] = {"taints": "none"}
    config_map = {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "c"}}
    cluster.write(node("n1"), bad, config_map)
    found = cluster.ask("--pods", cluster.pods(pod("a")))
    assert found["nodes"] == 1
    notes = "\n".join(found["notes"])
    assert "Node bad is left out" in notes
    assert "1 ConfigMap objects are not read" in notes


def test_one_object_in_two_files_is_a_mistake(cluster: Cluster) -> None:
    cluster.write(node("n1"))
    cluster.write(node("n1"), name="more.json")
    status, _, err = cluster.run("--pods", cluster.pods(pod("a")))
    assert status == 2
    assert "Node n1" in err
    assert "stands in" in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--capacity",), "add --pods"),
        (("--pods", "x", "--against", "y"), "leave --pods out"),
        (("--config", "/nowhere"), "cannot read /nowhere"),
    ],
)
def test_options_that_do_not_go_together(
    cluster: Cluster, arguments: tuple[str, ...], text: str
) -> None:
    cluster.write(node("n1"))
    status, _, err = cluster.run(*arguments)
    assert (status, text in err) == (2, True), err


def test_a_cluster_that_is_not_there_is_explained(cluster: Cluster) -> None:
    status, _, err = cluster.run(cluster="/nowhere")
    assert status == 2
    assert "kubectl get -o json" in err
    status, _, err = cluster.run()
    assert status == 2
    assert "holds no *.json" in err


def test_help_teaches_by_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    out = capsys.readouterr().out
    assert "--capacity" in out
    assert "kubectl get nodes,pods,priorityclasses -A -o json > dump/cluster.json" in out


def test_other_commands_do_not_load_the_scheduler() -> None:
    code = (
        "import sys, koordctl.main\n"
        "koordctl.main.main(['status', '--run-dir', '/nowhere'])\n"
        "print([m for m in sys.modules if m == 'numpy' or m.startswith('cluster')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- a running cluster ---------------------------------------------------------------------------


@pytest.mark.apiserver
def test_a_cluster_is_read_with_rights_to_read_alone(cluster: Cluster) -> None:
    from kube.resources import NODES, PODS
    from tests.beds.apiserver import api_server
    from tests.cluster.conftest import grant, kubeconfig

    role = {
        "kind": "ClusterRole",
        "metadata": {"name": "reader"},
        "rules": [
            # Without the right to list ReplicaSets.
            {"apiGroups": [""], "resources": ["*"], "verbs": ["list"]},
            {"apiGroups": ["scheduling.k8s.io"], "resources": ["*"], "verbs": ["list"]},
        ],
    }
    with api_server() as server:

        async def prepare() -> None:
            async with server.client() as client:
                await grant(client, "nobody", role)
                for each in (node("n1", 4), node("n2", 8)):
                    body = json.dumps(each).encode()
                    await client.create(NODES, body)
                    name = each["metadata"]["name"]
                    status = json.dumps({"status": each["status"]}).encode()
                    await client.patch(NODES, name, status, subresource="status")
                    await client.patch(NODES, name, b'{"spec":{"taints":null}}')
                running = pod("a", "3", on="n2", automountServiceAccountToken=False)
                for member in ("uid", "creationTimestamp"):
                    running["metadata"].pop(member)
                await client.create(PODS, json.dumps(running).encode(), namespace="default")

        async def snapshot() -> bytes:
            async with server.client() as client:
                return await client.request("GET", PODS.path())

        asyncio.run(prepare())
        before = json.loads(asyncio.run(snapshot()))["items"]
        path = str(kubeconfig(server, cluster.folder, "nobody"))
        pods = cluster.pods(pod("b", "4"), pod("c", "5", priorityClassName="system-node-critical"))
        found = cluster.ask("--pods", pods, cluster=path)
        assert _states(found) == {"default/b": "n1", "default/c": "n2"}
        assert any("replicasets may not be read" in note for note in found["notes"])
        assert json.loads(asyncio.run(snapshot()))["items"] == before
        nothing = server.kubeconfig("koordlet")
        (cluster.folder / "kubeconfig").write_text(nothing)
        status, _, err = cluster.run("--pods", pods, cluster=path)
        assert status == 2
        assert "nodes" in err and "forbidden" in err
