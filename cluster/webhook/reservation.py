"""Reservations at admission: profiles act on them as on pods. Source: manager.md section 26."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from apis.errors import InputError
from cluster.webhook.colocation_profile import (
    apply_metadata,
    apply_scheduling,
    drawn,
    labels_of,
    matching_profiles,
    patched,
)
from cluster.webhook.pod import PodCaches, plain_object
from kube.webhook import ALLOWED, AdmissionRequest, Verdict, json_patch

_log = logging.getLogger(__name__)


class ReservationAdmission:
    """Mutates new reservations."""

    def __init__(self, caches: PodCaches) -> None:
        self._caches = caches

    def mutate(self, request: AdmissionRequest) -> Verdict:
        if request.resource.resource != "reservations" or request.operation != "CREATE":
            return ALLOWED
        before = plain_object(request)
        after: dict[str, Any] = msgspec.json.decode(request.object)
        # Reservations have no namespace: a profile for one namespace must select by labels too.
        profiles = [
            msgspec.structs.replace(
                profile, spec=msgspec.structs.replace(profile.spec, namespace_selector=None)
            )
            for profile in self._caches.profiles.items.values()
            if profile.spec.selector is not None or profile.spec.namespace_selector is None
        ]
        matched = matching_profiles(
            profiles,
            labels=labels_of(before),
            namespace_labels=None,
            report=lambda error: _log.warning("%s; the profile is left out", error),
        )
        for profile in matched:
            if not drawn(profile, request.name or request.uid):
                continue
            apply_metadata(after, profile)
            spec = after.setdefault("spec", {})
            template = spec.get("template")
            if isinstance(template, dict):
                apply_scheduling(_pod_spec(template, request.ref), profile, self._priority)
            after = patched(after, profile)
        return Verdict(True, patch=tuple(json_patch(before, after)))

    def _priority(self, name: str) -> tuple[int, str | None] | None:
        found = self._caches.priority_classes.get(name)
        return (found.value, found.preemption_policy) if found is not None else None


def _pod_spec(template: dict[str, Any], obj: str) -> dict[str, Any]:
    """Return the template's pod spec, in place. No schema checks templates. Raises InputError."""
    spec = template.get("spec")
    if spec is None:
        spec = template["spec"] = {}
    if not isinstance(spec, dict):
        raise InputError(obj=obj, field="spec.template.spec", value=spec, problem="not an object")
    return spec
