"""What becomes of a request that is not answered as it should: Ignore and Fail."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import uvloop

from hooks.decision import Fault
from linux.resources import Resource
from nri_plugin.options import FailurePolicy
from nri_plugin.statistics import Missed
from protos.nri.v1alpha1 import nri_pb2 as nri
from tests.fake_runtime import profiles
from tests.fake_runtime.adaptation import Behaviour, EventFailed
from tests.fake_runtime.profiles import Profile
from tests.nri_plugin.scenes import SHARES, Scene, Values, container, pod

GPU = (Resource.ENV, "NVIDIA_VISIBLE_DEVICES")
FAIL, IGNORE = FailurePolicy.FAIL, FailurePolicy.IGNORE

every_runtime = pytest.mark.parametrize("profile", profiles.ALL, ids=lambda p: p.nri)


def late_scene(
    folder: Path, profile: Profile, policy: FailurePolicy, wanted: Values | None = None
) -> Scene:
    """Creations of containers whose id begins with "late" are answered too late."""
    behaviour = Behaviour(request_timeout_s=0.1)
    scene = Scene(folder, profile, behaviour, wanted=wanted or {SHARES: 7}, failure_policy=policy)

    def block(method: str) -> None:
        # Blocks the loop that the runtime runs on too; its deadline passes all the same.
        if scene.handler.told[-1][1].startswith("late"):
            time.sleep(0.3)

    scene.handler.disturb = block
    return scene


def test_a_late_answer_keeps_the_connection_where_the_runtime_can(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with late_scene(tmp_path, profiles.D_POLICY, IGNORE) as scene:
            await scene.synchronized()
            created = await scene.runtime.create_container(container("late"))
            assert not created.adjust.HasField("linux")
            assert scene.supervisor.statistics.missed[Missed.LATE] == 1
            created = await scene.runtime.create_container(container("next"))
            assert created.adjust.linux.resources.cpu.shares.value == 7
            assert scene.runtime.accepted == 1

    uvloop.run(scenario())


def test_a_late_answer_fails_the_creation_under_fail_where_the_runtime_can(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with late_scene(tmp_path, profiles.D_POLICY, FAIL) as scene:
            await scene.synchronized()
            with pytest.raises(EventFailed, match="00-koordlet_nri failed to handle"):
                await scene.runtime.create_container(container("late"))
            assert "late" not in scene.runtime.containers
            await scene.runtime.create_container(container("next"))
            assert scene.runtime.accepted == 1

    uvloop.run(scenario())


@pytest.mark.parametrize("profile", [profiles.A, profiles.B, profiles.D], ids=lambda p: p.nri)
def test_older_runtimes_go_on_without_a_late_answer_under_fail_too(
    tmp_path: Path, profile: Profile
) -> None:
    async def scenario() -> None:
        async with late_scene(tmp_path, profile, FAIL) as scene:
            await scene.synchronized()
            created = await scene.runtime.create_container(container("late"))
            assert not created.adjust.HasField("linux")
            await scene.runtime.wait(lambda: scene.runtime.accepted == 2)
            runtime = scene.handler.runtime
            assert runtime is not None
            assert not runtime.failure_policy

    uvloop.run(scenario())


def test_what_a_late_answer_would_have_injected_is_reported_at_the_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        wanted: Values = {GPU: "GPU-1", SHARES: 7}
        async with late_scene(tmp_path, profiles.D_POLICY, IGNORE, wanted) as scene:
            await scene.synchronized()
            for container_id in ("late", "next", "late-removed"):
                await scene.runtime.create_container(container(container_id))
            await scene.runtime.remove_container("late-removed")
            await scene.runtime.start_container("next")
            assert scene.handler.lacking == {}
            await scene.runtime.start_container("late")
            assert scene.handler.lacking == {"late": (GPU,)}

    uvloop.run(scenario())


@every_runtime
@pytest.mark.parametrize("failing", ["run_sandbox", "create_container", "update_container"])
def test_a_defect_of_the_handler_fails_the_request_under_fail(
    tmp_path: Path, profile: Profile, failing: str
) -> None:
    async def scenario() -> None:
        def fail(method: str) -> None:
            if method == failing:
                raise ZeroDivisionError("a defect")

        async with Scene(tmp_path, profile, wanted={SHARES: 7}, failure_policy=FAIL) as scene:
            await scene.synchronized()
            scene.handler.disturb = fail
            failed = 0
            for request in (
                scene.runtime.run_pod_sandbox(pod()),
                scene.runtime.create_container(container()),
                scene.runtime.update_container("c", nri.LinuxResources()),
            ):
                try:
                    await request
                except EventFailed as error:
                    assert "koordlet failed: ZeroDivisionError: a defect" in str(error)
                    failed += 1
                except KeyError:
                    assert failing == "create_container"
            assert failed == 1
            assert scene.runtime.accepted == 1

    uvloop.run(scenario())


@every_runtime
@pytest.mark.parametrize("failing", ["start_container", "stop_container", "remove_container"])
def test_a_defect_at_what_no_pod_waits_for_fails_nothing(
    tmp_path: Path, profile: Profile, failing: str
) -> None:
    async def scenario() -> None:
        def fail(method: str) -> None:
            if method == failing:
                raise ZeroDivisionError("a defect")

        async with Scene(tmp_path, profile, failure_policy=FAIL) as scene:
            await scene.synchronized()
            scene.handler.disturb = fail
            await scene.runtime.create_container(container())
            await scene.runtime.start_container("c")
            await scene.runtime.remove_container("c")
            assert scene.supervisor.statistics.handler_faults == 1
            assert scene.runtime.failures == []

    uvloop.run(scenario())


@pytest.mark.parametrize("policy", [FAIL, IGNORE])
def test_a_policy_that_could_not_decide_fails_the_creation_under_fail_only(
    tmp_path: Path, policy: FailurePolicy
) -> None:
    async def scenario() -> None:
        scene = Scene(tmp_path, profiles.A, wanted={SHARES: 7}, failure_policy=policy)
        scene.handler.faults = (Fault("GPUEnvInject", "annotation x: is not JSON", True),)
        async with scene:
            await scene.synchronized()
            if policy is IGNORE:
                created = await scene.runtime.create_container(container())
                assert created.adjust.linux.resources.cpu.shares.value == 7
                return
            with pytest.raises(EventFailed, match="policy GPUEnvInject: annotation x: is not JSON"):
                await scene.runtime.create_container(container())
            assert scene.supervisor.statistics.refused == 1

    uvloop.run(scenario())


def test_an_answer_that_is_too_large_fails_the_creation_under_fail(tmp_path: Path) -> None:
    async def scenario() -> None:
        wanted: Values = {(Resource.ENV, f"V{n}"): "v" * (1 << 20) for n in range(5)}
        async with Scene(tmp_path, profiles.B, wanted=wanted, failure_policy=FAIL) as scene:
            await scene.synchronized()
            with pytest.raises(EventFailed, match="too large"):
                await scene.runtime.create_container(container())

    uvloop.run(scenario())
