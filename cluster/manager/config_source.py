"""slo-controller-config for the controllers: the last good value of each key.

When the ConfigMap is deleted or a key becomes unusable, the last good value stays in force, and an
event and a gauge report it. Until a key has been usable once, controllers do not act on it:
otherwise a syntax error would write defaults to all nodes and switch co-location off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

from apis.core import ConfigMap
from apis.keys import CONFIG_COLOCATION
from apis.meta import ObjectReference
from apis.slo_config import MEMBERS, ConfigProblem, Effect, SLOConfig, load_slo_config
from cluster.metrics import ManagerMetrics
from kube.cache import Cache, Change, Event
from kube.events import EventRecorder
from kube.faults import Faults

_log = logging.getLogger(__name__)

_NODE_SLO_MEMBERS: Final = frozenset(
    {"threshold", "resource_qos", "cpu_burst", "system", "host_applications"}
)
NODE_SLO: Final = "nodeslo"
COLOCATION: Final = "colocation"
NODE_RESOURCE: Final = "noderesource"


class SLOConfigSource:
    """Watches one ConfigMap and notifies subscribers of the parts that changed."""

    def __init__(
        self,
        cache: Cache[ConfigMap],
        events: EventRecorder,
        metrics: ManagerMetrics,
        *,
        namespace: str,
        name: str,
    ) -> None:
        self._namespace = namespace
        self._name = name
        self._events = events
        self._metrics = metrics
        self._subscribers: list[Callable[[str], None]] = []
        self._data: Mapping[str, str] | None = None
        self.faults = Faults("slo-controller-config")
        self.config = SLOConfig()
        self.never_good: frozenset[str] = frozenset()
        """Keys without a usable value since the start of the process."""
        self._loaded_keys: set[str] = set()
        self.colocation_healthy = False
        """Whether the value in force of `colocation-config` is the stored one."""
        cache.subscribe(self._changed)

    def subscribe(self, subscriber: Callable[[str], None]) -> None:
        """Register a function that is called with NODE_SLO, COLOCATION or NODE_RESOURCE after a
        change of that part.
        """
        self._subscribers.append(subscriber)

    @property
    def colocation_known(self) -> bool:
        """Whether there is a colocation strategy to act on."""
        return CONFIG_COLOCATION not in self.never_good

    def _changed(self, event: Event[ConfigMap]) -> None:
        meta = event.new.metadata
        if (meta.namespace, meta.name) != (self._namespace, self._name):
            return
        if event.change is Change.DELETED:
            _log.warning(
                "ConfigMap %s was deleted; its last content stays in force until a restart",
                event.key,
            )
            for key in MEMBERS:
                self._metrics.config_stale.labels(key).set(1)
            self._data = None
            return
        if event.new.data == self._data:
            return
        self._data = event.new.data
        self.load(event.new)

    def load(self, config_map: ConfigMap) -> None:
        """Put the usable keys of `config_map` in force and report the others."""
        meta = config_map.metadata
        old = self.config
        self.config, problems = load_slo_config(
            config_map.data, old=old, obj=f"ConfigMap {meta.namespace}/{meta.name}"
        )
        kept = {problem.key for problem in problems if problem.effect is Effect.KEY_KEPT}
        # Subscribers are notified of the first usable value of a key, also if it is the default.
        first = self._loaded_keys
        self._loaded_keys = first | (set(MEMBERS) - kept)
        self.never_good = frozenset(set(MEMBERS) - self._loaded_keys)
        self.colocation_healthy = CONFIG_COLOCATION not in kept
        for key in MEMBERS:
            self._metrics.config_stale.labels(key).set(key in kept)
        self._report(meta.namespace, meta.name, meta.uid, problems)
        changed = {
            member
            for member in MEMBERS.values()
            if getattr(old, member) != getattr(self.config, member)
        }
        newly_known = {MEMBERS[key] for key in self._loaded_keys - first}
        self._notify(changed | newly_known)

    def _notify(self, members: set[str]) -> None:
        parts = set()
        if members & _NODE_SLO_MEMBERS:
            parts.add(NODE_SLO)
        if "colocation" in members:
            parts |= {COLOCATION, NODE_RESOURCE}
        if members & {"cpu_normalization", "resource_amplification"}:
            parts.add(NODE_RESOURCE)
        for part in sorted(parts):
            for subscriber in self._subscribers:
                try:
                    subscriber(part)
                except Exception:  # noqa: BLE001 - the other subscribers must be called
                    self.faults.note("a subscriber", about=part)

    def _report(self, namespace: str, name: str, uid: str, problems: list[ConfigProblem]) -> None:
        about = ObjectReference(
            api_version="v1", kind="ConfigMap", namespace=namespace, name=name, uid=uid
        )
        for problem in problems:
            _log.warning("%s: %s (%s)", problem.key, problem.message, problem.effect)
            self._events.warning(about, problem.reason, f"{problem.message} ({problem.effect})")
