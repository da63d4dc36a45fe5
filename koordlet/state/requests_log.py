"""What kubelet asked for each container, kept over a restart of the daemon.

A runtime that is asked later shows the values in force, which may be ours; the base of a division
or of a restore is what kubelet asked for. So every request seen in a hook is appended to a small
file on the run directory's tmpfs right after the reply: a line is there once written, also after a
SIGKILL; a half-written last line is left out. Each full list of containers rewrites the file, and
whoever appends does when it is `outdated`.

Of a container that no hook saw at its creation, the values at first sight are kept in that place:
later ones may be ours. And since kubelet may ask while nobody listens, so is what the runtime's
specification holds beside the request: a value that is none of them is a newer request.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from apis.cpuset import CpuSet
from hooks.subject import NOTHING_REQUESTED, Requested
from service.files import replacing

_LOG = logging.getLogger("koordlet.requests")

_REWRITE_AFTER: Final = 8192
_REST_S: Final = 10.0
_MAX_BYTES: Final = 32 << 20


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


class RequestsLog:
    """The file. One writer; a failure to write costs the memory of a restart, never a hook."""

    def __init__(self, path: str, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._monotonic = monotonic
        self._fd: int | None = None
        self._since_rewrite = 0
        self._behind = False
        self._rest_until = 0.0
        self.failures = 0

    def load(self) -> dict[str, Remembered]:
        """Return the last request of each container; an unreadable line is left out."""
        try:
            with open(self._path, "rb") as file:
                data = file.read(_MAX_BYTES)
        except FileNotFoundError:
            return {}
        except OSError as error:
            _LOG.warning("cannot read %s: %s", self._path, error.strerror)
            return {}
        found: dict[str, Remembered] = {}
        for line in data.splitlines():
            try:
                one = _decode(line)
                found[one.id] = Remembered(
                    _requested(one),
                    one.hooked,
                    given=None if one.given is None else _requested(one.given),
                    told=NOTHING_REQUESTED if one.told is None else _requested(one.told),
                )
            except ValueError:
                continue
        return found

    def append(self, container_id: str, remembered: Remembered) -> None:
        """Remember one request."""
        try:
            if self._fd is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
                self._fd = os.open(self._path, flags, 0o600)
            if not os.fstat(self._fd).st_nlink:
                self._behind = True  # somebody removed the file
            # What went wrong may have left half a line.
            data = b"\n" * self._behind + _line(container_id, remembered)
            if os.write(self._fd, data) != len(data):
                raise OSError(errno.ENOSPC, "the disk took a part of it only")
            self._since_rewrite += 1
        except OSError as error:
            self._failed(error)

    @property
    def outdated(self) -> bool:
        """Tell whether the file is to be written anew: it lacks lines, or has too many old ones."""
        if self._behind:
            return self._monotonic() >= self._rest_until
        return self._since_rewrite >= _REWRITE_AFTER

    def rewrite(self, requests: Mapping[str, Remembered]) -> None:
        """Keep only these: the containers that exist."""
        try:
            with replacing(self._path) as file:
                for container_id, remembered in requests.items():
                    file.write(_line(container_id, remembered))
        except OSError as error:
            self._failed(error)
            return
        self.close()
        self._since_rewrite = 0
        self._behind = False
        if self.failures:
            self.failures = 0
            _LOG.info("%s is written again", self._path)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _failed(self, error: OSError) -> None:
        self.failures += 1
        self._behind = True
        self._rest_until = self._monotonic() + _REST_S
        if self.failures == 1:
            _LOG.warning("cannot write %s: %s", self._path, error.strerror)


def _line(container_id: str, remembered: Remembered) -> bytes:
    given, told = remembered.given, remembered.told
    line = _Line(
        id=container_id,
        hooked=remembered.hooked,
        given=None if given is None else _values(given),
        told=None if told == NOTHING_REQUESTED else _values(told),
        **_fields(remembered.requested),
    )
    return _encode(line) + b"\n"


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
