"""Manifests of the manager: namespace, rights, Service, Deployment, webhooks, classes, ConfigMap.

Names are upstream's: docs/facts/manager.md, "Installed objects". The rights are exactly those that
this code uses; tests/cluster/test_rights.py runs the manager under them.
tools/generate_manifests.py writes the manifests to deploy/manager.
"""

from __future__ import annotations

from typing import Any, Final

from apis.keys import SLO_CONFIG_NAME
from cluster.manifests import (
    CONTAINER_SECURITY,
    NAMESPACE,
    POD_SECURITY,
    Account,
    namespace_manifest,
    rule,
    spread_over_nodes,
)
from cluster.webhook.configuration import (
    MUTATING_NAME,
    SERVICE_NAME,
    VALIDATING_NAME,
    configuration_manifest,
)

ACCOUNT: Final = "koord-manager"
SECRET_NAME: Final = "koordinator-webhook-certs"
IMAGE: Final = "koord-manager:0.1.0"

_FOLLOW: Final = ("list", "watch")


CLUSTER_RULES: Final = (
    rule("", ("namespaces",), _FOLLOW),
    # get, patch: the controller of colocation profiles, gate ColocationProfileController.
    rule("", ("pods",), ("get", *_FOLLOW, "patch")),
    rule("", ("nodes",), (*_FOLLOW, "patch")),
    rule("", ("nodes/status",), ("patch",)),
    rule("", ("events",), ("create", "patch")),
    rule("scheduling.k8s.io", ("priorityclasses",), _FOLLOW),
    rule(
        "admissionregistration.k8s.io",
        ("mutatingwebhookconfigurations",),
        ("get", *_FOLLOW, "patch"),
        MUTATING_NAME,
    ),
    rule(
        "admissionregistration.k8s.io",
        ("validatingwebhookconfigurations",),
        ("get", *_FOLLOW, "patch"),
        VALIDATING_NAME,
    ),
    rule("config.koordinator.sh", ("clustercolocationprofiles",), _FOLLOW),
    rule("quota.koordinator.sh", ("elasticquotaprofiles",), (*_FOLLOW, "patch")),
    rule("scheduling.koordinator.sh", ("devices",), _FOLLOW),
    rule("scheduling.sigs.k8s.io", ("elasticquotas",), ("get", *_FOLLOW, "create", "patch")),
    rule(
        "slo.koordinator.sh", ("nodeslos", "nodemetrics"), (*_FOLLOW, "create", "patch", "delete")
    ),
    rule("topology.node.k8s.io", ("noderesourcetopologies",), (*_FOLLOW, "patch")),
)

NAMESPACE_RULES: Final = (
    rule("", ("configmaps",), _FOLLOW),
    # A name cannot restrict create.
    rule("", ("secrets",), ("create",)),
    rule("", ("secrets",), ("get", "patch"), SECRET_NAME),
    rule("coordination.k8s.io", ("leases",), ("create",)),
    rule("coordination.k8s.io", ("leases",), ("get", "update"), "koordinator-manager"),
)


def rbac(namespace: str = NAMESPACE) -> list[dict[str, Any]]:
    """Return the service account and its rights."""
    account = Account(ACCOUNT, namespace)
    return [
        account.manifest(),
        *account.cluster_role("koord-manager-role", "koord-manager-rolebinding", CLUSTER_RULES),
        *account.role(
            "koord-leader-election-role", "koord-leader-election-rolebinding", NAMESPACE_RULES
        ),
    ]


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
        "securityContext": dict(CONTAINER_SECURITY),
        # TLS reads private keys from files only: they are written to memory, a few KiB each.
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    spec = {
        "serviceAccountName": ACCOUNT,
        # Kubernetes' default. A stop takes at most 18 s: 5 of drain, 10 for the last reviews and 3
        # for the last events.
        "terminationGracePeriodSeconds": 30,
        "securityContext": dict(POD_SECURITY),
        "affinity": spread_over_nodes(labels),
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
