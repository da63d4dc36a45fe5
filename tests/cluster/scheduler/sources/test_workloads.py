"""Which pods are spread together without a constraint of their own."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from apis.meta import LabelSelector, LabelSelectorRequirement
from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.sources.workloads import Workloads
from kube.client import Client
from tests.cluster.scheduler.making import make_pod


def _workloads(*objects: tuple[str, str, dict[str, Any]]) -> Workloads:
    """Return workloads with objects: kind, name, spec."""

    async def make() -> Workloads:
        return Workloads(cast(Client, None))

    workloads = asyncio.run(make())
    caches = {each.resource.kind: each for each in workloads.caches}
    for number, (kind, name, spec) in enumerate(objects):
        namespace, _, name = name.rpartition("/")
        metadata = {"name": name, "namespace": namespace or "default"}
        obj = {"metadata": metadata | {"resourceVersion": str(number + 1)}, "spec": spec}
        caches[kind].take(msgspec.json.encode({"type": "ADDED", "object": obj}))
    return workloads


def _pod(kind: str = "", *, controller: bool = True) -> SchedulingPod:
    pod = make_pod("p", labels={"app": "web", "tier": "a"})
    owners: list[dict[str, Any]] = []
    if kind:
        owners = [{"kind": kind, "name": "w", "uid": "u", "controller": controller}]
    return msgspec.convert(
        msgspec.to_builtins(pod)
        | {"metadata": msgspec.to_builtins(pod.metadata) | {"ownerReferences": owners}},
        SchedulingPod,
    )


_WEB = {"app": "web"}
_IN = LabelSelectorRequirement(key="tier", operator="In", values=("a",))
_IN_JSON = {"key": "tier", "operator": "In", "values": ["a"]}


@pytest.mark.parametrize(
    ("objects", "pod", "selector"),
    [
        ((), _pod(), None),
        ((("Service", "s", {"selector": _WEB}),), _pod(), LabelSelector(match_labels=_WEB)),
        ((("Service", "s", {"selector": {}}),), _pod(), None),
        ((("Service", "s", {"selector": {"app": "db"}}),), _pod(), None),
        ((("Service", "s", {"selector": _WEB | {"more": "x"}}),), _pod(), None),
        ((("Service", "other/s", {"selector": _WEB}),), _pod(), None),
        (
            (("Service", "s", {"selector": _WEB}), ("Service", "t", {"selector": {"tier": "a"}})),
            _pod(),
            LabelSelector(match_labels={"app": "web", "tier": "a"}),
        ),
        (
            (("ReplicaSet", "w", {"selector": {"matchLabels": _WEB}}),),
            _pod("ReplicaSet"),
            LabelSelector(match_labels=_WEB),
        ),
        (
            (("StatefulSet", "w", {"selector": {"matchExpressions": [_IN_JSON]}}),),
            _pod("StatefulSet"),
            LabelSelector(match_expressions=(_IN,)),
        ),
        (
            (("ReplicationController", "w", {"selector": _WEB}),),
            _pod("ReplicationController"),
            LabelSelector(match_labels=_WEB),
        ),
        (
            (
                ("Service", "s", {"selector": _WEB}),
                ("ReplicaSet", "w", {"selector": {"matchExpressions": [_IN_JSON]}}),
            ),
            _pod("ReplicaSet"),
            LabelSelector(match_labels=_WEB, match_expressions=(_IN,)),
        ),
        ((("ReplicaSet", "w", {"selector": {"matchLabels": _WEB}}),), _pod("StatefulSet"), None),
        ((("ReplicaSet", "v", {"selector": {"matchLabels": _WEB}}),), _pod("ReplicaSet"), None),
        ((("ReplicaSet", "w", {}),), _pod("ReplicaSet"), None),
        (
            (("ReplicaSet", "w", {"selector": {"matchLabels": _WEB}}),),
            _pod("ReplicaSet", controller=False),
            None,
        ),
        ((("ReplicationController", "w", {}),), _pod("ReplicationController"), None),
    ],
)
def test_the_selector_of_a_pods_workload(
    objects: tuple[tuple[str, str, dict[str, Any]], ...],
    pod: SchedulingPod,
    selector: LabelSelector | None,
) -> None:
    assert _workloads(*objects).selector_of(pod) == selector


def test_an_owner_that_controls_nothing_hides_no_other() -> None:
    pod = _pod("ReplicaSet")
    meta = pod.metadata
    other = msgspec.structs.replace(meta.owner_references[0], name="x", controller=False)
    owners = (other, *meta.owner_references)
    pod = msgspec.structs.replace(
        pod, metadata=msgspec.structs.replace(meta, owner_references=owners)
    )
    workloads = _workloads(("ReplicaSet", "w", {"selector": {"matchLabels": _WEB}}))
    assert workloads.selector_of(pod) == LabelSelector(match_labels=_WEB)


def test_the_objects_of_all_namespaces_are_followed() -> None:
    resources = [cache.resource for cache in _workloads().caches]
    assert [(each.path(), each.kind, each.namespaced) for each in resources] == [
        ("/api/v1/services", "Service", True),
        ("/api/v1/replicationcontrollers", "ReplicationController", True),
        ("/apis/apps/v1/replicasets", "ReplicaSet", True),
        ("/apis/apps/v1/statefulsets", "StatefulSet", True),
    ]
