"""Registration, events and replies against the fake runtime, in all four generations."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from apis.cpuset import CpuSet
from linux.resources import UNLIMITED, Resource
from nri_plugin.events import Event
from nri_plugin.handler import Refused
from nri_plugin.options import Launch
from nri_plugin.statistics import Missed, State
from nri_plugin.supervisor import Supervisor
from protos.nri.v1alpha1 import nri_pb2 as nri
from tests.fake_runtime import profiles
from tests.fake_runtime.adaptation import Behaviour, EventFailed, FakeRuntime
from tests.fake_runtime.profiles import Profile
from tests.nri_plugin.scenes import (
    CPUS,
    QUOTA,
    SHARES,
    RecordingHandler,
    Scene,
    Values,
    beside,
    container,
    options,
    pod,
    running,
)

every_generation = pytest.mark.parametrize("profile", profiles.ALL, ids=lambda p: p.nri)


@every_generation
def test_a_pod_lives_its_life(tmp_path: Path, profile: Profile) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path, profile, wanted={SHARES: 1024}) as scene:
            await scene.synchronized()
            runtime = scene.runtime
            await runtime.run_pod_sandbox(pod())
            created = await runtime.create_container(container())
            await runtime.start_container("c")
            await runtime.update_container("c", nri.LinuxResources())
            await runtime.remove_container("c")
            await runtime.remove_pod_sandbox("p")

            assert created.adjust.linux.resources.cpu.shares.value == 1024
            assert scene.handler.told == [
                ("configured", ""),
                ("synchronize", ""),
                ("run_sandbox", "p"),
                ("create_container", "c"),
                ("start_container", "c"),
                ("update_container", "c"),
                ("container_updated", "c"),
                ("stop_container", "c"),
                ("remove_container", "c"),
                ("stop_sandbox", "p"),
                ("remove_sandbox", "p"),
            ]
            assert scene.runtime.failures == []

    uvloop.run(scenario())


@every_generation
def test_the_mask_has_no_bit_too_many_and_no_validator(tmp_path: Path, profile: Profile) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path, profile, events=frozenset(Event)) as scene:
            await scene.synchronized()
            (plugin,) = scene.runtime.plugins
            assert plugin.events & ~profile.valid_mask == 0
            assert not plugin.events & Event.VALIDATE_CONTAINER_ADJUSTMENT.bit
            assert plugin.events

    uvloop.run(scenario())


@pytest.mark.parametrize("valid_mask", [0x7FF, 0x3FFF])
@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("containerd", ""),
        ("containerd", "(devel)"),
        ("containerd", "2.2.0-beta.0"),
        ("containerd", "v9.0.0+vendor"),
        ("cri-o", "1.34.0-dev"),
        ("", ""),
        ("acme", "v9"),
    ],
)
def test_a_runtime_that_sends_no_nri_version_gets_the_events_that_every_version_knows(
    tmp_path: Path, name: str, version: str, valid_mask: int
) -> None:
    async def scenario() -> None:
        profile = replace(
            profiles.C, runtime_name=name, runtime_version=version, valid_mask=valid_mask
        )
        async with Scene(tmp_path, profile, wanted={SHARES: 7}) as scene:
            await scene.synchronized()
            assert scene.runtime.failures == []
            created = await scene.runtime.create_container(container())
            assert created.adjust.linux.resources.cpu.shares.value == 7

    uvloop.run(scenario())


@every_generation
def test_configure_may_come_before_the_register_reply(tmp_path: Path, profile: Profile) -> None:
    async def scenario() -> None:
        behaviour = Behaviour(configure_before_reply=True)
        async with Scene(tmp_path, profile, behaviour) as scene:
            await scene.synchronized()
            assert scene.runtime.registrations == 1

    uvloop.run(scenario())


@every_generation
def test_noise_splits_and_metadata_change_nothing(tmp_path: Path, profile: Profile) -> None:
    async def scenario() -> None:
        behaviour = Behaviour(
            noise=struct.pack(">II", 77, 3) + b"abc" + struct.pack(">II", 1, 0),
            dribble=True,
            metadata=[("traceparent", "00-1"), ("traceparent", "00-2")],
        )
        async with Scene(tmp_path, profile, behaviour, wanted={SHARES: 7}) as scene:
            await scene.synchronized()
            created = await scene.runtime.create_container(container())
            assert created.adjust.linux.resources.cpu.shares.value == 7

    uvloop.run(scenario())


@pytest.mark.parametrize("environment_bytes", [3900, 4086, 8000, 8300, 1 << 20, 3 << 20])
def test_messages_of_all_sizes_pass_both_ways(tmp_path: Path, environment_bytes: int) -> None:
    async def scenario() -> None:
        wanted: Values = {(Resource.ENV, f"V{n}"): "v" * (environment_bytes // 8) for n in range(8)}
        async with Scene(tmp_path, profiles.B, wanted=wanted) as scene:
            await scene.synchronized()
            big = container(env=["BIG=" + "x" * environment_bytes])
            created = await scene.runtime.create_container(big)
            assert len(created.adjust.env) == 8
            assert scene.runtime.failures == []

    uvloop.run(scenario())


def test_an_answer_that_is_too_large_is_left_out_and_the_container_is_created(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        wanted: Values = {(Resource.ENV, f"V{n}"): "v" * (1 << 20) for n in range(5)}
        async with Scene(tmp_path, profiles.B, wanted=wanted) as scene:
            await scene.synchronized()
            created = await scene.runtime.create_container(container())
            assert not created.adjust.env
            assert scene.supervisor.statistics.unusable_values == 1

    uvloop.run(scenario())


@pytest.mark.parametrize("profile", [profiles.B, profiles.C, profiles.D], ids=lambda p: p.nri)
def test_a_split_synchronize_is_collected(tmp_path: Path, profile: Profile) -> None:
    async def scenario() -> None:
        scene = Scene(tmp_path, profile, wanted={SHARES: 1024}, max_synchronize_updates=1000)
        for n in range(20):
            scene.runtime.pods[f"p{n}"] = pod(f"p{n}", uid=f"u{n}")
        for n in range(60):
            big = container(f"c{n}", f"p{n % 20}", env=["BIG=" + "x" * 150_000])
            scene.runtime.containers[f"c{n}"] = big
        async with scene:
            await scene.synchronized()
            calls = [call for call in scene.runtime.calls if call.method == "Synchronize"]
            assert len(calls) >= 3
            assert len(scene.handler.sandboxes) == 20
            assert len(scene.handler.containers) == 60
            assert {c.subject.pod.uid for c in scene.handler.containers} == {
                f"u{n}" for n in range(20)
            }
            (plugin,) = scene.runtime.plugins
            assert len(plugin.synchronize_updates) == 60

    uvloop.run(scenario())


def test_an_unsplit_synchronize_of_10_mib_is_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        scene = Scene(tmp_path, profiles.A)
        for n in range(70):
            scene.runtime.containers[f"c{n}"] = container(f"c{n}", env=["B=" + "x" * 150_000])
        async with scene:
            await scene.synchronized()
            assert len(scene.handler.containers) == 70

    uvloop.run(scenario())


def test_synchronize_asks_only_for_what_differs(tmp_path: Path) -> None:
    async def scenario() -> None:
        scene = Scene(tmp_path, profiles.B, wanted={SHARES: 512, QUOTA: 50000})
        scene.runtime.pods["p"] = pod()
        scene.runtime.containers["same"] = container("same")
        scene.runtime.containers["same"].linux.resources.cpu.quota.value = 50000
        scene.runtime.containers["other"] = container("other")
        async with scene:
            await scene.synchronized()
            (update,) = scene.runtime.plugins[0].synchronize_updates
            assert update.container_id == "other"
            assert update.ignore_failure
            assert not update.linux.resources.cpu.HasField("shares")
            assert update.linux.resources.cpu.quota.value == 50000

    uvloop.run(scenario())


def test_a_synchronize_reply_is_bounded_and_what_all_containers_lack_is_reported(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        wanted: Values = {SHARES: 9, (Resource.ENV, "GPU"): "1"}
        scene = Scene(tmp_path, profiles.B, wanted=wanted, max_synchronize_updates=5)
        for n in range(12):
            scene.runtime.containers[f"c{n}"] = container(f"c{n}")
        async with scene:
            await scene.synchronized()
            assert len(scene.runtime.plugins[0].synchronize_updates) == 5
            assert scene.supervisor.statistics.truncated_synchronizations == 1
            assert len(scene.handler.lacking) == 12

    uvloop.run(scenario())


def test_containers_created_while_away_are_counted_and_what_they_lack_is_reported(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        gpu = (Resource.ENV, "NVIDIA_VISIBLE_DEVICES")
        async with Scene(tmp_path, profiles.B, wanted={gpu: "GPU-1"}) as scene:
            await scene.synchronized()
            await scene.runtime.run_pod_sandbox(pod())
            await scene.runtime.create_container(container("seen"))
            scene.runtime.plugins[0].trunk.close()
            scene.runtime.containers["unseen"] = container("unseen")
            await scene.runtime.wait(lambda: scene.handler.methods().count("synchronize") == 2)
            assert scene.supervisor.statistics.created_while_away == 1
            assert scene.handler.lacking == {"unseen": (gpu,)}

    uvloop.run(scenario())


@every_generation
def test_an_adjustment_that_is_there_already_is_not_claimed_again(
    tmp_path: Path, profile: Profile
) -> None:
    async def scenario() -> None:
        wanted: Values = {
            CPUS: CpuSet.parse("0-3"),
            QUOTA: UNLIMITED,
            (Resource.ENV, "E"): "1",
        }
        async with Scene(tmp_path, profile, wanted=wanted) as scene:
            await scene.synchronized()
            socket = beside(scene.options.socket, "twin")
            twin_options = options(tmp_path / "twin", socket=socket)
            async with running(Supervisor(twin_options, RecordingHandler(wanted))):
                await scene.runtime.synchronized(2)
                created = await scene.runtime.create_container(container())
                assert created.adjust.linux.resources.cpu.cpus == "0-3"
                assert len(scene.runtime.plugins) == 2
                final = await scene.runtime.update_container("c", _quota(200_000))
                assert final.cpu.quota.value == UNLIMITED

    uvloop.run(scenario())


def test_a_variable_that_another_plugin_removed_is_given_all_the_same(tmp_path: Path) -> None:
    async def scenario() -> None:
        gpu = (Resource.ENV, "GPU")
        async with Scene(tmp_path, profiles.D, wanted={gpu: "1"}) as scene:
            await scene.synchronized()
            kept = await scene.runtime.create_container(container("kept", env=["GPU=1"]))
            assert not kept.adjust.env
            removed = await scene.runtime.create_container(container("removed", env=[]))
            assert [(each.key, each.value) for each in removed.adjust.env] == [("GPU", "1")]

    uvloop.run(scenario())


def test_annotations_labels_and_variables_that_a_newer_list_lacks_are_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path, profiles.B, wanted={(Resource.ENV, "GPU"): "1"}) as scene:
            await scene.synchronized()
            await scene.runtime.run_pod_sandbox(pod())
            await scene.runtime.create_container(container())
            assert scene.handler.containers[-1].subject.pod.annotations == {"note": "x"}
            scene.runtime.pods["p"].ClearField("annotations")
            scene.runtime.pods["p"].ClearField("labels")
            del scene.runtime.containers["c"].env[:]
            scene.runtime.plugins[0].trunk.close()
            await scene.runtime.wait(lambda: scene.handler.methods().count("synchronize") == 2)
            (listed,) = scene.handler.containers
            assert (listed.subject.pod.annotations, listed.subject.pod.labels) == ({}, {})
            assert scene.handler.lacking == {"c": ((Resource.ENV, "GPU"),)}

    uvloop.run(scenario())


def _quota(quota_us: int) -> nri.LinuxResources:
    return nri.LinuxResources(cpu=nri.LinuxCPU(quota=nri.OptionalInt64(value=quota_us)))


@pytest.mark.parametrize(
    ("profile", "text"),
    [
        (profiles.A, 'plugins "50-other" and "00-koordlet_nri" both tried to set CPU pinning'),
        (profiles.D, 'plugins "50-other" and "00-koordlet_nri" both tried to set CPUSetCPUs '),
    ],
    ids=["0.6.1", "0.12.2"],
)
def test_two_plugins_that_disagree_conflict_in_the_runtimes_words(
    tmp_path: Path, profile: Profile, text: str
) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path, profile, wanted={CPUS: CpuSet.parse("0")}) as scene:
            await scene.synchronized()
            socket = beside(scene.options.socket, "other")
            other = options(tmp_path / "other", socket=socket, name="other", index="50")
            handler = RecordingHandler({CPUS: CpuSet.parse("1")})
            async with running(Supervisor(other, handler)):
                await scene.runtime.synchronized(2)
                with pytest.raises(EventFailed) as failed:
                    await scene.runtime.create_container(container())
                assert str(failed.value) == text

    uvloop.run(scenario())


def test_an_update_respects_what_kubelet_asks_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path, profiles.B, wanted={SHARES: 2048}) as scene:
            await scene.synchronized()
            await scene.runtime.create_container(container())
            final = await scene.runtime.update_container("c", _quota(300_000))
            assert final.cpu.quota.value == 300_000
            asked = scene.handler.containers[-1].subject.requested
            assert (asked.cfs_quota_us, asked.cpu_shares) == (300_000, None)
            # The decided shares are in force already: nothing is sent.
            assert not final.cpu.shares.value

    uvloop.run(scenario())


def test_an_update_overrides_a_value_that_kubelet_would_bring_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path, profiles.B, wanted={CPUS: CpuSet.parse("2-3")}) as scene:
            await scene.synchronized()
            await scene.runtime.create_container(container())
            asked = nri.LinuxResources(cpu=nri.LinuxCPU(cpus="0-7"))
            final = await scene.runtime.update_container("c", asked)
            assert final.cpu.cpus == "2-3"
            assert scene.runtime.containers["c"].linux.resources.cpu.cpus == "2-3"

    uvloop.run(scenario())


def test_a_refusal_fails_the_creation_and_keeps_the_connection(tmp_path: Path) -> None:
    async def scenario() -> None:
        def refuse(method: str) -> None:
            if method == "create_container":
                raise Refused("no such GPU")

        async with Scene(tmp_path, profiles.B) as scene:
            await scene.synchronized()
            scene.handler.disturb = refuse
            with pytest.raises(EventFailed, match="no such GPU"):
                await scene.runtime.create_container(container())
            scene.handler.disturb = lambda method: None
            await scene.runtime.create_container(container("d"))
            assert scene.supervisor.statistics.refused == 1

    uvloop.run(scenario())


@pytest.mark.parametrize(
    "failing", ["configured", "synchronize", "create_container", "update_container", "run_sandbox"]
)
def test_a_defect_of_the_handler_costs_its_answer_and_nothing_else(
    tmp_path: Path, failing: str
) -> None:
    async def scenario() -> None:
        def fail(method: str) -> None:
            if method == failing:
                raise ZeroDivisionError("a defect")

        scene = Scene(tmp_path, profiles.D, wanted={SHARES: 1024})
        scene.handler.disturb = fail
        async with scene:
            await scene.synchronized()
            await scene.runtime.run_pod_sandbox(pod())
            await scene.runtime.create_container(container())
            await scene.runtime.update_container("c", _quota(5000))
            assert scene.runtime.failures == []
            assert scene.runtime.plugins[0].events != profiles.D.valid_mask
            assert scene.supervisor.statistics.handler_faults == 1
            assert scene.supervisor.status.state is State.SYNCED

    uvloop.run(scenario())


def test_a_late_answer_is_counted_and_the_connection_is_made_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        behaviour = Behaviour(request_timeout_s=0.1)
        async with Scene(tmp_path, profiles.B, behaviour, wanted={SHARES: 1024}) as scene:
            await scene.synchronized()
            # Blocks the loop that the runtime runs on too; its deadline passes all the same.
            scene.handler.disturb = lambda method: (
                time.sleep(0.3) if method == "create_container" else None
            )
            await scene.runtime.create_container(container())
            await scene.runtime.wait(lambda: scene.handler.methods().count("synchronize") == 2)
            assert scene.supervisor.statistics.missed[Missed.LATE] == 1

    uvloop.run(scenario())


def test_a_zombie_of_generation_a_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        slow = [True]

        def first_is_slow(method: str) -> None:
            if method == "synchronize" and slow:
                slow.clear()
                time.sleep(0.3)

        scene = Scene(tmp_path, profiles.A, Behaviour(request_timeout_s=0.1))
        scene.handler.disturb = first_is_slow
        async with scene:
            await scene.runtime.synchronized()
            assert scene.runtime.failures == ["zombie"]
            assert scene.runtime.registrations == 2

    uvloop.run(scenario())


def test_a_pod_that_is_not_there_is_no_reason_to_fail(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path, profiles.B, wanted={SHARES: 8}) as scene:
            await scene.synchronized()
            await scene.runtime.create_container(nri.Container(id="bare", pod_sandbox_id="gone"))
            await scene.runtime.remove_container("bare")
            assert scene.handler.told[-1] == ("remove_container", "bare")
            assert scene.handler.containers[-1].subject.pod.uid == ""

    uvloop.run(scenario())


@pytest.mark.parametrize(
    ("config", "mask"),
    [
        ("", None),
        ("events: createcontainer,RunPodSandbox", 0x9),
        ("events: all", 0x7FF),
        ("events: nonsense", None),
        ("events: [1, 2]", None),
        ("{", None),
        ("events: validatecontaineradjustment", None),
    ],
)
def test_a_launched_plugins_configuration_may_name_the_events(
    tmp_path: Path, config: str, mask: int | None
) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path, profiles.B, Behaviour(config=config)) as scene:
            await scene.synchronized()
            default = 0x7FF & ~(1 << 4) & ~(1 << 5)
            assert scene.runtime.plugins[0].events == (default if mask is None else mask)

    uvloop.run(scenario())


@every_generation
def test_a_plugin_launched_by_the_runtime_uses_its_end_of_the_pair(
    tmp_path: Path, profile: Profile
) -> None:
    async def scenario() -> None:
        theirs, ours = socket.socketpair()
        handler = RecordingHandler()
        runtime = FakeRuntime(str(tmp_path / "nri.sock"), profile)
        launch = Launch(descriptor=ours.fileno(), name="given", index="07")
        async with runtime.running():
            supervisor = Supervisor(options(tmp_path), handler, launch=launch)
            task = asyncio.ensure_future(supervisor.run())
            await runtime.launch(socket.socketpair()[0], theirs)
            ours.detach()
            (plugin,) = await runtime.synchronized()
            assert plugin.full_name == "07-given"
            plugin.trunk.close()
            await asyncio.wait_for(task, 10)

    uvloop.run(scenario())
