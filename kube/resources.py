"""Which resource lives at which path of the API server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource type of one API version."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, *, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the URL path of a collection, an object or a subresource of it.

        Without a namespace a namespaced resource is addressed across all namespaces.
        """
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root]
        if self.namespaced and namespace:
            parts.append(f"namespaces/{quote(namespace, safe='')}")
        parts.append(self.plural)
        if name:
            parts.append(quote(name, safe=""))
        if subresource:
            parts.append(quote(subresource, safe=""))
        return "/".join(parts)


PODS: Final = Resource("", "v1", "pods", "Pod", True)
NODES: Final = Resource("", "v1", "nodes", "Node", False)
NAMESPACES: Final = Resource("", "v1", "namespaces", "Namespace", False)
CONFIG_MAPS: Final = Resource("", "v1", "configmaps", "ConfigMap", True)
SECRETS: Final = Resource("", "v1", "secrets", "Secret", True)
EVENTS: Final = Resource("", "v1", "events", "Event", True)
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases", "Lease", True)
PRIORITY_CLASSES: Final = Resource(
    "scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", False
)
CRDS: Final = Resource(
    "apiextensions.k8s.io",
    "v1",
    "customresourcedefinitions",
    "CustomResourceDefinition",
    False,
)
MUTATING_WEBHOOKS: Final = Resource(
    "admissionregistration.k8s.io",
    "v1",
    "mutatingwebhookconfigurations",
    "MutatingWebhookConfiguration",
    False,
)
VALIDATING_WEBHOOKS: Final = Resource(
    "admissionregistration.k8s.io",
    "v1",
    "validatingwebhookconfigurations",
    "ValidatingWebhookConfiguration",
    False,
)
NODE_SLOS: Final = Resource("slo.koordinator.sh", "v1alpha1", "nodeslos", "NodeSLO", False)
NODE_METRICS: Final = Resource("slo.koordinator.sh", "v1alpha1", "nodemetrics", "NodeMetric", False)
DEVICES: Final = Resource("scheduling.koordinator.sh", "v1alpha1", "devices", "Device", False)
PROFILES: Final = Resource(
    "config.koordinator.sh",
    "v1alpha1",
    "clustercolocationprofiles",
    "ClusterColocationProfile",
    False,
)
ELASTIC_QUOTAS: Final = Resource(
    "scheduling.sigs.k8s.io", "v1alpha1", "elasticquotas", "ElasticQuota", True
)
POD_GROUPS: Final = Resource("scheduling.sigs.k8s.io", "v1alpha1", "podgroups", "PodGroup", True)
QUOTA_PROFILES: Final = Resource(
    "quota.koordinator.sh", "v1alpha1", "elasticquotaprofiles", "ElasticQuotaProfile", True
)
CLUSTER_NETWORK_TOPOLOGIES: Final = Resource(
    "scheduling.koordinator.sh",
    "v1alpha1",
    "clusternetworktopologies",
    "ClusterNetworkTopology",
    False,
)
NODE_RESOURCE_TOPOLOGIES: Final = Resource(
    "topology.node.k8s.io", "v1alpha1", "noderesourcetopologies", "NodeResourceTopology", False
)
RESERVATIONS: Final = Resource(
    "scheduling.koordinator.sh", "v1alpha1", "reservations", "Reservation", False
)
PERSISTENT_VOLUME_CLAIMS: Final = Resource(
    "", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", True
)
PERSISTENT_VOLUMES: Final = Resource("", "v1", "persistentvolumes", "PersistentVolume", False)
STORAGE_CLASSES: Final = Resource("storage.k8s.io", "v1", "storageclasses", "StorageClass", False)
CSI_NODES: Final = Resource("storage.k8s.io", "v1", "csinodes", "CSINode", False)
CSI_DRIVERS: Final = Resource("storage.k8s.io", "v1", "csidrivers", "CSIDriver", False)
CSI_STORAGE_CAPACITIES: Final = Resource(
    "storage.k8s.io", "v1", "csistoragecapacities", "CSIStorageCapacity", True
)
VOLUME_ATTACHMENTS: Final = Resource(
    "storage.k8s.io", "v1", "volumeattachments", "VolumeAttachment", False
)
SCHEDULE_EXPLANATIONS: Final = Resource(
    "scheduling.koordinator.sh",
    "v1alpha1",
    "scheduleexplanations",
    "ScheduleExplanation",
    True,
)
