"""Use of GPUs, with a module that has NVML's rules in place of a GPU (fake_nvml.py)."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koordlet.measurement.accelerators.nvml import (
    NOT_SUPPORTED_XID,
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
    nvml.driver_loaded = True
    answered_or_unavailable(rounds, "does not start")  # this query began before
    assert Series(Metric.NODE_GPU_MEMORY, "GPU-0", "0") in answered(rounds)
    rounds.collector.close()


def answered_or_unavailable(rounds: Rounds, reason: str) -> None:
    """Take rounds until one is unavailable, for this reason."""
    with pytest.raises(Unavailable, match=reason):
        for _ in range(2):
            answered(rounds)
