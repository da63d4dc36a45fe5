"""Leases and states of strategies on disk, so that both outlast a restart of the daemon.

The kernel keeps what the strategies wrote while no daemon runs. The next daemon puts the same
claims in force before its first pass and its first reply, so nothing is released before the
strategies have measured, and replies to the runtime agree with what the kernel has.

They hold until the strategy's first step that can judge, and at most for its time to live, counted
from the first start after the step that made them: a daemon that restarts again and again before
its strategies step does not prolong them. A file belongs to one boot, which also dates its moments.

A state goes on from where it was: a container that has used up its burst does not get a new one
from a restart, and best-effort pods that yield to pressure do not begin again at full speed.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from apis.cpuset import CpuSet
from apis.errors import printable
from apis.qos import KubeQoS
from hooks.claim import Claim, Op
from hooks.standing import Claims, Standing, same_effect
from hooks.subject import Level
from koordlet.qos.board import Lease, checked
from linux.resources import Resource, Value
from service.files import replacing
from service.repeats import Repeats

_LOG = logging.getLogger("koordlet.qos")

FILE_NAME: Final = "leases"
"""The name of the file in the run directory."""
_FORMAT: Final = "koordlet leases 1"
_MOST_BYTES: Final = 64 << 20
"""Chosen: a larger file is not ours. 220 containers with three claims each have about 0.2 MiB."""
_STATES_EVERY_S: Final = 5.0
"""How often states are written that changed without a claim. Chosen: half of the time between two
steps for which CPU burst counts tokens, so that a daemon which is killed again and again counts all
that were spent. With 220 raised quotas and their tokens a write takes 2 ms for 190 KiB."""
_CPU_SETS: Final = frozenset({Resource.CPUSET_CPUS, Resource.CPUSET_MEMS})
_MOST_OF_PROBLEM: Final = 300
"""Characters of a decoder's message: about three lines."""


class LeaseFileError(Exception):
    """A file that cannot be used; the message says why."""


