"""/apis/v1: the state of the leader's tables, for people who look for the reason of a decision.

Paths and names are upstream's. Every answer is made from the tables at one moment. An answer about
all nodes or all gangs is made in parts, with decisions in between, so each part is of one moment
and the whole is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import msgspec

from cluster.scheduler.core import SchedulerCore
from cluster.scheduler.serving import dumps
from cluster.scheduler.tables.quotas.table import QuotaTable
from service.http_server import Handler, Request, Response, json

_ROOT: Final = "/apis/v1"
_SERVICES: Final = f"{_ROOT}/__services__"
_PART: Final = 16
"""Nodes or gangs that are written until decisions and watches go on. Chosen: the devices of 16
nodes with 8 GPUs take about 1 ms, as long as three decisions."""

_Page = Callable[[Request, tuple[str, ...]], Awaitable[Response]]
_encode: Final = msgspec.json.encode


class _NotFound(Exception):
    """The message says what is not known."""


class Debugging:
    """Answers the paths below /apis/v1."""

    def __init__(self, core: SchedulerCore, *, leading: Callable[[], bool]) -> None:
        self._core = core
        self._leading = leading
        plugins = f"{_ROOT}/plugins"
        self._pages: dict[str, _Page] = {
            f"{_ROOT}/nodes/:nodeName": self._node,
            f"{_ROOT}/pods/:namespace/:name": self._pod,
            f"{plugins}/LoadAwareScheduling/node/:nodeName": self._load,
            f"{plugins}/NodeNUMAResource/nodes/:nodeName": self._numa,
            f"{plugins}/DeviceShare/nodeDeviceSummaries": self._all_devices,
            f"{plugins}/DeviceShare/nodeDeviceSummaries/:name": self._devices,
            f"{plugins}/Reservation/nodeReservations/:nodeName": self._reservations,
            f"{plugins}/ElasticQuota/quotas": self._quotas,
            f"{plugins}/ElasticQuota/quotas/:name": self._quota,
            f"{plugins}/Coscheduling/gangs": self._gangs,
            f"{plugins}/Coscheduling/gang/:namespace/:name": self._gang,
        }
        self._patterns = {path: tuple(path.split("/")) for path in self._pages}

    async def page(self, request: Request) -> Response | None:
        """Return the answer to a request below /apis/v1, None for another path."""
        if request.path != _ROOT and not request.path.startswith(f"{_ROOT}/"):
            return None
        if request.method not in ("GET", "HEAD"):
            return _message(405, f"{request.method} is not possible here, only GET")
        if not self._leading():
            return _message(503, "the instance is not leader")
        if request.path == _SERVICES:
            return json(sorted((*self._pages, _SERVICES)))
        parts = tuple(request.path.split("/"))
        for path, pattern in self._patterns.items():
            values = _match(pattern, parts)
            if values is not None:
                try:
                    return await self._pages[path](request, values)
                except _NotFound as error:
                    return _message(404, str(error))
        return _message(404, f"no such path; {_SERVICES} lists them")

    def _row(self, name: str) -> int:
        row = self._core.tables.nodes.row(name)
        if row is None:
            raise _NotFound(f"node {name!r} is not known")
        return row

    async def _node(self, request: Request, values: tuple[str, ...]) -> Response:
        return json(dumps.node(self._core, self._row(values[0])))

    async def _pod(self, request: Request, values: tuple[str, ...]) -> Response:
        key = "/".join(values)
        found = self._core.why(key)
        if found is None:
            raise _NotFound(f"pod {key!r} is not known")
        return json(found)

    async def _load(self, request: Request, values: tuple[str, ...]) -> Response:
        row = self._row(values[0])
        tables = self._core.plugins.loads
        if not tables:
            raise _NotFound("no profile enables LoadAwareScheduling")
        # Profiles with equal arguments share one; the others follow in the order of the profiles.
        first, *others = (dumps.load(table, row) for table in tables)
        return json(first | {"otherProfiles": others} if others else first)

    async def _numa(self, request: Request, values: tuple[str, ...]) -> Response:
        return json(dumps.numa(self._core, self._row(values[0])))

    async def _devices(self, request: Request, values: tuple[str, ...]) -> Response:
        found = dumps.devices(self._core, self._row(values[0]))
        if found is None:
            raise _NotFound(f"node {values[0]!r} has no Device")
        return json(found)

    async def _all_devices(self, request: Request, values: tuple[str, ...]) -> Response:
        nodes = self._core.tables.nodes

        def entry(row: int) -> tuple[str, Any] | None:
            # The row may be free by now.
            found = dumps.devices(self._core, row) if nodes.alive[row] else None
            return None if found is None else (nodes.name(row), found)

        return await _object(entry, range(len(nodes)))

    async def _reservations(self, request: Request, values: tuple[str, ...]) -> Response:
        return json(dumps.reservations(self._core, self._row(values[0])))

    def _quota_table(self) -> QuotaTable:
        table = self._core.plugins.quotas
        if table is None:
            raise _NotFound("no profile enables ElasticQuota")
        return table

    async def _quotas(self, request: Request, values: tuple[str, ...]) -> Response:
        """Answer with the quotas by name, of one tree if the query names it."""
        table, pods = self._quota_table(), _with_pods(request)
        tree = request.query.get("tree", "")

        def entry(name: str) -> tuple[str, Any] | None:
            found = dumps.quota(table, name, pods=pods)
            if found is None or (tree and found["tree"] != tree):
                return None
            return name, found

        return await _object(entry, sorted(table.quotas))

    async def _quota(self, request: Request, values: tuple[str, ...]) -> Response:
        found = dumps.quota(self._quota_table(), values[0], pods=_with_pods(request))
        if found is None:
            raise _NotFound(f"quota {values[0]!r} is not known")
        return json(found)

    async def _gangs(self, request: Request, values: tuple[str, ...]) -> Response:
        table = self._core.gang_table

        def entry(name: str) -> tuple[str, Any] | None:
            found = table.get(name)
            return None if found is None else (name, dumps.gang(self._core, found))

        return await _object(entry, sorted(gang.id for gang in table))

    async def _gang(self, request: Request, values: tuple[str, ...]) -> Response:
        name = "/".join(values)
        found = self._core.gang_table.get(name)
        if found is None:
            raise _NotFound(f"gang {name!r} is not known")
        return json(dumps.gang(self._core, found))


def debugging_page(core: SchedulerCore, *, leading: Callable[[], bool]) -> Handler:
    """Return what answers every path below /apis/v1, and 404 for the others."""
    debugging = Debugging(core, leading=leading)

    async def answer(request: Request) -> Response:
        found = await debugging.page(request)
        return _message(404, "not found") if found is None else found

    return answer


def _with_pods(request: Request) -> bool:
    return request.query.get("includePods") == "true"


def _match(pattern: tuple[str, ...], parts: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the values of the named parts of a path, None if it is another path."""
    if len(pattern) != len(parts):
        return None
    values = []
    for expected, part in zip(pattern, parts, strict=True):
        if expected.startswith(":") and part:
            values.append(part)
        elif expected != part:
            return None
    return tuple(values)


async def _object(entry: Callable[[Any], tuple[str, Any] | None], about: Iterable[Any]) -> Response:
    """Return a JSON object of entries that are made one by one, with pauses for other work."""
    members: list[bytes] = []
    for number, each in enumerate(about, start=1):
        made = entry(each)
        if made is not None:
            members.append(_encode(made[0]) + b":" + _encode(made[1]))
        if number % _PART == 0:
            await asyncio.sleep(0)
    return Response(200, b"{" + b",".join(members) + b"}", "application/json")


def _message(status: int, message: str) -> Response:
    return json({"message": message}, status)
