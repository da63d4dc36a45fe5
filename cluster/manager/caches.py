"""The caches of one manager process, one for each type of object that it watches.

Controllers and admission share the caches, so both see the same state and each type is listed once.
"""

from __future__ import annotations

import threading
from typing import Any

from apis.core import ConfigMap, Namespace, Node, Pod, PriorityClassObject
from apis.device import Device
from apis.nodemetric import NodeMetric
from apis.profile import ClusterColocationProfile
from apis.quota import ElasticQuota, ElasticQuotaProfile
from apis.topology import NodeResourceTopology
from cluster.manager.flags import Settings
from cluster.manager.objects import (
    StoredNodeSLO,
    detach_node_slo,
    shrink_node,
    shrink_node_metric,
    shrink_pod,
)
from cluster.quota_tree import QuotaTree, quota_node
from kube.cache import Cache, Change, Event
from kube.client import Client
from kube.resources import (
    CONFIG_MAPS,
    DEVICES,
    ELASTIC_QUOTAS,
    NAMESPACES,
    NODE_METRICS,
    NODE_RESOURCE_TOPOLOGIES,
    NODE_SLOS,
    NODES,
    PODS,
    PRIORITY_CLASSES,
    PROFILES,
    QUOTA_PROFILES,
    Resource,
)


class Caches:
    """The caches of one process. The caller runs each cache in `all`."""

    def __init__(self, client: Client, settings: Settings) -> None:
        self._client = client
        self.all: list[Cache[Any]] = []
        config_namespace = settings.text("config-namespace")
        enhanced_namespace = settings.text("pod-enhanced-validator-config-namespace")
        watched = settings.text("namespace")

        self.nodes = self._cache(NODES, Node, shrink=shrink_node)
        self.pods = self._cache(PODS, Pod, namespace=watched, shrink=shrink_pod)
        self.config_maps = self._cache(CONFIG_MAPS, ConfigMap, namespace=config_namespace)
        self.enhanced_maps = (
            self.config_maps
            if enhanced_namespace == config_namespace
            else self._cache(CONFIG_MAPS, ConfigMap, namespace=enhanced_namespace)
        )
        self.node_metrics = self._cache(NODE_METRICS, NodeMetric, shrink=shrink_node_metric)
        self.node_slos = self._cache(NODE_SLOS, StoredNodeSLO, shrink=detach_node_slo)
        self.topologies = self._cache(NODE_RESOURCE_TOPOLOGIES, NodeResourceTopology)
        self.devices = self._cache(DEVICES, Device)
        self.quotas = self._cache(ELASTIC_QUOTAS, ElasticQuota)
        self.quota_profiles = self._cache(QUOTA_PROFILES, ElasticQuotaProfile)
        self.profiles = self._cache(PROFILES, ClusterColocationProfile)
        self.namespaces = self._cache(NAMESPACES, Namespace)
        self.priority_classes = self._cache(PRIORITY_CLASSES, PriorityClassObject)

        self._tree: QuotaTree | None = None
        # Large reviews read the tree in a thread, while the event loop changes the quotas.
        self._tree_lock = threading.Lock()
        self.quotas.subscribe(self._quota_changed)

    def _cache(self, resource: Resource, type_: type[Any], **options: Any) -> Cache[Any]:
        cache: Cache[Any] = Cache(self._client, resource, type_, **options)
        self.all.append(cache)
        return cache

    def quota_tree(self) -> QuotaTree:
        """Return the tree of the cached quotas."""
        with self._tree_lock:
            if self._tree is None:
                self._tree = QuotaTree(self.quotas.items.values())
            return self._tree

    def _quota_changed(self, event: Event[ElasticQuota]) -> None:
        # The scheduler and admission write usage into quotas all the time, which does not change
        # the tree. Building a new tree for each pod would add milliseconds to every review.
        old = quota_node(event.old) if event.old is not None else None
        if event.change is not Change.MODIFIED or quota_node(event.new) != old:
            with self._tree_lock:
                self._tree = None

    def waiting(self) -> list[str]:
        """Return the types whose caches are not synced yet."""
        return [cache.resource.plural for cache in self.all if not cache.synced]
