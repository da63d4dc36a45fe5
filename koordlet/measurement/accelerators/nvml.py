"""NVIDIA's management library: one query of all GPUs, and the list of GPUs.

A query runs in a thread of its own and may hang with the driver;
`koordlet.measurement.collectors.gpu` sees to that. A GPU that does not answer loses its own figures
only. Rules of the library that matter here:

- Samples of process utilisation have the time of day in microseconds, and several may name the same
  process at one time (one for each of its contexts). A process that did nothing has no sample, and
  "not found" means that no process had one.
- A GPU in MIG mode has no process utilisation; the memory of its processes is known.
- A process that computes and draws is in both lists, with the same memory in each.
- Critical errors (XIDs) wait in an event set from its registration on. A recent driver says which
  recovery a GPU needs; with an older one a GPU stays unhealthy after an error.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

_LOG = logging.getLogger("koordlet.measurement")

_IGNORED_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
"""Errors of an application and not of the GPU; upstream's list."""
_MOST_EVENTS: Final = 64
"""Chosen: errors that are taken in one query; further ones wait for the next."""
_EVENT_WAIT_MS: Final = 1
"""The least wait for an event."""
_FIRST_WINDOW_S: Final = 2.0
"""How far back the first query of a GPU looks. Samples are a sixth to one second apart."""
_RECOVERED_S: Final = 60.0
"""How long the driver must say that a GPU needs no recovery. Chosen: an error may be reported a
moment before its recovery. Twice the value keeps a GPU that was reset unused for a minute more."""
_RECOVERY_ACTION: Final = "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"
"""The field with the recovery that a GPU needs; old releases of the module lack it."""
NOT_SUPPORTED_XID: Final = "DeviceHealthCheckNotSupported"
"""Upstream's code for a GPU whose driver cannot report critical errors."""


class NvmlFailure(Exception):
    """The library or the driver does not answer at all; the message says why."""


class MigDevice(NamedTuple):
    """A part of a GPU in MIG mode. name: the library's, with the profile: "... MIG 1g.10gb"."""

    uuid: str
    name: str
    memory_bytes: int


class Gpu(NamedTuple):
    """A GPU. bus_id: PCI address, lower case, domain with four digits. error_code: "" when healthy;
    "Xid79" and so on. mig: None unless the GPU is in MIG mode."""

    uuid: str
    minor: int
    name: str
    memory_bytes: int
    bus_id: str
    error_code: str = ""
    error: str = ""
    mig: tuple[MigDevice, ...] | None = None

    @property
    def healthy(self) -> bool:
        return not self.error_code


class ProcessUsage(NamedTuple):
    """A process on one GPU. core: percent of the GPU, None where the GPU does not measure it.
    memory_bytes: None where the driver does not show it."""

    pid: int
    core: float | None
    memory_bytes: int | None


class GpuUsage(NamedTuple):
    """What one query found of a GPU."""

    gpu: Gpu
    processes: tuple[ProcessUsage, ...]


class Answer(NamedTuple):
    """What one query found. problems: what could not be asked, for people."""

    driver_version: str
    gpus: tuple[GpuUsage, ...]
    problems: tuple[str, ...]


class _Unit:
    """A GPU with its handle and what does not change."""

    def __init__(self, handle: Any, uuid: str, minor: int, name: str, bus_id: str) -> None:
        self.handle = handle
        self.uuid = uuid
        self.minor = minor
        self.name = name
        self.bus_id = bus_id
        self.seen_us = 0
        self.error_code = ""
        self.error = ""
        self.needs_none_since: float | None = None
        """Since when no recovery is needed after an error; None while one is, or may be."""


