"""Reservations at admission: profiles act on them as on pods, except on resources.

A reservation belongs to no namespace. As upstream, a profile with `selector` is judged by labels
alone. A profile with `namespaceSelector` alone would select every reservation upstream; here it
selects those whose `spec.template.metadata.namespace` it selects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from apis.profile import ClusterColocationProfile
from cluster.webhook.colocation_profile import (
    BadProfiles,
    apply_metadata,
    apply_scheduling,
    drawn_profiles,
    labels_of,
    matching_profiles,
    patched,
)
from cluster.webhook.plain import ReservationShape, shaped_object
from cluster.webhook.pod import PodCaches
from kube.patches import json_patch
from kube.webhook import ALLOWED, AdmissionRequest, Verdict


class ReservationAdmission:
    """Mutates new reservations."""

    def __init__(self, caches: PodCaches) -> None:
        self._caches = caches
        self._report = BadProfiles()

    def mutate(self, request: AdmissionRequest) -> Verdict:
        if request.resource.resource != "reservations" or request.operation != "CREATE":
            return ALLOWED
        before = shaped_object(request, ReservationShape)
        after: dict[str, Any] = msgspec.json.decode(request.object)
        matched = matching_profiles(
            [_for_reservations(one) for one in tuple(self._caches.profiles.items.values())],
            labels=labels_of(before),
            namespace_labels=self._namespace_labels(before),
            report=self._report,
        )
        identity = request.name or request.uid
        for profile in drawn_profiles(matched, identity, report=self._report):
            apply_metadata(after, profile)
            template = (after.get("spec") or {}).get("template")
            if template is not None:
                template["spec"] = template.get("spec") or {}
                apply_scheduling(template["spec"], profile, self._priority)
            after = patched(after, profile, ReservationShape)
        return Verdict(True, patch=tuple(json_patch(before, after)))

    def _namespace_labels(self, reservation: dict[str, Any]) -> Mapping[str, str] | None:
        """Return the labels of the namespace that the template names, None without one."""
        found: Any = reservation
        for member in ("spec", "template", "metadata", "namespace"):
            found = found.get(member) if isinstance(found, dict) else None
        namespace = self._caches.namespaces.get(found) if isinstance(found, str) else None
        return namespace.metadata.labels if namespace is not None else None

    def _priority(self, name: str) -> tuple[int, str | None] | None:
        found = self._caches.priority_classes.get(name)
        return (found.value, found.preemption_policy) if found is not None else None


def _for_reservations(profile: ClusterColocationProfile) -> ClusterColocationProfile:
    """Return the profile as it selects reservations: by labels alone, where it has a selector."""
    if profile.spec.selector is None:
        return profile
    spec = msgspec.structs.replace(profile.spec, namespace_selector=None)
    return msgspec.structs.replace(profile, spec=spec)
