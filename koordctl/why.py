"""`koordctl why POD`: why a pod has its node, or none.

The scheduler that leads knows most: the scores of the best nodes, and which change would free which
nodes. Where it cannot be reached, the pod's condition and a ScheduleExplanation say what they have.
The answer names its source.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, urlsplit

import msgspec

from apis.errors import printable
from apis.meta import unix_seconds
from apis.schedule_explanation import ScheduleExplanation
from koordctl.errors import CommandError
from koordctl.tables import cell, heading, table, when

DEFAULT_SCHEDULER: Final = "http://127.0.0.1:10251"
"""The scheduler's plain port, as `kubectl port-forward` brings it to this machine."""
_NAMESPACE: Final = "koordinator-system"
_LEASE: Final = "koord-scheduler"
"""The lease of the shipped configuration."""
_TIMEOUT_S: Final = 5.0
"""Chosen: far above the answer of a busy scheduler; a person waits no longer for the other
source."""


class _Listed(msgspec.Struct):
    items: tuple[ScheduleExplanation, ...] = ()


class _LeaseSpec(msgspec.Struct, rename="camel"):
    holder_identity: str = ""


class _Lease(msgspec.Struct):
    spec: _LeaseSpec


class _NoAnswer(Exception):
    """The scheduler has no answer; the message says why."""


def why(pod: str, *, scheduler: str | None, kubeconfig: str | None) -> dict[str, Any]:
    """Return what is known about a pod.

    pod: namespace/name, or a name in the namespace default. scheduler: the URL of the scheduler;
    None tries the usual one and then the API server. Raises CommandError.
    """
    namespace, _, name = pod.rpartition("/")
    namespace = namespace or "default"
    if not name or "/" in namespace:
        raise CommandError(f"{pod!r} is not a pod; expected namespace/name")
    url = (scheduler or DEFAULT_SCHEDULER).rstrip("/")
    try:
        return _from_scheduler(url, namespace, name) | {"source": url}
    except _NoAnswer as error:
        if scheduler is not None:
            raise CommandError(str(error)) from None
        import asyncio  # 30 ms, which other commands do not need

        return asyncio.run(_from_api_server(namespace, name, kubeconfig, str(error)))


def _from_scheduler(url: str, namespace: str, name: str) -> dict[str, Any]:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise CommandError(f"{url!r} is not an address of a scheduler; expected http://HOST:PORT")
    path = f"/apis/v1/pods/{quote(namespace, safe='')}/{quote(name, safe='')}"
    try:
        connection = http.client.HTTPConnection(
            parts.hostname, parts.port or 80, timeout=_TIMEOUT_S
        )
    except ValueError as error:
        raise CommandError(f"{url!r} is not an address of a scheduler: {error}") from None
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        reason = printable(str(error) or type(error).__name__)
        raise _NoAnswer(f"{url}: no scheduler answers: {reason}") from None
    finally:
        connection.close()
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if response.status != 200 or not isinstance(found, dict):
        message = found.get("message") if isinstance(found, dict) else ""
        raise _NoAnswer(cell(f"{url}: {message or f'HTTP {response.status}'}"))
    return found


async def _from_api_server(
    namespace: str, name: str, kubeconfig: str | None, without: str
) -> dict[str, Any]:
    # The API server's client takes long to import.
    from apis.decode import to_plain
    from apis.scheduling_pod import decode_scheduling_pod
    from kube.client import ApiError, Client, Unreachable
    from kube.connection import ConnectionConfigError, load_connection
    from kube.resources import PODS

    try:
        connection = load_connection(kubeconfig or os.environ.get("KUBECONFIG") or None)
        async with Client(connection, user_agent="koordctl") as client:
            pod = await client.get(PODS, name, decode_scheduling_pod, namespace=namespace)
            leader = await _leader(client)
            explanation = await _explanation_of(client, namespace, name)
    except (ApiError, Unreachable, ConnectionConfigError) as error:
        raise CommandError(cell(f"{without}; the API server: {error}")) from None
    condition = next((c for c in pod.status.conditions if c.type == "PodScheduled"), None)
    state = "unknown"
    if pod.spec.node_name:
        state = "bound"
    elif condition is not None:
        state = {"SchedulingGated": "gated"}.get(condition.reason, "unschedulable")
    found: dict[str, Any] = {
        "pod": f"{namespace}/{name}",
        "uid": pod.metadata.uid,
        "schedulerName": pod.spec.scheduler_name,
        "state": state,
        "node": pod.spec.node_name,
        "source": "the pod's condition PodScheduled",
        "withoutScheduler": without,
    }
    if condition is not None and condition.status != "True":
        found["message"] = condition.message
    if condition is not None and condition.last_transition_time:
        found["decidedAt"] = condition.last_transition_time
    if leader:
        found["leader"] = leader
    if explanation is not None:
        found["source"] += f", and ScheduleExplanation {explanation.metadata.name}"
        found["explanation"] = to_plain(explanation.status)
    return found


