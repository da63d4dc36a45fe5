"""Decisions as replies: only changed fields, each once, and never what would be dropped."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.cpuset import CpuSet
from hooks.decision import Decision
from hooks.subject import NOTHING_REQUESTED
from linux.resources import UNLIMITED, DeviceNode, Mount, Resource, Value
from nri_plugin import replies
from nri_plugin.capabilities import RuntimeProfile, runtime_profile
from nri_plugin.replies import Adjustment, Update, lacks_at_creation
from nri_plugin.subjects import values
from protos.nri.v1alpha1 import nri_pb2 as nri
from tests.nri_plugin.scenes import CPUS, MEMORY, QUOTA, SHARES, Values, container, decision

V1 = runtime_profile("containerd", "v2.1.0", cgroup_version=1)
V2 = runtime_profile("containerd", "v2.2.1", cgroup_version=2)
OLD = runtime_profile("containerd", "v1.7.20", cgroup_version=2)

GPU = DeviceNode(path="/dev/nvidia0", type="c", major=195, minor=0, file_mode=0o666)
LIBRARY = Mount(destination="/lib/x.so", type="bind", source="/opt/x.so", options=("ro", "bind"))
EVERYTHING: Values = {
    SHARES: 2048,
    QUOTA: UNLIMITED,
    (Resource.CPU_CFS_PERIOD, ""): 50000,
    CPUS: CpuSet.parse("0-1"),
    (Resource.CPUSET_MEMS, ""): CpuSet.parse("0"),
    MEMORY: 1 << 30,
    (Resource.MEMORY_MIN, ""): 4096,
    (Resource.MEMORY_HIGH, ""): UNLIMITED,
    (Resource.OOM_SCORE_ADJ, ""): 950,
    (Resource.RESCTRL_GROUP, ""): "BE",
    (Resource.ENV, "NVIDIA_VISIBLE_DEVICES"): "GPU-1",
    (Resource.MOUNT, LIBRARY.destination): LIBRARY,
    (Resource.DEVICE, GPU.path): GPU,
    (Resource.CPU_BVT, ""): -1,
    (Resource.CORE_SCHED_COOKIE, ""): "group",
}


def adjustment(
    message: nri.Container, wanted: Decision, profile: RuntimeProfile, groups: Collection[str]
) -> Adjustment:
    linux = message.linux
    requested = values(linux.resources, linux.oom_score_adj.value)
    return replies.adjustment(message, requested, wanted, profile, groups)


def update(
    message: nri.Container,
    wanted: Decision,
    profile: RuntimeProfile,
    requested: nri.LinuxResources | None = None,
) -> Update:
    return replies.update(
        message, values(message.linux.resources), wanted, profile, requested=requested
    )


def applied(message: nri.Container, adjust: nri.ContainerAdjustment) -> nri.Container:
    """The container as the next plugin, or the next registration, sees it."""
    after = nri.Container()
    after.CopyFrom(message)
    after.linux.resources.MergeFrom(adjust.linux.resources)
    if adjust.linux.HasField("oom_score_adj"):
        after.linux.oom_score_adj.CopyFrom(adjust.linux.oom_score_adj)
    after.linux.devices.extend(adjust.linux.devices)
    after.mounts.extend(adjust.mounts)
    for entry in adjust.env:
        after.env.append(f"{entry.key}={entry.value}")
    return after


class TestCreation:
    def test_everything_that_the_runtime_honours_is_there(self) -> None:
        made = adjustment(container(), decision(EVERYTHING), V2, {"BE"}).message
        assert made is not None
        resources = made.linux.resources
        assert resources.cpu.shares.value == 2048
        assert resources.cpu.quota.value == -1
        assert resources.cpu.period.value == 50000
        assert (resources.cpu.cpus, resources.cpu.mems) == ("0-1", "0")
        assert resources.memory.limit.value == 1 << 30
        assert dict(resources.unified) == {"memory.min": "4096", "memory.high": "max"}
        assert made.linux.oom_score_adj.value == 950
        assert resources.rdt_class.value == "BE"
        assert [(e.key, e.value) for e in made.env] == [("NVIDIA_VISIBLE_DEVICES", "GPU-1")]
        assert list(made.mounts[0].options) == ["ro", "bind"]
        device = made.linux.devices[0]
        assert (device.path, device.major, device.file_mode.value) == (GPU.path, 195, 0o666)

    def test_deciding_again_on_the_result_changes_nothing(self) -> None:
        message = container()
        made = adjustment(message, decision(EVERYTHING), V2, {"BE"}).message
        assert made is not None
        again = adjustment(applied(message, made), decision(EVERYTHING), V2, {"BE"})
        assert again.message is None

    def test_nothing_decided_is_nothing_sent(self) -> None:
        assert adjustment(container(), decision({}), V2, ()).message is None

    def test_a_value_that_kubelet_requested_is_not_sent(self) -> None:
        assert adjustment(container(shares=7), decision({SHARES: 7}), V1, ()).message is None

    def test_unlimited_is_what_a_container_without_a_quota_has(self) -> None:
        bare = nri.Container(id="c")
        wanted = decision({QUOTA: UNLIMITED, MEMORY: UNLIMITED})
        assert adjustment(bare, wanted, V1, ()).message is None

    @pytest.mark.parametrize("text", ["0-3", "0,1,2,3", "3,0-2"])
    def test_cpu_sets_are_compared_as_sets(self, text: str) -> None:
        message = container()
        message.linux.resources.cpu.cpus = text
        assert adjustment(message, decision({CPUS: CpuSet.parse("0-3")}), V1, ()).message is None

    def test_a_quota_is_sent_in_the_containers_own_period(self) -> None:
        message = container()
        message.linux.resources.cpu.period.value = 10_000
        message.linux.resources.cpu.quota.value = 10_000
        assert adjustment(message, decision({QUOTA: 100_000}), V1, ()).message is None
        made = adjustment(message, decision({QUOTA: 50_001}), V1, ()).message
        assert made is not None
        assert made.linux.resources.cpu.quota.value == 5001
        assert not made.linux.resources.cpu.HasField("period")
        unlimited = adjustment(message, decision({QUOTA: UNLIMITED}), V1, ()).message
        assert unlimited is not None
        assert unlimited.linux.resources.cpu.quota.value == UNLIMITED

    def test_a_quota_goes_with_a_period_that_is_decided_beside_it(self) -> None:
        wanted = decision({QUOTA: 80_000, (Resource.CPU_CFS_PERIOD, ""): 50_000})
        made = adjustment(container(), wanted, V1, ()).message
        assert made is not None
        cpu = made.linux.resources.cpu
        assert (cpu.quota.value, cpu.period.value) == (40_000, 50_000)

    def test_a_group_whose_directory_is_missing_is_not_named(self) -> None:
        wanted = decision({(Resource.RESCTRL_GROUP, ""): "pod-x"})
        assert adjustment(container(), wanted, V1, {"BE"}).message is None

    def test_unified_is_left_out_on_cgroup_v1(self) -> None:
        wanted = decision({(Resource.MEMORY_MIN, ""): 4096})
        assert adjustment(container(), wanted, V1, ()).message is None

    def test_oom_score_adj_is_left_out_where_it_would_be_dropped(self) -> None:
        wanted = decision({(Resource.OOM_SCORE_ADJ, ""): 950})
        assert adjustment(container(), wanted, OLD, ()).message is None
        assert adjustment(container(), wanted, V1, ()).message is not None

    def test_the_last_of_several_entries_is_the_environment(self) -> None:
        wanted = decision({(Resource.ENV, "A"): "1"})
        assert adjustment(container(env=["A=2", "A=1"]), wanted, V1, ()).message is None
        made = adjustment(container(env=["A=1", "A=2", "AB=1"]), wanted, V1, ()).message
        assert made is not None
        assert made.env[0].value == "1"

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            (SHARES, -2),
            (SHARES, 1 << 64),
            (SHARES, "many"),
            (QUOTA, -2),
            (QUOTA, 0),
            (MEMORY, 0),
            ((Resource.CPU_CFS_PERIOD, "key"), 5),
            (CPUS, CpuSet()),
            (CPUS, "0-3"),
            ((Resource.OOM_SCORE_ADJ, ""), -1001),
            ((Resource.RESCTRL_GROUP, ""), 3),
            ((Resource.ENV, "-NAME"), "removal"),
            ((Resource.ENV, "A=B"), "x"),
            ((Resource.ENV, ""), "x"),
            ((Resource.ENV, "A"), "nul\0"),
            ((Resource.ENV, "A"), "\udc80"),
            ((Resource.ENV, "A"), 3),
            ((Resource.MOUNT, "-/etc"), LIBRARY),
            ((Resource.MOUNT, "/x"), "not a mount"),
            ((Resource.DEVICE, "dev/x"), GPU),
            ((Resource.DEVICE, "/dev/x"), 5),
        ],
    )
    def test_a_value_that_cannot_be_sent_costs_only_itself(
        self, key: tuple[Resource, str], value: Value
    ) -> None:
        good = (Resource.CPU_CFS_PERIOD, "")
        made = adjustment(container(), decision({key: value, good: 50000}), V2, {"BE"})
        assert len(made.problems) == 1
        assert str(key[0]) in made.problems[0]
        assert made.message == nri.ContainerAdjustment(
            linux=nri.LinuxContainerAdjustment(
                resources=nri.LinuxResources(
                    cpu=nri.LinuxCPU(period=nri.OptionalUInt64(value=50000))
                )
            )
        )


class TestUpdate:
    def test_the_container_is_named_and_only_what_an_update_can_change_is_sent(self) -> None:
        made = update(container(), decision(EVERYTHING), V2).message
        assert made is not None
        assert made.container_id == "c"
        assert not made.ignore_failure
        resources = made.linux.resources
        assert not resources.HasField("rdt_class")
        assert resources.cpu.cpus == "0-1"
        assert dict(resources.unified) == {"memory.min": "4096", "memory.high": "max"}

    def test_what_kubelet_asks_for_is_what_is_compared_with(self) -> None:
        requested = nri.LinuxResources(cpu=nri.LinuxCPU(shares=nri.OptionalUInt64(value=100)))
        assert (
            update(container(shares=7), decision({SHARES: 100}), V1, requested=requested).message
            is None
        )
        made = update(container(shares=7), decision({SHARES: 7}), V1, requested=requested).message
        assert made is not None
        assert made.linux.resources.cpu.shares.value == 7

    def test_what_kubelet_does_not_give_stays_and_is_not_sent_again(self) -> None:
        requested = nri.LinuxResources()
        requested.cpu.shares.SetInParent()
        assert (
            update(container(shares=7), decision({SHARES: 7}), V1, requested=requested).message
            is None
        )

    def test_an_updates_own_period_counts(self) -> None:
        requested = nri.LinuxResources()
        requested.cpu.period.value = 20_000
        requested.cpu.quota.value = 20_000
        made = update(container(), decision({QUOTA: 50_000}), V1, requested=requested).message
        assert made is not None
        assert made.linux.resources.cpu.quota.value == 10_000

    def test_a_container_without_an_id_is_not_updated(self) -> None:
        assert update(nri.Container(), decision({SHARES: 9}), V1).message is None

    def test_unified_is_not_sent_blindly_where_the_runtime_does_not_tell_it(self) -> None:
        assert update(container(), decision({(Resource.MEMORY_MIN, ""): 4096}), OLD).message is None


def test_what_a_running_container_was_created_without() -> None:
    lacks = lacks_at_creation(container(), decision(EVERYTHING))
    assert {resource for resource, _ in lacks} == {Resource.ENV, Resource.MOUNT, Resource.DEVICE}
    whole = applied(
        container(),
        adjustment(container(), decision(EVERYTHING), V2, ()).message or nri.ContainerAdjustment(),
    )
    assert lacks_at_creation(whole, decision(EVERYTHING)) == ()


wanted_values = st.fixed_dictionaries(
    {},
    optional={
        SHARES: st.integers(2, 262144),
        QUOTA: st.one_of(st.just(UNLIMITED), st.integers(1000, 10**9)),
        CPUS: st.sets(st.integers(0, 200), min_size=1).map(CpuSet),
        MEMORY: st.one_of(st.just(UNLIMITED), st.integers(1, 1 << 50)),
        (Resource.ENV, "E"): st.text(st.characters(blacklist_categories=["Cs", "Cc"])),
        (Resource.MEMORY_LOW, ""): st.integers(0, 1 << 50),
    },
)


@given(wanted=wanted_values)
def test_a_second_instance_never_claims_a_field_again(wanted: Values) -> None:
    message = container()
    first = adjustment(message, decision(wanted), V2, ())
    assert first.problems == ()
    if first.message is not None:
        message = applied(message, first.message)
    assert adjustment(message, decision(wanted), V2, ()).message is None
    assert update(message, decision(wanted), V2).message is None


class TestRemembered:
    """What `Creations` gives a second time is what making it anew would give."""

    WANTED = decision({SHARES: 512, QUOTA: 20_000, (Resource.OOM_SCORE_ADJ, ""): 950})

    def replies_of(self, wanted: Decision, *messages: nri.Container) -> list[bytes]:
        creations = replies.Creations(V1)
        found = []
        for message in messages:
            linux = message.linux
            requested = values(linux.resources, linux.oom_score_adj.value)
            encoded, problems = creations.reply(message, requested, wanted, lambda: {"BE"})
            assert problems == ()
            anew = adjustment(message, wanted, V1, {"BE"}).message
            expected = nri.CreateContainerResponse(adjust=anew).SerializeToString() if anew else b""
            assert encoded == expected
            found.append(encoded)
        return found

    def test_the_same_decision_for_an_equal_request_is_encoded_once(self) -> None:
        first, second = self.replies_of(self.WANTED, container(), container())
        assert first is second

    def test_another_request_is_answered_for_itself(self) -> None:
        message = container(shares=7)
        first, second = self.replies_of(self.WANTED, container(), message)
        assert first != second

    def test_an_environment_that_is_there_already_is_not_injected_again(self) -> None:
        wanted = decision({SHARES: 512, (Resource.ENV, "GPU"): "0"})
        has_it = container()
        has_it.env.append("GPU=0")
        first, second, third = self.replies_of(wanted, container(), has_it, container())
        assert first == third != second

    def test_a_value_that_cannot_be_sent_is_reported_every_time(self) -> None:
        wanted = decision({SHARES: 0, QUOTA: 20_000})
        creations = replies.Creations(V1)
        for _ in range(2):
            _, problems = creations.reply(container(), NOTHING_REQUESTED, wanted, tuple)
            assert len(problems) == 1
