"""Which pods belong to the workload of a pod, for the cluster's default spread.

The selectors of all Services that select the pod, and that of the ReplicaSet, StatefulSet or
ReplicationController that controls it, joined. Source: kube-scheduler's default selector.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import field

from apis.core import ObjectMeta
from apis.decode import Wire
from apis.meta import LabelSelector, LabelSelectorRequirement
from apis.scheduling_pod import SchedulingPod
from kube.cache import Cache, Index
from kube.client import Client
from kube.resources import Resource

SERVICES = Resource("", "v1", "services", "Service", True)
REPLICATION_CONTROLLERS = Resource(
    "", "v1", "replicationcontrollers", "ReplicationController", True
)
REPLICA_SETS = Resource("apps", "v1", "replicasets", "ReplicaSet", True)
STATEFUL_SETS = Resource("apps", "v1", "statefulsets", "StatefulSet", True)


class _EqualitySpec(Wire, frozen=True):
    selector: dict[str, str] = field(default_factory=dict)


class SelectsByEquality(Wire, frozen=True):
    """A Service or ReplicationController, as far as its selector goes."""

    metadata: ObjectMeta = ObjectMeta()
    spec: _EqualitySpec = _EqualitySpec()


class _LabelSpec(Wire, frozen=True):
    selector: LabelSelector | None = None


class SelectsByLabels(Wire, frozen=True):
    """A ReplicaSet or StatefulSet, as far as its selector goes."""

    metadata: ObjectMeta = ObjectMeta()
    spec: _LabelSpec = _LabelSpec()


class Workloads:
    """Follows the objects that select pods. The caller runs each cache in `caches`."""

    def __init__(self, client: Client) -> None:
        self._services: Cache[SelectsByEquality] = Cache(client, SERVICES, SelectsByEquality)
        self._controllers: Cache[SelectsByEquality] = Cache(
            client, REPLICATION_CONTROLLERS, SelectsByEquality
        )
        self._replica_sets: Cache[SelectsByLabels] = Cache(client, REPLICA_SETS, SelectsByLabels)
        self._stateful_sets: Cache[SelectsByLabels] = Cache(client, STATEFUL_SETS, SelectsByLabels)
        self._by_namespace: Index[str, SelectsByEquality] = self._services.index(
            lambda service: (service.metadata.namespace,)
        )
        self.caches = (
            self._services,
            self._controllers,
            self._replica_sets,
            self._stateful_sets,
        )

    def selector_of(self, pod: SchedulingPod) -> LabelSelector | None:
        """Return what selects the pods of a pod's workload; None if nothing selects it."""
        selectors = list(self._selectors(pod))
        if not selectors:
            return None
        equal: dict[str, str] = {}
        expressions: list[LabelSelectorRequirement] = []
        for selector in selectors:
            equal |= selector.match_labels
            expressions += selector.match_expressions
        return LabelSelector(match_labels=equal, match_expressions=tuple(expressions))

    def _selectors(self, pod: SchedulingPod) -> Iterator[LabelSelector]:
        labels = pod.metadata.labels
        for service in self._by_namespace.get(pod.metadata.namespace):
            wanted = service.spec.selector
            if wanted and wanted.items() <= labels.items():
                yield LabelSelector(match_labels=wanted)
        for owner in pod.metadata.owner_references:
            if not owner.controller:
                continue
            namespace = pod.metadata.namespace
            if owner.kind == "ReplicationController":
                controller = self._controllers.get(owner.name, namespace=namespace)
                if controller is not None and controller.spec.selector:
                    yield LabelSelector(match_labels=controller.spec.selector)
            elif owner.kind in ("ReplicaSet", "StatefulSet"):
                sets = self._replica_sets if owner.kind == "ReplicaSet" else self._stateful_sets
                found = sets.get(owner.name, namespace=namespace)
                if found is not None and found.spec.selector is not None:
                    yield found.spec.selector
