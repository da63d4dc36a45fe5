"""The checks of the soak find what they are for, and nothing in a cluster that is right."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import soak_kinds
from benchmarks.scheduler_soak import differences, growth_mb_per_hour, log_kinds, per_minute
from benchmarks.soak_oracle import (
    CPUS_ANNOTATION,
    DEVICES_ANNOTATION,
    RESERVED_ANNOTATION,
    Room,
    Seen,
    violations,
)

Plain = dict[str, Any]


def _node(name: str, cpu: str = "4", **spec: Any) -> Plain:
    amounts = {"cpu": cpu, "memory": "8Gi", "pods": "10", "koordinator.sh/gpu-core": "400"}
    labels = {soak_kinds.ZONE: f"z-{name}"}
    metadata = {"name": name, "labels": labels}
    return {"metadata": metadata, "spec": spec, "status": {"allocatable": amounts}}


def _pod(
    name: str,
    node: str = "",
    *,
    cpu: str = "1",
    labels: dict[str, str] | None = None,
    annotations: dict[str, Any] | None = None,
    more: dict[str, str] | None = None,
    **spec: Any,
) -> Plain:
    resources = {"requests": {"cpu": cpu, **(more or {})}}
    container = {"resources": resources} | spec.pop("container", {})
    texts = {key: json.dumps(value) for key, value in (annotations or {}).items()}
    metadata = {"name": name, "namespace": "d", "labels": labels or {}, "annotations": texts}
    return {
        "metadata": metadata,
        "spec": {"nodeName": node, "containers": [container], **spec},
        "status": {},
    }


def _gpu(minor: int, core: str) -> Plain:
    return {"gpu": [{"minor": minor, "resources": {"koordinator.sh/gpu-core": core}}]}


_TOPOLOGY = soak_kinds.topology(0, "n")
_LSR = {"koordinator.sh/qosClass": "LSR"}
_RESERVATION = {
    "metadata": {"name": "r", "uid": "r"},
    "status": {"phase": "Available", "nodeName": "n", "allocatable": {"cpu": "3"}},
}


def _gang(name: str, node: str = "") -> Plain:
    return _pod(name, node, labels={"pod-group.scheduling.sigs.k8s.io": "g"})


def _gpu_pod(name: str, core: str) -> Plain:
    return _pod(
        name,
        "n",
        annotations={DEVICES_ANNOTATION: _gpu(0, core)},
        more={"koordinator.sh/gpu-core": core},
    )


def _pinned(name: str, cpus: str) -> Plain:
    return _pod(name, "n", labels=_LSR, annotations={CPUS_ANNOTATION: {"cpuset": cpus}})


def _with_port(name: str) -> Plain:
    return _pod(name, "n", container={"ports": [{"hostPort": 80}]})


@pytest.mark.parametrize(
    ("pods", "found"),
    [
        ([_pod("a", "n", cpu="3"), _pod("b", "n", cpu="2")], "5000 thousandths of cpu"),
        ([_pinned("a", "1"), _pinned("b", "1")], "CPU 1 belongs to d/a and d/b"),
        ([_pinned("a", "64")], "CPU 64 of d/a does not exist"),
        ([_pinned("a", "")], "0 CPUs for 1000 milli-cores"),
        ([_gpu_pod("a", "60"), _gpu_pod("b", "50")], "GPU 0 gives 110000 of 100000"),
        ([_pod("a", "n", more={"koordinator.sh/gpu-core": "50"})], "0 of 50000"),
        ([_gang("a", "n"), _gang("b")], "gang d/g: 1 members are bound, it needs 2"),
        ([_with_port("a"), _with_port("b")], "port 80 belongs to d/a and d/b"),
    ],
)
def test_what_is_wrong_is_found(pods: list[Plain], found: str) -> None:
    seen = Seen(
        [_node("n")],
        pods,
        devices=[soak_kinds.device("n")],
        topologies=[_TOPOLOGY],
        complete={"d/g": 2},
    )
    (text,) = violations(seen)
    assert found in text
    assert violations(replace(seen, pods=pods[1:] if len(pods) > 1 else [])) == []


def test_a_reservation_and_its_pods_count_together() -> None:
    inside = _pod("in", "n", cpu="2", annotations={RESERVED_ANNOTATION: {"uid": "r"}})
    seen = Seen([_node("n")], [inside, _pod("out", "n")], [_RESERVATION])
    assert violations(seen) == []
    assert violations(replace(seen, pods=[*seen.pods, _pod("more", "n")]))


def test_a_pod_that_waits_for_nothing_is_found() -> None:
    taint = {"key": "a", "effect": "NoSchedule"}
    nodes = [_node("full", "1"), _node("off", unschedulable=True), _node("bad", taints=[taint])]
    pods = [_pod("old", "full"), _pod("new")]
    seen = Seen(nodes, pods)
    assert Room(seen).stuck() == []
    (text,) = Room(replace(seen, nodes=[*nodes, _node("free")])).stuck()
    assert text == "d/new waits, although free has room for it"
    # Measured use may keep a pod off, and a quota without room in its minimum.
    measured = {"metadata": {"name": "free"}}
    assert Room(replace(seen, nodes=[_node("free")], metrics=[measured])).stuck() == []
    quota = {"metadata": {"name": "q"}, "spec": {"min": {"cpu": "0"}}}
    of_quota = _pod("new", labels={"quota.scheduling.koordinator.sh/name": "q"})
    assert Room(Seen([_node("free")], [of_quota], quotas=[quota])).stuck() == []


def _spread(name: str, node: str = "") -> Plain:
    constraint = {
        "maxSkew": 1,
        "topologyKey": soak_kinds.ZONE,
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"app": "a"}},
    }
    return _pod(name, node, labels={"app": "a"}, topologySpreadConstraints=[constraint])


def _apart(name: str, node: str = "") -> Plain:
    term = {"topologyKey": soak_kinds.HOST, "labelSelector": {"matchLabels": {"app": "a"}}}
    rule = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    return _pod(name, node, labels={"app": "a"}, affinity={"podAntiAffinity": rule})


def _of_gpu(name: str, node: str = "") -> Plain:
    whole = {"koordinator.sh/gpu-core": "400"}
    given = {"gpu": [{"minor": n, "resources": {"koordinator.sh/gpu-core": "100"}} for n in (0,)]}
    return _pod(name, node, more=whole, annotations={DEVICES_ANNOTATION: given} if node else {})


@pytest.mark.parametrize("kind", [_spread, _apart, _of_gpu])
def test_room_follows_the_rules_of_a_kind(kind: Any) -> None:
    nodes = [_node("a"), _node("b")]
    devices = [soak_kinds.device("a"), soak_kinds.device("b")]
    seen = Seen(nodes, [kind("first", "a"), kind("second")], devices=devices)
    assert list(Room(seen).nodes_for(seen.pods[1])) == ["b"]


def test_tables_are_compared_with_objects() -> None:
    seen = Seen([_node("n")], [_pod("a", "n"), _pod("b")], [_RESERVATION])
    assert differences(seen, {"n": ["d/a", "default/r"]}, 1) == []
    found = differences(seen, {"n": ["default/r", "d/x"]}, 2)
    assert found == [
        "tables of n: ['d/x'] only there, ['d/a'] only at the API server",
        "2 pods are in the queue, 1 wait at the API server",
    ]


def test_lines_of_a_log_are_counted_by_kind() -> None:
    lines = [
        json.dumps({"level": "info", "message": "pod a-1 on n17"}),
        json.dumps({"level": "info", "message": "pod b-2 on n3"}),
        json.dumps({"level": "error", "message": "bad", "traceback": "..."}),
        "Fatal Python error",
    ]
    assert log_kinds(lines) == Counter(
        {
            ("info", "pod * on *"): 2,
            ("traceback", "bad"): 1,
            ("not JSON", "Fatal Python error"): 1,
        }
    )


def test_growth_is_that_of_the_second_half() -> None:
    flat = [(10.0 * n, 100.0 if n > 20 else 3.0 * n) for n in range(61)]
    assert growth_mb_per_hour(flat) == 0
    assert growth_mb_per_hour([(10.0 * n, n / 36) for n in range(61)]) == pytest.approx(10)
    assert growth_mb_per_hour(flat[:5]) is None


def test_memory_is_shown_for_each_minute_that_was_sampled() -> None:
    samples = [(10.0, 80.2), (55.0, 90.6), (70.0, 91.0), (119.9, 92.4), (245.0, 93.0)]
    assert per_minute(samples) == [91, 92, 93]
    assert per_minute([]) == []
