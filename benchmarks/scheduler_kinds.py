"""Kinds of pods that the scheduler's benchmark binds, and the objects that each kind needs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kube.resources import (
    DEVICES,
    ELASTIC_QUOTAS,
    NODE_RESOURCE_TOPOLOGIES,
    POD_GROUPS,
    RESERVATIONS,
    Resource,
)

Plain = dict[str, Any]
Made = tuple[Resource, str, Plain]
"""A resource type, a namespace or "", and an object."""

_REPLICA_SETS: Final = Resource("apps", "v1", "replicasets", "ReplicaSet", True)
_NAMESPACE: Final = "default"
_WORKLOADS: Final = 20
_GANG: Final = 100
"""Pods of a gang."""
_QUOTAS: Final = 500
_RESERVATIONS: Final = 2000
_GPUS: Final = 8
_CPUS: Final = 32


@dataclass(frozen=True)
class Kind:
    """pod: the labels and the further spec of a pod by its number. needs: what has to exist before
    the pods, for so many nodes and pods. stuck: every so manieth pod fits nowhere; 0: none.
    kubernetes: kube-scheduler schedules such pods, too."""

    pod: Callable[[int], Plain]
    needs: Callable[[int, int], Iterator[Made]] = lambda nodes, pods: iter(())
    stuck: int = 0
    kubernetes: bool = True

    def bindable(self, pods: int) -> int:
        """Return how many of the first `pods` pods fit."""
        return pods - (len(range(0, pods, self.stuck)) if self.stuck else 0)


def _app(number: int) -> str:
    return f"a{number % _WORKLOADS}"


def _pod(
    number: int,
    amounts: Mapping[str, str] | None = None,
    *,
    labels: Mapping[str, str] | None = None,
    limited: bool = False,
    owners: list[Plain] | None = None,
    **spec: Any,
) -> Plain:
    """Return a pod. amounts: what it requests. limited: limits equal requests."""
    requests = {"cpu": "100m", "memory": "64Mi", **(amounts or {})}
    resources = {"requests": requests, "limits": requests if limited else {}}
    metadata: Plain = {"name": f"p{number}", "labels": {"app": _app(number), **(labels or {})}}
    if owners:
        metadata["ownerReferences"] = owners
    return {
        "metadata": metadata,
        "spec": {
            "schedulerName": "bench",
            "automountServiceAccountToken": False,
            "containers": [{"name": "main", "image": "x", "resources": resources}],
            **spec,
        },
    }


def _selector(number: int) -> Plain:
    return {"matchLabels": {"app": _app(number)}}


# --- Kubernetes' own features --------------------------------------------------------------------


def _owned(number: int) -> Plain:
    name = _app(number)
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": name, "uid": f"uid-{name}"}
    return _pod(number, owners=[{**owner, "controller": True}])


def _replica_sets(nodes: int, pods: int) -> Iterator[Made]:
    for number in range(_WORKLOADS):
        template = {
            "metadata": {"labels": {"app": _app(number)}},
            "spec": {"containers": [{"name": "main", "image": "x"}]},
        }
        spec = {"replicas": 0, "selector": _selector(number), "template": template}
        yield _REPLICA_SETS, _NAMESPACE, {"metadata": {"name": _app(number)}, "spec": spec}


def _cpu(number: int) -> Plain:
    return {"cpu": f"{100 + 10 * (number % 20)}m"}


def _affinity(number: int) -> Plain:
    expression = {"key": "size", "operator": "In", "values": ["s0", "s1"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    return _pod(number, _cpu(number), affinity={"nodeAffinity": required})


def _spread(number: int) -> Plain:
    constraint = {
        "maxSkew": 1,
        "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": _selector(number),
    }
    return _pod(number, topologySpreadConstraints=[constraint])


def _anti(number: int) -> Plain:
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": _selector(number)}
    rule = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    return _pod(number, affinity={"podAntiAffinity": rule})


def _stuck(number: int) -> Plain:
    return _pod(number, {"cpu": "100m" if number % 5 else "100"})


# --- Koordinator's features ----------------------------------------------------------------------


def _gang(number: int) -> Plain:
    return _pod(number, labels={"pod-group.scheduling.sigs.k8s.io": f"g{number // _GANG}"})


def _groups(nodes: int, pods: int) -> Iterator[Made]:
    for number in range(0, pods, _GANG):
        spec = {"minMember": min(_GANG, pods - number)}
        group = {"metadata": {"name": f"g{number // _GANG}"}, "spec": spec}
        yield POD_GROUPS, _NAMESPACE, group


def _of_quota(number: int) -> Plain:
    return _pod(number, labels={"quota.scheduling.koordinator.sh/name": f"q{number % _QUOTAS}"})


def _quotas(nodes: int, pods: int) -> Iterator[Made]:
    most = {"cpu": "100", "memory": "1Ti"}
    for number in range(_QUOTAS):
        spec = {"min": {"cpu": "10", "memory": "40Gi"}, "max": most}
        yield ELASTIC_QUOTAS, _NAMESPACE, {"metadata": {"name": f"q{number}"}, "spec": spec}


def _pinned(number: int) -> Plain:
    labels = {"koordinator.sh/qosClass": "LSR", "koordinator.sh/priority-class": "koord-prod"}
    return _pod(number, {"cpu": "2"}, labels=labels, limited=True)


def _topologies(nodes: int, pods: int) -> Iterator[Made]:
    half = _CPUS // 2
    detail = [
        {"id": n, "core": n // 2, "socket": n // half, "node": n // half} for n in range(_CPUS)
    ]
    annotations = {"node.koordinator.sh/cpu-topology": json.dumps({"detail": detail})}
    amount = [
        {"name": "cpu", "capacity": str(half), "allocatable": str(half), "available": str(half)}
    ]
    zones = [{"name": f"node-{n}", "type": "Node", "resources": amount} for n in range(2)]
    for number in range(nodes):
        yield (
            NODE_RESOURCE_TOPOLOGIES,
            "",
            {
                "metadata": {"name": f"n{number}", "annotations": annotations},
                "topologyPolicies": ["None"],
                "zones": zones,
            },
        )


def _with_gpu(number: int) -> Plain:
    one = {"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory-ratio": "100"}
    return _pod(number, one, limited=True)


def _devices(nodes: int, pods: int) -> Iterator[Made]:
    resources = {
        "koordinator.sh/gpu-core": "100",
        "koordinator.sh/gpu-memory-ratio": "100",
        "koordinator.sh/gpu-memory": "80Gi",
    }
    for number in range(nodes):
        devices = [
            {
                "type": "gpu",
                "minor": minor,
                "id": f"GPU-{number}-{minor}",
                "health": True,
                "resources": resources,
                "topology": {"socketID": -1, "nodeID": minor // 4, "pcieID": str(minor // 2)},
            }
            for minor in range(_GPUS)
        ]
        yield DEVICES, "", {"metadata": {"name": f"n{number}"}, "spec": {"devices": devices}}


def _reservations(nodes: int, pods: int) -> Iterator[Made]:
    """Available ones on all nodes in turns, each for the pods of one workload."""
    amounts = {"cpu": "1", "memory": "1Gi"}
    for number in range(_RESERVATIONS):
        container = {"name": "main", "image": "x", "resources": {"requests": amounts}}
        template = {"spec": {"schedulerName": "bench", "containers": [container]}}
        condition = {"type": "Scheduled", "status": "True", "reason": "Scheduled"}
        yield (
            RESERVATIONS,
            "",
            {
                "metadata": {"name": f"r{number}"},
                "spec": {
                    "owners": [{"labelSelector": _selector(number)}],
                    "template": template,
                    "allocateOnce": False,
                    "ttl": "0s",
                },
                "status": {
                    "phase": "Available",
                    "nodeName": f"n{number % nodes}",
                    "allocatable": amounts,
                    "conditions": [condition],
                },
            },
        )


KINDS: Final[Mapping[str, Kind]] = {
    "plain": Kind(_pod),
    "owned": Kind(_owned, _replica_sets),
    "shapes": Kind(lambda number: _pod(number, _cpu(number))),
    "affinity": Kind(_affinity),
    "spread": Kind(_spread),
    "anti": Kind(_anti),
    "stuck": Kind(_stuck, stuck=5),
    "gang": Kind(_gang, _groups, kubernetes=False),
    "quota": Kind(_of_quota, _quotas, kubernetes=False),
    "pinned": Kind(_pinned, _topologies, kubernetes=False),
    "gpu": Kind(_with_gpu, _devices, kubernetes=False),
    "reserved": Kind(_pod, _reservations, kubernetes=False),
}
"""plain: pods of 20 workloads. owned: by a ReplicaSet, so the default spread counts. shapes: 20
sizes. affinity: these with node affinity. spread: hard, over three zones. anti: no two pods of a
workload on a node. stuck: every fifth pod fits nowhere. gang: of 100. quota: 500 quotas. pinned:
LSR, CPUs of their own. gpu: one GPU each, on nodes with eight. reserved: 2,000 reservations."""
