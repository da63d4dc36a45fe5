"""Use of GPUs, with a module that has NVML's rules in place of a GPU (fake_nvml.py)."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from koordlet.measurement.accelerators.nvml import (
    NOT_SUPPORTED_XID,
    Answer,
    Gpu,
    GpuUsage,
    MigDevice,
    NvmlFailure,
    ProcessUsage,
    Session,
    mean_use,
    short_bus_id,
)
from koordlet.measurement.collecting import ContainerTarget, PodTarget, Targets, Unavailable
from koordlet.measurement.collectors.gpu import GpuCollector
from koordlet.measurement.series import Metric, Series
from linux.discovery import discover
from tests.koordlet.measurement.collectors.fake_nvml import FakeGpu, FakeNvml
from tests.koordlet.measurement.collectors.rounds import Rounds
from tests.simulated import DEBIAN_12_V1, DEBIAN_12_V2, SimulatedKernel
from tests.simulated.profiles import Profile
from tests.simulated.vfs import text
from tests.waiting import wait_until

WALL = 1_000_000.0
NOW_US = int(WALL * 1e6)
POD, BOX = "kubepods/podone", "kubepods/podone/box"


def session(nvml: FakeNvml, wall: float = WALL) -> Session:
    return Session(nvml, wall=lambda: wall)


def test_samples_are_added_at_one_time_and_averaged_over_times() -> None:
    samples = [(7, 1, 40), (7, 1, 20), (7, 2, 30), (8, 2, 10), (9, 1, 90), (9, 1, 90)]
    assert mean_use(samples) == {7: 45.0, 8: 5.0, 9: 50.0}
    assert mean_use([]) == {}


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(-5, 1000))))
def test_mean_use_is_a_percentage(samples: list[tuple[int, int, int]]) -> None:
    assert all(0 <= use <= 100 for use in mean_use(samples).values())


@pytest.mark.parametrize(
    ("bus_id", "short"),
    [("00000000:3B:00.0", "0000:3b:00.0"), ("00010000:01:00.0", "10000:01:00.0"), ("odd", "odd")],
)
def test_bus_ids(bus_id: str, short: str) -> None:
    assert short_bus_id(bus_id) == short


def test_a_process_without_a_sample_keeps_its_memory() -> None:
    gpu = FakeGpu(0, compute=[(7, 100), (8, 200)], samples=[(7, NOW_US - 10, 40)])
    (usage,) = session(FakeNvml(gpu)).query().gpus
    assert usage.processes == (ProcessUsage(7, 40.0, 100), ProcessUsage(8, 0.0, 200))


def test_a_process_that_computes_and_draws_counts_once() -> None:
    gpu = FakeGpu(0, compute=[(7, 100)], graphics=[(7, 100), (9, None)])
    (usage,) = session(FakeNvml(gpu)).query().gpus
    assert usage.processes == (ProcessUsage(7, 0.0, 100), ProcessUsage(9, 0.0, None))


def test_a_gpu_without_a_list_of_computing_processes_has_those_that_draw() -> None:
    gpu = FakeGpu(0, compute=[(7, 100)], graphics=[(9, 5)], computes=False)
    (usage,) = session(FakeNvml(gpu)).query().gpus
    assert usage.processes == (ProcessUsage(9, 0.0, 5),)


def test_a_missing_library_is_a_failure_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlFailure, match="nvidia-ml-py is missing"):
        Session()


def test_this_machine_without_the_driver_says_so() -> None:
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has an NVIDIA driver")
    with pytest.raises(NvmlFailure, match="NVML does not start"):
        Session()


def test_each_sample_counts_once() -> None:
    gpu = FakeGpu(0, compute=[(7, 1)], samples=[(7, NOW_US - 10, 40)])
    asked = session(FakeNvml(gpu))
    assert asked.query().gpus[0].processes[0].core == 40.0
    assert asked.query().gpus[0].processes[0].core == 0.0
    gpu.samples.append((7, NOW_US - 5, 60))
    assert asked.query().gpus[0].processes[0].core == 60.0


def test_old_samples_do_not_count_and_a_clock_that_went_back_does_not_end_the_figures() -> None:
    gpu = FakeGpu(0, compute=[(7, 1)], samples=[(7, NOW_US - 60_000_000, 90), (7, NOW_US, 40)])
    walls = [WALL, WALL - 3600]
    asked = Session(FakeNvml(gpu), wall=lambda: walls[0])
    assert asked.query().gpus[0].processes[0].core == 40.0
    walls.pop(0)
    gpu.samples = [(7, NOW_US - 3_600_000_000, 30)]
    assert asked.query().gpus[0].processes[0].core == 30.0


def test_a_gpu_in_mig_mode_has_named_parts_and_no_core_use() -> None:
    places = [("MIG-a", "NVIDIA H100 MIG 1g.10gb", 10 << 30), ("", "", 0)]
    gpu = FakeGpu(0, mig=places, compute=[(7, 100), (7, 50)])
    (usage,) = session(FakeNvml(gpu)).query().gpus
    assert usage.gpu.mig == (MigDevice("MIG-a", "NVIDIA H100 MIG 1g.10gb", 10 << 30),)
    assert usage.processes == (ProcessUsage(7, None, 150),)


def test_a_lost_gpu_is_unhealthy_and_leaves_the_others() -> None:
    lost, good = FakeGpu(0), FakeGpu(1, compute=[(7, 100)])
    asked = session(FakeNvml(lost, good))
    lost.lost = True
    answer = asked.query()
    assert [usage.gpu.healthy for usage in answer.gpus] == [False, True]
    assert answer.gpus[1].processes == (ProcessUsage(7, 0.0, 100),)
    assert len(answer.problems) == 1 and "GPU 0" in answer.problems[0]
    lost.lost = False
    assert asked.query().gpus[0].gpu.healthy


def test_critical_errors_mark_their_gpu_and_those_of_applications_none() -> None:
    nvml = FakeNvml(FakeGpu(0), FakeGpu(1))
    asked = session(nvml)
    applications = (13, 31, 43, 45, 68, 109)
    nvml.events = [*((nvml.gpus[0], xid) for xid in applications), (nvml.gpus[1], 79)]
    codes = [usage.gpu.error_code for usage in asked.query().gpus]
    assert codes == ["", "Xid79"]
    assert [usage.gpu.error_code for usage in asked.query().gpus] == codes
    nvml.events = [(None, 119)]
    assert [usage.gpu.error_code for usage in asked.query().gpus] == ["Xid119", "Xid119"]


@pytest.mark.parametrize(
    ("recovery", "heals"),
    [
        (pynvml.NVML_GPU_RECOVERY_ACTION_NONE, True),
        (pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET, False),
        (None, False),  # a driver that does not say
    ],
)
def test_a_gpu_is_healthy_again_a_minute_after_it_needs_no_recovery(
    recovery: int | None, heals: bool
) -> None:
    gpu, now = FakeGpu(0, recovery=pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET), [1000.0]
    nvml = FakeNvml(gpu)
    asked = Session(nvml, wall=lambda: WALL, monotonic=lambda: now[0])

    def code() -> str:
        return asked.query().gpus[0].gpu.error_code

    nvml.events = [(gpu, 94)]
    assert code() == "Xid94"
    now[0] += 3600
    assert code() == "Xid94"  # the driver demands a reset all the time
    gpu.recovery = recovery
    assert code() == "Xid94"
    now[0] += 59
    assert code() == "Xid94"
    now[0] += 1
    assert code() == ("" if heals else "Xid94")


def test_a_gpu_that_fails_again_begins_its_minute_again() -> None:
    gpu, now = FakeGpu(0, recovery=pynvml.NVML_GPU_RECOVERY_ACTION_NONE), [1000.0]
    nvml = FakeNvml(gpu)
    asked = Session(nvml, wall=lambda: WALL, monotonic=lambda: now[0])
    nvml.events = [(gpu, 94)]
    asked.query()
    now[0] += 59
    gpu.lost = True
    asked.query()
    gpu.lost = False
    now[0] += 59
    assert asked.query().gpus[0].gpu.error_code == "Xid94"
    now[0] += 30
    nvml.events = [(gpu, 95)]
    assert asked.query().gpus[0].gpu.error_code == "Xid95"
    now[0] += 59
    assert asked.query().gpus[0].gpu.error_code == "Xid95"
    now[0] += 1
    assert asked.query().gpus[0].gpu.error_code == ""


def test_a_gpu_whose_errors_cannot_be_watched_is_unhealthy() -> None:
    (usage,) = session(FakeNvml(FakeGpu(0, watchable=False))).query().gpus
    assert usage.gpu.error_code == NOT_SUPPORTED_XID


def test_an_unloaded_driver_ends_the_session() -> None:
    nvml = FakeNvml(FakeGpu(0))
    asked = session(nvml)
    nvml.driver_loaded = False
    with pytest.raises(NvmlFailure, match="unloaded"):
        asked.query()
    asked.close()
    with pytest.raises(NvmlFailure, match="does not start"):
        session(nvml)


def machine(nvml: FakeNvml, profile: Profile = DEBIAN_12_V2) -> tuple[SimulatedKernel, Rounds]:
    kernel = SimulatedKernel(profile)
    kernel.add_device("/dev/nvidiactl", "c", 195, 255)
    for hierarchy in ("memory", "cpu") if profile.cgroup == 1 else ("",):
        kernel.make(f"/sys/fs/cgroup/{hierarchy}/{BOX}/inner")
    collector = GpuCollector(kernel, session=lambda: session(nvml))
    pods = (PodTarget("uid-1", POD, (ContainerTarget("box", BOX),)),)
    return kernel, Rounds.over(collector, kernel, Targets(discover(kernel), pods))


def answered(rounds: Rounds) -> dict[Series, float]:
    """Return the samples of the round after the query that is in progress."""
    assert isinstance(rounds.collector, GpuCollector)
    assert rounds.collector.wait(10)
    return rounds.next()


@pytest.mark.parametrize("profile", [DEBIAN_12_V2, DEBIAN_12_V1], ids=lambda one: one.name)
def test_node_pod_and_container(profile: Profile) -> None:
    nvml = FakeNvml(FakeGpu(0), FakeGpu(1))
    kernel, rounds = machine(nvml, profile)
    inside = kernel.spawn_process("train", cgroup=f"{BOX}/inner").pid
    sandbox = kernel.spawn_process("helper", cgroup=POD).pid
    outside = kernel.spawn_process("xorg").pid
    gone = 99_999
    nvml.gpus[0].compute = [(inside, 100), (sandbox, 10), (outside, 1), (gone, 5)]
    nvml.gpus[0].samples = [(inside, NOW_US, 40), (sandbox, NOW_US, 20), (outside, NOW_US, 3)]
    assert rounds.next() == {}
    assert answered(rounds) == {
        Series(Metric.NODE_GPU_CORE, "GPU-0", "0"): 63.0,
        Series(Metric.NODE_GPU_MEMORY, "GPU-0", "0"): 116.0,
        Series(Metric.NODE_GPU_CORE, "GPU-1", "1"): 0.0,
        Series(Metric.NODE_GPU_MEMORY, "GPU-1", "1"): 0.0,
        Series(Metric.POD_GPU_CORE, "uid-1", "GPU-0/0"): 60.0,
        Series(Metric.POD_GPU_MEMORY, "uid-1", "GPU-0/0"): 110.0,
        Series(Metric.CONTAINER_GPU_CORE, "box", "GPU-0/0"): 40.0,
        Series(Metric.CONTAINER_GPU_MEMORY, "box", "GPU-0/0"): 100.0,
    }
    rounds.collector.close()


def test_without_a_driver_the_library_is_not_even_started() -> None:
    nvml = FakeNvml(FakeGpu(0))
    kernel, rounds = machine(nvml)
    kernel.dev.remove("nvidiactl")
    with pytest.raises(Unavailable, match="no NVIDIA driver"):
        rounds.next()
    assert nvml.session == 0


def test_a_driver_that_hangs_holds_up_no_round_and_its_return_is_noticed() -> None:
    nvml = FakeNvml(FakeGpu(0))
    _, rounds = machine(nvml)
    rounds.next()
    answered(rounds)
    assert isinstance(rounds.collector, GpuCollector)
    assert rounds.collector.wait(10)
    nvml.may_answer.clear()
    rounds.next()
    calls = nvml.calls
    assert rounds.next() == {}
    rounds.next()
    with pytest.raises(Unavailable, match="has not answered for 3 s"):
        rounds.next()
    assert nvml.calls - calls <= 1  # no second query beside the one that hangs
    nvml.may_answer.set()
    assert Series(Metric.NODE_GPU_MEMORY, "GPU-0", "0") in answered(rounds)
    rounds.collector.close()


def test_close_ends_the_session() -> None:
    nvml = FakeNvml(FakeGpu(0))
    _, rounds = machine(nvml)
    rounds.next()
    answered(rounds)
    assert isinstance(rounds.collector, GpuCollector) and rounds.collector.wait(10)
    assert nvml.started == 1
    rounds.collector.close()
    wait_until(lambda: nvml.started == 0, "the session has ended")
    rounds.collector.close()


def test_the_threads_that_ask_the_driver_are_scheduled_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: list[str] = []
    monkeypatch.setattr(
        "koordlet.measurement.collectors.gpu.schedule_beside_event_loop",
        lambda: names.append(threading.current_thread().name),
    )
    _, rounds = machine(FakeNvml(FakeGpu(0)))
    rounds.next()
    assert isinstance(rounds.collector, GpuCollector) and rounds.collector.wait(10)
    assert names == ["koordlet-nvml"]
    rounds.collector.close()
    wait_until(lambda: names == ["koordlet-nvml"] * 2, "the thread that ends the session")


def test_close_while_the_driver_hangs_ends_the_session_later() -> None:
    nvml = FakeNvml(FakeGpu(0))
    _, rounds = machine(nvml)
    rounds.next()
    answered(rounds)
    assert isinstance(rounds.collector, GpuCollector) and rounds.collector.wait(10)
    nvml.may_answer.clear()
    rounds.next()
    rounds.collector.close()
    assert nvml.started == 1
    nvml.may_answer.set()
    wait_until(lambda: nvml.started == 0, "the session has ended")


def test_a_session_that_failed_is_made_again() -> None:
    nvml = FakeNvml(FakeGpu(0))
    _, rounds = machine(nvml)
    rounds.next()
    answered(rounds)
    nvml.driver_loaded = False
    for reason in ("unloaded", "does not start"):
        answered_or_unavailable(rounds, reason)
    assert isinstance(rounds.collector, GpuCollector)
    assert rounds.collector.latest is None
    assert rounds.collector.wait(10)  # for the query in progress
    nvml.driver_loaded = True
    answered_or_unavailable(rounds, "does not start")
    assert Series(Metric.NODE_GPU_MEMORY, "GPU-0", "0") in answered(rounds)
    rounds.collector.close()


def answered_or_unavailable(rounds: Rounds, reason: str) -> None:
    """Take rounds until one is unavailable, for this reason."""
    with pytest.raises(Unavailable, match=reason):
        for _ in range(2):
            answered(rounds)


class Scripted:
    """Stands for a session: gives answers, or raises errors, in turn."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self.answers = list(answers)
        self.closed = 0

    def query(self) -> Answer:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed += 1


