"""Annotation `pod.koordinator.sh/replace-resources`: a quota counts resources under other names.

The text is `from1:to1,from2:to2,from3:`. An empty target takes the resource out; a part without
exactly one colon is skipped; blanks around names do not count. Only the copy that a quota counts is
renamed; the pod keeps its resources. The rules, upstream's:

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
from typing import Any

import msgspec

from apis.keys import CPU
from apis.quantity import Quantity
from cluster.webhook.pod_resources import Plain, containers, quantity


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


def replaced(resources: Plain, replacements: Replacements, *, obj: str, where: str) -> Plain:
    """Return a list of resources renamed. Raises InputError for a cpu that is no quantity."""
    named = {name: value for name, value in resources.items() if name not in replacements.erased}
    result = dict(named)
    for source, target in replacements.renamed.items():
        if source not in named or target in named or target in result:
            continue
        value = result.pop(source)
        if source == CPU:
            amount = quantity(value, obj=obj, where=f"{where}.{source}")
            value = str(Quantity.of(amount.milli_value()))
        result[target] = value
    return result


def with_replaced_resources(pod: Mapping[str, Any], text: str, *, obj: str) -> Plain:
    """Return a copy of a plain pod with its resources renamed as `text` says. Raises InputError."""
    replacements = parse_replacements(text)
    result: Plain = msgspec.json.decode(msgspec.json.encode(pod))
    for where, container in containers(result, "initContainers", "containers"):
        resources = container.get("resources") or {}
        for part in ("requests", "limits"):
            if resources.get(part):
                resources[part] = replaced(
                    resources[part], replacements, obj=obj, where=f"{where}.resources.{part}"
                )
    spec = result.get("spec") or {}
    if spec.get("overhead"):
        spec["overhead"] = replaced(spec["overhead"], replacements, obj=obj, where="spec.overhead")
    return result
