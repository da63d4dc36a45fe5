"""`matchLabelKeys` and `mismatchLabelKeys` of affinity terms, for pods that no API server made.

The API server writes what they mean into the selectors of a pod that it creates, and that stays
when the pod's labels change later. The scheduler does not look at the keys.
docs/facts/scheduler.md, "Affinity between pods".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from apis.meta import LabelSelectorRequirement
from apis.scheduling_pod import Affinity, PodAffinity, PodAffinityTerm

_NONE: Final = PodAffinity()


def with_label_keys(affinity: Affinity, labels: Mapping[str, str]) -> Affinity:
    """Return affinity as the API server stores it for a new pod with these labels."""
    return replace(
        affinity,
        pod_affinity=_merged(affinity.pod_affinity or _NONE, labels),
        pod_anti_affinity=_merged(affinity.pod_anti_affinity or _NONE, labels),
    )


def _merged(affinity: PodAffinity, labels: Mapping[str, str]) -> PodAffinity:
    return replace(
        affinity,
        required=tuple(_term(term, labels) for term in affinity.required),
        preferred=tuple(
            replace(each, pod_affinity_term=_term(each.pod_affinity_term, labels))
            for each in affinity.preferred
        ),
    )


def _term(term: PodAffinityTerm, labels: Mapping[str, str]) -> PodAffinityTerm:
    """Return a term that asks for the pod's own values of some labels, and not for those of others.

    Keys that the pod lacks are left out.
    """
    selector = term.label_selector
    if selector is None:
        return term
    more = [
        LabelSelectorRequirement(key=key, operator=operator, values=(labels[key],))
        for operator, keys in (("In", term.match_label_keys), ("NotIn", term.mismatch_label_keys))
        for key in keys
        if key in labels
    ]
    expressions = (*selector.match_expressions, *more)
    return replace(term, label_selector=replace(selector, match_expressions=expressions))
