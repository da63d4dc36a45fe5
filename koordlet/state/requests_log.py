"""The requests log: what kubelet requested for each container, kept over a restart of the daemon.

The base of a division or of a restore is what kubelet requested. A runtime's later lists show the
values in force, which may be delivered ones. So every request that a hook saw is appended to a log
in the run directory (`service.append_log`) right after the reply. Each full list of containers
rewrites the file.

For a container that no hook saw created, the log keeps the values that the runtime first reported.
Kubelet may also request values while koordlet is not connected. So the log keeps what was delivered
and what the runtime last reported as well: a value that equals none of these is a newer request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from apis.cpuset import CpuSet
from hooks.subject import NOTHING_REQUESTED, Requested
from service import append_log

_LOG = logging.getLogger("koordlet.requests")

_HEADER: Final = b"koordlet requests 2"
"""The first line of the file, with the number of its format."""
_REWRITE_BYTES: Final = 1 << 20
"""How long the file may grow before it is rewritten: some thousand requests, which a restart reads
in about 20 ms. Twice the value doubles that time, and halves the number of rewrites."""
_KEPT_TEXTS: Final = 2048
"""Distinct requests whose encoded form is cached. Chosen: replicas share one, and a node runs far
fewer kinds of containers. Twice the value changes nothing on such a node."""


class Remembered(NamedTuple):
    """A container's request.

    hooked: the request came in a hook; else these are the values that were first reported.
    delivered, reported: see `koordlet.state.records.ContainerRecord`.
    """

    requested: Requested
    hooked: bool
    delivered: Requested | None = None
    reported: Requested = NOTHING_REQUESTED


class _Values(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `Requested` in the file. CPU sets are in the kernel's list format."""

    shares: int | None = None
    quota_us: int | None = None
    period_us: int | None = None
    memory: int | None = None
    cpus: str | None = None
    mems: str | None = None
    oom: int | None = None


class _Line(_Values, frozen=True, omit_defaults=True, kw_only=True):
    """One request."""

    id: str
    hooked: bool = True
    delivered: _Values | None = None
    reported: _Values | None = None


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(_Line).decode


def load_requests(path: str) -> dict[str, Remembered]:
    """Return the last request of each container; unreadable lines are skipped and logged."""
    try:
        content = append_log.read(path, header=_HEADER)
    except OSError as error:
        _LOG.warning("cannot read %s: %s", path, error.strerror)
        return {}
    found: dict[str, Remembered] = {}
    lost = content.damaged
    for line in content.lines:
        try:
            one = _decode(line)
            found[one.id] = Remembered(
                _requested(one),
                one.hooked,
                delivered=None if one.delivered is None else _requested(one.delivered),
                reported=NOTHING_REQUESTED if one.reported is None else _requested(one.reported),
            )
        except ValueError:
            lost += 1
    if lost:
        _LOG.warning("%s: %d lines cannot be read; their containers' requests are lost", path, lost)
    return found


class RequestsLog:
    """The file. One writer. A failed write costs requests after a restart, and never a hook."""

    def __init__(self, path: str, all_requests: Callable[[], Mapping[str, Remembered]]) -> None:
        """all_requests: returns the requests of all containers that exist, for a rewrite."""
        self._all_requests = all_requests
        self._log = append_log.AppendLog(
            path,
            header=_HEADER,
            live=self._live,
            consequence="after a restart, the values then in force count as kubelet's requests",
            rewrite_bytes=_REWRITE_BYTES,
        )

    @property
    def problem(self) -> str:
        """Why the file is incomplete; "" while it is complete."""
        return self._log.problem

    def append(self, container_id: str, remembered: Remembered) -> None:
        """Append one request. `all_requests` must return it already."""
        self._log.append([_line(container_id, remembered)])

    def rewrite(self) -> None:
        """Keep the requests of the containers that exist, and no others."""
        self._log.rewrite()

    def close(self) -> None:
        self._log.close()

    def _live(self) -> Iterator[bytes]:
        for container_id, remembered in self._all_requests().items():
            yield _line(container_id, remembered)


def _line(container_id: str, remembered: Remembered) -> bytes:
    delivered, reported = remembered.delivered, remembered.reported
    line = _Line(
        id=container_id,
        hooked=remembered.hooked,
        delivered=None if delivered is None else _values(delivered),
        reported=None if reported == NOTHING_REQUESTED else _values(reported),
        **_fields(remembered.requested),
    )
    return _encode(line)


@lru_cache(maxsize=_KEPT_TEXTS)
def _values(requested: Requested) -> _Values:
    """Return the values as the file has them."""
    return _Values(**_fields(requested))


def _fields(requested: Requested) -> dict[str, Any]:
    return {
        "shares": requested.cpu_shares,
        "quota_us": requested.cfs_quota_us,
        "period_us": requested.cfs_period_us,
        "memory": requested.memory_limit_bytes,
        "cpus": None if requested.cpus is None else str(requested.cpus),
        "mems": None if requested.mems is None else str(requested.mems),
        "oom": requested.oom_score_adj,
    }


def _requested(values: _Values) -> Requested:
    return Requested(
        cpu_shares=values.shares,
        cfs_quota_us=values.quota_us,
        cfs_period_us=values.period_us,
        memory_limit_bytes=values.memory,
        cpus=None if values.cpus is None else CpuSet.parse(values.cpus),
        mems=None if values.mems is None else CpuSet.parse(values.mems),
        oom_score_adj=values.oom,
    )
