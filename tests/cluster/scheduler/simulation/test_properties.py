"""Simulations of random and of damaged clusters."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.errors import InputError
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.simulation.answers import Question, count_capacity, place_all, place_pods
from cluster.scheduler.simulation.objects import FileObject
from cluster.scheduler.simulation.simulation import moment_of
from tests.cluster.scheduler.simulation.dumps import KOORDINATOR, Tree, node, pod, workload

_PLAIN = read_configuration(
    "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration", obj="plain"
)
_KOORDINATOR = read_configuration(KOORDINATOR, obj="koordinator")
_DAMAGE: tuple[Any, ...] = (None, "", "x", -1, 1.5, True, [], {}, [None], {"a": None}, "9" * 40)


def _quiet(text: str) -> None:
    """Take progress that nobody looks at."""


def _objects(*trees: Tree) -> tuple[FileObject, ...]:
    result = []
    for tree in trees:
        group, slash, _ = str(tree.get("apiVersion", "v1")).partition("/")
        meta = tree["metadata"]
        result.append(
            FileObject(
                group if slash else "",
                tree["kind"],
                meta.get("namespace", ""),
                meta["name"],
                msgspec.json.encode(tree),
                "test",
            )
        )
    return tuple(result)


def _question(cluster: tuple[FileObject, ...], configuration: Any = _PLAIN) -> Question:
    return Question(cluster, configuration, now=moment_of(cluster))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_nothing_is_overbooked_and_what_is_refused_fits_nowhere(seed: int) -> None:
    random = Random(seed)
    cpus = {f"n{number}": random.randrange(1, 12) for number in range(random.randrange(1, 8))}
    running = [
        pod(f"r{number}", str(random.randrange(1, 4)), on=random.choice(list(cpus)))
        for number in range(random.randrange(6))
    ]
    waiting = {f"w{n}": random.randrange(1, 6) for n in range(random.randrange(1, 12))}
    cluster = _objects(*(node(name, cpu) for name, cpu in cpus.items()), *running)
    used: Counter[str] = Counter()
    for each in running:
        requests = each["spec"]["containers"][0]["resources"]["requests"]
        used[each["spec"]["nodeName"]] += int(requests["cpu"])
    pods = _objects(*(pod(name, str(cpu)) for name, cpu in waiting.items()))
    found = place_pods(_question(cluster), pods, progress=_quiet)
    for each in found["pods"]:
        if each["node"]:
            used[each["node"]] += waiting[each["pod"].partition("/")[2]]
            # What ran there before may be more than the node has.
            assert used[each["node"]] <= cpus[each["node"]]
    for each in found["pods"]:
        if not each["node"]:
            wanted = waiting[each["pod"].partition("/")[2]]
            assert all(cpus[name] - used[name] < wanted for name in cpus)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_capacity_is_the_sum_over_nodes_of_what_fits(seed: int) -> None:
    random = Random(seed)
    cpus = {f"n{number}": random.randrange(1, 12) for number in range(random.randrange(1, 8))}
    wanted = random.randrange(1, 5)
    cluster = _objects(*(node(name, cpu) for name, cpu in cpus.items()))
    pods = _objects(pod("a", str(wanted)))
    (found,) = count_capacity(_question(cluster), pods, limit=1000, progress=_quiet)["capacity"]
    expected = {name: cpu // wanted for name, cpu in cpus.items() if cpu >= wanted}
    assert found["nodes"] == expected
    assert found["count"] == sum(expected.values())


def test_an_expired_report_holds_its_node_back_for_placements_and_capacity() -> None:
    metric = {
        "apiVersion": "slo.koordinator.sh/v1alpha1",
        "kind": "NodeMetric",
        "metadata": {"name": "n"},
        "status": {
            "updateTime": "2026-01-01T00:00:00Z",
            "nodeMetric": {"nodeUsage": {"resources": {"cpu": "1", "memory": "1Gi"}}},
        },
    }
    cluster, pods = _objects(node("n"), metric), _objects(pod("a", "3"))
    made = moment_of(cluster)
    for later, fits in ((0.0, True), (86400.0, False)):
        question = Question(
            cluster, _KOORDINATOR, now=made + later, scheduler_name="koord-scheduler"
        )
        (placed,) = place_pods(question, pods, progress=_quiet)["pods"]
        assert bool(placed["node"]) == fits
        (found,) = count_capacity(question, pods, limit=9, progress=_quiet)["capacity"]
        assert found["count"] == int(fits)


def _places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values inside a tree."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree)
    result = []
    for key, value in inner:
        result.append((*path, key))
        if isinstance(value, dict | list):
            result += _places(value, (*path, key))
    return result


def _damaged(tree: Tree, random: Random) -> Tree:
    copy: Tree = msgspec.json.decode(msgspec.json.encode(tree))
    # The name and the kind are read where files are split into objects.
    kept = (("kind",), ("apiVersion",), ("metadata",), ("metadata", "name"))
    places = [path for path in _places(copy) if path not in (*kept, ("metadata", "namespace"))]
    *outer, last = random.choice(places)
    at: Any = copy
    for key in outer:
        at = at[key]
    at[last] = random.choice(_DAMAGE)
    return copy


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_damaged_objects_are_errors_with_a_place_or_left_out(seed: int) -> None:
    random = Random(seed)
    metric = {
        "apiVersion": "slo.koordinator.sh/v1alpha1",
        "kind": "NodeMetric",
        "metadata": {"name": "n1"},
        "status": {
            "updateTime": "2026-01-01T00:00:00Z",
            "nodeMetric": {"nodeUsage": {"resources": {"cpu": "1", "memory": "1Gi"}}},
        },
    }
    owner = {"ownerReferences": [{"kind": "DaemonSet", "name": "d", "controller": True}]}
    trees = [
        node("n1"),
        metric,
        pod("r", on="n1", metadata={**owner, "annotations": {"a": "b"}}),
        pod("s", on="n1", schedulerName="koord-scheduler"),
        pod("a", on="n1"),
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": "high"},
            "value": 9,
        },
    ]
    claim = {
        "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    trees.append(
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {
                "name": "disk",
                "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
            },
            "provisioner": "disk.example.com",
            "volumeBindingMode": "WaitForFirstConsumer",
        }
    )
    koord: Tree = {"schedulerName": "koord-scheduler"}
    replicas = workload("StatefulSet", "db", 2, "1", **koord)
    replicas["spec"]["volumeClaimTemplates"] = [claim]
    scratch = {"name": "s", "ephemeral": {"volumeClaimTemplate": {"spec": claim["spec"]}}}
    asked = [
        pod("a", priorityClassName="high", **koord),
        workload("Deployment", "w", 2, "1", volumes=[scratch], **koord),
        replicas,
    ]
    which = random.randrange(len(trees) + len(asked))
    if which < len(trees):
        trees[which] = _damaged(trees[which], random)
    else:
        asked[which - len(trees)] = _damaged(asked[which - len(trees)], random)
    cluster, pods = _objects(*trees), _objects(*asked)
    question = _question(cluster, _KOORDINATOR)
    for whole in (False, True):
        try:
            if whole:
                found = place_all(question, against=None, progress=_quiet)
            else:
                found = place_pods(question, pods, progress=_quiet)
        except InputError as error:
            assert error.obj
        else:
            msgspec.json.encode(found)


def test_progress_is_shown_for_every_500_pods() -> None:
    """What the last attempt placed is confirmed after it, so it is not among the placed ones."""
    cluster = _objects(*(node(f"n{n}", 200, more={"memory": "1Ti"}) for n in range(11)))
    shown: list[str] = []
    pods = _objects(workload("Deployment", "d", 1001, "100m"))
    place_pods(_question(cluster), pods, progress=shown.append)
    assert shown == ["500 attempts, 499 pods placed", "1000 attempts, 999 pods placed"]
    shown.clear()
    count_capacity(
        _question(cluster), _objects(pod("p", "100m")), limit=1001, progress=shown.append
    )
    assert shown == ["500 more default/p fit so far", "1000 more default/p fit so far"]
