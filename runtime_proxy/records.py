"""What both modes keep of pods and containers: the store, and its journal where there is one."""

import logging

from runtime_proxy.checkpoint import Checkpoint, Recorded
from runtime_proxy.status import Gauge
from runtime_proxy.store import NoJournal, Store

log = logging.getLogger(__name__)


class Records:
    """The store with its journal in `folder`; without one where that cannot be, or is empty."""

    def __init__(self, folder: str) -> None:
        self._checkpoint: Checkpoint | None = None
        self.recorded = Recorded()
        """What the journal held at the start."""
        if folder:
            try:
                self._checkpoint = Checkpoint(folder)
                self.recorded = self._checkpoint.recorded
            except OSError as error:
                log.error(
                    "no journal: a restart will recover from the runtime alone",
                    extra={"folder": folder, "reason": error.strerror or str(error)},
                )
        self.store = Store(self._checkpoint or NoJournal())

    def reread(self) -> Recorded:
        """Return the journal as it is by now, with what a predecessor added to it."""
        return Recorded() if self._checkpoint is None else self._checkpoint.reread()

    def gauges(self) -> tuple[Gauge, ...]:
        """Return what an operator sees of it."""
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

    def stand_back(self) -> None:
        """Leave the journal to a successor."""
        if self._checkpoint is not None:
            self._checkpoint.stand_back()

    def close(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()
