"""What kubelet asked for each container, kept over a restart of the daemon.

A runtime that is asked later shows the values in force, which may be ours; the base of a division
or of a restore is what kubelet asked for. So every request seen in a hook is appended to a small
file on the run directory's tmpfs right after the reply: a line is there once written, also after a
SIGKILL; a half-written last line is left out. Each full list of containers rewrites the file.

Of a container that no hook saw at its creation, the values at first sight are kept in that place:
later ones may be ours.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from hooks.subject import Requested
from linux.cpuset import CpuSet
from service.files import replacing

_LOG = logging.getLogger("koordlet.requests")

MAX_LINES: Final = 65536
_MAX_BYTES: Final = 32 << 20


class Remembered(NamedTuple):
    """A container's request. hooked: it was asked of us; else it was in force when first seen."""

    requested: Requested
    hooked: bool


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request. Sets are in the kernel's list format."""

    id: str
    shares: int | None = None
    quota_us: int | None = None
    period_us: int | None = None
    memory: int | None = None
    cpus: str | None = None
    mems: str | None = None
    oom: int | None = None
    hooked: bool = True


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(_Line).decode


class RequestsLog:
    """The file. One writer; a failure to write costs the memory of a restart, never a hook."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: int | None = None
        self._lines = 0
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
        for line in data.splitlines()[-MAX_LINES:]:
            try:
                one = _decode(line)
                requested = Requested(
                    cpu_shares=one.shares,
                    cfs_quota_us=one.quota_us,
                    cfs_period_us=one.period_us,
                    memory_limit_bytes=one.memory,
                    cpus=None if one.cpus is None else CpuSet.parse(one.cpus),
                    mems=None if one.mems is None else CpuSet.parse(one.mems),
                    oom_score_adj=one.oom,
                )
                found[one.id] = Remembered(requested, one.hooked)
            except ValueError:
                continue
        return found

    def append(self, container_id: str, remembered: Remembered) -> None:
        """Remember one request."""
        if self._lines >= MAX_LINES:
            return
        try:
            if self._fd is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
                self._fd = os.open(self._path, flags, 0o600)
            os.write(self._fd, _line(container_id, remembered))
            self._lines += 1
        except OSError as error:
            self._failed(error)

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
        self._lines = len(requests)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _failed(self, error: OSError) -> None:
        self.failures += 1
        if self.failures == 1:
            _LOG.warning("cannot write %s: %s", self._path, error.strerror)


def _line(container_id: str, remembered: Remembered) -> bytes:
    requested = remembered.requested
    fields: dict[str, Any] = {
        "shares": requested.cpu_shares,
        "quota_us": requested.cfs_quota_us,
        "period_us": requested.cfs_period_us,
        "memory": requested.memory_limit_bytes,
        "cpus": None if requested.cpus is None else str(requested.cpus),
        "mems": None if requested.mems is None else str(requested.mems),
        "oom": requested.oom_score_adj,
        "hooked": remembered.hooked,
    }
    return _encode(_Line(container_id, **fields)) + b"\n"
