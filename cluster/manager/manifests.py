"""Manifests of the manager: namespace, rights, Service, Deployment, webhooks, classes, ConfigMap.

Names are upstream's: docs/facts/manager.md, "Installed objects". The rights are exactly those that
this code uses; tests/cluster/test_rights.py runs the manager under them.
tools/generate_manifests.py writes the manifests to deploy/manager.
"""

from __future__ import annotations

from typing import Any, Final

from apis.keys import KOORDINATOR_NAMESPACE, SLO_CONFIG_NAME
from cluster.webhook.configuration import (
    MUTATING_NAME,
    SERVICE_NAME,
    VALIDATING_NAME,
    configuration_manifest,
)

NAMESPACE: Final = KOORDINATOR_NAMESPACE
ACCOUNT: Final = "koord-manager"
SECRET_NAME: Final = "koordinator-webhook-certs"
IMAGE: Final = "koord-manager:0.1.0"

_FOLLOW: Final = ("list", "watch")


def _rule(
    group: str, resources: tuple[str, ...], verbs: tuple[str, ...], *names: str
) -> dict[str, Any]:
    rule: dict[str, Any] = {
        "apiGroups": [group],
        "resources": list(resources),
        "verbs": list(verbs),
    }
    if names:
        rule["resourceNames"] = list(names)
    return rule


CLUSTER_RULES: Final = (
    _rule("", ("namespaces",), _FOLLOW),
    # get, patch: the controller of colocation profiles, gate ColocationProfileController.
    _rule("", ("pods",), ("get", *_FOLLOW, "patch")),
    _rule("", ("nodes",), (*_FOLLOW, "patch")),
    _rule("", ("nodes/status",), ("patch",)),
    _rule("", ("events",), ("create", "patch")),
    _rule("scheduling.k8s.io", ("priorityclasses",), _FOLLOW),
    _rule(
        "admissionregistration.k8s.io",
        ("mutatingwebhookconfigurations",),
        ("get", *_FOLLOW, "patch"),
        MUTATING_NAME,
    ),
    _rule(
        "admissionregistration.k8s.io",
        ("validatingwebhookconfigurations",),
        ("get", *_FOLLOW, "patch"),
        VALIDATING_NAME,
    ),
    _rule("config.koordinator.sh", ("clustercolocationprofiles",), _FOLLOW),
    _rule("quota.koordinator.sh", ("elasticquotaprofiles",), (*_FOLLOW, "patch")),
    _rule("scheduling.koordinator.sh", ("devices",), _FOLLOW),
    _rule("scheduling.sigs.k8s.io", ("elasticquotas",), ("get", *_FOLLOW, "create", "patch")),
    _rule(
        "slo.koordinator.sh", ("nodeslos", "nodemetrics"), (*_FOLLOW, "create", "patch", "delete")
    ),
    _rule("topology.node.k8s.io", ("noderesourcetopologies",), (*_FOLLOW, "patch")),
)

NAMESPACE_RULES: Final = (
    _rule("", ("configmaps",), _FOLLOW),
    # A name cannot restrict create.
    _rule("", ("secrets",), ("create",)),
    _rule("", ("secrets",), ("get", "patch"), SECRET_NAME),
    _rule("coordination.k8s.io", ("leases",), ("create",)),
    _rule("coordination.k8s.io", ("leases",), ("get", "update"), "koordinator-manager"),
)

_RBAC: Final = "rbac.authorization.k8s.io"


def rbac(namespace: str = NAMESPACE) -> list[dict[str, Any]]:
    """Return the service account and its rights."""
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": ACCOUNT, "namespace": namespace},
        },
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "koord-manager-role"},
            "rules": list(CLUSTER_RULES),
        },
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "koord-manager-rolebinding"},
            "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": "koord-manager-role"},
            "subjects": [subject],
        },
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "Role",
            "metadata": {"name": "koord-leader-election-role", "namespace": namespace},
            "rules": list(NAMESPACE_RULES),
        },
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "koord-leader-election-rolebinding", "namespace": namespace},
            "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": "koord-leader-election-role"},
            "subjects": [subject],
        },
    ]


def namespace_manifest(namespace: str = NAMESPACE) -> dict[str, Any]:
    """Return the namespace; its label keeps the pod webhooks away from the manager's own pods."""
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": namespace, "labels": {"control-plane": "koordinator"}},
    }


