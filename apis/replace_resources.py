"""Annotation `pod.koordinator.sh/replace-resources`: a pod counts with other names of resources.

The text is `from1:to1,from2:to2,from3:`. An empty target takes the resource out; a part without
exactly one colon is skipped; blanks around names do not count. The pod keeps its resources; only
what is counted is renamed. The rules, upstream's:

- what is taken out goes first, so it makes room for a target of its name, and cannot be renamed;
- a target that the container names itself stays, and its source stays too;
- `cpu` becomes a whole number of milli-cores, as the extended resources count;
- of two parts with one source the last one counts.

Upstream walks the parts in random order. Here a source is what the pod names: with `a:b,b:c` an
`a` becomes `b` and never `c`, and of two sources with one target the first one gets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from apis.keys import CPU
from apis.quantity import Quantity, ResourceList

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Replacements:
    """A parsed annotation."""

    erased: frozenset[str]
    renamed: Mapping[str, str]
    """Source -> target."""


def parse_replacements(text: str) -> Replacements:
    """Return what the annotation's text asks for."""
    renamed: dict[str, str] = {}
    erased: set[str] = set()
    for part in text.split(","):
        names = [name.strip() for name in part.split(":")]
        if len(names) != 2:
            continue
        source, target = names
        if target:
            renamed[source] = target
        else:
            erased.add(source)
    return Replacements(frozenset(erased), renamed)


def renamed(resources: Mapping[str, T], replacements: Replacements) -> dict[str, tuple[str, T]]:
    """Return what remains of a list of resources: name -> its name before, and its amount."""
    named = {name: value for name, value in resources.items() if name not in replacements.erased}
    result = {name: (name, value) for name, value in named.items()}
    for source, target in replacements.renamed.items():
        if source in named and target not in named and target not in result:
            result[target] = result.pop(source)
    return result


def replaced(resources: ResourceList, replacements: Replacements) -> ResourceList:
    """Return a list of resources under the names that count."""
    return {
        name: Quantity.of(amount.milli_value()) if before == CPU != name else amount
        for name, (before, amount) in renamed(resources, replacements).items()
    }
