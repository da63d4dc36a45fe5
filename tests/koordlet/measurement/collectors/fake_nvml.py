"""NVML without a GPU: the functions of the real module, with the library's rules.

Errors and constants are those of the real module. Kept rules: nothing works before the start or
after the end; a handle belongs to its session; process utilisation gives samples later than the
given time and "not found" without any; a GPU in MIG mode refuses it; memory that the driver does
not show is None; events wait in the set from their registration on.
"""

# ruff: noqa: N802 - the names are those of the module
from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

NVMLError: Any = pynvml.NVMLError


@dataclass
class FakeGpu:
    """A GPU. processes: pid -> bytes or None. samples: (pid, time in us, percent)."""

    minor: int
    uuid: str = ""
    name: str = "NVIDIA H100 80GB HBM3"
    memory_bytes: int = 80 << 30
    bus_id: str = ""
    compute: list[tuple[int, int | None]] = field(default_factory=list)
    graphics: list[tuple[int, int | None]] = field(default_factory=list)
    samples: list[tuple[int, int, int]] = field(default_factory=list)
    mig: list[tuple[str, str, int]] | None = None  # places: uuid ("" is empty), name, bytes
    watchable: bool = True
    measures: bool = True
    computes: bool = True
    lost: bool = False
    recovery: int | None = None  # what the driver says that it needs; None: it is too old to

    def __post_init__(self) -> None:
        self.uuid = self.uuid or f"GPU-{self.minor}"
        self.bus_id = self.bus_id or f"0000{0x3B + self.minor:04X}:00:00.0"[4:].rjust(16, "0")


@dataclass(frozen=True)
class Handle:
    gpu: FakeGpu | None
    session: int
    part: tuple[str, str, int] | None = None


class FakeNvml:
    """The module. may_answer: while it is cleared, every call hangs, as in a driver that hangs."""

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = list(gpus)
        self.driver_loaded = True
        self.started = 0
        self.sessions = itertools.count(1)
        self.session = 0
        self.events: list[tuple[FakeGpu | None, int]] = []
        self.watched: list[FakeGpu] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("NVML_", "nvmlEventType")):
            return getattr(pynvml, name)
        raise AttributeError(name)

    @property
    def NVMLError(self) -> Any:
        return NVMLError

    def _check(self) -> None:
        self.calls += 1
        self.may_answer.wait(60)
        if not self.started:
            raise NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        if not self.driver_loaded:
            raise NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    def _gpu(self, handle: Handle) -> FakeGpu:
        self._check()
        if handle.session != self.session or handle.gpu is None:
            raise NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if handle.gpu.lost:
            raise NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return handle.gpu

    def nvmlInit(self) -> None:
        if not self.driver_loaded:
            raise NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        self.started += 1
        self.session = next(self.sessions)

    def nvmlShutdown(self) -> None:
        if not self.started:
            raise NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        self.started -= 1
        self.watched = []

    def nvmlSystemGetDriverVersion(self) -> str:
        self._check()
        return "570.86.10"

    def nvmlDeviceGetCount(self) -> int:
        self._check()
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        self._check()
        return Handle(self.gpus[index], self.session)

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        gpu = self._gpu(handle)
        return handle.part[0] if handle.part else gpu.uuid

    def nvmlDeviceGetMinorNumber(self, handle: Handle) -> int:
        return self._gpu(handle).minor

    def nvmlDeviceGetName(self, handle: Handle) -> str:
        gpu = self._gpu(handle)
        return handle.part[1] if handle.part else gpu.name

    def nvmlDeviceGetPciInfo(self, handle: Handle) -> Any:
        return SimpleNamespace(busId=self._gpu(handle).bus_id.encode())

    def nvmlDeviceGetMemoryInfo(self, handle: Handle) -> Any:
        gpu = self._gpu(handle)
        return SimpleNamespace(total=handle.part[2] if handle.part else gpu.memory_bytes)

    def nvmlDeviceGetMigMode(self, handle: Handle) -> list[int]:
        mode = int(self._gpu(handle).mig is not None)
        return [mode, mode]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Handle) -> int:
        return len(self._gpu(handle).mig or ())

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Handle, index: int) -> Handle:
        part = (self._gpu(handle).mig or [])[index]
        if not part[0]:
            raise NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return Handle(handle.gpu, self.session, part)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Handle) -> list[Any]:
        gpu = self._gpu(handle)
        if not gpu.computes:
            raise NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return _processes(gpu.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Handle) -> list[Any]:
        if self._gpu(handle).mig is not None:
            raise NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return _processes(self._gpu(handle).graphics)

    def nvmlDeviceGetProcessUtilization(self, handle: Handle, seen_us: int) -> list[Any]:
        gpu = self._gpu(handle)
        if gpu.mig is not None or not gpu.measures:
            raise NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        found = [sample for sample in gpu.samples if sample[1] > seen_us]
        if not found:
            raise NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return [SimpleNamespace(pid=pid, timeStamp=at, smUtil=use) for pid, at, use in found]

    def nvmlDeviceGetFieldValues(self, handle: Handle, fields: list[int]) -> list[Any]:
        gpu = self._gpu(handle)
        assert fields == [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        if gpu.recovery is None:
            return [SimpleNamespace(nvmlReturn=pynvml.NVML_ERROR_NOT_SUPPORTED, value=None)]
        value = SimpleNamespace(uiVal=gpu.recovery)
        return [SimpleNamespace(nvmlReturn=pynvml.NVML_SUCCESS, value=value)]

    def nvmlEventSetCreate(self) -> object:
        self._check()
        return object()

    def nvmlEventSetFree(self, events: object) -> None:
        self._check()

    def nvmlDeviceRegisterEvents(self, handle: Handle, kinds: int, events: object) -> None:
        gpu = self._gpu(handle)
        if not gpu.watchable:
            raise NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        assert kinds == pynvml.nvmlEventTypeXidCriticalError
        self.watched.append(gpu)

    def nvmlEventSetWait(self, events: object, timeout_ms: int) -> Any:
        self._check()
        if not self.events:
            raise NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        gpu, xid = self.events.pop(0)
        return SimpleNamespace(
            device=Handle(gpu, self.session),
            eventType=pynvml.nvmlEventTypeXidCriticalError,
            eventData=xid,
        )


def _processes(processes: list[tuple[int, int | None]]) -> list[Any]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in processes]