async def _leader(client: Any) -> str:
    """Return the pod of the scheduler that leads, "" if the lease may not be read or is not there.

    The holder of a lease is the host name, which is the pod's, and a random part.
    """
    from kube.client import ApiError
    from kube.resources import LEASES

    try:
        raw = await client.request("GET", LEASES.path(namespace=_NAMESPACE, name=_LEASE))
    except ApiError as error:
        if error.status in (403, 404):
            return ""
        raise
    return msgspec.json.decode(raw, type=_Lease).spec.holder_identity.rpartition("_")[0]


async def _explanation_of(client: Any, namespace: str, name: str) -> Any:
    """Return the ScheduleExplanation about a pod, None if there is none or it may not be read."""
    from kube.client import ApiError
    from kube.resources import SCHEDULE_EXPLANATIONS

    try:
        raw = await client.request("GET", SCHEDULE_EXPLANATIONS.path(namespace=namespace))
    except ApiError as error:
        if error.status in (403, 404):
            return None
        raise
    for each in msgspec.json.decode(raw, type=_Listed).items:
        if each.spec.question_object_key == f"{namespace}/{name}":
            return each
    return None


# --- text ----------------------------------------------------------------------------------------


def text(found: Mapping[str, Any]) -> str:
    """Return the answer for people, without control characters of what others wrote."""
    state = f"{found['state']} on {found['node']}" if found["node"] else found["state"]
    lines = [heading(cell(f"{found['pod']}: {state}"))]
    at = found.get("decidedAt")
    decided = f"decided {when(unix_seconds(at))}, " if at else ""
    by, source = cell(found["schedulerName"]), cell(found["source"])
    lines.append(f"  {decided}by {by}; source: {source}")
    if "withoutScheduler" in found:
        why_not = cell(found["withoutScheduler"])
        lines.append(f"  scores and nearest nodes need the scheduler: {why_not}")
    if "leader" in found:
        lines.append(f"  kubectl -n {_NAMESPACE} port-forward {cell(found['leader'])} 10251")
    if found.get("message"):
        lines += ["", cell(found["message"])]
    nearest = found.get("nearest")
    if nearest:
        rows = ((e["nodes"], e["text"], " ".join(e["examples"])) for e in nearest)
        lines += ["", table(("NODES", "WHAT WOULD HAVE TO CHANGE", "SUCH AS"), rows)]
    if "scores" in found:
        lines += ["", *score_lines(found["scores"])]
    details = _details(found.get("explanation"))
    if details:
        header = ("NODES", "PLUGIN", "REASON", "SUCH AS")
        lines += ["", table(header, details)]
    return "\n".join(lines)


def score_lines(scores: Mapping[str, Any]) -> list[str]:
    """Return the table of the best nodes."""
    best = scores["best"]
    plugins = list(best[0]["scores"]) if best else []
    rows = (
        (row["node"], row["total"], *(row["scores"][name] for name in plugins), "") for row in best
    )
    return [
        f"{cell(scores['feasible'])} of {cell(scores['nodes'])} nodes could take it; the best:",
        table(("NODE", "TOTAL", *plugins, ""), rows),
    ]


def _details(explanation: Mapping[str, Any] | None) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for domain in (explanation or {}).get("detailedExplanation") or ():
        attempt = domain.get("scheduleExplanation") or {}
        for each in attempt.get("nodeFailedDetails") or ():
            nodes = each.get("failedNodes") or ()
            rows.append(
                (len(nodes), each.get("failedPlugin"), each.get("reason"), " ".join(nodes[:3]))
            )
    return rows
