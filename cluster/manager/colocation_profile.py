"""The controller of ClusterColocationProfiles: applies them to pods that wait for a node.

It patches metadata and applies the profile's own patch. What cannot change on an existing pod
(resources, scheduler, priority, QoS class) is left to admission. Applying a profile twice has the
same result as applying it once. Rules: docs/facts/manager.md, "Profiles for waiting pods".
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from apis.core import Namespace, Pod
from apis.errors import InputError
from apis.keys import LABEL_CONTROLLER_MANAGED, LABEL_PRIORITY, LABEL_QOS_CLASS
from apis.profile import ClusterColocationProfile
from cluster.webhook.colocation_profile import (
    apply_metadata,
    drawn,
    patched,
    pod_identity,
    selects,
)
from cluster.webhook.plain import PodShape
from kube.cache import Cache, Index
from kube.client import ApiError, Client, RateLimit
from kube.patches import merge_patch
from kube.queue import WorkQueue
from kube.resources import PODS

_log = logging.getLogger(__name__)

_decode_plain = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass(frozen=True, slots=True)
class ProfileControllerSettings:
    """The flags `--colocation-profile-*`, durations in seconds. Defaults are upstream's."""

    by_default: bool = False
    interval: float = 30.0
    forget_after: float = 300.0
    qps: float = 10.0
    burst: int = 100


class ColocationProfileController:
    """Applies profiles to pending pods without a node."""

    name = "colocationprofile"

    def __init__(
        self,
        client: Client,
        profiles: Cache[ClusterColocationProfile],
        pods: Cache[Pod],
        namespaces: Cache[Namespace],
        unscheduled: Index[str, Pod],
        settings: ProfileControllerSettings,
    ) -> None:
        """unscheduled: index of pods by node name, "" for pods without a node."""
        self._client = client
        self._profiles = profiles
        self._pods = pods
        self._namespaces = namespaces
        self._unscheduled = unscheduled
        self._settings = settings
        self._limit = RateLimit(settings.qps, settings.burst)
        self._done: dict[tuple[str, str, str], float] = {}
        self.queue = WorkQueue(self.name)
        profiles.subscribe(lambda event: self.queue.add(event.key))

    async def reconcile(self, name: str) -> float | None:
        """Apply one profile to the pods that it selects; return seconds until it is due again."""
        profile = self._profiles.get(name)
        if profile is None or profile.metadata.deletion_timestamp is not None:
            self.queue.forget(name)
            return None
        if not self._manages(profile):
            return None
        self._forget_old()
        for pod in self._unscheduled.get(""):
            if pod.status.phase == "Pending" and self._selects(profile, pod):
                await self._apply(profile, pod)
        return self._settings.interval

    def _manages(self, profile: ClusterColocationProfile) -> bool:
        label = profile.metadata.labels.get(LABEL_CONTROLLER_MANAGED)
        return label == "true" or self._settings.by_default

    def _selects(self, profile: ClusterColocationProfile, pod: Pod) -> bool:
        spec = profile.spec
        if spec.selector is None or spec.selector.is_empty():
            # At admission this selects all pods. Here it would patch every pending pod at once.
            return False
        try:
            if not selects(spec.selector, pod.metadata.labels):
                return False
            if spec.namespace_selector is not None and not spec.namespace_selector.is_empty():
                namespace = self._namespaces.get(pod.metadata.namespace)
                if namespace is None:
                    return False
                if not selects(spec.namespace_selector, namespace.metadata.labels):
                    return False
            plain = {"metadata": {"name": pod.metadata.name}}
            return drawn(profile, pod_identity(plain, pod.metadata.namespace, pod.metadata.uid))
        except InputError as error:
            _log.warning("%s", error.about(f"ClusterColocationProfile {profile.metadata.name}"))
            return False

    async def _apply(self, profile: ClusterColocationProfile, pod: Pod) -> None:
        key = (
            profile.metadata.name,
            profile.metadata.resource_version,
            pod.metadata.uid,
        )
        if key in self._done:
            return
        await self._limit.take()
        meta = pod.metadata
        try:
            before = await self._client.get(
                PODS, meta.name, _decode_plain, namespace=meta.namespace
            )
            after = profiled(before, profile)
            patch = merge_patch(before, after)
            if patch:
                patch.setdefault("metadata", {})["resourceVersion"] = before["metadata"][
                    "resourceVersion"
                ]
                await self._client.patch(
                    PODS, meta.name, msgspec.json.encode(patch), namespace=meta.namespace
                )
        except ApiError as error:
            if error.not_found or error.conflict:
                return
            # A refused patch is not tried again in each reconcile, only after `forget_after`.
            _log.warning(
                "cannot apply ClusterColocationProfile %s to %s: %s",
                profile.metadata.name,
                pod.ref,
                error,
            )
        self._done[key] = time.monotonic()

    def _forget_old(self) -> None:
        limit = time.monotonic() - self._settings.forget_after
        self._done = {key: at for key, at in self._done.items() if at >= limit}


def profiled(pod: Mapping[str, Any], profile: ClusterColocationProfile) -> dict[str, Any]:
    """Return a plain existing pod with the profile's metadata and patch applied.

    QoS class and sub-priority stay as they are, also if they are missing, because validation
    refuses to change them.
    """
    result: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(pod))
    before = dict((result.get("metadata") or {}).get("labels") or {})
    apply_metadata(result, profile)
    labels: dict[str, str] = result["metadata"].get("labels") or {}
    for key in (LABEL_QOS_CLASS, LABEL_PRIORITY):
        labels.pop(key, None)
        if key in before:
            labels[key] = before[key]
    return patched(result, profile, PodShape)
