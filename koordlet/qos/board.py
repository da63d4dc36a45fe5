"""The board of leases: what each strategy wants of the kernel, for as long as its time to live.

A verdict's standing claims are in force until the strategy's next step, and at most for its
`ttl_s`. A strategy that dies, stalls or keeps failing thus loses its claims, and the original
values return. Expiry must not depend on the thread that steps the strategies, since it is this
thread that may stall: the daemon's event loop calls `expire` when `next_expiry` says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

from hooks.check import claim_problem
from hooks.standing import NOTHING_STANDS, Claims, Standing, merged, renewed
from hooks.subject import Level


class Lease(msgspec.Struct, frozen=True):
    """The claims of one strategy, and when they end, in seconds of the monotonic clock.

    resumed: they are of a step before the daemon's restart.
    """

    standing: Standing
    until: float
    resumed: bool = False


class Board:
    """All leases. Any thread; no call blocks for longer than the merging of the claims takes.

    order: the strategies' names in the order in which their claims are merged.
    published: called with all claims in force whenever they change, in the order of the changes.
        It must not block, and must not call the board.
    """

    def __init__(self, order: Sequence[str], published: Callable[[Standing], None]) -> None:
        self._lock = threading.Lock()
        self._order = tuple(order)
        self._published = published
        self._leases: dict[str, Lease] = {}
        self._standing = NOTHING_STANDS

    @property
    def standing(self) -> Standing:
        """The claims of all strategies that are in force."""
        return self._standing

    def lease(self, name: str) -> Lease | None:
        """Return a strategy's lease; None when it has no claims in force."""
        return self._leases.get(name)

    @property
    def leases(self) -> Mapping[str, Lease]:
        """All leases that are in force, by strategy."""
        with self._lock:
            return dict(self._leases)

    @property
    def claims(self) -> Mapping[str, Standing]:
        """The claims in force by strategy, in the order in which they are merged."""
        leases = self.leases
        return {name: leases[name].standing for name in self._order if name in leases}

    def resume(self, leases: Mapping[str, Lease]) -> None:
        """Put claims from before a restart in force. Before the first step of any strategy."""
        with self._lock:
            self._leases.update(leases)
            if leases:
                self._publish()

    def publish(self, name: str, standing: Standing, *, until: float) -> None:
        """Put a strategy's claims in force in place of its former ones, until that moment."""
        with self._lock:
            lease = self._leases.pop(name, None)
            before = NOTHING_STANDS if lease is None else lease.standing
            standing = renewed(before, standing)
            if standing.by_subject or standing.by_class:
                self._leases[name] = Lease(standing, until)
            if standing is not before:
                self._publish()

    def renew(self, name: str, *, until: float) -> None:
        """Let a strategy's claims, if they are still in force, end at that moment."""
        with self._lock:
            lease = self._leases.get(name)
            if lease is not None:
                self._leases[name] = msgspec.structs.replace(lease, until=until)

    def drop(self, name: str) -> None:
        """End a strategy's claims now."""
        with self._lock:
            if self._leases.pop(name, None) is not None:
                self._publish()

    def expire(self, now: float) -> tuple[str, ...]:
        """End the claims whose time has passed; return their strategies."""
        with self._lock:
            ended = tuple(name for name, lease in self._leases.items() if lease.until <= now)
            for name in ended:
                del self._leases[name]
            if ended:
                self._publish()
            return ended

    def next_expiry(self) -> float | None:
        """Return when the next claims end unless they are renewed; None without any."""
        with self._lock:
            return min((lease.until for lease in self._leases.values()), default=None)

    def _publish(self) -> None:
        names = [name for name in self._order if name in self._leases]
        self._standing = merged([self._leases[name].standing for name in names])
        self._published(self._standing)


def checked(standing: Standing) -> tuple[Standing, tuple[str, ...]]:
    """Return the claims that can be carried out, and why the others cannot.

    A claim of a wrong type or level would otherwise fail in every hook and pass. The same claims
    on many subjects of one level are looked at once.
    """
    problems: list[str] = []
    known: dict[tuple[str, int], Claims] = {}

    def good(level: str, claims: Claims) -> Claims:
        result = known.get((level, id(claims)))
        if result is None:
            found = [(claim, claim_problem(claim, Level(level))) for claim in claims]
            problems.extend(problem for _, problem in found if problem)
            result = tuple(claim for claim, problem in found if not problem)
            known[level, id(claims)] = result
        return result

    by_subject = {
        key: good(key.partition("/")[0], claims) for key, claims in standing.by_subject.items()
    }
    by_class = {group: good(group[0], claims) for group, claims in standing.by_class.items()}
    if not problems:
        return standing, ()
    kept = Standing(
        {key: claims for key, claims in by_subject.items() if claims},
        {group: claims for group, claims in by_class.items() if claims},
    )
    return kept, tuple(dict.fromkeys(problems))
