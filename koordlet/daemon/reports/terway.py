"""Keeps the files of the terway-qos agent as the NodeSLO and the pods ask for.

The files exist while gate TerwayQoS is on and the NodeSLO's `netQOSPolicy` is terway-qos. A NodeSLO
that cannot be used leaves the last file in force.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from apis.errors import InputErrors
from apis.nodeslo import NetQOSPolicy, NodeSLOSpec
from hooks.facts import NodeInputs
from hooks.subject import Pod
from koordlet.configuration.config import Config
from koordlet.qos.network.bandwidth import bandwidths
from koordlet.reporters.terway import GLOBAL, PODS, TerwayFiles, global_config, pod_table
from linux.cgroup_paths import Layout
from service.events import Events, Severity

GATE: Final = "TerwayQoS"
_NET_CLS: Final = "net_cls"


class Terway:
    """`look` belongs to one worker thread at a time."""

    def __init__(
        self,
        config: Config,
        *,
        inputs: Callable[[], NodeInputs],
        pods: Callable[[], Sequence[tuple[Pod, bool]]],
        layout: Callable[[], Layout | None],
        listed: Callable[[], bool],
        events: Events,
    ) -> None:
        """The callables return the newest values; any thread calls them. listed: whether every
        source of pods has listed them once."""
        self._files = TerwayFiles(config.terway_qos.directory)
        self._cgroup_root = config.cgroup_root
        self._inputs = inputs
        self._pods = pods
        self._layout = layout
        self._listed = listed
        self._events = events
        self._seen: tuple[NodeSLOSpec, tuple[tuple[Pod, bool], ...], Layout | None] | None = None
        self._global: bytes | None = None
        self._active = True

    def look(self) -> None:
        """Write or remove the files, if something has changed; report what cannot be done."""
        inputs = self._inputs()
        policy = inputs.slo.resource_qos_strategy.policies.net_qos_policy
        active = inputs.settings.gate(GATE, default=False) and policy is NetQOSPolicy.TERWAY_QOS
        try:
            if active:
                self._write(inputs.slo)
            elif self._active:
                self._files.remove()
                self._seen = self._global = None
            self._active = active
        except OSError as error:
            self._seen = None
            self._events.add(
                "terway-qos", "terway-qos", f"its files: {error}", severity=Severity.ERROR
            )

    def _write(self, slo: NodeSLOSpec) -> None:
        if not self._listed():
            return  # the file of an earlier run is better than one without the pods
        pods = tuple(self._pods())
        layout = self._layout()
        seen = slo, pods, layout
        if seen == self._seen:
            return
        try:
            self._global = global_config(bandwidths(slo))
        except InputErrors as error:
            self._events.add("bad-object", "NodeSLO", str(error), severity=Severity.ERROR)
        if self._global is None:
            return
        table, errors = pod_table([pod for pod, _ in pods if pod.cgroup], self._net_cls(layout))
        for bad in errors:
            self._events.add("bad-object", "terway-qos", str(bad))
        self._files.write({GLOBAL: self._global, PODS: table})
        self._seen = seen

    def _net_cls(self, layout: Layout | None) -> str:
        """Return where the pods' cgroups are: of the controller net_cls, which v2 does not have."""
        if layout is not None and layout.has(_NET_CLS):
            return layout.hierarchy(_NET_CLS)
        return f"{self._cgroup_root}/{_NET_CLS}"
