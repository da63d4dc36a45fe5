"""Nodes and pods of irregular kinds, for a cluster that never stands still.

A unit is what comes and goes together: a pod, the pods of a workload, or a gang with its PodGroup.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.soak_oracle import GANG_LABEL, QOS_LABEL, QUOTA_LABEL
from kube.resources import PERSISTENT_VOLUME_CLAIMS, POD_GROUPS, Resource

Plain = dict[str, Any]

NAMESPACES: Final = ("default", "team-a", "team-b")
QUOTAS: Final = 12
RESERVED_APPS: Final = 20
"""Workloads for which there are reservations."""
CPUS: Final = (8, 16, 32)
GPUS: Final = 4
ZONE: Final = "topology.kubernetes.io/zone"
HOST: Final = "kubernetes.io/hostname"
LOCAL: Final = "local"
"""The storage class of local volumes."""
PREEMPTOR_PRIORITY: Final = 100_000
_GATE: Final = "soak/gate"
_ANNOTATION_GANG: Final = "gang.scheduling.koordinator.sh"


@dataclass(frozen=True)
class Unit:
    """objects: what has to exist before the pods, as (type, namespace, object). least: how many
    pods of a gang have to get nodes together; 0: not a gang. stuck: nothing can take the pods.
    gated: the pods have a scheduling gate that is to be removed."""

    name: str
    namespace: str
    pods: list[Plain]
    objects: list[tuple[Resource, str, Plain]] = field(default_factory=list)
    least: int = 0
    gated: bool = False

    @property
    def gang(self) -> str:
        return f"{self.namespace}/{self.name}"


def node(number: int, name: str) -> Plain:
    """Return a node. Every fifth has GPUs, every seventh a taint, every ninth offers batch CPU."""
    cpu = CPUS[number % len(CPUS)]
    amounts = {"cpu": str(cpu), "memory": f"{4 * cpu}Gi", "pods": "110"}
    if number % 5 == 0:
        amounts |= {"koordinator.sh/gpu-core": str(100 * GPUS)}
        amounts |= {"koordinator.sh/gpu-memory-ratio": str(100 * GPUS)}
    if number % 9 == 0:
        amounts |= {"kubernetes.io/batch-cpu": "4000", "kubernetes.io/batch-memory": "8Gi"}
    labels = {HOST: name, ZONE: f"z{number % 3}", "size": f"s{number % 4}"}
    return {
        "metadata": {"name": name, "labels": labels},
        "status": {"capacity": amounts, "allocatable": amounts},
    }


def taints(number: int) -> list[Plain]:
    """Return the taints that a node has from the beginning."""
    return [{"key": "team", "value": "a", "effect": "NoSchedule"}] if number % 7 == 0 else []


def topology(number: int, name: str) -> Plain:
    """Return the NodeResourceTopology of a node: two threads a core, one NUMA node."""
    cpus = CPUS[number % len(CPUS)]
    detail = [{"id": n, "core": n // 2, "socket": 0, "node": 0} for n in range(cpus)]
    annotations = {"node.koordinator.sh/cpu-topology": json.dumps({"detail": detail})}
    return {
        "metadata": {"name": name, "annotations": annotations},
        "topologyPolicies": ["None"],
        "zones": [],
    }


def device(name: str, *, unhealthy: int | None = None) -> Plain:
    """Return the Device of a node with GPUs; unhealthy: the minor of a broken one."""
    resources = {
        "koordinator.sh/gpu-core": "100",
        "koordinator.sh/gpu-memory-ratio": "100",
        "koordinator.sh/gpu-memory": "80Gi",
    }
    devices = [
        {
            "type": "gpu",
            "minor": minor,
            "id": f"GPU-{name}-{minor}",
            "health": minor != unhealthy,
            "resources": resources,
            "topology": {"socketID": -1, "nodeID": 0, "pcieID": str(minor // 2)},
        }
        for minor in range(GPUS)
    ]
    return {"metadata": {"name": name}, "spec": {"devices": devices}}


def quota(number: int, rng: random.Random) -> Plain:
    """Return the spec of a quota. Every third lends nothing, and few have room for all."""
    least = rng.randrange(20, 120)
    most = least + rng.randrange(0, 200)
    return {
        "min": {"cpu": str(least), "memory": f"{4 * least}Gi"},
        "max": {"cpu": str(most), "memory": f"{4 * most}Gi"},
    }


def reservation(name: str, rng: random.Random, scheduler: str) -> Plain:
    """Return a Reservation for the pods of one workload, for one pod or for several."""
    cpu = rng.choice((1, 2, 4))
    once = rng.random() < 0.3
    requested = {"cpu": str(cpu), "memory": f"{cpu}Gi"}
    container = {"name": "main", "image": "x", "resources": {"requests": requested}}
    app = f"r{rng.randrange(RESERVED_APPS)}"
    return {
        "metadata": {"name": name},
        "spec": {
            "owners": [{"labelSelector": {"matchLabels": {"app": app}}}],
            "template": {"spec": {"schedulerName": scheduler, "containers": [container]}},
            "allocateOnce": once,
            "ttl": rng.choice(("45s", "3m", "0s")),
        },
    }


class Kinds:
    """Draws units. `scheduler`: the schedulerName of their pods."""

    def __init__(self, rng: random.Random, scheduler: str) -> None:
        self._rng = rng
        self._scheduler = scheduler
        self._number = 0

    def draw(self) -> Unit:
        """Return a unit of a kind drawn by weight."""
        self._number += 1
        kinds = tuple(_WEIGHTS)
        (kind,) = self._rng.choices(kinds, [_WEIGHTS[each] for each in kinds])
        return kind(self, f"{kind.__name__.strip('_').replace('_', '-')}-{self._number}")

    def _pod(
        self,
        name: str,
        amounts: Mapping[str, str],
        *,
        labels: Mapping[str, str] | None = None,
        limited: bool = False,
        metadata: Plain | None = None,
        **spec: Any,
    ) -> Plain:
        resources: Plain = {"requests": dict(amounts)}
        if limited:
            resources["limits"] = dict(amounts)
        priority = self._rng.choice(("", "", "", "koord-prod", "koord-batch", "koord-free"))
        if priority and "priorityClassName" not in spec:
            spec["priorityClassName"] = priority
        if self._rng.random() < 0.2:
            spec["tolerations"] = [{"key": "team", "operator": "Exists"}]
        container = {"name": "main", "image": "x", "resources": resources}
        container |= spec.pop("container", {})
        return {
            "metadata": {"name": name, "labels": dict(labels or {}), **(metadata or {})},
            "spec": {
                "schedulerName": self._scheduler,
                "automountServiceAccountToken": False,
                "terminationGracePeriodSeconds": self._rng.choice((0, 0, 0, 30)),
                "containers": [container],
                **spec,
            },
        }

    def _amounts(self) -> dict[str, str]:
        cpu = self._rng.choice((100, 250, 500, 1000, 2000, 4000, 7000))
        memory = self._rng.choice((128, 512, 1024, 2048, 8192))
        return {"cpu": f"{cpu}m", "memory": f"{memory}Mi"}

    def _namespace(self) -> str:
        return self._rng.choice(NAMESPACES)

    def _plain(self, name: str) -> Unit:
        selector = {"nodeSelector": {"size": f"s{self._rng.randrange(4)}"}}
        more: Plain = selector if self._rng.random() < 0.2 else {}
        return Unit(name, self._namespace(), [self._pod(name, self._amounts(), **more)])

    def _several(self, name: str, **spec: Any) -> Unit:
        """The pods of a ReplicaSet, which are of one shape; the default spread counts."""
        owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": name, "uid": name}
        labels, amounts = {"app": name}, self._amounts()
        first = self._pod(
            name,
            amounts,
            labels=labels,
            metadata={"ownerReferences": [owner | {"controller": True}]},
            **spec,
        )
        pods = []
        for number in range(self._rng.randrange(2, 12)):
            metadata = first["metadata"] | {"name": f"{name}-{number}"}
            pods.append({"metadata": metadata, "spec": first["spec"]})
        return Unit(name, self._namespace(), pods)

    def _owned(self, name: str) -> Unit:
        return self._several(name)

    def _spread(self, name: str) -> Unit:
        constraint = {
            "maxSkew": 1,
            "topologyKey": ZONE,
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"app": name}},
        }
        return self._several(name, topologySpreadConstraints=[constraint])

    def _anti(self, name: str) -> Unit:
        term = {"topologyKey": HOST, "labelSelector": {"matchLabels": {"app": name}}}
        rule = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        return self._several(name, affinity={"podAntiAffinity": rule})

    def _gang(self, name: str) -> Unit:
        count = self._rng.randrange(2, 16)
        namespace = self._namespace()
        labels = {GANG_LABEL: name}
        first = self._pod(name, self._amounts(), labels=labels, priorityClassName="soak-gang")
        pods = [
            {"metadata": {"name": f"{name}-{n}", "labels": labels}, "spec": first["spec"]}
            for n in range(count)
        ]
        least = self._rng.randrange(2, count + 1)
        group = {
            "metadata": {"name": name},
            "spec": {"minMember": least, "scheduleTimeoutSeconds": 20},
        }
        return Unit(name, namespace, pods, [(POD_GROUPS, namespace, group)], least=least)

    def _pinned(self, name: str) -> Unit:
        cpu = self._rng.choice((1, 2, 4))
        labels = {QOS_LABEL: "LSR", "koordinator.sh/priority-class": "koord-prod"}
        amounts = {"cpu": str(cpu), "memory": "1Gi"}
        pod = self._pod(name, amounts, labels=labels, limited=True, priorityClassName="koord-prod")
        return Unit(name, self._namespace(), [pod])

    def _gpu(self, name: str) -> Unit:
        share = str(self._rng.choice((50, 100, 200, 400)))
        amounts = {"cpu": "1", "memory": "1Gi", "koordinator.sh/gpu-core": share}
        amounts["koordinator.sh/gpu-memory-ratio"] = share
        return Unit(name, self._namespace(), [self._pod(name, amounts, limited=True)])

    def _of_quota(self, name: str) -> Unit:
        labels = {QUOTA_LABEL: f"q{self._rng.randrange(QUOTAS)}"}
        pods = [
            self._pod(f"{name}-{number}", self._amounts(), labels=labels)
            for number in range(self._rng.randrange(1, 5))
        ]
        return Unit(name, self._namespace(), pods)

    def _reserved(self, name: str) -> Unit:
        labels = {"app": f"r{self._rng.randrange(RESERVED_APPS)}"}
        amounts = {"cpu": self._rng.choice(("500m", "1", "2")), "memory": "512Mi"}
        return Unit(name, self._namespace(), [self._pod(name, amounts, labels=labels)])

    def _volume(self, name: str) -> Unit:
        claim = {
            "metadata": {"name": name},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": LOCAL,
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }
        volume = {"name": "data", "persistentVolumeClaim": {"claimName": name}}
        pod = self._pod(name, {"cpu": "500m", "memory": "512Mi"}, volumes=[volume])
        # The bed's volume controller looks after the namespace default.
        return Unit(name, "default", [pod], [(PERSISTENT_VOLUME_CLAIMS, "default", claim)])

    def _port(self, name: str) -> Unit:
        port = self._rng.choice((8080, 8443, 9090))
        ports = {"ports": [{"containerPort": port, "hostPort": port}]}
        return Unit(name, self._namespace(), [self._pod(name, self._amounts(), container=ports)])

    def _batch(self, name: str) -> Unit:
        amounts = {"kubernetes.io/batch-cpu": "1000", "kubernetes.io/batch-memory": "1Gi"}
        labels = {QOS_LABEL: "BE"}
        pod = self._pod(name, amounts, labels=labels, limited=True, priorityClassName="koord-batch")
        return Unit(name, self._namespace(), [pod])

    def _gated(self, name: str) -> Unit:
        gates = [{"name": _GATE}]
        pod = self._pod(name, self._amounts(), schedulingGates=gates)
        return Unit(name, self._namespace(), [pod], gated=True)

    def _huge(self, name: str) -> Unit:
        return Unit(name, self._namespace(), [self._pod(name, {"cpu": "1000", "memory": "1Gi"})])

    def _preemptor(self, name: str) -> Unit:
        amounts = {"cpu": "6", "memory": "8Gi"}
        pod = self._pod(name, amounts, priorityClassName="soak-preemptor")
        return Unit(name, self._namespace(), [pod])


_WEIGHTS: Final[Mapping[Callable[[Kinds, str], Unit], int]] = {
    Kinds._plain: 30,
    Kinds._owned: 12,
    Kinds._spread: 5,
    Kinds._anti: 5,
    Kinds._gang: 6,
    Kinds._pinned: 8,
    Kinds._gpu: 6,
    Kinds._of_quota: 12,
    Kinds._reserved: 8,
    Kinds._volume: 4,
    Kinds._port: 4,
    Kinds._batch: 4,
    Kinds._gated: 2,
    Kinds._huge: 1,
    Kinds._preemptor: 2,
}
