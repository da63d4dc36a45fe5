"""The requests log: what kubelet requested for each container, kept over a restart of the daemon.

The base of a division or of a restore is what kubelet requested. A runtime's later lists show the
values in force, which may be delivered ones. So every request that a hook saw is kept in a log in
the run directory (`service.append_log`). It is staged before the reply, in a mapped file that
outlasts a kill (`service.staged_lines`), and appended to the log a moment after it. Each full list
of containers rewrites the log.

For a container that no hook saw created, the log keeps the values that the runtime first reported.
Kubelet may also request values while koordlet is not connected. So the log keeps what was delivered
and what the runtime last reported as well: a value that equals none of these is a newer request.

What the proxy sends for a container that has no id yet is kept under a name that
`koordlet.state.proxy_requests` makes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from apis.cpuset import CpuSet
from hooks.subject import NOTHING_REQUESTED, Requested
from service import append_log, staged_lines

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


class _Memory(_Values, frozen=True, omit_defaults=True, kw_only=True):
    """What is remembered of a container, and of its replicas."""

    hooked: bool = True
    delivered: _Values | None = None
    reported: _Values | None = None


class _Line(_Memory, frozen=True, omit_defaults=True, kw_only=True):
    """One request."""

    id: str


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(_Line).decode


def load_requests(path: str) -> dict[str, Remembered]:
    """Return the last request of each container; unreadable lines are skipped and logged."""
    found: dict[str, Remembered] = {}
    for file, content in ((path, _logged(path)), (_staging(path), _staged(path))):
        lost = content.damaged
        for line in content.lines:
            try:
                one = _decode(line)
                found[one.id] = Remembered(
                    _requested(one),
                    one.hooked,
                    delivered=None if one.delivered is None else _requested(one.delivered),
                    reported=NOTHING_REQUESTED
                    if one.reported is None
                    else _requested(one.reported),
                )
            except ValueError:
                lost += 1
        if lost:
            _LOG.warning(
                "%s: %d lines cannot be read; their containers' requests are lost", file, lost
            )
    return found


def _logged(path: str) -> append_log.Content:
    try:
        return append_log.read(path, header=_HEADER)
    except OSError as error:
        _LOG.warning("cannot read %s: %s", path, error.strerror)
        return append_log.Content()


def _staged(path: str) -> append_log.Content:
    try:
        return staged_lines.read(_staging(path), header=_HEADER)
    except OSError as error:
        _LOG.warning("cannot read %s: %s", _staging(path), error.strerror)
        return append_log.Content()


def _staging(path: str) -> str:
    """Return the path of the mapped file beside the log at `path`."""
    return f"{path}.staged"


class RequestsLog:
    """The two files. One writer. A failed write costs requests after a restart, and never a hook.

    A line stays staged until the log has it. So a staged line is as new as the log's last one of
    the same container, or newer, and a restart reads the log first.
    """

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
        self._staged = staged_lines.StagedLines(_staging(path), header=_HEADER)
        self._staging_problem = ""
        self._waiting: list[bytes] = list(_staged(path).lines)
        """Bodies of staged lines, for the log; the first ones may be an earlier process's."""

    @property
    def problem(self) -> str:
        """Why the log is incomplete; "" while it is complete."""
        return self._log.problem

    def keep(
        self,
        container_id: str,
        requested: Requested,
        hooked: bool,
        delivered: Requested | None = None,
        reported: Requested = NOTHING_REQUESTED,
    ) -> None:
        """Keep a request over a restart from now on; `write` must follow soon.

        The arguments are those of `Remembered`.
        """
        self.keep_members(
            container_id,
            members(requested, hooked=hooked, delivered=delivered, reported=reported),
        )

    def keep_members(self, container_id: str, after_id: bytes) -> None:
        """As `keep`, with what `members` returned for the request.

        The reply to a creation waits for this method, so it makes few objects and few calls: in
        cold caches each costs about a microsecond.
        """
        body = b'{"id":%b%b' % (_encode(container_id), after_id)
        self._waiting.append(body)
        if not self._staged.put(append_log.encode_line(body)):
            self.write()

    def write(self) -> None:
        """Append what is staged to the log."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            # After a failure the log is rewritten from `all_requests`.
            self._written(self._log.append(waiting))

    def rewrite(self) -> None:
        """Keep the requests of the containers that exist, and no others."""
        self._waiting = []
        self._written(self._log.rewrite())

    def _written(self, done: bool) -> None:
        """Empty the mapped file, or make it, where the log has everything."""
        if not done:
            return
        self._staged.clear()
        if self._staged.problem != self._staging_problem:
            self._staging_problem = self._staged.problem
            if self._staging_problem:
                _LOG.warning("%s; requests are written during hooks", self._staging_problem)

    def close(self) -> None:
        self.write()
        self._staged.close()
        self._log.close()

    def _live(self) -> Iterator[bytes]:
        for container_id, remembered in self._all_requests().items():
            after_id = members(
                remembered.requested,
                hooked=remembered.hooked,
                delivered=remembered.delivered,
                reported=remembered.reported,
            )
            yield b'{"id":%b%b' % (_encode(container_id), after_id)


@lru_cache(maxsize=_KEPT_TEXTS)
def members(
    requested: Requested,
    *,
    hooked: bool,
    delivered: Requested | None = None,
    reported: Requested = NOTHING_REQUESTED,
) -> bytes:
    """Return the members of a line's object behind the id, with the closing brace."""
    memory = _Memory(
        hooked=hooked,
        delivered=None if delivered is None else _values(delivered),
        reported=None if reported == NOTHING_REQUESTED else _values(reported),
        **_fields(requested),
    )
    text = _encode(memory)[1:]
    return text if text == b"}" else b"," + text


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