GPU = Gpu("GPU-0", 0, "H100", 80 << 30, "0000:3b:00.0")


def answer_of(*processes: ProcessUsage, gpu: Gpu = GPU, problems: tuple[str, ...] = ()) -> Answer:
    return Answer("570", (GpuUsage(gpu, processes),), problems)


def scripted(*answers: Answer | Exception) -> tuple[SimulatedKernel, Rounds, Scripted]:
    kernel, rounds = machine(FakeNvml())
    asked = Scripted(*answers)
    session: Any = asked
    rounds.collector = GpuCollector(kernel, session=lambda: session)
    return kernel, rounds, asked


def by_metric(samples: dict[Series, float]) -> dict[tuple[Metric, str], float]:
    return {(series.metric, series.of): value for series, value in samples.items()}


def test_what_a_query_could_not_ask_is_a_problem_of_the_round() -> None:
    _, rounds, _ = scripted(answer_of(problems=("GPU 0: it is odd", "and more")))
    rounds.next()
    answered(rounds)
    assert rounds.problems == ["GPU 0: it is odd", "and more"]
    assert isinstance(rounds.collector, GpuCollector)
    assert rounds.collector.latest == answer_of(problems=("GPU 0: it is odd", "and more"))


def test_a_defect_in_a_query_is_raised_and_ends_its_session() -> None:
    _, rounds, asked = scripted(answer_of(), ZeroDivisionError("a defect"), answer_of())
    rounds.next()
    assert answered(rounds)
    with pytest.raises(ZeroDivisionError):
        answered(rounds)
    assert asked.closed == 1
    assert isinstance(rounds.collector, GpuCollector)
    assert rounds.collector.latest is None
    assert answered(rounds)
    assert rounds.collector.latest == answer_of()


