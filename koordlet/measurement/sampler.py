"""The sampling thread: calls the collectors on fixed ticks and stores what they return.

Ticks are multiples of the interval after the start, so rounds do not drift. A round that takes
longer than a tick is followed by the next tick that is still to come: none is made up for. Each
collector is on its own: what one raises stays in its status, with the age of its last samples, and
the others go on. After each round the strategies run, in this thread too.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from koordlet.measurement import saved
from koordlet.measurement.collecting import Collector, Round, Targets, Unavailable
from koordlet.measurement.kernel_files import KernelFiles
from koordlet.measurement.store import Store, View
from service.repeats import Repeats
from service.scheduling import StepAside, schedule_beside_event_loop

log = logging.getLogger(__name__)

_EARLY_S: Final = 0.001
"""A wait may end so much early; the tick counts as reached."""
_UNAVAILABLE_AGAIN_S: Final = 30.0
"""How often a collector is tried whose data the kernel does not offer. Twice the value finds a
hierarchy that is mounted later half a minute later still."""
_SAVE_EVERY_S: Final = 60.0
"""How often the samples are saved: a killed process loses a minute at most."""
_LONG_ROUND_S: Final = 0.25
"""A round that has taken so long rests no more. Chosen: a quarter of the shortest interval, so that
no tick is left out, and what follows from the samples follows nearly as soon as always. Twice the
value doubles that delay on nodes on which pods appear without a pause."""
_STOP_S: Final = 5.0
"""How long `stop` waits for the round in progress: a read of the kernel may block."""
_MOST_OF_ERROR: Final = 300
"""Characters of an error in status: about three lines."""
_MOST_PROBLEMS: Final = 3
"""Problems of one round that status shows; further ones are counted."""


class CollectorStatus(msgspec.Struct, frozen=True):
    """One collector, for status.

    state: "off" (its gate or setting), "waiting" (before its first round), "ready", "unavailable"
    (the kernel or node does not offer it) or "failing". age_s: since its last good round, which may
    have no samples on a node without pods; None before one. error: why the last round was not good,
    or what it left out. took_ms: the last round's time.
    series, bytes: of its table. left_out: samples that the store did not take.
    """

    name: str
    state: str
    interval_s: float
    age_s: float | None
    error: str
    took_ms: float
    failures: int
    series: int
    bytes: int
    left_out: int


class SamplerStatus(msgspec.Struct, frozen=True):
    """The thread, for status. saving: the last error of the saved file, "" without one."""

    rounds: int
    skipped_ticks: int
    round_ms: float
    running: bool
    saving: str
    collectors: tuple[CollectorStatus, ...]


@dataclass(slots=True)
class _Timed:
    """A collector with the state of its rounds. Belongs to the sampling thread."""

    collector: Collector
    due: float = -math.inf
    state: str = "waiting"
    sampled_at: float | None = None
    error: str = ""
    took_s: float = 0.0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class SavedFile:
    """Where the samples are saved. boot: the id of this boot; "" (unknown) saves nothing."""

    path: str
    boot: str


def _always(_collector: Collector) -> bool:
    return True


def _nothing(_view: View) -> None:
    pass


def _at_once() -> bool:
    return False


@dataclass(slots=True)
class Sampler:
    """See the module.

    targets: returns what is measured, a new value for each change; called once a round.
    enabled: whether a collector shall run now; called once a tick for each.
    after_round: called after each round with the samples as of its moment; it may raise.
    rest: called often during a round; may wait, and returns whether it did.
    """

    store: Store
    collectors: Sequence[Collector]
    files: KernelFiles
    targets: Callable[[], Targets]
    enabled: Callable[[Collector], bool] = _always
    after_round: Callable[[View], None] = _nothing
    rest: Callable[[], bool] = _at_once
    saved_file: SavedFile | None = None
    tick_s: float = 1.0
    clock: Callable[[], float] = time.monotonic
    _timed: list[_Timed] = field(init=False, default_factory=list)
    _thread: threading.Thread | None = field(init=False, default=None)
    _stop: threading.Event = field(init=False, default_factory=threading.Event)
    _repeats: Repeats = field(init=False, default_factory=Repeats)
    _step_aside: StepAside = field(init=False)
    _round_began_at: float = field(init=False, default=-math.inf)
    _saved_at: float = field(init=False, default=0.0)
    _saving: str = field(init=False, default="")
    _rounds: int = field(init=False, default=0)
    _skipped: int = field(init=False, default=0)
    _round_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._step_aside = StepAside(wait=self._rests)
        for collector in self.collectors:
            self.store.add_table(
                collector.name,
                interval_s=collector.interval_s,
                # An interval may be configured longer than the retention that a reader needs.
                retention_s=max(collector.retention_s, collector.interval_s),
            )
            self._timed.append(_Timed(collector))
        self._saved_at = self.clock()

    def start(self) -> None:
        """Restore what was saved, and start the thread."""
        if self._thread is not None:
            raise RuntimeError("the sampler runs already")
        self.restore()
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="koordlet-sampling", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """End the thread after the round in progress, and save; False if it did not end in time."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_STOP_S)
            return not thread.is_alive()
        return True

    def restore(self) -> int:
        """Fill the store from the saved file; returns the number of series."""
        if self.saved_file is None:
            return 0
        path, boot = self.saved_file.path, self.saved_file.boot
        try:
            count = saved.load(self.store, path, boot=boot, now=self.clock())
        except FileNotFoundError:
            return 0
        except (saved.SavedError, OSError, ValueError) as error:
            log.warning("saved measurements are ignored: %s", error)
            return 0
        log.info("restored the measurements of %d series from %s", count, path)
        return count

    def save(self) -> None:
        """Save the samples now. A failure stays in status."""
        if self.saved_file is None or not self.saved_file.boot:
            return
        now = self._saved_at = self.clock()
        try:
            saved.save(self.store, self.saved_file.path, boot=self.saved_file.boot, now=now)
        except OSError as error:
            self._saving = str(error)[:_MOST_OF_ERROR]
            if (left_out := self._repeats.due("save")) is not None:
                log.warning("measurements are not saved: %s (%d times more)", error, left_out)
        else:
            self._saving = ""

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        schedule_beside_event_loop()
        try:
            begun = self.clock()
            tick = 0
            while not self._stop.is_set():
                self.round(self.clock())
                reached = math.floor((self.clock() - begun + _EARLY_S) / self.tick_s)
                self._skipped += max(reached - tick, 0)
                tick = max(tick, reached) + 1
                self._stop.wait(max(begun + tick * self.tick_s - self.clock(), 0.0))
        finally:
            self.save()
            for timed in self._timed:
                timed.collector.close()

    def round(self, now: float) -> None:
        """Call the collectors that are due, then `after_round`. Raises nothing."""
        self._round_began_at = self.clock()
        try:
            targets = self.targets()
            for timed in self._timed:
                if not self.enabled(timed.collector):
                    self._switch_off(timed)
                elif now >= timed.due - _EARLY_S:
                    self._sample(timed, now, targets)
                    self._step_aside()
            self._rounds += 1
            self._round_s = self.clock() - now
            self.after_round(self.store.view(now))
            if self.clock() - self._saved_at >= _SAVE_EVERY_S:
                self.save()
        except Exception:
            # The thread outlives a defect of one round: without samples all strategies would end.
            if (left_out := self._repeats.due("round")) is not None:
                log.exception("a round of measurements failed (%d times more)", left_out)

    def _rests(self) -> bool:
        return self.clock() - self._round_began_at < _LONG_ROUND_S and self.rest()

    def _sample(self, timed: _Timed, now: float, targets: Targets) -> None:
        collector = timed.collector
        timed.due = self._next_due(timed.due, collector.interval_s, now)
        round_ = Round(
            now=now,
            targets=targets,
            files=self.files,
            measured=self.store.view(now),
            clock=self.clock,
            step_aside=self._step_aside,
        )
        begun = self.clock()
        try:
            samples = collector.sample(round_)
            if samples:
                self.store.record(collector.name, now, samples)
        except Unavailable as error:
            timed.state, timed.error = "unavailable", str(error)[:_MOST_OF_ERROR]
            timed.due = max(timed.due, now + min(_UNAVAILABLE_AGAIN_S, 10 * collector.interval_s))
        except Exception as error:  # noqa: BLE001 - collectors are isolated from each other
            timed.failures += 1
            timed.state = "failing"
            timed.error = (str(error) or type(error).__name__)[:_MOST_OF_ERROR]
            self._log_failure(collector.name, error)
        else:
            timed.error = _summary(round_.problems)
            timed.sampled_at, timed.state = now, "ready"
        timed.took_s = self.clock() - begun

    @staticmethod
    def _next_due(due: float, interval_s: float, now: float) -> float:
        """Return the next time on the collector's own grid that is later than `now`."""
        if due == -math.inf:
            return now + interval_s
        return due + interval_s * (max(math.floor((now - due + _EARLY_S) / interval_s), 0) + 1)

    def _switch_off(self, timed: _Timed) -> None:
        if timed.state != "off":
            timed.collector.close()
            timed.state, timed.error, timed.due = "off", "", -math.inf

    def _log_failure(self, name: str, error: Exception) -> None:
        if (left_out := self._repeats.due(("collector", name))) is None:
            return
        expected = isinstance(error, (OSError, ValueError))
        log.warning(
            "collector %s failed: %s (%d times more)",
            name,
            error,
            left_out,
            exc_info=None if expected else error,
        )

    def status(self, now: float) -> SamplerStatus:
        """Return what status shows. Any thread."""
        sizes = self.store.sizes()
        return SamplerStatus(
            rounds=self._rounds,
            skipped_ticks=self._skipped,
            round_ms=round(self._round_s * 1000, 3),
            running=self._thread is not None and self._thread.is_alive(),
            saving=self._saving,
            collectors=tuple(
                CollectorStatus(
                    name=timed.collector.name,
                    state=timed.state,
                    interval_s=timed.collector.interval_s,
                    age_s=None if timed.sampled_at is None else round(now - timed.sampled_at, 3),
                    error=timed.error,
                    took_ms=round(timed.took_s * 1000, 3),
                    failures=timed.failures,
                    series=sizes[timed.collector.name][0],
                    bytes=sizes[timed.collector.name][1],
                    left_out=sizes[timed.collector.name][2],
                )
                for timed in self._timed
            ),
        )


def _summary(problems: Sequence[str]) -> str:
    """Return the first problems of a round as one line; "" without any."""
    text = "; ".join(problems[:_MOST_PROBLEMS])[:_MOST_OF_ERROR]
    more = len(problems) - _MOST_PROBLEMS
    return f"{text}; and {more} more" if more > 0 else text
