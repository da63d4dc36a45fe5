"""Cold memory of node, pods, containers and host applications, on kernels with kidled.

Cold: inactive file pages that were not used for 300 s. Usage with hot pages is the usage with page
cache less the cold part, never below 0: both are read at different moments. kidled is started with
the first round if it is off, and set back by `close`; a scan period of the operator stays.
Files: docs/facts/kernel.md, "Cold memory".
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final, NamedTuple

from koordlet.measurement.collecting import Round, Targets, Unavailable, followed
from koordlet.measurement.kernel_files import GONE, KernelFile
from koordlet.measurement.series import LATEST_PERIODS, Metric, Series
from linux.cgroup_paths import Layout
from linux.host import Host
from linux.kidled import SCAN_PERIOD_S, STATS_FILE, Kidled, cold_bytes, read_kidled, write_kidled

log = logging.getLogger(__name__)

_FILE_BYTES: Final = 8192
"""31 lines; the rows have eight numbers of at most 15 digits."""


class _Kind(NamedTuple):
    """The metrics of one kind of object."""

    cold: Metric
    hot: Metric
    with_page_cache: Metric


_NODE: Final = _Kind(
    Metric.NODE_MEMORY_COLD, Metric.NODE_MEMORY_WITH_HOT_PAGES, Metric.NODE_MEMORY_WITH_PAGE_CACHE
)
_POD: Final = _Kind(
    Metric.POD_MEMORY_COLD, Metric.POD_MEMORY_WITH_HOT_PAGES, Metric.POD_MEMORY_WITH_PAGE_CACHE
)
_CONTAINER: Final = _Kind(
    Metric.CONTAINER_MEMORY_COLD,
    Metric.CONTAINER_MEMORY_WITH_HOT_PAGES,
    Metric.CONTAINER_MEMORY_WITH_PAGE_CACHE,
)
_HOST_APP: Final = _Kind(
    Metric.HOST_APP_MEMORY_COLD,
    Metric.HOST_APP_MEMORY_WITH_HOT_PAGES,
    Metric.HOST_APP_MEMORY_WITH_PAGE_CACHE,
)


class _Group:
    """One cgroup and its open file."""

    __slots__ = ("cgroup", "file", "kind", "of")

    def __init__(self, kind: _Kind, of: str, cgroup: str) -> None:
        self.kind = kind
        self.of = of
        self.cgroup = cgroup
        self.file: KernelFile | None = None

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def cold_bytes(self, round_: Round, layout: Layout) -> int | None:
        """Return the group's cold memory; None if it is gone. Raises OSError and ValueError."""
        try:
            if self.file is None:
                directory = layout.directory("memory", self.cgroup)
                self.file = round_.files.open(f"{directory}/{STATS_FILE}", _FILE_BYTES)
            return cold_bytes(self.file.read())
        except OSError as error:
            self.close()
            if error.errno in GONE:
                return None
            raise


class ColdMemoryCollector:
    """Cold bytes, and usage with hot pages."""

    name = "cold-memory"
    gate = "ColdPageCollector"

    def __init__(
        self, host: Host, *, sys_root: str = "/sys", interval_s: float = 5.0,
        retention_s: float = 630.0,
    ) -> None:  # fmt: skip
        """interval_s: upstream's coldpage-collector-interval. retention_s: chosen, ten minutes."""
        self.interval_s = interval_s
        self.retention_s = retention_s
        self._host = host
        self._sys_root = sys_root
        self._before: Kidled | None = None
        self._targets: Targets | None = None
        self._groups: dict[tuple[_Kind, str, str], _Group] = {}

    def sample(self, round_: Round) -> dict[Series, float]:
        layout = round_.targets.layout
        if layout is None:
            raise Unavailable("the cgroup tree is not known yet")
        kidled = read_kidled(self._host, sys_root=self._sys_root)
        if kidled is None or not layout.has("memory"):
            raise Unavailable("this kernel has no kidled: only Alibaba's kernels have it")
        if kidled.scan_period_s == 0:
            write_kidled(self._host, Kidled(SCAN_PERIOD_S, True), sys_root=self._sys_root)
            self._before = kidled
        if round_.targets is not self._targets:
            self._follow(round_.targets)
        cold = self._cold(round_, layout)
        samples: dict[Series, float] = {
            Series(kind.cold, of): float(number) for (kind, of), number in cold.items()
        }
        for kind in (_NODE, _POD, _CONTAINER, _HOST_APP):
            usages = round_.measured.latest_of(
                kind.with_page_cache, within_s=LATEST_PERIODS * self.interval_s
            )
            for (of, _), usage in usages.items():
                if (kind, of) in cold:
                    samples[Series(kind.hot, of)] = max(usage - cold[kind, of], 0.0)
        return samples

    def close(self) -> None:
        self._close_groups()
        self._targets = None
        if self._before is not None:
            before, self._before = self._before, None
            try:
                write_kidled(self._host, before, sys_root=self._sys_root)
            except OSError as error:
                log.warning("kidled goes on scanning memory: %s", error)

    def _close_groups(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups = {}

    def _cold(self, round_: Round, layout: Layout) -> dict[tuple[_Kind, str], int]:
        found: dict[tuple[_Kind, str], int] = {}
        for group in self._groups.values():
            try:
                cold = group.cold_bytes(round_, layout)
            except (OSError, ValueError) as error:
                round_.problem(f"{group.cgroup or 'the node'}: {error}")
                continue
            if cold is not None:
                found[group.kind, group.of] = cold
            round_.step_aside()
        return found

    def _follow(self, targets: Targets) -> None:
        """Keep the groups that are still there, and close the others."""
        if self._targets is not None and self._targets.layout != targets.layout:
            self._close_groups()
        self._groups = followed(
            self._groups, _groups(targets), lambda key: _Group(*key), _Group.close
        )
        self._targets = targets


def _groups(targets: Targets) -> Iterator[tuple[_Kind, str, str]]:
    yield _NODE, "", ""
    for is_pod, of, cgroup in targets.groups:
        yield _POD if is_pod else _CONTAINER, of, cgroup
    for app in targets.host_apps:
        yield _HOST_APP, app.name, app.cgroup
