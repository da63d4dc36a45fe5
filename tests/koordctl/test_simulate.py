"""`koordctl simulate`: what would happen to pods, over dumps and a cluster that is only read."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections import Counter
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
)
from tests.koordctl.simulated import (
    Cluster,
    states_of,
)

_QUOTAS = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: koord-scheduler
  plugins:
    preFilter: {enabled: [{name: ElasticQuota}]}
    reserve: {enabled: [{name: ElasticQuota}]}
"""


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
    states = states_of(found)
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
    assert states_of(cluster.ask("--pods", pods)) == {
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
    assert states_of(found) == {"default/new": "n1", "default/old": "unschedulable"}
    found = cluster.ask("--pods", cluster.pods(pod("new", "4", priority=9)))
    assert states_of(found) == {"default/new": "n1"}
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
    assert states_of(found) == {"default/new": "unschedulable"}
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
    assert set(states_of(found).values()) == {"n1"}
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
    assert Counter(states_of(cluster.ask(*arguments)).values()) == {"n1": 2, "unschedulable": 1}


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
    assert states_of(cluster.ask(*pods, "--seed", "7")) != states_of(first)
    (cluster.dump / "cluster.json").unlink()
    (cluster.dump / "nodes.yml").write_text(
        yaml.safe_dump({"apiVersion": "v1", "kind": "NodeList", "items": [
            {key: value for key, value in each.items() if key not in ("kind", "apiVersion")}
            for each in nodes
        ]})
    )  # fmt: skip
    assert states_of(cluster.ask(*pods)) == states_of(first)


def test_the_configuration_may_be_the_config_map_that_holds_it(cluster: Cluster) -> None:
    def config_map(data: Any) -> str:
        return yaml.safe_dump({"apiVersion": "v1", "kind": "ConfigMap", "data": data})

    cluster.write(node("n1"))
    pods = ("--pods", cluster.pods(pod("a", schedulerName="koord-scheduler")))
    held = cluster.config(config_map({"koord-scheduler-config": KOORDINATOR, "other": "x"}))
    assert states_of(cluster.ask(*pods, "--config", held)) == {"default/a": "n1"}
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
    assert states_of(cluster.ask(*pods))["default/a"] == "n1"
    states = states_of(cluster.ask(*pods, "--feature-gates", "PriorityTransformer=true"))
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
    limited = cluster.ask("--pods", pods, "--capacity", "--limit", "1")["capacity"][0]
    assert (limited["count"], limited["more"]) == (1, True)


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
    states = states_of(found)
    assert set(states) == {*(f"default/p{n}" for n in range(6)), "default/waits"}
    # Packed onto one node, the one on which another pod is already.
    assert len({states[f"default/p{n}"] for n in range(6)}) == 1
    assert (found["nodesUsed"], found["nodesUsedNow"]) == (1, 3)
    status, out, _ = cluster.run("--config", cluster.config(PACKED))
    assert status == 1
    assert "6 of 7 pods get a node" in out
    assert "nodes with such pods: 1, now 3" in out


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
    assert states_of(cluster.ask(*config, "--as", "koord-scheduler")) == {"default/a": "n1"}
    status, _, err = cluster.run(*config, "--as", "nobody")
    assert status == 2
    assert "its profiles: koord-scheduler" in err


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
        assert states_of(found) == {"default/b": "n1", "default/c": "n2"}
        assert any("replicasets may not be read" in note for note in found["notes"])
        assert json.loads(asyncio.run(snapshot()))["items"] == before
        nothing = server.kubeconfig("koordlet")
        (cluster.folder / "kubeconfig").write_text(nothing)
        status, _, err = cluster.run("--pods", pods, cluster=path)
        assert status == 2
        assert "nodes" in err and "forbidden" in err