class Session:
    """The library between its start and its end. One thread at a time."""

    def __init__(
        self,
        nvml: Any = None,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """nvml: the module pynvml; None imports it. wall: seconds since the epoch, as the samples
        have it. Raises NvmlFailure."""
        self._wall = wall
        self._monotonic = monotonic
        self._units: list[_Unit] = []
        self._events: Any = None
        try:
            self._nvml: Any = importlib.import_module("pynvml") if nvml is None else nvml
            self._nvml.nvmlInit()
        except ImportError as error:
            raise NvmlFailure(f"the package nvidia-ml-py is missing: {error}") from error
        except Exception as error:
            raise NvmlFailure(f"NVML does not start: {error}") from error
        try:
            self._driver = _text(self._nvml.nvmlSystemGetDriverVersion())
            self._list()
        except self._nvml.NVMLError as error:
            self.close()
            raise NvmlFailure(f"NVML does not list the GPUs: {error}") from error

    def close(self) -> None:
        """End the library's use. Later calls do nothing."""
        nvml, self._nvml = self._nvml, None
        if nvml is None:
            return
        try:
            if self._events is not None:
                nvml.nvmlEventSetFree(self._events)
            nvml.nvmlShutdown()
        except nvml.NVMLError:
            pass  # the driver is gone, and the session with it

    def query(self) -> Answer:
        """Ask for everything. Raises NvmlFailure when the session has to be made again."""
        nvml = self._nvml
        problems: list[str] = []
        self._take_events(problems)
        found: list[GpuUsage] = []
        for unit in self._units:
            try:
                found.append(self._query_gpu(unit, problems))
            except nvml.NVMLError as error:
                if error.value in (
                    nvml.NVML_ERROR_UNINITIALIZED, nvml.NVML_ERROR_DRIVER_NOT_LOADED,
                ):  # fmt: skip
                    raise NvmlFailure(f"the driver was unloaded: {error}") from error
                problems.append(f"GPU {unit.minor}: {error}")
                unit.needs_none_since = None
                lost = Gpu(
                    unit.uuid, unit.minor, unit.name, 0, unit.bus_id, unit.error_code or "Unknown",
                    unit.error or str(error),
                )  # fmt: skip
                found.append(GpuUsage(lost, ()))
        return Answer(self._driver, tuple(found), tuple(problems))

    def _list(self) -> None:
        nvml = self._nvml
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            self._units.append(
                _Unit(
                    handle,
                    _text(nvml.nvmlDeviceGetUUID(handle)),
                    int(nvml.nvmlDeviceGetMinorNumber(handle)),
                    _text(nvml.nvmlDeviceGetName(handle)),
                    short_bus_id(_text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
                )
            )
        try:
            self._events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return  # the GPUs are used without a watch over their errors
        for unit in self._units:
            try:
                nvml.nvmlDeviceRegisterEvents(
                    unit.handle, nvml.nvmlEventTypeXidCriticalError, self._events
                )
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
                    unit.error_code = NOT_SUPPORTED_XID
                    unit.error = "the GPU is too old to report critical errors"

    def _take_events(self, problems: list[str]) -> None:
        """Mark the GPUs whose critical errors have arrived."""
        nvml = self._nvml
        if self._events is None:
            return
        for _ in range(_MOST_EVENTS):
            try:
                event = nvml.nvmlEventSetWait(self._events, _EVENT_WAIT_MS)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    problems.append(f"critical errors of GPUs: {error}")
                return
            xid = int(event.eventData)
            if event.eventType != nvml.nvmlEventTypeXidCriticalError or xid in _IGNORED_XIDS:
                continue
            try:
                uuid = _text(nvml.nvmlDeviceGetUUID(event.device))
            except nvml.NVMLError:
                uuid = ""  # an event without a GPU concerns all
            for unit in self._units:
                if not uuid or unit.uuid == uuid:
                    unit.error_code = f"Xid{xid}"
                    unit.error = f"critical error {xid} on GPU {unit.uuid}"
                    unit.needs_none_since = None

    def _look_for_recovery(self, unit: _Unit) -> None:
        """Clear the error of a GPU that needs no recovery any more."""
        now = self._monotonic()
        if not self._needs_no_recovery(unit):
            unit.needs_none_since = None
        elif unit.needs_none_since is None:
            unit.needs_none_since = now
        elif now - unit.needs_none_since >= _RECOVERED_S:
            _LOG.info("GPU %s needs no recovery after %s: healthy again", unit.uuid, unit.error)
            unit.error_code = unit.error = ""
            unit.needs_none_since = None

    def _needs_no_recovery(self, unit: _Unit) -> bool:
        """Return whether the driver says so; False where it says nothing about it."""
        nvml = self._nvml
        field = getattr(nvml, _RECOVERY_ACTION, None)
        if field is None:
            return False
        try:
            (found,) = nvml.nvmlDeviceGetFieldValues(unit.handle, [field])
        except nvml.NVMLError:
            return False
        answered = found.nvmlReturn == nvml.NVML_SUCCESS
        return bool(answered and found.value.uiVal == nvml.NVML_GPU_RECOVERY_ACTION_NONE)

    def _query_gpu(self, unit: _Unit, problems: list[str]) -> GpuUsage:
        nvml = self._nvml
        memory = int(nvml.nvmlDeviceGetMemoryInfo(unit.handle).total)
        if unit.error_code not in ("", NOT_SUPPORTED_XID):
            self._look_for_recovery(unit)
        mig = self._mig(unit)
        gpu = Gpu(
            unit.uuid, unit.minor, unit.name, memory, unit.bus_id, unit.error_code, unit.error, mig
        )
        used: dict[int, int | None] = {}
        for list_processes in (
            nvml.nvmlDeviceGetComputeRunningProcesses,
            nvml.nvmlDeviceGetGraphicsRunningProcesses,
        ):
            try:
                processes = list_processes(unit.handle)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
                    raise
                continue
            listed: defaultdict[int, int] = defaultdict(int)
            for process in processes:
                # In MIG mode a process has an entry for each part that it uses.
                if process.usedGpuMemory is not None:
                    listed[process.pid] += int(process.usedGpuMemory)
                used.setdefault(process.pid, None)
            for pid, number in listed.items():
                used[pid] = max(used[pid] or 0, number)
        cores = None if mig is not None else self._cores(unit, problems)
        return GpuUsage(
            gpu,
            tuple(
                ProcessUsage(pid, None if cores is None else cores.get(pid, 0.0), number)
                for pid, number in used.items()
            ),
        )

    def _mig(self, unit: _Unit) -> tuple[MigDevice, ...] | None:
        nvml = self._nvml
        try:
            if nvml.nvmlDeviceGetMigMode(unit.handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
                return None
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                return None
            raise
        parts: list[MigDevice] = []
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(unit.handle)):
            try:
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(unit.handle, index)
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_NOT_FOUND:
                    continue  # this place is not in use
                raise
            parts.append(
                MigDevice(
                    _text(nvml.nvmlDeviceGetUUID(handle)),
                    _text(nvml.nvmlDeviceGetName(handle)),
                    int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                )
            )
        return tuple(parts)

    def _cores(self, unit: _Unit, problems: list[str]) -> Mapping[int, float] | None:
        """Return pid -> percent of the GPU since the last query; None where it is not measured."""
        nvml = self._nvml
        now_us = int(self._wall() * 1e6)
        if not 0 < unit.seen_us <= now_us:
            # The first query, or the clock was set back: samples of the past two seconds.
            unit.seen_us = max(now_us - int(_FIRST_WINDOW_S * 1e6), 0)
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(unit.handle, unit.seen_us)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_NOT_FOUND:
                return {}
            if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
                problems.append(f"GPU {unit.minor}: it does not measure the use by processes")
                return None
            raise
        young = [
            (int(one.pid), int(one.timeStamp), int(one.smUtil))
            for one in samples
            if one.timeStamp > unit.seen_us
        ]
        unit.seen_us = max((stamp for _, stamp, _ in young), default=unit.seen_us)
        return mean_use(young)


def mean_use(samples: Iterable[tuple[int, int, int]]) -> dict[int, float]:
    """Return pid -> mean percent of the GPU. samples: pid, time, percent at that time.

    Samples of one process at one time are added, up to 100; a process without a sample at a time at
    which another has one did nothing then.
    """
    at: defaultdict[int, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    for pid, stamp, percent in samples:
        at[stamp][pid] += max(percent, 0)
    sums: defaultdict[int, float] = defaultdict(float)
    for used in at.values():
        for pid, percent in used.items():
            sums[pid] += min(percent, 100)
    return {pid: total / len(at) for pid, total in sums.items()}


def short_bus_id(bus_id: str) -> str:
    """Return a PCI address as sysfs has it: with a domain of four digits, where NVML has eight."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if rest else bus_id.lower()


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
