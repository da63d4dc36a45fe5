"""Annotation `pod.koordinator.sh/replace-resources` on a pod as JSON, for the quota that counts it.

Only the copy that a quota counts is renamed; the pod keeps its resources.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from apis.keys import CPU
from apis.quantity import Quantity
from apis.replace_resources import Replacements, parse_replacements, renamed
from cluster.webhook.pod_resources import Plain, containers, quantity


def replaced(resources: Plain, replacements: Replacements, *, obj: str, where: str) -> Plain:
    """Return a list of resources renamed. Raises InputError for a cpu that is not a quantity."""
    result: Plain = {}
    for name, (before, value) in renamed(resources, replacements).items():
        if before == CPU != name:
            amount = quantity(value, obj=obj, where=f"{where}.{before}")
            value = str(Quantity.of(amount.milli_value()))
        result[name] = value
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
