"""The manifests for the daemon in a cluster: an account, and rights to its node's objects.

Names are upstream's: docs/facts/koordlet.md, "Names in a cluster". The rights are exactly those
that this code uses; a test runs with them. RBAC cannot express "its own node": the daemon selects
objects by its node's name. tools/generate_manifests.py writes the files below deploy/koordlet.
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

REPORT_RULES: Final[tuple[dict[str, Any], ...]] = (
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]},
    {"apiGroups": ["slo.koordinator.sh"], "resources": ["nodemetrics"], "verbs": ["get"]},
    {"apiGroups": ["slo.koordinator.sh"], "resources": ["nodemetrics/status"], "verbs": ["patch"]},
    *(
        {"apiGroups": [group], "resources": [resource], "verbs": ["get", "create", "patch"]}
        for group, resource in (
            ("topology.node.k8s.io", "noderesourcetopologies"),
            ("scheduling.koordinator.sh", "devices"),
        )
    ),
)
"""Rights to report. The manager creates NodeMetrics; koordlet patches their status. Topology and
Device are created by koordlet, owned by the Node, whose UID it reads."""

EVICTION_RULES: Final[tuple[dict[str, Any], ...]] = (
    {"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]},
)
"""Rights to evict pods and to write events about it; `patch` counts an event that repeats."""

POD_RULES: Final[tuple[dict[str, Any], ...]] = (
    {"apiGroups": [""], "resources": ["pods"], "verbs": _FOLLOW},
)
"""Rights to read pods from the API server, for `kubernetes.pods`. They hold for the pods of all
nodes, so they have a file of their own."""

KUBELET_PARTS: Final = {"/pods/": "pods", "/configz": "configz"}
"""What koordlet reads of a kubelet: the path, and the subresource of nodes that it belongs to."""

KUBELET_RULES: Final[tuple[dict[str, Any], ...]] = tuple(
    {"apiGroups": [""], "resources": [f"nodes/{part}"], "verbs": ["get"]}
    for part in KUBELET_PARTS.values()
)
"""Rights to what koordlet reads of a kubelet, from Kubernetes 1.33 on."""

OLD_KUBELET_RULES: Final[tuple[dict[str, Any], ...]] = (
    {"apiGroups": [""], "resources": ["nodes/proxy"], "verbs": ["get"]},
)
"""What an older kubelet checks for the same. It allows much more, such as running a command in a
container (a websocket begins with a GET), so it has a file of its own."""


def files(namespace: str = KOORDINATOR_NAMESPACE) -> dict[str, list[dict[str, Any]]]:
    """Return the documents of each file, by its name."""
    return {
        "rbac.yaml": [
            {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": ACCOUNT, "namespace": namespace},
            },
            *_granted("koordlet", CLUSTER_RULES + REPORT_RULES + EVICTION_RULES, namespace),
        ],
        "rbac-kubelet.yaml": _granted("koordlet-kubelet", KUBELET_RULES, namespace),
        "rbac-pods.yaml": _granted("koordlet-pods", POD_RULES, namespace),
        "rbac-kubelet-proxy.yaml": _granted("koordlet-kubelet-proxy", OLD_KUBELET_RULES, namespace),
    }


def _granted(name: str, rules: tuple[dict[str, Any], ...], namespace: str) -> list[dict[str, Any]]:
    """Return a role `<name>-role` with these rules, and its binding to the account."""
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
