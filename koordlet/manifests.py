"""What is installed in a cluster for the daemon: an account, and rights to read its node's objects.

Names are upstream's (deploy.md 10.4); the rights are what this code uses and nothing else (a test
runs under them). RBAC cannot say "its own node": the daemon asks for objects by its node's name.
tools/generate_manifests.py writes them below deploy/koordlet.
"""

from __future__ import annotations

from typing import Any, Final

from apis.keys import KOORDINATOR_NAMESPACE

ACCOUNT: Final = "koordlet"

_FOLLOW: Final = ["list", "watch"]
_RBAC: Final = "rbac.authorization.k8s.io"

CLUSTER_RULES: Final[tuple[dict[str, Any], ...]] = tuple(
    {"apiGroups": [group], "resources": [resource], "verbs": _FOLLOW}
    for group, resource in (
        ("", "nodes"),
        ("slo.koordinator.sh", "nodeslos"),
        ("topology.node.k8s.io", "noderesourcetopologies"),
        ("scheduling.koordinator.sh", "devices"),
    )
)


KUBELET_RULES: Final[tuple[dict[str, Any], ...]] = tuple(
    {"apiGroups": [""], "resources": [f"nodes/{part}"], "verbs": ["get"]}
    for part in ("pods", "proxy")
)
"""Kubelet's pod list: `pods` since Kubernetes 1.33, before that `proxy`, which is much more."""


def files(namespace: str = KOORDINATOR_NAMESPACE) -> dict[str, list[dict[str, Any]]]:
    """Return the documents of each file."""
    return {
        "rbac.yaml": [
            {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": ACCOUNT, "namespace": namespace},
            },
            *_granted("koordlet", CLUSTER_RULES, namespace),
        ],
        "rbac-kubelet.yaml": _granted("koordlet-kubelet", KUBELET_RULES, namespace),
    }


def _granted(name: str, rules: tuple[dict[str, Any], ...], namespace: str) -> list[dict[str, Any]]:
    """Return a role `<name>-role` of these rules, and that the account has it."""
    return [
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": f"{name}-role"},
            "rules": list(rules),
        },
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": f"{name}-rolebinding"},
            "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": f"{name}-role"},
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}],
        },
    ]
