"""Use of NVIDIA GPUs by node, pods and containers.

Every question to the driver is asked in a thread that lives for one query. A round takes what the
last query answered and starts the next one, so the figures are one interval old, and a driver that
hangs holds up nothing but its thread: while that one runs, no other is started, and the collector
says for how long the driver has not answered.

A process belongs to the pod and container in whose cgroup it is. Core use is in percent of one GPU,
summed over the processes. A process without a sample of its core use has used none, and its memory
counts; in MIG mode there is no core use.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from koordlet.measurement.accelerators.nvml import Answer, GpuUsage, NvmlFailure, Session
from koordlet.measurement.collecting import Round, Targets, Unavailable
from koordlet.measurement.series import Metric, Series
from linux.host import Host
from linux.procfs import cgroup_paths
from service.scheduling import schedule_beside_event_loop

_CONTROL: Final = "/dev/nvidiactl"
"""The driver makes this node when it is loaded; without it the library is not even looked for."""
_HUNG_AFTER: Final = 3.0
"""Intervals after which a query counts as hanging. A query takes some 10 ms a GPU."""


def driver_loaded(host: Host) -> bool:
    """Return whether NVIDIA's driver is loaded."""
    try:
        host.device_number(_CONTROL)
    except OSError:
        return False
    return True