def service(namespace: str = NAMESPACE) -> dict[str, Any]:
    """Return the Service of the webhooks; ports are upstream's."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": SERVICE_NAME, "namespace": namespace},
        "spec": {
            "ports": [{"port": 443, "targetPort": 9876}],
            "selector": {"koord-app": "koord-manager"},
        },
    }


def priority_classes() -> list[dict[str, Any]]:
    """Return the four PriorityClasses, with the values of upstream."""
    return [
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": name},
            "value": value,
            "preemptionPolicy": "PreemptLowerPriority",
        }
        for name, value in (
            ("koord-prod", 9000),
            ("koord-mid", 7000),
            ("koord-batch", 5000),
            ("koord-free", 3000),
        )
    ]


def config_map(namespace: str = NAMESPACE) -> dict[str, Any]:
    """Return the first slo-controller-config; its label selects it for the validating webhook."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": SLO_CONFIG_NAME,
            "namespace": namespace,
            "labels": {"koordinator.sh/configmap-type": "slo-controller-config"},
        },
        "data": {
            "colocation-config": '{"enable": true}\n',
            "resource-threshold-config": '{"clusterStrategy": {"enable": true}}\n',
        },
    }


def deployment(namespace: str = NAMESPACE) -> dict[str, Any]:
    """Return the Deployment: two replicas, of which one leads and both serve webhooks."""
    labels = {"koord-app": "koord-manager"}
    container = {
        "name": "manager",
        "image": IMAGE,
        "command": ["/koord-manager"],
        "args": [
            "--enable-leader-election",
            "--metrics-addr=:8080",
            "--health-probe-addr=:8000",
            f"--leader-election-namespace={namespace}",
            f"--config-namespace={namespace}",
            # Upstream's 30 and 50 need three minutes to update 5,000 nodes, these 25 s.
            "--rest-config-qps=200",
            "--rest-config-burst=400",
            "--sync-period=0",
        ],
        "env": [
            {
                "name": "POD_NAMESPACE",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}},
            },
            {"name": "WEBHOOK_PORT", "value": "9876"},
        ],
        "ports": [
            {"containerPort": 9876, "name": "webhook-server", "protocol": "TCP"},
            {"containerPort": 8080, "name": "metrics", "protocol": "TCP"},
            {"containerPort": 8000, "name": "health", "protocol": "TCP"},
        ],
        # Chosen: a replica leaves the Service at most 15 s after it stopped to be ready (three
        # failures are kubelet's default), and is restarted after two minutes without an answer.
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": 8000}, "periodSeconds": 5},
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": 8000},
            "periodSeconds": 20,
            "failureThreshold": 6,
        },
        # Upstream's. Measured use with 5,000 nodes: 8 % of a core and 190 MB.
        "resources": {
            "requests": {"cpu": "500m", "memory": "256Mi"},
            "limits": {"cpu": "1", "memory": "1Gi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # TLS reads private keys from files only: they are written to memory, a few KiB each.
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    spec = {
        "serviceAccountName": ACCOUNT,
        # Kubernetes' default. A stop takes at most 18 s: 5 of drain, 10 for the last reviews and 3
        # for the last events.
        "terminationGracePeriodSeconds": 30,
        "securityContext": {
            "runAsNonRoot": True,
            # The user "nonroot" of common base images.
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "affinity": {
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": 100,
                        "podAffinityTerm": {
                            "labelSelector": {"matchLabels": labels},
                            "topologyKey": "kubernetes.io/hostname",
                        },
                    }
                ]
            }
        },
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "koord-manager", "namespace": namespace, "labels": labels},
        "spec": {
            "replicas": 2,
            # Chosen: endpoints usually follow within this time, so that a rollout keeps one replica
            # reachable.
            "minReadySeconds": 3,
            "selector": {"matchLabels": labels},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": "100%", "maxUnavailable": 0},
            },
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def webhook_configurations(namespace: str = NAMESPACE) -> list[dict[str, Any]]:
    """Return both webhook configuration objects."""
    return [
        configuration_manifest(mutating=mutating, namespace=namespace) for mutating in (True, False)
    ]


def files(namespace: str = NAMESPACE) -> dict[str, list[dict[str, Any]]]:
    """Return the documents of each file, in the order in which they are applied."""
    return {
        "00-namespace.yaml": [namespace_manifest(namespace)],
        "10-rbac.yaml": rbac(namespace),
        "20-priority-classes.yaml": priority_classes(),
        "30-slo-controller-config.yaml": [config_map(namespace)],
        "40-manager.yaml": [service(namespace), deployment(namespace)],
        "50-webhooks.yaml": webhook_configurations(namespace),
    }
