"""Settings of the host: written once, restored exactly, and only those of the table."""

from __future__ import annotations

import errno

import pytest

from hooks.state import State
from koordlet.executor.slots import Want
from linux.resources import Resource
from tests.koordlet.executor.bed import Bed, claim_of
from tests.simulated import ANOLIS_8, RHEL_9, Profile

_MIN_FREE = "vm.min_free_kbytes"


def _want(bed: Bed, settings: dict[str, str]) -> None:
    resource = Resource.KERNEL_SETTING
    bed.executor.want(
        "node",
        [
            Want("node", "", resource, key, value, claim_of(resource, value, key=key))
            for key, value in settings.items()
        ],
    )


def test_a_setting_is_written_once_and_its_original_returns() -> None:
    bed = Bed()
    before = bed.kernel.sysctls[_MIN_FREE]
    _want(bed, {_MIN_FREE: "671088"})
    assert bed.run().written == 1
    assert bed.kernel.sysctls[_MIN_FREE] == 671088
    assert bed.run().written == 0
    _want(bed, {_MIN_FREE: "700000"})
    bed.run()
    bed.restart()
    _want(bed, {})
    for record in bed.executor.orphans():
        bed.executor.restore(record)
    bed.run()
    assert bed.kernel.sysctls[_MIN_FREE] == before
    bed.run()
    assert not len(bed.journal)


def test_what_another_program_writes_over_ours_is_what_returns() -> None:
    bed = Bed()
    _want(bed, {_MIN_FREE: "671088"})
    bed.run()
    bed.kernel.sysctls[_MIN_FREE] = 90000
    bed.executor.look_again()
    bed.run()
    assert bed.kernel.sysctls[_MIN_FREE] == 671088
    _want(bed, {})
    bed.run()
    assert bed.kernel.sysctls[_MIN_FREE] == 90000


@pytest.mark.parametrize("profile", [ANOLIS_8, RHEL_9], ids=lambda profile: profile.name)
def test_a_scheduler_feature_is_switched_by_its_word_in_old_and_new_kernels(
    profile: Profile,
) -> None:
    bed = Bed(profile)
    wanted = {"sched_feature.WAKEUP_PREEMPTION": "0", "sched_feature.HRTICK": "1"}
    with bed.kernel.recording() as writes:
        _want(bed, wanted)
        assert bed.run().written == 2
    assert sorted(write.data for write in writes) == [b"HRTICK", b"NO_WAKEUP_PREEMPTION"]
    assert (bed.kernel.switches["WAKEUP_PREEMPTION"], bed.kernel.switches["HRTICK"]) == (0, 1)
    assert bed.run().written == 0
    _want(bed, {})
    bed.run()
    assert (bed.kernel.switches["WAKEUP_PREEMPTION"], bed.kernel.switches["HRTICK"]) == (1, 0)


def test_a_setting_that_the_kernel_lacks_is_unsupported_and_harms_no_other() -> None:
    bed = Bed()
    _want(
        bed,
        {
            "memcg_reaper.reap_background": "1",
            "sched_feature.NOT_THERE": "1",
            _MIN_FREE: "671088",
        },
    )
    assert bed.run().written == 1
    states = {view.key: view.state for view in bed.executor.views("node")}
    assert states == {
        "memcg_reaper.reap_background": State.UNSUPPORTED,
        "sched_feature.NOT_THERE": State.UNSUPPORTED,
        _MIN_FREE: State.APPLIED,
    }


def test_a_refused_setting_holds_back_no_other() -> None:
    bed = Bed(ANOLIS_8)
    bed.kernel.faults.fail("write", errno.EPERM, path="/proc/sys/vm/min_free_kbytes", nth=0)
    _want(bed, {_MIN_FREE: "671088", "pagecache_limit.enabled": "1"})
    report = bed.run()
    assert (report.written, report.failed) == (1, 1)
    assert bed.kernel.switches["kernel/mm/pagecache_limit/enabled"] == 1


def test_a_name_outside_of_the_table_is_not_written() -> None:
    bed = Bed()
    with bed.kernel.recording() as writes:
        _want(bed, {"kernel.core_pattern": "|/bin/sh", "sched_feature.../x": "1"})
        bed.run()
    assert not writes
    assert {view.state for view in bed.executor.views("node")} == {State.BLOCKED}
