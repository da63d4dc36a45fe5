"""Manifests of the scheduler: account and rights, ConfigMap, Deployment.

Names are upstream's: docs/facts/scheduler.md, "Installed objects". The configuration is that of
upstream's chart. The rights are those of `rights`. tools/generate_manifests.py writes the manifests
to deploy/scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import yaml

from apis.keys import HUAWEI_NPU_CORE
from cluster.manifests import (
    CONTAINER_SECURITY,
    NAMESPACE,
    POD_SECURITY,
    Account,
    Rule,
    rule,
    spread_over_nodes,
)
from cluster.scheduler.exact.devices.templates import DATA_KEY
from cluster.scheduler.rights import (
    CLUSTER_WIDE,
    IN_NAMESPACE,
    LEASE_NAME,
    NODE_LOCKS,
    TEMPLATES_NAME,
    Right,
)

ACCOUNT: Final = "koord-scheduler"
IMAGE: Final = "koord-scheduler:0.1.0"
NODE_LOCKS_FOLDER: Final = "node-locks"
CONFIG_NAME: Final = "koord-scheduler-config"
_GROUP_VERSION: Final = "kubescheduler.config.k8s.io/v1"


_VERBS: Final = ("get", "list", "watch", "create", "update", "patch", "delete")
"""In the order in which rules show them."""


def rules(rights: Iterable[Right]) -> list[Rule]:
    """Return the rules that grant these rights, with resources of equal verbs together."""
    verbs: dict[tuple[str, str, tuple[str, ...]], set[str]] = {}
    for right in rights:
        key = (right.resource.group, right.plural, right.names)
        verbs.setdefault(key, set()).update(right.verbs)
    merged: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for (group, plural, names), of_it in verbs.items():
        ordered = tuple(verb for verb in _VERBS if verb in of_it)
        merged.setdefault((group, ordered, names), []).append(plural)
    return [
        rule(group, sorted(plurals), ordered, *names)
        for (group, ordered, names), plurals in sorted(merged.items())
    ]


def rbac(namespace: str = NAMESPACE) -> list[dict[str, Any]]:
    """Return the service account and its rights."""
    account = Account(ACCOUNT, namespace)
    return [
        account.manifest(),
        *account.cluster_role(
            "koord-scheduler-role", "koord-scheduler-rolebinding", rules(CLUSTER_WIDE)
        ),
        *account.role(
            "koord-scheduler-leader-election-role",
            "koord-scheduler-leader-election-rolebinding",
            rules(IN_NAMESPACE),
        ),
    ]


def node_locks_rbac(namespace: str = NAMESPACE) -> list[dict[str, Any]]:
    """Return the rights that locks of nodes need beside those of `rbac`."""
    role = "koord-scheduler-node-locks-role"
    binding = "koord-scheduler-node-locks-rolebinding"
    return Account(ACCOUNT, namespace).cluster_role(role, binding, rules(NODE_LOCKS))


def _enabled(*names: str, only: bool = False) -> dict[str, Any]:
    """Return the plugins of a point; "Name:5" has a weight. only: instead of the default ones."""
    entries: list[dict[str, Any]] = []
    for each in names:
        name, _, weight = each.partition(":")
        entries.append({"name": name, "weight": int(weight)} if weight else {"name": name})
    disabled = {"disabled": [{"name": "*"}]} if only else {}
    return {**disabled, "enabled": entries}


def _arguments(plugin: str, **arguments: object) -> dict[str, Any]:
    named = {"apiVersion": _GROUP_VERSION, "kind": f"{plugin}Args"}
    return {"name": plugin, "args": named | arguments}


def configuration(namespace: str = NAMESPACE) -> dict[str, Any]:
    """Return the KubeSchedulerConfiguration of upstream's chart, with its default values."""
    koordinator = ("NodeNUMAResource", "DeviceShare")
    plugins = {
        "preEnqueue": _enabled("Coscheduling"),
        "queueSort": _enabled("PrioritySort", only=True),
        "preFilter": _enabled(
            "SchedulingHint", "Coscheduling", "Reservation", *koordinator, "ElasticQuota"
        ),
        "filter": _enabled("Reservation", "LoadAwareScheduling", *koordinator),
        "postFilter": _enabled("Reservation", "Coscheduling", "ElasticQuota", only=True),
        "preScore": _enabled("Reservation", "Coscheduling"),
        "score": _enabled(
            "LoadAwareScheduling:1",
            "NodeNUMAResource:1",
            "DeviceShare:1",
            "Reservation:5000",
            "Coscheduling:1",
        ),
        "reserve": _enabled(
            "Reservation", "LoadAwareScheduling", *koordinator, "Coscheduling", "ElasticQuota"
        ),
        "permit": _enabled("Coscheduling"),
        "preBind": _enabled(*koordinator, "Reservation", "Coscheduling", "DefaultPreBind"),
        "bind": _enabled("Reservation", "DefaultBinder", only=True),
        "postBind": _enabled("Coscheduling"),
    }
    packed = ("cpu", "memory", "kubernetes.io/batch-cpu", "kubernetes.io/batch-memory")
    arguments = [
        _arguments(
            "NodeResourcesFit",
            scoringStrategy={
                "type": "LeastAllocated",
                "resources": [{"name": name, "weight": 1} for name in packed],
            },
        ),
        _arguments(
            "LoadAwareScheduling",
            filterExpiredNodeMetrics=False,
            nodeMetricExpirationSeconds=300,
            resourceWeights={"cpu": 1, "memory": 1},
            usageThresholds={"cpu": 65, "memory": 95},
            estimatedScalingFactors={"cpu": 85, "memory": 70},
        ),
        _arguments("ElasticQuota", quotaGroupNamespace=namespace),
        _arguments("Coscheduling", enablePreemption=True, awareNetworkTopology=True),
        _arguments(
            "DeviceShare",
            gpuShareUnsupportedModels=[{"vendor": "huawei", "model": "Ascend-310P3-300I-DUO"}],
            # Upstream's chart leaves the default, the namespace koordinator-system.
            gpuSharedResourceTemplatesConfig={"configMapNamespace": namespace},
        ),
    ]
    return {
        "apiVersion": _GROUP_VERSION,
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {
            "leaderElect": True,
            "resourceLock": "leases",
            "resourceName": LEASE_NAME,
            "resourceNamespace": namespace,
        },
        "profiles": [
            {"schedulerName": "koord-scheduler", "plugins": plugins, "pluginConfig": arguments}
        ],
    }