class _Claim(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of a `Claim` whose value is a number or a text; a CPU set is a text."""

    resource: Resource
    value: int | str
    policy: str
    reason: str
    source: str
    rank: int
    key: str = ""
    op: Op = Op.SET
    factor: float = 1.0
    degraded: str = ""


_Claims = tuple[_Claim, ...]


class _Lease(msgspec.Struct, frozen=True):
    until: float
    resumed: bool
    by_subject: dict[str, _Claims]
    by_class: tuple[tuple[Level, KubeQoS, _Claims], ...]


class _File(msgspec.Struct, frozen=True):
    format: str
    boot: str
    leases: dict[str, _Lease]
    states: dict[str, msgspec.Raw] = {}


_DECODER: Final = msgspec.json.Decoder(_File)
_NO_STATES: Final[Mapping[str, msgspec.Struct]] = {}
_NO_TYPES: Final[Mapping[str, type[msgspec.Struct]]] = {}


class Carried(NamedTuple):
    """What outlasted a restart, by strategy."""

    leases: Mapping[str, Lease] = {}
    states: Mapping[str, msgspec.Struct] = {}


class LeaseFile:
    """The file of one daemon. Any thread; a call blocks for as long as the file is written.

    path: the file. boot: the id of this boot; "" where it is not known, and then nothing is kept.
    """

    def __init__(self, path: str, *, boot: str) -> None:
        self._path = path
        self._boot = boot
        self._lock = threading.Lock()
        self._kept: Mapping[str, Lease] | None = None
        """The leases in the file; None while they are not known."""
        self._kept_states: Mapping[str, msgspec.Struct] = {}
        self._kept_at = -math.inf
        self._repeats = Repeats()

    def resumed(
        self,
        ttl_s: Mapping[str, float],
        now: float,
        *,
        types: Mapping[str, type[msgspec.Struct]] = _NO_TYPES,
    ) -> Carried:
        """Return what is to be resumed; nothing, and a warning, without a usable file.

        ttl_s, now, types: as in `load`.
        """
        try:
            carried, problems = load(self._path, boot=self._boot, ttl_s=ttl_s, now=now, types=types)
        except (LeaseFileError, OSError) as error:
            _LOG.warning(
                "the strategies' claims and states of before the restart are lost: the original"
                " values return until the strategies have claimed again: %s",
                error,
            )
            return Carried()
        for problem in problems:
            _LOG.warning("a strategy begins without its state of before the restart: %s", problem)
        return carried

    def keep(
        self,
        leases: Mapping[str, Lease],
        states: Mapping[str, msgspec.Struct],
        now: float,
        *,
        at_once: bool = False,
    ) -> None:
        """Write leases and states, unless the file holds claims to the same values.

        Other states alone are written every few seconds. at_once: without that wait. now: seconds
        of the monotonic clock.
        """
        with self._lock:
            if not self._boot:
                return
            due = at_once or now - self._kept_at >= _STATES_EVERY_S
            if (
                self._kept is not None
                and same_claims(self._kept, leases)
                and not (due and self._kept_states != states)
            ):
                return
            try:
                save(leases, self._path, boot=self._boot, states=states)
            except OSError as error:
                self._kept = None
                if self._repeats.due(type(error).__name__) is not None:
                    _LOG.warning(
                        "cannot keep the strategies' claims for a restart of this daemon: %s", error
                    )
            else:
                self._kept, self._kept_states, self._kept_at = leases, states, now


def save(
    leases: Mapping[str, Lease],
    path: str,
    *,
    boot: str,
    states: Mapping[str, msgspec.Struct] = _NO_STATES,
) -> None:
    """Write leases and states, by strategy, to `path`. boot: of this machine. Raises OSError."""
    known: dict[int, _Claims] = {}

    def saved_claims(claims: Claims) -> _Claims:
        # Most subjects have the same claims as others.
        if id(claims) not in known:
            known[id(claims)] = _plain(claims)
        return known[id(claims)]

    saved = {
        name: _Lease(
            until=lease.until,
            resumed=lease.resumed,
            by_subject={
                key: saved_claims(claims) for key, claims in lease.standing.by_subject.items()
            },
            by_class=tuple(
                (*group, saved_claims(claims)) for group, claims in lease.standing.by_class.items()
            ),
        )
        for name, lease in leases.items()
    }
    plain = {name: msgspec.Raw(msgspec.json.encode(state)) for name, state in states.items()}
    with replacing(path) as file:
        file.write(msgspec.json.encode(_File(_FORMAT, boot, saved, plain)))


def load(
    path: str,
    *,
    boot: str,
    ttl_s: Mapping[str, float],
    now: float,
    types: Mapping[str, type[msgspec.Struct]] = _NO_TYPES,
) -> tuple[Carried, tuple[str, ...]]:
    """Return what is to be resumed, and why states cannot be. A missing file holds nothing.

    ttl_s: the time to live of the claims of each strategy that runs; others are left out.
    types: of the states that outlast a restart, by strategy. A state of another type or version
    is left out. now: the moment, in seconds of the monotonic clock.
    Raises LeaseFileError for a file that cannot be used, and OSError.
    """
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                raise LeaseFileError(f"{path} has more than {_MOST_BYTES} bytes")
            content = file.read()
    except FileNotFoundError:
        return Carried(), ()
    try:
        saved = _DECODER.decode(content)
        if saved.format != _FORMAT:
            raise LeaseFileError(f"{path} is not in this version's format: {saved.format[:40]!r}")
        if not boot or saved.boot != boot:
            return Carried(), ()  # the cgroups of that boot are gone
        leases = {
            name: lease
            for name, one in saved.leases.items()
            if name in ttl_s and (lease := _resumed(one, ttl_s[name], now)).until > now
        }
    except (msgspec.MsgspecError, ValueError) as error:
        raise LeaseFileError(f"{path} is not readable: {_text(error)}") from error
    states: dict[str, msgspec.Struct] = {}
    problems: list[str] = []
    for name, raw in saved.states.items():
        if name not in ttl_s or name not in types:
            continue
        try:
            states[name] = msgspec.json.decode(raw, type=types[name])
        except msgspec.MsgspecError as error:
            problems.append(f"{path}: the state of {name} is not readable: {_text(error)}")
    return Carried(leases, states), tuple(problems)


def _text(error: Exception) -> str:
    return printable(str(error))[:_MOST_OF_PROBLEM]


def same_claims(one: Mapping[str, Lease], other: Mapping[str, Lease]) -> bool:
    """Return whether two sets of leases lead to the same values, whatever their reasons are."""
    return one.keys() == other.keys() and all(
        lease.resumed == other[name].resumed and _same(lease.standing, other[name].standing)
        for name, lease in one.items()
    )


def _same(one: Standing, other: Standing) -> bool:
    return one is other or (
        one.by_subject.keys() == other.by_subject.keys()
        and one.by_class.keys() == other.by_class.keys()
        and all(same_effect(a, other.by_subject[key]) for key, a in one.by_subject.items())
        and all(same_effect(a, other.by_class[group]) for group, a in one.by_class.items())
    )


def _plain(claims: Claims) -> _Claims:
    """Return the claims on numbers, texts and CPU sets; strategies make no others."""
    return tuple(
        _Claim(**{**msgspec.structs.asdict(one), "value": value})
        for one in claims
        if isinstance(
            value := str(one.value) if isinstance(one.value, CpuSet) else one.value, int | str
        )
    )


def _resumed(saved: _Lease, ttl_s: float, now: float) -> Lease:
    standing, _ = checked(
        Standing(
            {key: _typed(claims) for key, claims in saved.by_subject.items()},
            {(level, qos): _typed(claims) for level, qos, claims in saved.by_class},
        )
    )
    return Lease(standing, saved.until if saved.resumed else now + ttl_s, resumed=True)


def _typed(claims: _Claims) -> Claims:
    return tuple(
        Claim(**{**msgspec.structs.asdict(one), "value": _typed_value(one)}) for one in claims
    )


def _typed_value(saved: _Claim) -> Value:
    if isinstance(saved.value, str) and saved.resource in _CPU_SETS:
        return CpuSet.parse(saved.value)
    return saved.value
