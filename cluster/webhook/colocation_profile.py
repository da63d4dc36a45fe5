"""ClusterColocationProfile: which pods a profile selects, and what it does to them.

A profile selects a pod by the labels of its namespace and by its own labels, as submitted. The
profiles apply in the order of their names, later ones overwrite earlier ones. One profile sets, in
this order: labels and annotations, copies of keys, suffixes of labels, QoS class and sub-priority,
scheduler, priority class, and its strategic merge patch.

Pods are plain JSON here, so nothing that a user wrote is lost. A profile that cannot be judged
(broken selector, unknown namespace) does not match: a typing error must not turn every new pod into
a batch pod. Chance is a stable hash of profile and pod, so a retried admission decides the same.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from apis.errors import InputError
from apis.keys import (
    ANNOTATION_SKIP_UPDATE_RESOURCES,
    LABEL_PRIORITY,
    LABEL_QOS_CLASS,
)
from apis.meta import LabelSelector, matches, selector_problem
from apis.profile import ClusterColocationProfile
from cluster.webhook.plain import Plain, PodShape, Shape, shape_problem
from cluster.webhook.strategic import PatchError, strategic_merge

_log = logging.getLogger(__name__)

_MOST_LOGGED: Final = 1000
"""Sentences about bad profiles that are kept. Chosen: a bound for the memory; beyond it a sentence
is logged once more."""


def labels_of(obj: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of a plain object."""
    return (obj.get("metadata") or {}).get("labels") or {}


def selects(selector: LabelSelector | None, labels: Mapping[str, str]) -> bool:
    """Return whether an optional selector matches; an absent or empty one matches all.

    Raises InputError for a broken selector.
    """
    if selector is None or selector.is_empty():
        return True
    problem = selector_problem(selector)
    if problem:
        raise InputError(obj="", field="selector", value=selector, problem=problem)
    return matches(selector, labels)


class BadProfiles:
    """Logs what is bad about profiles, each sentence once. Called with the error."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def __call__(self, error: InputError) -> None:
        text = str(error)
        if text not in self._logged:
            if len(self._logged) > _MOST_LOGGED:
                self._logged.clear()
            self._logged.add(text)
            _log.warning("%s; the profile is not applied", text)


def matching_profiles(
    profiles: Iterable[ClusterColocationProfile],
    *,
    labels: Mapping[str, str],
    namespace_labels: Mapping[str, str] | None,
    report: Callable[[InputError], None],
) -> list[ClusterColocationProfile]:
    """Return the profiles that select a pod, by name; later ones overwrite earlier ones.

    namespace_labels: None if the namespace is not known; profiles that ask for it do not match.
    """
    found: list[ClusterColocationProfile] = []
    for profile in profiles:
        spec = profile.spec
        try:
            asked = spec.namespace_selector
            if asked is not None and not asked.is_empty() and namespace_labels is None:
                continue
            if selects(asked, namespace_labels or {}) and selects(spec.selector, labels):
                found.append(profile)
        except InputError as error:
            report(error.about(f"ClusterColocationProfile {profile.metadata.name}"))
    return sorted(found, key=lambda profile: profile.metadata.name)


def probability_percent(profile: ClusterColocationProfile) -> int:
    """Return the profile's chance in percent, 100 when it names none. Raises InputError."""
    value = profile.spec.probability
    if value is None:
        return 100
    if isinstance(value, str):
        digits = value.removesuffix("%")
        percent = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else -1
        if not value.endswith("%"):
            percent = -1
    else:
        percent = value
    if percent < 0:
        raise InputError(
            obj=f"ClusterColocationProfile {profile.metadata.name}",
            field="spec.probability",
            value=value,
            problem='expected a number or a text such as "50%"',
        )
    return min(percent, 100)


def drawn(profile: ClusterColocationProfile, identity: str) -> bool:
    """Return whether `identity` falls into the profile's share. Raises InputError."""
    percent = probability_percent(profile)
    if percent in (0, 100):
        return percent == 100
    seed = f"{profile.metadata.name}\0{identity}".encode()
    return int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest()) % 100 < percent


def drawn_profiles(
    profiles: Iterable[ClusterColocationProfile],
    identity: str,
    *,
    report: Callable[[InputError], None],
) -> list[ClusterColocationProfile]:
    """Return the profiles into whose share `identity` falls; a bad share counts as none."""
    found: list[ClusterColocationProfile] = []
    for profile in profiles:
        try:
            if drawn(profile, identity):
                found.append(profile)
        except InputError as error:
            report(error)
    return found


