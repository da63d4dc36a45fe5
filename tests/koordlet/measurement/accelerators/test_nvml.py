"""One query of NVML: what it finds of each GPU, and what each failure costs."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from koordlet.measurement.accelerators.nvml import (
    Answer,
    Gpu,
    GpuUsage,
    MigDevice,
    NvmlFailure,
    ProcessUsage,
    Session,
)
from tests.koordlet.measurement.collectors.fake_nvml import FakeGpu, FakeNvml, NVMLError

WALL = 1_000_000.0
NOW_US = 1_000_000_000_000


def session(nvml: FakeNvml) -> Session:
    return Session(nvml, wall=lambda: WALL)


def fail(nvml: FakeNvml, function: str, code: int, *, times: int = 1000) -> None:
    """Let a function of the library fail so often."""
    real = getattr(nvml, function)
    left = [times]

    def failing(*arguments: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise NVMLError(code)
        return real(*arguments)

    setattr(nvml, function, failing)


UNKNOWN = pynvml.NVML_ERROR_UNKNOWN
LOST = pynvml.NVML_ERROR_GPU_IS_LOST
NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
NOT_FOUND = pynvml.NVML_ERROR_NOT_FOUND
NO_FUNCTION = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND


def test_an_answer_has_the_driver_and_every_gpu() -> None:
    two = FakeGpu(1, "GPU-b", "NVIDIA A10", 24 << 30, "00000000:3B:00.0", compute=[(7, 5)])
    one = FakeGpu(0, "GPU-a", "NVIDIA H100", 80 << 30, "00010000:C1:00.0")
    assert session(FakeNvml(one, two)).query() == Answer(
        "570.86.10",
        (
            GpuUsage(Gpu("GPU-a", 0, "NVIDIA H100", 80 << 30, "10000:c1:00.0"), ()),
            GpuUsage(
                Gpu("GPU-b", 1, "NVIDIA A10", 24 << 30, "0000:3b:00.0"),
                (ProcessUsage(7, 0.0, 5),),
            ),
        ),
        (),
    )


def test_texts_of_old_libraries_are_bytes() -> None:
    nvml = FakeNvml(FakeGpu(0))
    nvml.nvmlDeviceGetName = lambda handle: b"Tesla \xff"  # type: ignore[method-assign,assignment,return-value]
    assert session(nvml).query().gpus[0].gpu.name == "Tesla \ufffd"


# -- beginning and end ----------------------------------------------------------------------------


def test_a_session_that_cannot_list_ends_again() -> None:
    for function in ("nvmlSystemGetDriverVersion", "nvmlDeviceGetCount", "nvmlDeviceGetUUID"):
        nvml = FakeNvml(FakeGpu(0))
        fail(nvml, function, UNKNOWN)
        with pytest.raises(NvmlFailure, match=r"^NVML does not list the GPUs: Unknown Error$"):
            session(nvml)
        assert nvml.started == 0


def test_a_library_that_does_not_start_says_why() -> None:
    nvml = FakeNvml()
    nvml.driver_loaded = False
    with pytest.raises(NvmlFailure, match=r"^NVML does not start: Driver Not Loaded$"):
        session(nvml)


def test_close_frees_the_events_once_and_never_raises() -> None:
    nvml = FakeNvml(FakeGpu(0))
    freed: list[object] = []
    nvml.nvmlEventSetFree = freed.append  # type: ignore[method-assign,assignment]
    asked = session(nvml)
    asked.close()
    asked.close()
    assert (len(freed), nvml.started) == (1, 0)
    nvml = FakeNvml(FakeGpu(0))
    asked = session(nvml)
    nvml.driver_loaded = False
    asked.close()


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED]
)
def test_a_driver_that_goes_is_the_end_of_the_session(code: int) -> None:
    nvml = FakeNvml(FakeGpu(0))
    asked = session(nvml)
    fail(nvml, "nvmlDeviceGetMemoryInfo", code)
    reason = re.escape(str(NVMLError(code)))
    with pytest.raises(NvmlFailure, match=f"^the driver was unloaded: {reason}$"):
        asked.query()


@pytest.mark.parametrize("function", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMigMode"])
def test_a_gpu_that_fails_is_unhealthy_for_that_query(function: str) -> None:
    nvml = FakeNvml(FakeGpu(0, compute=[(7, 5)]), FakeGpu(1))
    asked = session(nvml)
    fail(nvml, function, LOST, times=1)
    answer = asked.query()
    bus_id = answer.gpus[0].gpu.bus_id
    assert answer.gpus[0] == GpuUsage(
        Gpu("GPU-0", 0, "NVIDIA H100 80GB HBM3", 0, bus_id, "Unknown", "GPU is lost"), ()
    )
    assert answer.gpus[1].gpu.healthy
    assert answer.problems == ("GPU 0: GPU is lost",)
    assert asked.query().gpus[0].gpu.healthy


def test_a_gpu_that_fails_keeps_its_critical_error() -> None:
    nvml = FakeNvml(FakeGpu(0))
    asked = session(nvml)
    nvml.events = [(nvml.gpus[0], 79)]
    fail(nvml, "nvmlDeviceGetMemoryInfo", LOST)
    (usage,) = asked.query().gpus
    assert (usage.gpu.error_code, usage.gpu.error) == ("Xid79", "critical error 79 on GPU GPU-0")


# -- critical errors ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "watch", "health"),
    [
        (
            NOT_SUPPORTED,
            "DeviceHealthCheckNotSupported",
            "the GPU is too old to report critical errors",
        ),
        (UNKNOWN, "", ""),
    ],
)
def test_a_gpu_without_a_watch_over_its_errors(code: int, watch: str, health: str) -> None:
    nvml = FakeNvml(FakeGpu(0))
    fail(nvml, "nvmlDeviceRegisterEvents", code)
    (usage,) = session(nvml).query().gpus
    assert (usage.gpu.error_code, usage.gpu.error) == (watch, health)


def test_without_an_event_set_the_gpus_are_used() -> None:
    nvml = FakeNvml(FakeGpu(0))
    fail(nvml, "nvmlEventSetCreate", NOT_SUPPORTED)
    nvml.events = [(nvml.gpus[0], 79)]
    answer = session(nvml).query()
    assert answer.gpus[0].gpu.healthy
    assert (answer.problems, nvml.watched) == ((), [])


def test_errors_that_cannot_be_asked_for_are_a_problem_and_cost_no_figures() -> None:
    nvml = FakeNvml(FakeGpu(0, compute=[(7, 5)]))
    fail(nvml, "nvmlEventSetWait", UNKNOWN)
    answer = session(nvml).query()
    assert answer.problems == ("critical errors of GPUs: Unknown Error",)
    assert answer.gpus[0].processes == (ProcessUsage(7, 0.0, 5),)


def test_a_query_takes_at_most_64_errors_and_waits_a_millisecond_for_each() -> None:
    nvml = FakeNvml(FakeGpu(0), FakeGpu(1))
    asked = session(nvml)
    waits: list[int] = []
    wait = nvml.nvmlEventSetWait

    def waiting(events: object, timeout_ms: int) -> Any:
        waits.append(timeout_ms)
        return wait(events, timeout_ms)

    nvml.nvmlEventSetWait = waiting  # type: ignore[method-assign]
    nvml.events = [*[(nvml.gpus[0], 13)] * 64, (nvml.gpus[1], 48)]
    assert [usage.gpu.healthy for usage in asked.query().gpus] == [True, True]
    assert waits == [1] * 64
    codes = [usage.gpu.error_code for usage in asked.query().gpus]
    assert codes == ["", "Xid48"]


def test_other_events_are_no_errors() -> None:
    nvml = FakeNvml(FakeGpu(0))
    asked = session(nvml)
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    event = SimpleNamespace(device=handle, eventType=pynvml.nvmlEventTypePState, eventData=79)
    waiting = [event]

    def wait(events: object, timeout_ms: int) -> Any:
        if waiting:
            return waiting.pop()
        raise NVMLError(pynvml.NVML_ERROR_TIMEOUT)

    nvml.nvmlEventSetWait = wait  # type: ignore[method-assign]
    answer = asked.query()
    assert (answer.gpus[0].gpu.healthy, answer.problems) == (True, ())


# -- processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute", "graphics", "memory"),
    [
        ([(7, 100)], [(7, 100)], 100),
        ([(7, 60)], [(7, 100)], 100),
        ([(7, 100)], [(7, 60)], 100),
        ([(7, None)], [(7, 60)], 60),
        ([(7, 60)], [(7, None)], 60),
        ([(7, None)], [], None),
        ([(7, 60), (7, 40)], [(7, 90)], 100),
        ([(7, 60), (7, None)], [], 60),
        ([(7, 0)], [], 0),
    ],
)
def test_the_memory_of_a_process_in_both_lists(
    compute: list[tuple[int, int | None]],
    graphics: list[tuple[int, int | None]],
    memory: int | None,
) -> None:
    (usage,) = session(FakeNvml(FakeGpu(0, compute=compute, graphics=graphics))).query().gpus
    assert usage.processes == (ProcessUsage(7, 0.0, memory),)


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"]
)
def test_a_list_of_processes_that_fails_is_a_gpu_that_fails(function: str) -> None:
    nvml = FakeNvml(FakeGpu(0, compute=[(7, 1)], graphics=[(8, 1)]))
    fail(nvml, function, UNKNOWN)
    answer = session(nvml).query()
    assert answer.problems == ("GPU 0: Unknown Error",)
    assert not answer.gpus[0].gpu.healthy


def test_a_gpu_that_does_not_measure_processes_says_so_and_has_their_memory() -> None:
    gpu = FakeGpu(3, compute=[(7, 100)], measures=False)
    answer = session(FakeNvml(gpu)).query()
    assert answer.gpus[0].processes == (ProcessUsage(7, None, 100),)
    assert answer.gpus[0].gpu.healthy
    assert answer.problems == ("GPU 3: it does not measure the use by processes",)


def test_a_measurement_that_fails_is_a_gpu_that_fails() -> None:
    nvml = FakeNvml(FakeGpu(0, compute=[(7, 100)]))
    fail(nvml, "nvmlDeviceGetProcessUtilization", LOST)
    assert session(nvml).query().problems == ("GPU 0: GPU is lost",)


@pytest.mark.parametrize(("age_us", "use"), [(0, 40.0), (1_999_999, 40.0), (2_000_000, 0.0)])
def test_the_first_query_looks_two_seconds_back(age_us: int, use: float) -> None:
    gpu = FakeGpu(0, compute=[(7, 1)], samples=[(7, NOW_US - age_us, 40)])
    assert session(FakeNvml(gpu)).query().gpus[0].processes == (ProcessUsage(7, use, 1),)


def test_later_queries_look_back_to_the_newest_sample() -> None:
    nvml = FakeNvml(FakeGpu(0, compute=[(7, 1)]))
    walls = [WALL]
    asked = Session(nvml, wall=lambda: walls[0])
    since: list[int] = []
    measure = nvml.nvmlDeviceGetProcessUtilization

    def measuring(handle: Any, seen_us: int) -> Any:
        since.append(seen_us)
        return measure(handle, seen_us)

    nvml.nvmlDeviceGetProcessUtilization = measuring  # type: ignore[method-assign]
    nvml.gpus[0].samples = [(7, NOW_US - 500, 10), (8, NOW_US - 900, 20)]
    asked.query()
    walls[0] += 60
    asked.query()
    # Some drivers give samples that are older than what was asked for.
    nvml.nvmlDeviceGetProcessUtilization = lambda handle, seen_us: [  # type: ignore[method-assign]
        SimpleNamespace(pid=7, timeStamp=stamp, smUtil=use)
        for stamp, use in ((1, 10), (seen_us, 20), (seen_us + 1, 50))
    ]
    assert asked.query().gpus[0].processes == (ProcessUsage(7, 50.0, 1),)
    assert since == [NOW_US - 2_000_000, NOW_US - 500]


def test_a_clock_near_its_beginning_is_no_negative_time() -> None:
    nvml = FakeNvml(FakeGpu(0, compute=[(7, 1)], samples=[(7, 1, 30)]))
    measure = nvml.nvmlDeviceGetProcessUtilization

    def measuring(handle: Any, seen_us: int) -> Any:
        assert seen_us >= 0, "the library takes an unsigned number"
        return measure(handle, seen_us)

    nvml.nvmlDeviceGetProcessUtilization = measuring  # type: ignore[method-assign]
    assert Session(nvml, wall=lambda: 0.5).query().gpus[0].processes == (ProcessUsage(7, 30.0, 1),)


# -- MIG ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_FUNCTION])
def test_a_gpu_or_driver_without_mig_is_whole(code: int) -> None:
    nvml = FakeNvml(FakeGpu(0))
    fail(nvml, "nvmlDeviceGetMigMode", code)
    answer = session(nvml).query()
    assert (answer.gpus[0].gpu.mig, answer.problems) == (None, ())


def test_a_gpu_in_mig_mode_without_parts_has_none() -> None:
    (usage,) = session(FakeNvml(FakeGpu(0, mig=[("", "", 0)]))).query().gpus
    assert usage.gpu.mig == ()


def test_all_places_in_use_are_parts() -> None:
    places = [("", "", 0), ("MIG-a", "A", 10), ("", "", 0), ("MIG-b", "B", 20)]
    answer = session(FakeNvml(FakeGpu(0, mig=places, compute=[(7, 3), (7, None)]))).query()
    assert answer.gpus[0].gpu.mig == (MigDevice("MIG-a", "A", 10), MigDevice("MIG-b", "B", 20))
    assert answer.gpus[0].processes == (ProcessUsage(7, None, 3),)
    assert answer.problems == ()


def test_a_part_that_fails_is_a_gpu_that_fails() -> None:
    nvml = FakeNvml(FakeGpu(0, mig=[("MIG-a", "A", 10)]))
    fail(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", UNKNOWN)
    assert session(nvml).query().problems == ("GPU 0: Unknown Error",)
