"""Evicts the victims of a preemption: a condition that says why, then the deletion.

By the condition DisruptionTarget, a Job's failure policy distinguishes preempted from failed pods.
Both requests name the victim's uid, so that a pod of the same name that came later is
spared, and both can be repeated: a lost answer is resolved by the next try.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from apis.meta import format_time
from cluster.scheduler.binding.pauses import MOST_FAILURES, Pauses
from cluster.scheduler.binding.placement import Refused, Why
from kube.client import STRATEGIC_PATCH, ApiError, Client, Unreachable
from kube.resources import PODS

_log = logging.getLogger(__name__)


PREEMPTED: Final = "PreemptionByScheduler"
"""Reason of the condition DisruptionTarget of a pod that a scheduler evicts for another one."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A pod that makes room for another one."""

    namespace: str
    name: str
    uid: str


async def evict_victim(
    client: Client, victim: Victim, *, controller: str, now: Callable[[], float]
) -> Refused | None:
    """Delete a victim; return None when it is being deleted or gone, else why it was refused.

    controller: the scheduler's name, for the condition's message. now: the wall clock in seconds.
    """
    pauses = Pauses()
    failures = 0
    while True:
        try:
            await _evict(client, victim, controller, now())
            return None
        except ApiError as error:
            if error.not_found or is_other_pod(error):
                return None
            if error.status == 403:
                return Refused(Why.FORBIDDEN, error.message)
            if error.status < 500 and error.status not in (401, 408, 409, 429):
                return Refused(Why.INVALID, str(error))
            if error.status >= 500 or error.status == 409:
                failures += 1
            if failures >= MOST_FAILURES:
                return Refused(Why.FAILING, str(error))
            reason = str(error)
        except Unreachable as error:
            reason = str(error)
        _log.info("pod %s/%s is not evicted yet: %s", victim.namespace, victim.name, reason)
        await pauses.rest()


def is_other_pod(error: ApiError) -> bool:
    """Return whether the name has another uid now: 422 for a PATCH, 409 for a DELETE."""
    return (error.status == 422 and "metadata.uid" in error.message) or (
        error.status == 409 and "UID" in error.message and "precondition" in error.message
    )


async def _evict(client: Client, victim: Victim, controller: str, now: float) -> None:
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": PREEMPTED,
        "message": f"{controller}: preempting to accommodate a higher priority pod",
        "lastTransitionTime": format_time(datetime.fromtimestamp(now, UTC)),
    }
    path = PODS.path(namespace=victim.namespace, name=victim.name)
    await client.request(
        "PATCH",
        f"{path}/status",
        body=msgspec.json.encode(
            {"metadata": {"uid": victim.uid}, "status": {"conditions": [condition]}}
        ),
        content_type=STRATEGIC_PATCH,
        tries=1,
    )
    options = {
        "kind": "DeleteOptions",
        "apiVersion": "v1",
        "preconditions": {"uid": victim.uid},
    }
    await client.request("DELETE", path, body=msgspec.json.encode(options), tries=1)