def test_the_use_of_several_processes_is_a_whole_gpu_at_most() -> None:
    processes = [ProcessUsage(pid, 60.0, 10) for pid in (90_001, 90_002)]
    _, rounds, _ = scripted(answer_of(*processes))
    rounds.next()
    assert by_metric(answered(rounds)) == {
        (Metric.NODE_GPU_CORE, "GPU-0"): 100.0,
        (Metric.NODE_GPU_MEMORY, "GPU-0"): 20.0,
    }


@pytest.mark.parametrize(
    ("gpu", "processes", "cores"),
    [
        (GPU, (), 0.0),
        (GPU, (ProcessUsage(90_001, None, 1),), None),
        (GPU, (ProcessUsage(90_001, None, 1), ProcessUsage(90_002, 5.0, 1)), 5.0),
        (GPU._replace(error_code="Xid79"), (), None),
        (GPU._replace(error_code="Xid79"), (ProcessUsage(90_001, 5.0, 1),), 5.0),
        (GPU._replace(mig=()), (), None),
    ],
)
def test_a_gpu_without_figures_is_not_idle(
    gpu: Gpu, processes: tuple[ProcessUsage, ...], cores: float | None
) -> None:
    _, rounds, _ = scripted(answer_of(*processes, gpu=gpu))
    rounds.next()
    found = by_metric(answered(rounds))
    assert found.get((Metric.NODE_GPU_CORE, "GPU-0")) == cores
    assert found[Metric.NODE_GPU_MEMORY, "GPU-0"] == float(len(processes))


