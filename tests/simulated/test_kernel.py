"""What the simulated kernel does where no real one at hand can be compared with it; its faults."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.simulated import (
    AMD_CCD_SMBA,
    ANOLIS_8,
    ARM64,
    DEBIAN_12_V1,
    DEBIAN_12_V2,
    INTEL_RDT,
    PROFILES,
    UBUNTU_24_04,
    Crash,
    Kubelet,
    Profile,
    SimulatedKernel,
)
from tests.simulated.kubelet import Limits, linear_weight, quadratic_weight
from tests.simulated.profiles import Driver, Feature
from tests.simulated.systemd import slice_path

RESCTRL = "/sys/fs/resctrl"


def refused(act: Callable[[], object]) -> int:
    """The errno of a refusal; 0 if there was none."""
    try:
        act()
    except OSError as error:
        return error.errno or 0
    return 0


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_every_profile_runs_pods(profile: Profile) -> None:
    kernel = SimulatedKernel(profile)
    kubelet = Kubelet(kernel)
    container = kubelet.add_pod(Limits(500, 1000, 1 << 30)).start(Limits(500, 1000, 1 << 30))
    assert f"{container.pid}\n".encode() in kernel.read(
        kubelet.path(container.cgroup, "cgroup.procs")
    )
    assert container.cgroup in kernel.text(f"/proc/{container.pid}/cgroup")


class TestResctrl:
    def test_groups_end_with_the_closids(self) -> None:
        kernel = SimulatedKernel(INTEL_RDT)
        for number in range(7):
            kernel.mkdir(f"{RESCTRL}/g{number}")
        assert refused(lambda: kernel.mkdir(f"{RESCTRL}/g7")) == errno.ENOSPC
        assert "CLOSID" in kernel.text(f"{RESCTRL}/info/last_cmd_status")
        kernel.rmdir(f"{RESCTRL}/g0")
        kernel.mkdir(f"{RESCTRL}/g7")

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("L3:0=0;1=f\n", "Mask out of range"),
            ("L3:0=1fff\n", "Mask out of range"),
            ("L3:0=5\n", "non-consecutive"),
            ("L3:7=f\n", "domain"),
            ("L2:0=f\n", "Unknown or unsupported"),
            ("MB:0=5\n", "out of range"),
            ("MB:0=101\n", "out of range"),
            ("L3:0=f;0=3\n", "Duplicate"),
            ("nonsense\n", "Missing ':'"),
        ],
    )
    def test_a_bad_line_is_refused_with_a_reason(self, line: str, reason: str) -> None:
        kernel = SimulatedKernel(INTEL_RDT)
        before = kernel.text(f"{RESCTRL}/schemata")
        write = lambda: kernel.write(f"{RESCTRL}/schemata", line.encode())  # noqa: E731
        assert refused(write) == errno.EINVAL
        assert reason in kernel.text(f"{RESCTRL}/info/last_cmd_status")
        assert kernel.text(f"{RESCTRL}/schemata") == before

    def test_a_write_counts_as_a_whole(self) -> None:
        kernel = SimulatedKernel(INTEL_RDT)
        before = kernel.text(f"{RESCTRL}/schemata")
        write = lambda: kernel.write(f"{RESCTRL}/schemata", b"L3:0=f\nMB:0=7\n")  # noqa: E731
        assert refused(write) == errno.EINVAL
        assert kernel.text(f"{RESCTRL}/schemata") == before

    def test_a_write_ends_with_a_newline(self) -> None:
        kernel = SimulatedKernel(INTEL_RDT)
        assert refused(lambda: kernel.write(f"{RESCTRL}/schemata", b"L3:0=f")) == errno.EINVAL
        kernel.write(f"{RESCTRL}/schemata", b"L3:0=f;\n")
        assert "L3:0=f;1=fff" in kernel.text(f"{RESCTRL}/schemata")

    def test_bandwidth_is_rounded_up_to_the_step(self) -> None:
        kernel = SimulatedKernel(INTEL_RDT)
        kernel.write(f"{RESCTRL}/schemata", b"MB:0=25\n")
        assert "MB:0=30;1=100" in kernel.text(f"{RESCTRL}/schemata")

    def test_amd_counts_bandwidth_in_eighths_and_takes_sparse_masks(self) -> None:
        kernel = SimulatedKernel(AMD_CCD_SMBA)
        kernel.write(f"{RESCTRL}/schemata", b"MB:3=48\nSMBA:0=16\nL3:0=5\n")
        text = kernel.text(f"{RESCTRL}/schemata")
        assert "3=48" in text and "SMBA:0=16" in text and "L3:0=5" in text

    def test_tasks_move_and_come_back_when_the_group_goes(self) -> None:
        kernel = SimulatedKernel(INTEL_RDT)
        task = kernel.spawn_process("app")
        kernel.mkdir(f"{RESCTRL}/BE")
        kernel.write(f"{RESCTRL}/BE/tasks", f"{task.pid}\n".encode())
        assert kernel.text(f"{RESCTRL}/BE/tasks") == str(task.pid)
        child = kernel.fork(task)
        assert str(child.pid) in kernel.text(f"{RESCTRL}/BE/tasks").split()
        kernel.rmdir(f"{RESCTRL}/BE")
        assert str(task.pid) in kernel.text(f"{RESCTRL}/tasks").split()
        missing = lambda: kernel.write(f"{RESCTRL}/tasks", b"999999\n")  # noqa: E731
        assert refused(missing) == errno.ESRCH

    def test_monitor_files_end_with_a_newline(self) -> None:
        kernel = SimulatedKernel(INTEL_RDT)
        path = f"{RESCTRL}/mon_data/mon_L3_00/llc_occupancy"
        assert kernel.read(path) == b"0\n"

    def test_a_machine_without_rdt_has_no_resctrl(self) -> None:
        kernel = SimulatedKernel(DEBIAN_12_V2)
        assert refused(lambda: kernel.read(f"{RESCTRL}/schemata")) == errno.ENOENT


class TestAlibabaKernel:
    def test_identity_has_a_range_and_a_switch(self) -> None:
        kernel = SimulatedKernel(ANOLIS_8)
        kernel.make("/sys/fs/cgroup/cpu/g")
        bvt = "/sys/fs/cgroup/cpu/g/cpu.bvt_warp_ns"
        kernel.write(bvt, b"-1")
        assert refused(lambda: kernel.write(bvt, b"3")) == errno.EINVAL
        kernel.write("/proc/sys/kernel/sched_group_identity_enabled", b"0")
        assert refused(lambda: kernel.write(bvt, b"2")) == errno.EINVAL

    def test_a_new_group_inherits_the_identity(self) -> None:
        kernel = SimulatedKernel(ANOLIS_8)
        kernel.make("/sys/fs/cgroup/cpu/g")
        kernel.write("/sys/fs/cgroup/cpu/g/cpu.bvt_warp_ns", b"2")
        kernel.make("/sys/fs/cgroup/cpu/g/h")
        assert kernel.text("/sys/fs/cgroup/cpu/g/h/cpu.bvt_warp_ns") == "2"

    @pytest.mark.parametrize(
        ("file", "good", "bad"),
        [
            ("memory.wmark_ratio", "95", "101"),
            ("memory.wmark_scale_factor", "20", "0"),
            ("memory.wmark_min_adj", "-25", "-26"),
            ("memory.priority", "12", "13"),
            ("memory.use_priority_oom", "1", "2"),
        ],
    )
    def test_memory_files_have_ranges(self, file: str, good: str, bad: str) -> None:
        kernel = SimulatedKernel(ANOLIS_8)
        kernel.make("/sys/fs/cgroup/memory/g")
        path = f"/sys/fs/cgroup/memory/g/{file}"
        kernel.write(path, good.encode())
        assert kernel.text(path) == good
        assert refused(lambda: kernel.write(path, bad.encode())) == errno.EINVAL

    def test_mainline_has_none_of_this(self) -> None:
        kernel = SimulatedKernel(DEBIAN_12_V1)
        kernel.make("/sys/fs/cgroup/cpu/g")
        absent = lambda: kernel.write("/sys/fs/cgroup/cpu/g/cpu.bvt_warp_ns", b"0")  # noqa: E731
        assert refused(absent) == errno.ENOENT


class TestCoreScheduling:
    def test_a_cookie_is_shared_inherited_and_taken_away(self) -> None:
        kernel = SimulatedKernel(UBUNTU_24_04)
        one, two = kernel.spawn_process("one", threads=2), kernel.spawn_process("two")
        kernel.core_sched_create(one.pid)
        cookie = kernel.core_sched_cookie(one.pid)
        assert cookie and kernel.core_sched_cookie(kernel.fork(one).pid) == cookie
        assert kernel.core_sched_copy(one.pid, [two.pid, 99_999]) == [99_999]
        assert kernel.core_sched_cookie(two.pid) == cookie
        assert kernel.core_sched_copy(0, [two.pid]) == []
        assert kernel.core_sched_cookie(two.pid) == 0

    @pytest.mark.parametrize(
        ("profile", "error"),
        [
            (DEBIAN_12_V2, errno.EINVAL),
            (ARM64.having(Feature.CORE_SCHED), errno.ENODEV),
            (ANOLIS_8, errno.EINVAL),
        ],
        ids=["not built in", "no SMT", "switched off"],
    )
    def test_where_there_is_none(self, profile: Profile, error: int) -> None:
        kernel = SimulatedKernel(profile)
        assert refused(lambda: kernel.core_sched_cookie(kernel.own_pid)) == error


class TestSystemd:
    def test_a_slice_lives_inside_those_that_its_name_names(self) -> None:
        assert slice_path("a-b-c.slice") == "a.slice/a-b.slice/a-b-c.slice"

    def test_a_reload_puts_the_units_values_back(self) -> None:
        kernel = SimulatedKernel(DEBIAN_12_V2)
        kubelet = Kubelet(kernel)
        container = kubelet.add_pod(Limits(500, 1000)).start(Limits(500, 1000))

        def text(file: str) -> str:
            return kernel.text(kubelet.path(container.cgroup, file))

        written = {
            "cpu.max": "50000 100000",
            "cpu.max.burst": "10000",
            "memory.min": "4096",
            "memory.oom.group": "1",
            "cpuset.cpus": "1",
            "cpu.idle": "1",
        }
        for file, value in written.items():
            kernel.write(kubelet.path(container.cgroup, file), value.encode())
        kubelet.systemd.daemon_reload()
        assert text("cpu.max") == "100000 100000"
        assert text("cpu.weight") == str(linear_weight(512))
        assert (text("memory.min"), text("memory.oom.group"), text("cpu.idle")) == ("0", "0", "0")
        assert (text("cpu.max.burst"), text("cpuset.cpus")) == ("10000", "1")

    def test_set_property_resets_the_unit_and_no_other(self) -> None:
        kernel = SimulatedKernel(DEBIAN_12_V2)
        kubelet = Kubelet(kernel)
        other = kubelet.qos_dir("Burstable")
        for group in (kubelet.root, other):
            kernel.write(f"/sys/fs/cgroup/{group}/memory.min", b"4096")
        kubelet.systemd.set_property("kubepods.slice", CPUWeight=77)
        assert kernel.text(f"/sys/fs/cgroup/{kubelet.root}/cpu.weight") == "77"
        assert kernel.text(f"/sys/fs/cgroup/{kubelet.root}/memory.min") == "0"
        assert kernel.text(f"/sys/fs/cgroup/{other}/memory.min") == "4096"

    def test_a_slices_first_group_and_the_end_of_its_last_one_reset_it(self) -> None:
        kernel = SimulatedKernel(DEBIAN_12_V2)
        kubelet = Kubelet(kernel)

        def was_reset(slice_: str, event: Callable[[], object]) -> bool:
            base = f"/sys/fs/cgroup/{slice_}"
            kernel.write(f"{base}/memory.min", b"4096")
            kernel.write(f"{base}/cpuset.cpus", b"0")
            event()
            found = kernel.text(f"{base}/memory.min"), kernel.text(f"{base}/cpuset.cpus")
            assert found in (("0", ""), ("4096", "0"))
            return found == ("0", "")

        def start(name: str) -> Callable[[], object]:
            return lambda: kubelet.systemd.start(f"kubepods-besteffort-{name}.slice")

        def stop(name: str) -> Callable[[], object]:
            return lambda: kubelet.systemd.stop(f"kubepods-besteffort-{name}.slice")

        best_effort = kubelet.qos_dir("BestEffort")
        assert was_reset(best_effort, start("a"))
        assert not was_reset(best_effort, start("b"))
        assert not was_reset(best_effort, stop("a"))
        assert was_reset(best_effort, stop("b"))
        assert not was_reset(kubelet.root, start("c"))  # has the slices of the classes
        assert not was_reset(kubelet.root, stop("c"))


@pytest.mark.parametrize(
    ("shares", "linear", "quadratic"),
    [
        (2, 1, 1),
        (102, 4, 17),
        (512, 20, 59),
        (1024, 39, 100),
        (4096, 157, 303),
        (262144, 10000, 10000),
    ],
)
def test_both_weight_formulas(shares: int, linear: int, quadratic: int) -> None:
    assert linear_weight(shares) == linear
    assert quadratic_weight(shares) == quadratic


class TestFaults:
    def _kernel(self) -> tuple[SimulatedKernel, str]:
        kernel = SimulatedKernel(DEBIAN_12_V1)
        kernel.make("/sys/fs/cgroup/cpu/g")
        return kernel, "/sys/fs/cgroup/cpu/g/cpu.shares"

    def test_the_nth_write_fails_and_leaves_no_trace(self) -> None:
        kernel, path = self._kernel()
        kernel.faults.fail("write", errno.EBUSY, nth=2, path="*/cpu.shares")
        kernel.write(path, b"100")
        assert refused(lambda: kernel.write(path, b"200")) == errno.EBUSY
        assert kernel.text(path) == "100"
        kernel.write(path, b"200")

    def test_a_group_vanishes_between_two_calls(self) -> None:
        kernel, path = self._kernel()
        kernel.faults.before("write", lambda: kernel.remove_group("g"))
        kernel.read(path)
        assert refused(lambda: kernel.write(path, b"100")) == errno.ENOENT

    def test_a_write_takes_time(self) -> None:
        kernel, path = self._kernel()
        kernel.faults.before("write", lambda: kernel.clock.advance(3), nth=0)
        kernel.write(path, b"100")
        kernel.write(path, b"200")
        assert kernel.clock.now == 6

    def test_after_a_crash_nothing_of_the_program_happens(self) -> None:
        kernel, path = self._kernel()
        kernel.faults.crash("write")
        with pytest.raises(Crash):
            kernel.write(path, b"100")
        with pytest.raises(Crash):
            kernel.read(path)
        assert kernel.text(path) == "1024"
        kernel.restart_program()
        kernel.write(path, b"100")

    def test_other_actors_are_not_disturbed_and_everything_is_on_record(self) -> None:
        kernel, path = self._kernel()
        kernel.faults.fail("write", errno.EIO, nth=0)
        kernel.write_as("kubelet", path, "300")
        assert [(w.writer, w.data, w.error) for w in kernel.writes] == [("kubelet", b"300", 0)]


class TestMemory:
    def test_reclaim_spares_what_is_protected_the_whole_way_up(self) -> None:
        kernel = SimulatedKernel(replace(DEBIAN_12_V2, driver=Driver.CGROUPFS))
        kubelet = Kubelet(kernel)
        kept = kubelet.add_pod().start()
        lost = kubelet.add_pod().start()
        for container in (kept, lost):
            kernel.use_page_cache(container.cgroup, 64 << 20)
        for cgroup in (kubelet.root, "kubepods/burstable", kept.pod.cgroup, kept.cgroup):
            kernel.write(kubelet.path(cgroup, "memory.min"), b"64m")
        kernel.write(kubelet.path(kubelet.root, "memory.high"), b"96m")
        assert kernel.text(kubelet.path(kept.cgroup, "memory.current")) == str(64 << 20)
        assert kernel.text(kubelet.path(lost.cgroup, "memory.current")) == str(32 << 20)

    def test_oom_group_ends_all_of_the_group(self) -> None:
        kernel = SimulatedKernel(DEBIAN_12_V2)
        kubelet = Kubelet(kernel)
        container = kubelet.add_pod().start()
        second = kernel.spawn_process("second", cgroup=container.cgroup)
        kernel.write(kubelet.path(container.cgroup, "memory.oom.group"), b"1")
        kernel.write(kubelet.path(container.cgroup, "memory.max"), b"8m")
        kernel.use_memory(second, 16 << 20)
        assert container.pid not in kernel.tasks and second.pid not in kernel.tasks


class TestTopology:
    def test_threads_of_a_core_know_each_other(self) -> None:
        kernel = SimulatedKernel(UBUNTU_24_04)
        base = "/sys/devices/system/cpu"
        assert kernel.text(f"{base}/cpu1/topology/thread_siblings_list") == "1,5"
        kernel.write(f"{base}/cpu5/online", b"0")
        assert kernel.text(f"{base}/cpu1/topology/thread_siblings_list") == "1"
        assert kernel.text(f"{base}/online") == "0-4,6-7"

    def test_core_numbers_start_again_in_each_socket(self) -> None:
        kernel = SimulatedKernel(INTEL_RDT)
        base = "/sys/devices/system/cpu"
        assert kernel.text(f"{base}/cpu16/topology/core_id") == "0"
        assert kernel.text(f"{base}/cpu16/topology/physical_package_id") == "1"
        assert kernel.text("/sys/devices/system/node/node1/cpulist") == "16-31,48-63"

    def test_ccds_have_caches_of_their_own(self) -> None:
        kernel = SimulatedKernel(AMD_CCD_SMBA)
        cache = "/sys/devices/system/cpu/cpu8/cache/index3"
        assert kernel.text(f"{cache}/id") == "1"
        assert kernel.text(f"{cache}/shared_cpu_list") == "8-15,72-79"
