"""What kubelet asked for each container, kept over a restart of the daemon.

A runtime that is asked later shows the values in force, which may be ours; the base of a division
or of a restore is what kubelet asked for. So every request seen in a hook is appended to a log on
the run directory's tmpfs (`service.append_log`) right after the reply. Each full list of containers
rewrites the file.

Of a container that no hook saw at its creation, the values at first sight are kept in that place:
later ones may be ours. And since kubelet may ask while nobody listens, so is what the runtime's
specification holds beside the request: a value that is none of them is a newer request.
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

_HEADER: Final = b"koordlet requests 1"
_REWRITE_BYTES: Final = 1 << 20
"""History that is kept before a rewrite: some thousand requests, which a restart reads in about
20 ms."""


class Remembered(NamedTuple):
    """A container's request. hooked: it was asked of us; else it was in force when first seen.

    given, told: see `koordlet.state.runtime_records.ContainerRecord`.
    """

    requested: Requested
    hooked: bool
    given: Requested | None = None
    told: Requested = NOTHING_REQUESTED


class _Values(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `Requested`. Sets are in the kernel's list format."""

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
    given: _Values | None = None
    told: _Values | None = None


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(_Line).decode


def load_requests(path: str) -> dict[str, Remembered]:
    """Return the last request of each container; what cannot be read is left out and logged."""
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
                given=None if one.given is None else _requested(one.given),
                told=NOTHING_REQUESTED if one.told is None else _requested(one.told),
            )
        except ValueError:
            lost += 1
    if lost:
        _LOG.warning("%s: %d lines cannot be read; their containers' requests are lost", path, lost)
    return found


class RequestsLog:
    """The file. One writer; a failure to write costs the memory of a restart, never a hook."""

    def __init__(self, path: str, all_requests: Callable[[], Mapping[str, Remembered]]) -> None:
        """all_requests: returns those of all containers that exist, for a rewrite."""
        self._all_requests = all_requests
        self._log = append_log.AppendLog(
            path,
            header=_HEADER,
            live=self._live,
            consequence="after a restart, requests from before count as the values in force",
            rewrite_bytes=_REWRITE_BYTES,
        )

    @property
    def problem(self) -> str:
        """Why the file lacks requests; "" while it has them all."""
        return self._log.problem

    def append(self, container_id: str, remembered: Remembered) -> None:
        """Remember one request, which `all_requests` returns already."""
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
    given, told = remembered.given, remembered.told
    line = _Line(
        id=container_id,
        hooked=remembered.hooked,
        given=None if given is None else _values(given),
        told=None if told == NOTHING_REQUESTED else _values(told),
        **_fields(remembered.requested),
    )
    return _encode(line)


@lru_cache(maxsize=2048)
def _values(requested: Requested) -> _Values:
    """Return the values as they are written; replicas are answered alike."""
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
