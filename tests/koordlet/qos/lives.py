"""Lives of a daemon with one strategy; each begins with the file that the one before left."""

from __future__ import annotations

import msgspec

from hooks.facts import Settings
from hooks.standing import Standing
from koordlet.qos.board import Board
from koordlet.qos.lease_file import LeaseFile
from koordlet.qos.runner import Runner
from koordlet.qos.strategy import Situation, Strategy
from service.events import Events


class Life:
    """From a start of the daemon at `now` to its end; a killed one ends without `end`."""

    def __init__(self, path: str, strategy: Strategy, *, now: float, boot: str = "b1") -> None:
        self.settings = Settings(feature_gates=dict.fromkeys(strategy.gates, True))
        self.board = Board([strategy.name], lambda standing: None)
        self.runner = Runner([strategy], self.board, Events(), intervals={})
        self._file = LeaseFile(path, boot=boot)
        ttl_s = self.runner.times_to_live(self.settings)
        carried = self._file.resumed(ttl_s, now, types=self.runner.kept_types)
        self.runner.resume(carried.states)
        self.board.resume(carried.leases)
        self._keep(now)

    def step(self, situation: Situation) -> Standing:
        """Step the strategy; return the claims in force afterwards."""
        inputs = msgspec.structs.replace(situation.inputs, settings=self.settings)
        self.board.expire(situation.now)
        self.runner.run(msgspec.structs.replace(situation, inputs=inputs), lambda: self.settings)
        self._keep(situation.now)
        return self.board.standing

    def end(self, now: float) -> None:
        self._keep(now, at_once=True)

    def _keep(self, now: float, *, at_once: bool = False) -> None:
        self._file.keep(self.board.leases, self.runner.kept_states, now, at_once=at_once)
