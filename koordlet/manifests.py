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


def files(namespace: str = KOORDINATOR_NAMESPACE) -> dict[str, list[dict[str, Any]]]:
    """Return the documents of each file."""
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}
    return {
        "rbac.yaml": [
            {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": ACCOUNT, "namespace": namespace},
            },
            {
                "apiVersion": f"{_RBAC}/v1",
                "kind": "ClusterRole",
                "metadata": {"name": "koordlet-role"},
                "rules": list(CLUSTER_RULES),
            },
            {
                "apiVersion": f"{_RBAC}/v1",
                "kind": "ClusterRoleBinding",
                "metadata": {"name": "koordlet-rolebinding"},
                "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": "koordlet-role"},
                "subjects": [subject],
            },
        ]
    }
