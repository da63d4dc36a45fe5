"""From definitions to trees of quotas: which definition is in force, and which is left out and why.

A definition that cannot be used costs itself only. Where the quota was usable before, its former
definition stays in force; where it never was, the quota is in no tree. A quota that is deleted
while it has children stays until they are gone. What is left out is tried again after each change,
because a child may be read before its parent. Of quotas with one name the oldest usable one counts,
in whatever order they are read, so that a restart does not change which.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from apis.keys import DEFAULT_QUOTA, LABEL_QUOTA_PARENT, ROOT_QUOTA, SYSTEM_QUOTA
from cluster.scheduler.tables.quotas.definitions import QuotaDefinition

_WITHOUT_CHILDREN = (DEFAULT_QUOTA, SYSTEM_QUOTA)
_MOST_LEVELS: Final = 64
"""Quotas from the top of a tree down. Chosen: organisations have about 10, and amounts are worked
out by recursion of some calls a level, of which Python allows 1000."""


class Definitions:
    """The definitions in force by name, and what is left out."""

    def __init__(self, *, several_trees: bool, built_in_namespace: str) -> None:
        """several_trees: tree ids count (MultiQuotaTree); else all quotas are in one tree.
        built_in_namespace: the only one whose objects define the built-in quotas."""
        self._several_trees = several_trees
        self._built_in_namespace = built_in_namespace
        self._in_force: dict[str, QuotaDefinition] = {}
        self._children: dict[str, dict[str, None]] = {}
        """Name -> names of the quotas in force whose parent it is."""
        self._wanted: dict[str, QuotaDefinition] = {}
        """namespace/name -> a definition that is not in force."""
        self._why: dict[str, str] = {}
        """namespace/name -> why such a definition is not in force. Kept, because thousands that are
        left out would else be looked at with every quota that is read."""
        self._deleted: set[str] = set()
        """Names of deleted quotas that stay in force for their children."""
        self._unreadable: dict[str, str] = {}
        """namespace/name -> why the object as it is now defines nothing."""

    @property
    def in_force(self) -> Mapping[str, QuotaDefinition]:
        return MappingProxyType(self._in_force)

    def tree(self, definition: QuotaDefinition) -> str:
        """Return the id of the tree that a quota is in."""
        return definition.tree if self._several_trees else ""

    def problems(self) -> dict[str, str]:
        """Return why quotas, by namespace/name, are not as their objects say."""
        found = dict(self._why)
        for name in self._deleted:
            key = self._in_force[name].key
            found[key] = (
                f"ElasticQuota {key} was deleted, and counts as long as it has children:"
                f" {', '.join(sorted(self._children[name]))}"
            )
        return {**found, **self._unreadable}

    def left_out(self, name: str) -> str | None:
        """Return why a quota that exists is in no tree; None if it is in one or does not exist."""
        if name in self._in_force:
            return None
        for key, definition in self._wanted.items():
            if definition.name == name:
                return self._why[key]
        for key, problem in self._unreadable.items():
            if key.rpartition("/")[2] == name:
                return problem
        return None

    # --- changes -------------------------------------------------------------------------------

    def set(self, definition: QuotaDefinition) -> bool:
        """Take the present definition of a quota; return whether what is in force changed."""
        self._unreadable.pop(definition.key, None)
        if self._in_force.get(definition.name) == definition:
            revived = definition.name in self._deleted
            self._deleted.discard(definition.name)
            self._drop(definition.key)
            if revived:
                self._retry()
            return revived
        self._wanted[definition.key] = definition
        if not self._try(definition):
            # Nothing changed for the others.
            return False
        self._retry()
        return True

    def unreadable(self, key: str, problem: str) -> None:
        """Take note of an object that cannot be read; its former definition stays in force."""
        self._drop(key)
        self._unreadable[key] = problem

    def delete(self, key: str) -> bool:
        """Forget a quota; return whether what is in force changed."""
        self._unreadable.pop(key, None)
        self._drop(key)
        name = key.rpartition("/")[2]
        held = self._in_force.get(name)
        if held is None or held.key != key:
            return False
        self._deleted.add(name)
        self._bury()
        self._retry()
        return True

    def _try(self, definition: QuotaDefinition) -> bool:
        """Put a definition in force if it can be; return whether it was."""
        problem = self._why_not(definition)
        if problem:
            self._why[definition.key] = f"ElasticQuota {definition.key}: {problem}"
            return False
        self._drop(definition.key)
        self._put(definition)
        return True

    def _retry(self) -> None:
        """Put in force what can be after a change. The last pass says why the others cannot be."""
        again = True
        while again:
            again = False
            for key in sorted(self._wanted):
                if self._try(self._wanted[key]):
                    again = True
            if self._bury():
                again = True

    def _drop(self, key: str) -> None:
        self._wanted.pop(key, None)
        self._why.pop(key, None)

    def _bury(self) -> bool:
        """Take deleted quotas without children out; return whether there were any."""
        found = False
        while ready := [name for name in self._deleted if not self._children.get(name)]:
            found = True
            for name in ready:
                self._deleted.discard(name)
                self._unlink(self._in_force.pop(name))
        return found

    def _put(self, definition: QuotaDefinition) -> None:
        before = self._in_force.get(definition.name)
        if before is not None:
            self._unlink(before)
            gone = definition.name in self._deleted or before.key in self._unreadable
            if before.key != definition.key and not gone:
                # An older quota of the name takes its place. A later edit that waits goes first.
                self._wanted.setdefault(before.key, before)
        self._deleted.discard(definition.name)
        self._in_force[definition.name] = definition
        self._children.setdefault(definition.parent, {})[definition.name] = None

    def _unlink(self, definition: QuotaDefinition) -> None:
        children = self._children[definition.parent]
        del children[definition.name]
        if not children:
            del self._children[definition.parent]

    def _why_not(self, definition: QuotaDefinition) -> str:
        """Return why a definition cannot be in force as things are; "" if it can."""
        name, parent = definition.name, definition.parent
        if name in _WITHOUT_CHILDREN and definition.namespace != self._built_in_namespace:
            return (
                f"metadata.namespace is {definition.namespace!r}, and the built-in quota of this"
                f" name is defined in namespace {self._built_in_namespace} alone"
            )
        held = self._in_force.get(name)
        if (
            held is not None
            and name not in self._deleted
            and held.key != definition.key
            and _age(held) < _age(definition)
        ):
            return (
                f"the name is used by ElasticQuota {held.key}, which is older; names are unique in"
                " the cluster"
            )
        if name in (ROOT_QUOTA, *_WITHOUT_CHILDREN):
            return ""
        for child in self._children.get(name, ()):
            other = self.tree(self._in_force[child])
            if other != self.tree(definition):
                return (
                    f"tree-id {self.tree(definition)!r} differs from that of its child {child},"
                    f" which is {other!r}"
                )
        if parent == ROOT_QUOTA:
            return ""
        if parent in _WITHOUT_CHILDREN:
            return f"parent {parent} takes no children"
        above = self._in_force.get(parent)
        if above is None:
            return f"parent {parent} does not exist, or cannot be used itself"
        if self.tree(above) != self.tree(definition):
            return (
                f"tree-id {self.tree(definition)!r} differs from that of parent {parent},"
                f" which is {self.tree(above)!r}"
            )
        levels = 0
        at: QuotaDefinition | None = above
        while at is not None:
            if at.name == name:
                return f"parent {parent} leads back to the quota itself (a cycle)"
            levels += 1
            at = self._in_force.get(at.parent)
        levels += self._height(name)
        if levels > _MOST_LEVELS:
            return (
                f'metadata.labels["{LABEL_QUOTA_PARENT}"] = {parent!r}: the tree would have'
                f" {levels} levels of quotas; at most {_MOST_LEVELS} can be used"
            )
        return ""

    def _height(self, name: str) -> int:
        """Return the levels of a quota and those below it; 1 without children."""
        below = (self._height(child) for child in self._children.get(name, ()))
        return 1 + max(below, default=0)


def _age(definition: QuotaDefinition) -> tuple[str, str]:
    """Return what sorts quotas by age, the oldest first; of one second, by namespace."""
    return definition.created, definition.key