def pod_identity(pod: Mapping[str, Any], namespace: str, request_uid: str) -> str:
    """Return what the draw depends on: the pod's name, or for generated names the request."""
    meta = pod.get("metadata") or {}
    name = meta.get("name")
    return f"{namespace}/{name}" if name else f"{namespace}/{request_uid}"


def skips_resources(profiles: Iterable[ClusterColocationProfile]) -> bool:
    """Return whether one of the profiles forbids replacing resources."""
    return any(
        ANNOTATION_SKIP_UPDATE_RESOURCES in profile.metadata.annotations for profile in profiles
    )


def apply_metadata(obj: Plain, profile: ClusterColocationProfile) -> None:
    """Apply the labels and annotations of a profile to a plain object, in place.

    Applying twice is applying once: a mapping without a source does nothing, and a suffix that is
    there already is not appended again.
    """
    spec = profile.spec
    metadata = obj["metadata"] = obj.get("metadata") or {}
    labels: dict[str, str] = dict(metadata.get("labels") or {})
    annotations: dict[str, str] = dict(metadata.get("annotations") or {})
    labels.update(spec.labels)
    annotations.update(spec.annotations)
    for mapping, values in (
        (spec.label_keys_mapping, labels),
        (spec.annotation_keys_mapping, annotations),
    ):
        before = dict(values)
        for old, new in sorted(mapping.items()):
            if old in before:
                values[new] = before[old]
    for key, suffix in spec.label_suffixes.items():
        if key in labels and not labels[key].endswith(suffix):
            labels[key] += suffix
    if spec.qos_class:
        labels[LABEL_QOS_CLASS] = spec.qos_class
    if spec.koordinator_priority is not None:
        labels[LABEL_PRIORITY] = str(spec.koordinator_priority)
    if labels:
        metadata["labels"] = labels
    if annotations:
        metadata["annotations"] = annotations


PriorityLookup = Callable[[str], tuple[int, str | None] | None]
"""PriorityClass name -> (value, preemption policy), or None if there is no such class."""


def apply_scheduling(
    spec: Plain, profile: ClusterColocationProfile, priority_class: PriorityLookup
) -> None:
    """Apply a profile's scheduler and priority to a plain pod spec, in place. Raises InputError."""
    wanted = profile.spec
    if wanted.scheduler_name:
        spec["schedulerName"] = wanted.scheduler_name
    if wanted.priority_class_name:
        found = priority_class(wanted.priority_class_name)
        if found is None:
            raise InputError(
                obj=f"ClusterColocationProfile {profile.metadata.name}",
                field="spec.priorityClassName",
                value=wanted.priority_class_name,
                problem="there is no such PriorityClass",
                hint="create it, or name another PriorityClass in the profile",
            )
        value, policy = found
        spec["priorityClassName"] = wanted.priority_class_name
        spec["priority"] = value
        if policy is not None:
            spec["preemptionPolicy"] = policy
        else:
            spec.pop("preemptionPolicy", None)


def apply_profile(
    pod: Plain, profile: ClusterColocationProfile, priority_class: PriorityLookup
) -> Plain:
    """Return the pod as the profile wants it. Raises InputError."""
    apply_metadata(pod, profile)
    pod["spec"] = pod.get("spec") or {}
    apply_scheduling(pod["spec"], profile, priority_class)
    return patched(pod, profile, PodShape)


def patched(obj: Plain, profile: ClusterColocationProfile, shape: type[Shape]) -> Plain:
    """Return `obj` after the profile's strategic merge patch, of `shape`. Raises InputError."""
    patch = profile.spec.patch
    if patch is None:
        return obj
    try:
        if not isinstance(patch, dict):
            raise PatchError("expected an object")
        merged = strategic_merge(obj, patch)
        problem = shape_problem(merged, shape)
        if problem is None:
            return merged
    except RecursionError:
        problem = "nested too deep"
    except PatchError as error:
        problem = str(error)
    raise InputError(
        obj=f"ClusterColocationProfile {profile.metadata.name}",
        field="spec.patch",
        value=patch if not isinstance(patch, dict) else "...",
        problem=problem,
    )
