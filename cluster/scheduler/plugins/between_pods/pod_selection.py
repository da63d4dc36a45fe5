"""Which pods a label selector of a spread constraint or an affinity term means.

docs/facts/scheduler.md, "Pod topology spread" and "Affinity between pods".
"""

from __future__ import annotations

from collections.abc import Mapping

from apis.meta import LabelSelector, LabelSelectorRequirement, matches
from apis.scheduling_pod import PodAffinityTerm, TopologySpreadConstraint
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables


def with_label_keys(
    selector: LabelSelector | None,
    labels: Mapping[str, str],
    same: tuple[str, ...],
    other: tuple[str, ...] = (),
) -> LabelSelector | None:
    """Return a selector that also asks for the pod's own value of the keys in `same`, and for any
    other value of those in `other`. Keys that the pod lacks are left out."""
    if selector is None or not (same or other):
        return selector
    more = [
        LabelSelectorRequirement(key=key, operator=operator, values=(labels[key],))
        for operator, keys in (("In", same), ("NotIn", other))
        for key in keys
        if key in labels
    ]
    return LabelSelector(
        match_labels=selector.match_labels,
        match_expressions=(*selector.match_expressions, *more),
    )


def selector_key(selector: LabelSelector | None) -> tuple[object, ...] | None:
    """Return a hashable value that is equal for selectors of equal content."""
    if selector is None:
        return None
    return (tuple(sorted(selector.match_labels.items())), selector.match_expressions)


def spread_selector(pod: PodShape, constraint: TopologySpreadConstraint) -> LabelSelector | None:
    """Return which pods of the pod's namespace a constraint counts."""
    return with_label_keys(constraint.label_selector, pod.labels, constraint.match_label_keys)


def sees_reserve_pods(pod: PodShape, tables: Tables) -> bool:
    """Return whether reserve pods count as pods for a pod.

    Not for one that matches a reservation: it would meet the pod that keeps its own place.
    """
    return not len(tables.reservations.matched(pod))


class TermPods:
    """The pods that an affinity term of a pod means, as a value with a key.

    namespaces: names of labels-selected namespaces are resolved by the caller, because they follow
    the Namespace objects; None is every namespace.
    """

    __slots__ = ("key", "namespaces", "selector")

    def __init__(self, owner: PodShape, term: PodAffinityTerm, selected: frozenset[str]) -> None:
        """selected: names of the namespaces that `namespaceSelector` selects now."""
        named = frozenset(term.namespaces)
        if not named and term.namespace_selector is None:
            named = frozenset((owner.namespace,))
        self.namespaces: frozenset[str] | None = named | selected
        if term.namespace_selector is not None and term.namespace_selector.is_empty():
            self.namespaces = None
        self.selector = with_label_keys(
            term.label_selector, owner.labels, term.match_label_keys, term.mismatch_label_keys
        )
        self.key = (self.namespaces, selector_key(self.selector))

    def match(self, pod: PodShape) -> bool:
        """Return whether the term means pods of this shape."""
        if self.namespaces is not None and pod.namespace not in self.namespaces:
            return False
        return matches(self.selector, pod.labels)
