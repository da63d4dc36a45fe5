"""`koordctl explain node NAME RESOURCE`: why a node offers as much as it does.

koord-manager writes every term of its calculation into an annotation of the Node. This command
reads it from the API server and prints the formula with each term, its source and its age.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from apis.core import Node, decode_node
from apis.decode import to_plain
from apis.errors import InputError
from apis.explanation import ANNOTATION_RESOURCE_EXPLANATION, parse_explanation, render
from apis.keys import BATCH_CPU, BATCH_MEMORY, MID_CPU, MID_MEMORY

SHORT_NAMES = {
    "batch-cpu": BATCH_CPU,
    "batch-memory": BATCH_MEMORY,
    "mid-cpu": MID_CPU,
    "mid-memory": MID_MEMORY,
}


def explain_node(node: Node, resource: str | None) -> tuple[dict[str, Any], str]:
    """Return (plain data, text) that explain `resource` of a node, or all of its resources.

    Raises InputError when the node's annotation does not explain the resource.
    """
    name = node.metadata.name
    where = f'metadata.annotations["{ANNOTATION_RESOURCE_EXPLANATION}"]'
    text = node.metadata.annotations.get(ANNOTATION_RESOURCE_EXPLANATION)
    if not text:
        raise InputError(
            obj=f"Node {name}",
            field=where,
            value="(absent)",
            problem="koord-manager has not calculated resources for this node",
            hint="check that koord-manager runs, and that it is this project's",
        )
    found = parse_explanation(text, obj=f"Node {name}").resources
    wanted = [SHORT_NAMES.get(resource, resource)] if resource else sorted(found)
    missing = [one for one in wanted if one not in found]
    if missing:
        raise InputError(
            obj=f"Node {name}",
            field=where,
            value=missing[0],
            problem="koord-manager does not explain this resource",
            hint=f"it explains {', '.join(sorted(found))}",
        )
    lines = []
    for one in wanted:
        offered = node.status.allocatable.get(one)
        lines.append(render(one, found[one]))
        lines.append(f"  offered now: {'nothing' if offered is None else offered}")
    return {one: to_plain(found[one]) for one in wanted}, "\n".join(lines)


def fetch_node(name: str, *, kubeconfig: str | None = None) -> Node:
    """Return a Node from the API server of the kubeconfig. Raises kube's errors."""
    from kube.client import Client
    from kube.connection import load_connection
    from kube.resources import NODES

    async def fetch() -> Node:
        connection = load_connection(kubeconfig or os.environ.get("KUBECONFIG") or None)
        async with Client(connection, user_agent="koordctl") as client:
            return await client.get(NODES, name, decode_node)

    return asyncio.run(fetch())
