"""Which pods a label selector of a spread constraint or an affinity term means.

docs/facts/scheduler.md, "Pod topology spread" and "Affinity between pods".
"""

from __future__ import annotations

from apis.meta import LabelSelector, LabelSelectorRequirement, matches
from apis.scheduling_pod import PodAffinityTerm, TopologySpreadConstraint
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables


def selector_key(selector: LabelSelector | None) -> tuple[object, ...] | None:
    """Return a hashable value that is equal for selectors of equal content."""
    if selector is None:
        return None
    return (tuple(sorted(selector.match_labels.items())), selector.match_expressions)


def spread_selector(pod: PodShape, constraint: TopologySpreadConstraint) -> LabelSelector | None:
    """Return which pods of the pod's namespace a constraint counts.

    They have the pod's own values of `matchLabelKeys`; keys that it lacks are left out.
    """
    selector = constraint.label_selector
    if selector is None or not constraint.match_label_keys:
        return selector
    own = [
        LabelSelectorRequirement(key=key, operator="In", values=(pod.labels[key],))
        for key in constraint.match_label_keys
        if key in pod.labels
    ]
    return LabelSelector(
        match_labels=selector.match_labels,
        match_expressions=(*selector.match_expressions, *own),
    )


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
        # The API server has merged `matchLabelKeys` into it.
        self.selector = term.label_selector
        self.key = (self.namespaces, selector_key(self.selector))

    def match(self, pod: PodShape) -> bool:
        """Return whether the term means pods of this shape."""
        if self.namespaces is not None and pod.namespace not in self.namespaces:
            return False
        return matches(self.selector, pod.labels)
