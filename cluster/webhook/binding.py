"""Binding admission: only named users may bind pods of the protected namespaces.

The checks, in this order: no user names configured, everything passes; a named user passes; an
excluded namespace passes; a namespace that is not protected passes (`*` protects all); a pod that
the cache does not know passes; a pod with a bypass label or annotation passes; a dry run passes and
is counted. Users are compared as a whole (upstream tests for a substring).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from apis.core import Pod
from kube.cache import Cache
from kube.webhook import ALLOWED, AdmissionRequest, Verdict, denied


@dataclass(frozen=True, slots=True)
class BindingRules:
    """The flags `--binding-admission-*`."""

    user_names: tuple[str, ...] = ()
    dry_run: bool = False
    namespaces: tuple[str, ...] = ()
    exclude_namespaces: tuple[str, ...] = ("kube-system",)
    bypass_labels: tuple[str, ...] = ("koordinator.sh/binding-admission-bypass",)
    bypass_annotations: tuple[str, ...] = ()


class BindingAdmission:
    """Judges creations of pods/binding."""

    def __init__(self, rules: BindingRules, pods: Cache[Pod], count: Callable[[str], None]) -> None:
        """count: called with the metric name of each decision."""
        self._rules = rules
        self._pods = pods
        self._count = count

    def validate(self, request: AdmissionRequest) -> Verdict:
        if request.resource.resource != "pods" or request.sub_resource != "binding":
            return ALLOWED
        if request.operation != "CREATE" or not self._rules.user_names:
            return ALLOWED
        decision = self._decision(request)
        self._count(decision)
        if decision == "denied":
            return denied("binding denied: username is not in the allowed list")
        return ALLOWED

    def _decision(self, request: AdmissionRequest) -> str:
        rules = self._rules
        user = request.user_info.username
        # A service account is also known by its bare name.
        if user in rules.user_names or user.rpartition(":")[2] in rules.user_names:
            return "allowed_username"
        if request.namespace in rules.exclude_namespaces:
            return "excluded_ns"
        if "*" not in rules.namespaces and request.namespace not in rules.namespaces:
            return "out_of_scope"
        pod = self._pods.get(request.name, namespace=request.namespace)
        if pod is None:
            return "out_of_scope"
        if any(key in pod.metadata.labels for key in rules.bypass_labels):
            return "bypass_label"
        if any(key in pod.metadata.annotations for key in rules.bypass_annotations):
            return "bypass_annotation"
        return "dry_run" if rules.dry_run else "denied"