class _Query:
    """One query in a thread of its own."""

    def __init__(self, ask: Callable[[], Answer], begun: float) -> None:
        self.begun = begun
        self.answer: Answer | None = None
        self.error: Exception | None = None
        self._ask = ask
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="koordlet-nvml", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        schedule_beside_event_loop()
        try:
            self.answer = self._ask()
        except Exception as error:  # noqa: BLE001 - reported by the round that takes it
            self.error = error
        finally:
            self._done.set()

    def finished(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """For tests and for the end: wait for the answer."""
        return self._done.wait(seconds)


def _end(session: Session) -> None:
    schedule_beside_event_loop()
    session.close()


class GpuCollector:
    """Core use and memory of each GPU, by node, pod and container."""

    name = "gpu"
    gate = "Accelerators"

    def __init__(
        self,
        host: Host,
        *,
        session: Callable[[], Session] = Session,
        interval_s: float = 1.0,
        retention_s: float = 330.0,
    ) -> None:
        self.interval_s = interval_s
        self.retention_s = retention_s
        self._host = host
        self._make_session = session
        self._session: Session | None = None
        self._query: _Query | None = None
        self._latest: Answer | None = None
        self._targets: Targets | None = None
        self._owners: dict[str, tuple[str, str]] = {}
        self._wanted = True

    @property
    def latest(self) -> Answer | None:
        """The newest answer, for the report of devices; None before the first and without GPUs.
        Any thread."""
        return self._latest

    def sample(self, round_: Round) -> dict[Series, float]:
        self._wanted = True
        query = self._query
        if query is not None and not query.finished():
            waited_s = round_.now - query.begun
            if waited_s >= _HUNG_AFTER * self.interval_s:
                raise Unavailable(f"NVIDIA's driver has not answered for {waited_s:.0f} s")
            return {}
        if query is None and not driver_loaded(self._host):
            raise Unavailable(f"no NVIDIA driver is loaded: there is no {_CONTROL}")
        self._query = _Query(self._ask, round_.now)
        if query is None:
            return {}
        if query.error is not None:
            self._latest = None
            if isinstance(query.error, NvmlFailure):
                raise Unavailable(str(query.error))
            raise query.error
        self._latest = query.answer
        assert query.answer is not None
        for problem in query.answer.problems:
            round_.problem(problem)
        if round_.targets is not self._targets:
            self._targets, self._owners = round_.targets, _owners(round_.targets)
        return self._samples(query.answer)

    def close(self) -> None:
        """Forget everything and end the session: now, or after the query that still runs."""
        self._wanted = False
        self._latest = None
        self._targets, self._owners = None, {}
        if self._query is None or self._query.finished():
            self._query = None
            session, self._session = self._session, None
            if session is not None:
                # The end of a session asks the driver too.
                threading.Thread(
                    target=_end, args=(session,), name="koordlet-nvml", daemon=True
                ).start()

    def wait(self, seconds: float) -> bool:
        """Wait for the query in progress; False if it has not ended. For tests."""
        return self._query is None or self._query.wait(seconds)

    # --- the query's thread ---------------------------------------------------------------------

    def _ask(self) -> Answer:
        session = self._session
        if session is None:
            session = self._session = self._make_session()
        failed = True
        try:
            answer = session.query()
            failed = False
            return answer
        finally:
            if failed or not self._wanted:
                self._session = None
                session.close()

    # --- the sampling thread --------------------------------------------------------------------

    def _samples(self, answer: Answer) -> dict[Series, float]:
        samples: dict[Series, float] = {}
        known: dict[int, tuple[str, str]] = {}
        for usage in answer.gpus:
            uuid, minor = usage.gpu.uuid, str(usage.gpu.minor)
            cores: defaultdict[tuple[Metric, str], float] = defaultdict(float)
            memory: defaultdict[tuple[Metric, str], float] = defaultdict(float)
            for process in usage.processes:
                if process.pid not in known:
                    known[process.pid] = self._owner(process.pid)
                pod, container = known[process.pid]
                for core_metric, memory_metric, of in (
                    (Metric.NODE_GPU_CORE, Metric.NODE_GPU_MEMORY, uuid),
                    (Metric.POD_GPU_CORE, Metric.POD_GPU_MEMORY, pod),
                    (Metric.CONTAINER_GPU_CORE, Metric.CONTAINER_GPU_MEMORY, container),
                ):
                    if not of:
                        continue
                    if process.core is not None:
                        cores[core_metric, of] += process.core
                    if process.memory_bytes is not None:
                        memory[memory_metric, of] += process.memory_bytes
            if _measures_cores(usage):
                cores[Metric.NODE_GPU_CORE, uuid] += 0.0
            memory[Metric.NODE_GPU_MEMORY, uuid] += 0.0
            for (metric, of), value in cores.items():
                samples[_series(metric, of, uuid, minor)] = min(value, 100.0)
            for (metric, of), value in memory.items():
                samples[_series(metric, of, uuid, minor)] = value
        return samples

    def _owner(self, pid: int) -> tuple[str, str]:
        """Return (pod UID, container id) of a process; "" for what it does not belong to."""
        try:
            paths = cgroup_paths(self._host.read(f"/proc/{pid}/cgroup"))
        except OSError:
            return "", ""  # it has ended
        for path in (paths.get("memory"), paths.get("")):
            # Seen from a cgroup namespace, the path goes up first.
            cgroup = "/".join(part for part in (path or "").split("/") if part != "..")
            while cgroup:
                owner = self._owners.get(cgroup)
                if owner is not None:
                    return owner
                cgroup = cgroup.rpartition("/")[0]
        return "", ""


def _measures_cores(usage: GpuUsage) -> bool:
    """Return whether a GPU without a busy process is idle, and not merely without figures."""
    return (
        usage.gpu.healthy
        and usage.gpu.mig is None
        and all(process.core is not None for process in usage.processes)
    )


def _series(metric: Metric, of: str, uuid: str, minor: str) -> Series:
    if metric in (Metric.NODE_GPU_CORE, Metric.NODE_GPU_MEMORY):
        return Series(metric, of, minor)
    return Series(metric, of, f"{uuid}/{minor}")


def _owners(targets: Targets) -> dict[str, tuple[str, str]]:
    """Return cgroup -> (pod UID, container id or "")."""
    owners: dict[str, tuple[str, str]] = {}
    for pod in targets.pods:
        if pod.cgroup:
            owners[pod.cgroup] = (pod.uid, "")
        for container in pod.containers:
            if container.cgroup:
                owners[container.cgroup] = (pod.uid, container.id)
    return owners
