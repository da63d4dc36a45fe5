"""Dynamic QoS in the daemon: connects measurements and strategies with what carries claims out.

Strategies run in the sampling thread after each round. They see immutable values only: the pods
that the event loop published last, the newest inputs of the rules, and the measurements. What they
claim goes over the board of leases to the hooks' decider and to the reconciler, each of which takes
it as one reference; what only evictions can end goes to the evictor. The event loop ends leases
that are not renewed: the claims of a sampling thread that stalls do not stay. A failure here
affects neither the hooks nor the reconciler.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final

from hooks.facts import NodeInputs, NodeMeta, Settings
from hooks.standing import Standing
from hooks.subject import HostAppSubject
from koordlet.configuration.config import Config, Qos
from koordlet.daemon.dynamic.on_node import Converted, node_amounts, pod_on_node
from koordlet.measurement.series import Measurements
from koordlet.node.hardware import Machine
from koordlet.qos.board import Board
from koordlet.qos.lease_file import LeaseFile
from koordlet.qos.runner import Runner
from koordlet.qos.strategy import Note, Shortage, Situation, Strategy
from koordlet.state import NodeState
from koordlet.state.merging import PodView
from service.events import Events
from service.repeats import Repeats
from service.scheduling import StepAside

_LOG = logging.getLogger("koordlet")

_GATHER_S: Final = 0.2
"""How long changes of pods are gathered before they are published. Chosen: a fifth of the shortest
time between two rounds, so a new pod is missing in one round at most."""
_LEAST_WAIT_S: Final = 0.05
_MOST_WAIT_S: Final = 1.0
"""Bounds of the time between two looks at the leases. A new lease lives for a second at least, so
none ends later than a second after its time. Twice the bound lets a stalled strategy's claims stand
a second longer."""
_LISTS_S: Final = 5.0
"""How long strategies wait for the first lists of all sources. Chosen: half of the time to live of
their claims, so that without an API server or kubelet they claim again what they can before the
claims of before the restart end. With twice the value best-effort pods had all CPUs in between."""

Short = Callable[[Sequence[Shortage], Situation], None]
"""Takes the shortages of one round, with the situation that they were found in. Must not block."""


def strategy_intervals(config: Qos, strategies: Sequence[Strategy]) -> dict[str, float]:
    """Return the interval of each strategy, in seconds, as upstream's flags set them."""
    own = {
        "BECPUSuppress": config.cpu_suppress_interval,
        "CPUEvict": config.cpu_evict_interval,
        "memoryEvict": config.memory_evict_interval,
    }
    return {
        each.name: float(own.get(each.name, max(each.interval_s, config.interval)))
        for each in strategies
    }


