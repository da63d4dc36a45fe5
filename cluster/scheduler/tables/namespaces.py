"""Labels of namespaces, for terms that select namespaces by label."""

from __future__ import annotations

from collections.abc import Mapping

from apis.meta import LabelSelector, matches


class NamespaceTable:
    """`version` grows with each change of a namespace's labels."""

    def __init__(self) -> None:
        self.version = 0
        self._labels: dict[str, Mapping[str, str]] = {}

    def set(self, name: str, labels: Mapping[str, str]) -> None:
        """Add a namespace or take its new labels."""
        if self._labels.get(name) != labels:
            self._labels[name] = labels
            self.version += 1

    def delete(self, name: str) -> None:
        if self._labels.pop(name, None) is not None:
            self.version += 1

    def selected(self, selector: LabelSelector) -> frozenset[str]:
        """Return the names of the namespaces with matching labels."""
        return frozenset(name for name, labels in self._labels.items() if matches(selector, labels))
