"""Sends the NodeMetric's status at the interval of the object's spec, and keeps it as a file.

The manager creates the object and writes its spec; koordlet patches the status alone. A round that
fails is followed by another one with newer measurements, so nothing queues while the API server is
away, and what the server had last stays there.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final, TypeVar

import msgspec

from apis.decode import decode_leniently, encode
from apis.nodemetric import NodeMetricSpec, NodeMetricStatus
from koordlet.reporters.files import write_manifest
from koordlet.reporters.node_metric import Policy, policy_of
from koordlet.reporters.stored import Plain, StoredObject
from kube.client import ApiError, Client, Unreachable
from kube.resources import NODE_METRICS
from service.events import Events, Severity

T = TypeVar("T")

_LOG = logging.getLogger("koordlet.reporters")

_JITTER: Final = 0.05
"""Share of the interval by which a report may come earlier or later, so that nodes that started
together spread out. Chosen: the manager counts reports as old after 15 intervals."""
_ABSENT_S: Final = 10.0
"""How often an object that is not there is looked for, at most. Chosen: a new node waits this long
for its batch resources; half of it doubles the requests of a cluster without a manager."""
_FIRST_RETRY_S: Final = 5.0
"""The pause after a failed round; it doubles up to the report interval. Chosen: a restart of an API
server takes some seconds, and thousands of nodes must not all ask again at once. At twice the value
a report that a short fault prevented comes up to 10 s late."""
_UNMEASURED_S: Final = 1.0
"""How often the first report looks for samples of the node: the shortest collection interval."""

_OBJECT: Final = "NodeMetric"

Build = Callable[[Policy], NodeMetricStatus]
"""Returns the report of this moment; runs in a worker thread."""


class NodeMetricReporter:
    """Reports of one node. Belongs to the event loop; `build` and files run in the workers.

    directory: where the object is kept as a file; "" for nowhere.
    """

    def __init__(
        self,
        node_name: str,
        build: Build,
        *,
        workers: Executor,
        events: Events,
        directory: str = "",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = Policy()
        """What the object's spec asked for when it was last seen."""
        self.reports = 0
        """Reports that the API server took, or that were written as a file without one."""
        self.problem = ""
        """Why the last round sent nothing; empty when it did."""
        self.refused = False
        """Whether the API server did not answer the last round, or refused it."""
        self._node_name = node_name
        self._build = build
        self._workers = workers
        self._events = events
        self._directory = directory
        self._monotonic = monotonic
        self._object = StoredObject(NODE_METRICS, node_name, subresource="status")
        self._spec: object = None
        self._failed_rounds = 0
        self._started: float | None = None
        self.last_at: float | None = None
        """When the last report was sent, in seconds of the monotonic clock."""

    async def run(self, client: Client | None) -> None:
        """Report until cancelled. client: None on a node without an API server."""
        while True:
            pause_s = await self.round(client)
            await asyncio.sleep(pause_s)

    async def round(self, client: Client | None) -> float:
        """Send one report; return the seconds until the next one."""
        if self._started is None:
            self._started = self._monotonic()
        try:
            pause_s = await self._round(client)
            self.refused = False
            return pause_s
        except (ApiError, Unreachable) as error:
            self.refused = True
            return self._failed(str(error))
        except Exception as error:  # noqa: BLE001 - a defect must not end all later reports
            _LOG.exception("a report could not be made")
            return self._failed(f"{type(error).__name__}: {error}")

    async def _round(self, client: Client | None) -> float:
        if client is not None:
            stored = await self._object.read(client)
            if stored is None:
                self._object.look_again()
                self._set_problem(
                    f"there is no NodeMetric {self._node_name}: koord-manager creates it",
                    absent=True,
                )
                return min(_ABSENT_S, self.policy.report_interval_s)
            self._take_spec(stored)
        status = await self._in_worker(self._build, self.policy)
        if self._too_early(status):
            return _UNMEASURED_S
        if client is not None:
            status = await self._send(client, status)
        if self._directory:
            await self._in_worker(self._write_file, status)
        self.reports += 1
        self.last_at = self._monotonic()
        self._failed_rounds = 0
        self._set_problem("")
        return self.policy.report_interval_s * random.uniform(1 - _JITTER, 1 + _JITTER)

    async def _send(self, client: Client, status: NodeMetricStatus) -> NodeMetricStatus:
        """Patch the status. If the spec has changed, the report is made again by the new one."""
        made_for = self.policy
        deleted = False

        def change(stored: Plain | None) -> Plain | None:
            nonlocal deleted
            if stored is None:
                deleted = True
                return None
            self._take_spec(stored)
            return {**stored, "status": wanted} if self.policy == made_for else None

        while True:
            wanted = _plain(status)
            await self._object.write(client, change)
            if deleted:
                raise Unreachable(f"NodeMetric {self._node_name} was deleted")
            if self.policy == made_for:
                return status
            made_for = self.policy
            status = await self._in_worker(self._build, self.policy)

    def _take_spec(self, stored: Plain) -> None:
        """Follow the object's spec; for a field that cannot be read its default counts."""
        spec = stored.get("spec") or {}
        if spec == self._spec:
            return
        self._spec = spec
        obj = f"{_OBJECT} {self._node_name}"
        decoded, errors = decode_leniently(spec, NodeMetricSpec, obj=obj)
        policy, problems = policy_of(decoded if decoded is not None else NodeMetricSpec())
        self.policy = policy
        for problem in (*(str(error) for error in errors), *problems):
            self._events.add("bad-object", obj, problem, severity=Severity.ERROR)

    def _too_early(self, status: NodeMetricStatus) -> bool:
        """Return whether the first report waits for the first samples of the node.

        An empty one would replace what the server still has from before a restart.
        """
        if self.reports or self._started is None:
            return False
        if status.node_metric is not None and status.node_metric.node_usage.resources:
            return False
        return self._monotonic() - self._started < self.policy.report_interval_s

    def _failed(self, problem: str) -> float:
        self._object.look_again()
        pause = min(_FIRST_RETRY_S * 2.0**self._failed_rounds, self.policy.report_interval_s)
        self._failed_rounds = min(self._failed_rounds + 1, 10)
        self._set_problem(problem)
        return pause * random.uniform(0.5, 1.0)

    def _set_problem(self, problem: str, *, absent: bool = False) -> None:
        """Keep the state of the reports, and add an event when it changes."""
        if problem == self.problem:
            return
        before, self.problem = self.problem, problem
        if problem and not before:
            self._events.add(
                "report-failed",
                _OBJECT,
                f"{problem}; koordlet tries again",
                severity=Severity.INFO if absent else Severity.WARNING,
            )
        elif not problem:
            self._events.add(
                "report-back", _OBJECT, "reports are taken again", severity=Severity.INFO
            )

    async def _in_worker(self, work: Callable[..., T], *arguments: object) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, work, *arguments)

    def _write_file(self, status: NodeMetricStatus) -> None:
        write_manifest(
            self._directory,
            NODE_METRICS,
            {"metadata": {"name": self._node_name}, "status": _plain(status)},
        )


def _plain(status: NodeMetricStatus) -> Plain:
    """Return the status as it looks when the server's JSON is decoded."""
    decoded: Plain = msgspec.json.decode(encode(status))
    return decoded
