"""What the manifests of the cluster's programs have in common: the namespace, and RBAC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from apis.keys import KOORDINATOR_NAMESPACE

NAMESPACE: Final = KOORDINATOR_NAMESPACE
RBAC: Final = "rbac.authorization.k8s.io"

Rule = Mapping[str, Any]


def rule(group: str, resources: Sequence[str], verbs: Sequence[str], *names: str) -> dict[str, Any]:
    """Return a rule of a role. names: of the objects that it is restricted to; none: all."""
    made: dict[str, Any] = {
        "apiGroups": [group],
        "resources": list(resources),
        "verbs": list(verbs),
    }
    if names:
        made["resourceNames"] = list(names)
    return made


@dataclass(frozen=True, slots=True)
class Account:
    """A service account. name, namespace: of the account, and of its Roles."""

    name: str
    namespace: str = NAMESPACE

    def manifest(self) -> dict[str, Any]:
        """Return the ServiceAccount."""
        return {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": self.name, "namespace": self.namespace},
        }

    def cluster_role(self, role: str, binding: str, rules: Sequence[Rule]) -> list[dict[str, Any]]:
        """Return a ClusterRole and what gives it to the account."""
        return [
            {
                "apiVersion": f"{RBAC}/v1",
                "kind": "ClusterRole",
                "metadata": {"name": role},
                "rules": list(rules),
            },
            {
                "apiVersion": f"{RBAC}/v1",
                "kind": "ClusterRoleBinding",
                "metadata": {"name": binding},
                "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role},
                "subjects": [self._subject()],
            },
        ]

    def role(self, role: str, binding: str, rules: Sequence[Rule]) -> list[dict[str, Any]]:
        """Return a Role in the account's namespace and what gives it to the account."""
        return [
            {
                "apiVersion": f"{RBAC}/v1",
                "kind": "Role",
                "metadata": {"name": role, "namespace": self.namespace},
                "rules": list(rules),
            },
            {
                "apiVersion": f"{RBAC}/v1",
                "kind": "RoleBinding",
                "metadata": {"name": binding, "namespace": self.namespace},
                "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": role},
                "subjects": [self._subject()],
            },
        ]

    def _subject(self) -> dict[str, Any]:
        return {"kind": "ServiceAccount", "name": self.name, "namespace": self.namespace}


def namespace_manifest(namespace: str = NAMESPACE) -> dict[str, Any]:
    """Return the namespace; its label keeps the pod webhooks away from the programs' own pods."""
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": namespace, "labels": {"control-plane": "koordinator"}},
    }


POD_SECURITY: Final[Rule] = {
    "runAsNonRoot": True,
    # The user "nonroot" of common base images.
    "runAsUser": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Final[Rule] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def spread_over_nodes(labels: Mapping[str, str]) -> dict[str, Any]:
    """Return an affinity that keeps pods with these labels on different nodes where possible."""
    return {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 100,
                    "podAffinityTerm": {
                        "labelSelector": {"matchLabels": dict(labels)},
                        "topologyKey": "kubernetes.io/hostname",
                    },
                }
            ]
        }
    }