def test_memory_that_the_driver_does_not_show_is_no_figure_of_the_pod() -> None:
    kernel, rounds, asked = scripted(answer_of())
    pid = kernel.spawn_process("train", cgroup=BOX).pid
    asked.answers = [answer_of(ProcessUsage(pid, 5.0, None))]
    rounds.next()
    assert by_metric(answered(rounds)) == {
        (Metric.NODE_GPU_CORE, "GPU-0"): 5.0,
        (Metric.NODE_GPU_MEMORY, "GPU-0"): 0.0,
        (Metric.POD_GPU_CORE, "uid-1"): 5.0,
        (Metric.CONTAINER_GPU_CORE, "box"): 5.0,
    }


@pytest.mark.parametrize(
    ("cgroup", "owner"),
    [
        (f"0::/{BOX}/inner", ("uid-1", "box")),
        (f"0::/../../{BOX}", ("uid-1", "box")),
        (f"0::/{POD}/other", ("uid-1", "")),
        ("0::/kubepods", ("", "")),
        ("0::/", ("", "")),
        (f"5:memory:/{BOX}\n0::/", ("uid-1", "box")),
        (f"5:memory:/elsewhere\n0::/{POD}", ("uid-1", "")),
        (f"5:cpu:/{BOX}\n0::/", ("", "")),
    ],
)
def test_a_process_belongs_to_the_nearest_group_that_is_known(
    cgroup: str, owner: tuple[str, str]
) -> None:
    kernel, rounds, _ = scripted(answer_of(ProcessUsage(77, 5.0, 3)))
    kernel.proc.put("77/cgroup", text(cgroup + "\n"))
    kernel.proc.root.dynamic = None
    rounds.next()
    found = by_metric(answered(rounds))
    pod, container = owner
    assert found.get((Metric.POD_GPU_MEMORY, "uid-1")) == (3.0 if pod else None)
    assert found.get((Metric.CONTAINER_GPU_MEMORY, "box")) == (3.0 if container else None)


