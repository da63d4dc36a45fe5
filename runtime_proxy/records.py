"""What both modes keep of pods and containers: the store, and its journal where there is one."""

import logging
import time
from collections.abc import Callable

from runtime_proxy.checkpoint import Checkpoint, Recorded
from runtime_proxy.status import Gauge
from runtime_proxy.store import NoJournal, Store

log = logging.getLogger(__name__)


class Records:
    """The store with its journal in `folder`; without a journal where `folder` is empty."""

    def __init__(self, folder: str, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._checkpoint: Checkpoint | None = None
        self._no_folder = ""
        self.recorded = Recorded()
        """What the journal held at the start."""
        if folder:
            try:
                self._checkpoint = Checkpoint(folder, monotonic=monotonic)
                self.recorded = self._checkpoint.recorded
            except OSError as error:
                reason = error.strerror or str(error)
                self._no_folder = f"no journal: {folder} cannot be made: {reason}"
                log.error("%s; a restart recovers from the runtime alone", self._no_folder)
        self.store = Store(self._checkpoint or NoJournal())

    def status(self) -> dict[str, object]:
        """Return how many objects are known, and what is wrong with the journal."""
        pods, containers = self.store.sizes
        return {"pods": pods, "containers": containers, "journalProblem": self._problem}

    def troubles(self) -> list[str]:
        """Return why a restart would find less than is known now; nothing where it would not."""
        return [self._problem] if self._problem else []

    @property
    def _problem(self) -> str:
        return self._no_folder if self._checkpoint is None else self._checkpoint.problem

    def reread(self) -> Recorded:
        """Return the journal as it is by now, with what a predecessor added to it."""
        return Recorded() if self._checkpoint is None else self._checkpoint.reread()

    def gauges(self) -> tuple[Gauge, ...]:
        """Return the metrics of the store and the journal."""
        prefix = "koord_runtime_proxy_"
        return (
            Gauge(f"{prefix}stored_pods", "Sandboxes known", lambda: self.store.sizes[0]),
            Gauge(f"{prefix}stored_containers", "Containers known", lambda: self.store.sizes[1]),
            Gauge(
                f"{prefix}journal_errors",
                "Writes of the journal that failed",
                lambda: 0 if self._checkpoint is None else self._checkpoint.errors,
                counter=True,
            ),
        )

    def catch_up(self) -> None:
        """Write to the journal what a failure kept back. Called from time to time."""
        if self._checkpoint is not None:
            self._checkpoint.catch_up()

    def stand_back(self) -> None:
        """Leave the journal to a successor."""
        if self._checkpoint is not None:
            self._checkpoint.stand_back()

    def close(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()
