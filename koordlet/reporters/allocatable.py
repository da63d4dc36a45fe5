"""What a node had to allocate before admission amplified it.

The manager's webhook multiplies allocatable cpu and memory of a Node by its amplification ratios,
and keeps kubelet's own amounts in an annotation. docs/facts/manager.md, "Normalisation and
amplification".
"""

from __future__ import annotations

from apis.annotations import parse_raw_allocatable
from apis.keys import ANNOTATION_RAW_ALLOCATABLE, CPU, MEMORY
from hooks.facts import NodeMeta


def raw_allocatable(node: NodeMeta) -> dict[str, int]:
    """Return kubelet's cpu (milli-cores) and memory (bytes); nothing where none is amplified.

    Raises InputError for a bad annotation.
    """
    text = node.annotations.get(ANNOTATION_RAW_ALLOCATABLE)
    if not text:
        return {}
    resources = parse_raw_allocatable(text, obj=f"Node {node.name}")
    found = {}
    if CPU in resources:
        found[CPU] = resources[CPU].milli_value()
    if MEMORY in resources:
        found[MEMORY] = resources[MEMORY].value()
    return found