def test_pods_that_come_are_owners_from_the_next_round_on() -> None:
    kernel, rounds, asked = scripted(answer_of())
    pid = kernel.spawn_process("train", cgroup=BOX).pid
    asked.answers = [answer_of(ProcessUsage(pid, 5.0, 3))]
    layout = rounds.targets.layout
    nameless = PodTarget("uid-0", "", (ContainerTarget("none", ""),))
    rounds.targets = Targets(layout, (nameless,))
    rounds.next()
    assert not any(metric is Metric.POD_GPU_CORE for metric, _ in by_metric(answered(rounds)))
    rounds.targets = Targets(layout, (nameless, PodTarget("uid-2", POD)))
    found = by_metric(answered(rounds))
    assert found[Metric.POD_GPU_CORE, "uid-2"] == 5.0
    assert not any(metric is Metric.CONTAINER_GPU_CORE for metric, _ in found)


def test_a_query_hangs_from_three_intervals_on() -> None:
    kernel, rounds, _ = scripted(answer_of())
    go_on = threading.Event()
    hanging: Any = Scripted(answer_of())
    hanging.query = lambda: (go_on.wait(60), answer_of())[1]
    rounds.collector = GpuCollector(kernel, session=lambda: hanging, interval_s=10.0)
    rounds.next()
    assert rounds.next(29.0) == {}
    kernel.dev.remove("nvidiactl")  # it may go with the driver that hangs
    with pytest.raises(Unavailable, match=r"^NVIDIA's driver has not answered for 30 s$"):
        rounds.next(1.0)
    go_on.set()
    assert answered(rounds)
    rounds.collector.close()


