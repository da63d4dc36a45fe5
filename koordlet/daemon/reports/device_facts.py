"""Gathers what the Device object is made from: GPUs, accelerator files and RDMA functions.

Runs in worker threads, a few seconds apart. Without the gates `Accelerators` and `RDMADevices`
there is nothing to report, and the object stays as it is; it also does while NVIDIA's driver is
loaded and does not answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from apis.meta import format_time
from koordlet.configuration.config import Config
from koordlet.measurement.accelerators.nvml import Answer
from koordlet.measurement.accelerators.xpu import Xpu, read_xpus
from koordlet.measurement.collectors.gpu import driver_loaded
from koordlet.reporters.device import KeptDevice
from koordlet.reporters.device_spec import device_content
from linux.host import Host
from linux.pci import read_place
from linux.rdma import RdmaFunction, read_rdma_functions

_RDMA_S: Final = 10.0
"""How often RDMA functions are read: some ten files each. Chosen: a port that went down is reported
after 10 s at most; half of it doubles the reads."""


class DeviceFacts:
    """One thread at a time gathers."""

    def __init__(
        self,
        config: Config,
        host: Host,
        *,
        gpus: Callable[[], Answer | None],
        gate: Callable[[str], bool],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """gpus: what NVML answered last. gate: whether a feature gate is on."""
        self._reports = config.reports
        self._host = host
        self._gpus = gpus
        self._gate = gate
        self._monotonic = monotonic
        self._rdma: tuple[RdmaFunction, ...] = ()
        self._rdma_at = -float("inf")
        self._kept: KeptDevice | None = None

    def gather(self) -> KeptDevice | None:
        """Return the devices; None while they are not to be reported."""
        accelerators, rdma = self._gate("Accelerators"), self._gate("RDMADevices")
        if not accelerators and not rdma:
            return None
        functions = self._read_rdma() if rdma else ()
        xpus, problems = self._read_xpus() if accelerators else ((), ())
        files_only = self._reports.accelerators_from_files_only
        answer = None
        if accelerators and not xpus and not files_only:
            answer = self._gpus()
            if answer is None and driver_loaded(self._host):
                return None  # the driver has not answered yet, or hangs
        places = {
            usage.gpu.bus_id: read_place(self._host, usage.gpu.bus_id)
            for usage in (() if answer is None else answer.gpus)
        }
        content = device_content(answer, xpus, functions, places, files_only=files_only)
        kept = self._kept
        if kept is None or kept.wanted != content or kept.problems != problems:
            self._kept = kept = KeptDevice(content, format_time(datetime.now(UTC)), problems)
        return kept

    def _read_xpus(self) -> tuple[tuple[Xpu, ...], tuple[str, ...]]:
        return read_xpus(self._host, self._reports.accelerator_files)

    def _read_rdma(self) -> tuple[RdmaFunction, ...]:
        now = self._monotonic()
        if now - self._rdma_at >= _RDMA_S:
            self._rdma, self._rdma_at = read_rdma_functions(self._host), now
        return self._rdma