def config_map(namespace: str = NAMESPACE) -> dict[str, Any]:
    """Return the ConfigMap with the file of --config."""
    text = yaml.safe_dump(configuration(namespace), sort_keys=False)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": CONFIG_NAME, "namespace": namespace},
        "data": {CONFIG_NAME: text},
    }


def gpu_templates(namespace: str = NAMESPACE) -> dict[str, Any]:
    """Return the ConfigMap with the sizes in which Huawei's NPUs can be divided, upstream's."""
    tree = {
        model: {
            name: {
                resource: amount
                for resource, amount in zip(_NPU_RESOURCES, amounts.split("/"), strict=True)
                if amount != "-"
            }
            for name, amounts in templates.items()
        }
        for models, templates in _NPU_TEMPLATES
        for model in models
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": TEMPLATES_NAME, "namespace": namespace},
        "data": {DATA_KEY: yaml.safe_dump(tree)},
    }


_NPU_RESOURCES: Final = (
    HUAWEI_NPU_CORE,
    "huawei.com/npu-cpu",
    "huawei.com/npu-dvpp",
    "koordinator.sh/gpu-memory",
)
_NPU_TEMPLATES: Final[tuple[tuple[tuple[str, ...], Mapping[str, str]], ...]] = (
    (
        ("huawei-Ascend-310P", "huawei-Ascend-310P3"),
        {
            "vir01": "1/1/12/3Gi",
            "vir02": "2/2/25/6Gi",
            "vir02_1c": "2/1/25/6Gi",
            "vir04": "4/4/50/12Gi",
            "vir04_3c": "4/3/50/12Gi",
            "vir04_3c_ndvpp": "4/3/-/12Gi",
            "vir04_4c_dvpp": "4/4/100/12Gi",
        },
    ),
    (
        ("huawei-Ascend-910",),
        {
            "vir02": "2/1/-/2Gi",
            "vir04": "4/1/-/4Gi",
            "vir08": "8/3/-/8Gi",
            "vir16": "16/7/-/16Gi",
        },
    ),
    (
        ("huawei-Ascend-910B1", "huawei-Ascend-910B2", "huawei-Ascend-910B2C"),
        {
            "vir03_1c_8g": "3/1/-/8Gi",
            "vir06_1c_16g": "6/1/-/16Gi",
            "vir12_3c_32g": "12/3/-/32Gi",
        },
    ),
    (
        ("huawei-Ascend-910B3",),
        {"vir05_1c_16g": "5/1/-/16Gi", "vir10_3c_32g": "10/3/-/32Gi"},
    ),
    (
        ("huawei-Ascend-910B4",),
        {
            "vir05_1c_8g": "5/1/25/8Gi",
            "vir10_3c_16g": "10/3/50/16Gi",
            "vir10_3c_16g_nm": "10/3/-/16Gi",
            "vir10_4c_16g_m": "10/4/100/16Gi",
        },
    ),
)
"""Models, and the amounts of each template in the order of _NPU_RESOURCES."""