def test_the_thread_of_a_query_holds_up_no_end_of_the_process() -> None:
    kernel, rounds, _ = scripted(answer_of())
    go_on = threading.Event()
    hanging: Any = Scripted(answer_of())
    hanging.query = lambda: (go_on.wait(60), answer_of())[1]
    rounds.collector = GpuCollector(kernel, session=lambda: hanging)
    rounds.next()
    (thread,) = [one for one in threading.enumerate() if one.name == "koordlet-nvml"]
    assert thread.daemon
    assert not rounds.collector.wait(0)
    go_on.set()
    thread.join(10)
    assert rounds.collector.wait(0)


def test_a_collector_that_is_closed_forgets_and_begins_again() -> None:
    _, rounds, asked = scripted(answer_of())
    assert isinstance(rounds.collector, GpuCollector)
    assert rounds.collector.wait(0)
    rounds.next()
    answered(rounds)
    assert rounds.collector.wait(10)
    rounds.collector.close()
    assert rounds.collector.latest is None
    wait_until(lambda: asked.closed == 1, "the session has ended")
    assert rounds.next() == {}, "the first round only asks"
    assert answered(rounds)
    assert asked.closed == 1


def test_no_driver_is_named_by_its_device_node() -> None:
    kernel, rounds, _ = scripted(answer_of())
    kernel.dev.remove("nvidiactl")
    with pytest.raises(
        Unavailable, match=r"^no NVIDIA driver is loaded: there is no /dev/nvidiactl$"
    ):
        rounds.next()