class Dynamics:
    """See the module. Belongs to the event loop, except where stated."""

    def __init__(
        self,
        config: Config,
        strategies: Sequence[Strategy],
        *,
        state: NodeState,
        inputs: Callable[[], NodeInputs],
        node: Callable[[], NodeMeta | None],
        machine: Callable[[], Machine | None],
        events: Events,
        claimed: Callable[[Standing], None],
        noted: Callable[[str, Note], None],
        short: Short,
        record: Callable[[Situation], None],
        leases: LeaseFile,
        workers: Executor,
    ) -> None:
        """inputs, node, machine: return the newest values; called by the sampling thread.
        claimed: called by any thread with all claims in force; must not block. noted: called by the
        sampling thread with a strategy's name and an audit entry. short: called by the sampling
        thread with what only evictions end. record: called by the
        sampling thread with each situation; must not raise OSError.
        leases: where claims and states are kept for the next daemon. workers: threads for I/O.
        """
        self._state = state
        self._inputs = inputs
        self._node = node
        self._machine = machine
        self._noted = noted
        self._short = short
        self._record = record
        self._leases = leases
        self._workers = workers
        self._interval_s = float(config.measuring.interval)
        self.board = Board([each.name for each in strategies], claimed)
        intervals = strategy_intervals(config.qos, strategies)
        self.runner = Runner(
            strategies, self.board, events, intervals=intervals, step_aside=StepAside()
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gathering: asyncio.TimerHandle | None = None
        self._resumed = False
        self._started_at = 0.0
        self._listed = False
        """Whether every source had given its first list when the pods were published last."""
        self._views: Collection[PodView] = ()
        self._host_apps: tuple[HostAppSubject, ...] = ()
        listed = config.kubelet.enabled or config.kubernetes.gives_pods
        self._pods = Converted(partial(pod_on_node, listed=listed))
        self._repeats = Repeats()

    # --- the event loop ------------------------------------------------------------------------

    async def resume(self) -> None:
        """Put the claims of before the restart in force, and go on from the strategies' states.

        Before the first pass and reply.
        """
        await asyncio.get_running_loop().run_in_executor(self._workers, self._resume)

    def _resume(self) -> None:
        ttl_s = self.runner.times_to_live(self._inputs().settings)
        carried = self._leases.resumed(ttl_s, time.monotonic(), types=self.runner.kept_types)
        self.runner.resume(carried.states)
        self.board.resume(carried.leases)
        self._resumed = True
        self.keep()

    def start(self) -> None:
        """Publish what is known; strategies are stepped as soon as all sources gave their lists."""
        self._started_at = time.monotonic()
        self._publish()
        self._loop = asyncio.get_running_loop()

    def state_changed(self) -> None:
        """Publish the pods and host applications soon: they have changed."""
        if self._gathering is None and self._loop is not None:
            self._gathering = self._loop.call_later(_GATHER_S, self._publish)

    def _publish(self) -> None:
        self._gathering = None
        self._listed = self._state.complete
        self._views = tuple(self._state.pod_views())
        self._host_apps = self._state.host_apps

    def settings_changed(self, settings: Settings) -> None:
        """End the claims of strategies that were switched off."""
        self.runner.settings_changed(settings)

    async def end_leases(self) -> None:
        """End the claims of strategies that do not renew them, again and again."""
        while True:
            now = time.monotonic()
            if ended := self.board.expire(now):
                for name in ended:
                    _LOG.warning(
                        "strategy %s made no step in its time to live: its claims end", name
                    )
                # The sampling thread may be stuck.
                await asyncio.get_running_loop().run_in_executor(self._workers, self.keep)
            at = self.board.next_expiry()
            left = _MOST_WAIT_S if at is None else at - now
            await asyncio.sleep(min(max(left, _LEAST_WAIT_S), _MOST_WAIT_S))

    def stop(self) -> None:
        """Step no strategy any more. The claims in force stay, as all values at an end."""
        self._loop = None
        if self._gathering is not None:
            self._gathering.cancel()

    async def keep_last(self) -> None:
        """Keep the last states for the next daemon. After the sampling thread's end."""
        if self._resumed:  # else what the daemon before left would be lost
            keep = partial(self.keep, at_once=True)
            await asyncio.get_running_loop().run_in_executor(self._workers, keep)

    # --- the sampling thread -------------------------------------------------------------------

    @property
    def views(self) -> Collection[PodView]:
        """The pods as published last; the same collection until they change. Any thread."""
        return self._views

    @property
    def host_apps(self) -> tuple[HostAppSubject, ...]:
        """The host applications as published last. Any thread."""
        return self._host_apps

    def step(self, measurements: Measurements) -> None:
        """Step the strategies that are due, as of the moment of `measurements`. Raises nothing."""
        try:
            self._step(measurements)
        except Exception as error:  # noqa: BLE001 - measuring goes on, and the error is reported
            if (left_out := self._repeats.due(type(error).__name__)) is not None:
                _LOG.error(
                    "the strategies of one round failed",
                    exc_info=error,
                    extra={"same_failure_not_logged": left_out} if left_out else None,
                )

    def _step(self, measurements: Measurements) -> None:
        machine = self._machine()
        if machine is None or self._loop is None:
            return  # the daemon is starting or stopping
        if not self._listed and time.monotonic() - self._started_at < _LISTS_S:
            return  # a step without the pods would end claims of before the restart
        situation = Situation(
            now=measurements.now,
            wall=time.time(),
            inputs=self._inputs(),
            node=node_amounts(machine, self._node()),
            pods=self._pods.of(self._views),
            host_apps=self._host_apps,
            measurements=measurements,
            interval_s=self._interval_s,
        )
        self._record(situation)
        outcome = self.runner.run(situation, lambda: self._inputs().settings)
        self.keep()
        for name, note in outcome.notes:
            self._noted(name, note)
        if outcome.shortages:
            self._short(outcome.shortages, situation)

    def keep(self, *, at_once: bool = False) -> None:
        """Keep claims and states for the next daemon. Any thread; blocks for a file's writing.

        at_once: also states that were written a moment ago.
        """
        self._leases.keep(
            self.board.leases, self.runner.kept_states, time.monotonic(), at_once=at_once
        )