def deployment(namespace: str = NAMESPACE) -> dict[str, Any]:
    """Return the Deployment: two replicas, of which one schedules."""
    labels = {"koord-app": "koord-scheduler"}
    container = {
        "name": "scheduler",
        "image": IMAGE,
        "command": ["/koord-scheduler"],
        "args": [
            "--port=10251",
            # Readers of the secure port present tokens.
            "--authentication-skip-lookup=true",
            "--v=4",
            "--config=/config/koord-scheduler.config",
        ],
        "ports": [
            {"containerPort": 10251, "name": "metrics", "protocol": "TCP"},
            {"containerPort": 10259, "name": "https", "protocol": "TCP"},
        ],
        # Chosen, as for the manager: three failures in a row are kubelet's default for readiness,
        # and a process without an answer for two minutes is restarted.
        "readinessProbe": _probe("/readyz", periodSeconds=5),
        "livenessProbe": _probe("/livez", periodSeconds=20, failureThreshold=6),
        # The CPU limit is upstream's: decisions are made by one thread. Memory: 1.5 GB are
        # the goal with 5,000 nodes and 150,000 pods.
        "resources": {
            "requests": {"cpu": "500m", "memory": "512Mi"},
            "limits": {"cpu": "1", "memory": "2Gi"},
        },
        "securityContext": dict(CONTAINER_SECURITY),
        "volumeMounts": [
            {"name": "config", "mountPath": "/config", "readOnly": True},
            # TLS reads private keys from files only: they are written to memory.
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    key_to_path = {"key": CONFIG_NAME, "path": "koord-scheduler.config"}
    spec = {
        "serviceAccountName": ACCOUNT,
        # Pods of the cluster wait for it: it must not be evicted for one of them.
        "priorityClassName": "system-cluster-critical",
        # Kubernetes' default. A stop takes at most 8 s: the bindings under way have what the lease
        # leaves, 4 s, and the last events 3 s.
        "terminationGracePeriodSeconds": 30,
        "securityContext": dict(POD_SECURITY),
        "affinity": spread_over_nodes(labels),
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": CONFIG_NAME, "items": [key_to_path]}},
            {"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        ],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "koord-scheduler", "namespace": namespace, "labels": labels},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            # A replica that waits for the lease is ready, so a rollout ends with the old leader's
            # end, and a new one follows at once: the lease is released at a stop.
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": "100%", "maxUnavailable": 0},
            },
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def _probe(path: str, **times: int) -> Mapping[str, Any]:
    return {"httpGet": {"path": path, "port": 10251}, **times}


def files(namespace: str = NAMESPACE) -> dict[str, list[dict[str, Any]]]:
    """Return the documents of each file, in the order in which they are applied.

    The namespace is in deploy/manager. A file in a folder of its own is for some clusters only.
    """
    return {
        "10-rbac.yaml": rbac(namespace),
        "20-config.yaml": [config_map(namespace)],
        "25-gpu-templates.yaml": [gpu_templates(namespace)],
        "30-scheduler.yaml": [deployment(namespace)],
        f"{NODE_LOCKS_FOLDER}/10-rbac.yaml": node_locks_rbac(namespace),
    }
