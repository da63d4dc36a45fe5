"""CPU and memory of host applications: processes outside pods that the NodeSLO declares."""

from __future__ import annotations

from koordlet.measurement.collecting import HostAppTarget, Round, Targets, followed, layout_with
from koordlet.measurement.collectors.cgroups import CONTROLLERS, Group
from koordlet.measurement.series import Metric, Series


class HostAppCollector:
    """CPU and memory of each host application's cgroup, as of a pod's."""

    name = "host-applications"
    gate = None

    def __init__(self, cpus: int, *, interval_s: float = 1.0, retention_s: float = 330.0) -> None:
        """cpus: of the machine. retention_s: as for pods."""
        self.interval_s = interval_s
        self.retention_s = retention_s
        self._cpus = cpus
        self._targets: Targets | None = None
        self._groups: dict[HostAppTarget, Group] = {}

    def sample(self, round_: Round) -> dict[Series, float]:
        layout = layout_with(round_.targets, *CONTROLLERS)
        if round_.targets is not self._targets:
            self._follow(round_.targets)
        samples: dict[Series, float] = {}
        for app, group in self._groups.items():
            try:
                used = group.read(round_, layout, self._cpus)
            except (OSError, ValueError) as error:
                round_.problem(f"{app.name}: {error}")
                continue
            if used.cpu is not None:
                samples[Series(Metric.HOST_APP_CPU, app.name)] = used.cpu
            if used.memory is not None and used.with_page_cache is not None:
                samples[Series(Metric.HOST_APP_MEMORY, app.name)] = used.memory
                with_cache = Series(Metric.HOST_APP_MEMORY_WITH_PAGE_CACHE, app.name)
                samples[with_cache] = used.with_page_cache
        return samples

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups = {}
        self._targets = None

    def _follow(self, targets: Targets) -> None:
        if self._targets is None or self._targets.layout != targets.layout:
            self.close()
        self._groups = followed(
            self._groups,
            targets.host_apps,
            lambda app: Group(app.cgroup, self.interval_s),
            Group.close,
        )
        self._targets = targets
