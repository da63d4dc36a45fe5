"""A runtime that configures the plugin and sends no list of containers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import uvloop

from nri_plugin import supervisor
from nri_plugin.statistics import State
from tests.fake_runtime import profiles
from tests.fake_runtime.adaptation import Behaviour
from tests.fake_runtime.profiles import Profile
from tests.nri_plugin.scenes import SHARES, Scene, container
from tests.waiting import until


def test_a_list_that_nri_0_6_1_cannot_send_is_noticed_said_and_asked_for_again(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        scene = Scene(tmp_path, profiles.A, wanted={SHARES: 7}, list_overdue_s=0.2)
        for n in range(120):
            scene.runtime.containers[f"c{n}"] = container(f"c{n}", env=["B=" + "x" * 150_000])
        async with scene:
            await scene.runtime.wait(lambda: scene.runtime.registrations >= 3)
            assert scene.runtime.failures[:2] == ["zombie", "zombie"]
            assert scene.handler.methods()[:3] == ["configured", "list_overdue", "disconnected"]
            said = {text for method, text in scene.handler.told if method != "configured"}
            (reason,) = said
            assert reason.startswith(
                "containerd 1.7.24~ds1 configured the plugin and sends no list"
            )
            assert " 4086 of the 18" in reason
            assert "upgrade to containerd 1.7.26" in reason
            assert not scene.supervisor.status.protects
            assert scene.supervisor.statistics.connected_s == 0

            for n in range(60):
                del scene.runtime.containers[f"c{n}"]
            await scene.synchronized()
            assert scene.supervisor.status.problem == ""
            created = await scene.runtime.create_container(container("new"))
            assert created.adjust.linux.resources.cpu.shares.value == 7

    uvloop.run(scenario())


def test_while_the_list_is_missing_the_status_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        behaviour = Behaviour(never_synchronize=True)
        scene = Scene(tmp_path, profiles.A, behaviour, list_overdue_s=0.1, first_backoff_s=3600.0)
        async with scene:
            await until(lambda: "disconnected" in scene.handler.methods())
            status = scene.supervisor.status
            assert status.state is State.DISCONNECTED
            assert "sends no list of containers; NRI up to 0.6.1 cannot" in status.problem
            assert scene.supervisor.statistics.seconds_in(State.CONFIGURED) > 0

    uvloop.run(scenario())


@pytest.mark.parametrize("profile", [profiles.B, profiles.C, profiles.D], ids=lambda p: p.nri)
def test_a_list_that_waits_for_running_calls_is_reported_overdue_and_awaited(
    tmp_path: Path, profile: Profile
) -> None:
    async def scenario() -> None:
        behaviour = Behaviour(synchronize_after_s=0.7)
        async with Scene(tmp_path, profile, behaviour, list_overdue_s=0.1) as scene:
            await until(lambda: scene.supervisor.status.state is State.UNLISTED)
            assert "takes long to stop" in scene.supervisor.status.problem
            await scene.synchronized()
            assert scene.handler.methods() == ["configured", "list_overdue", "synchronize"]
            assert scene.supervisor.status.problem == ""
            assert scene.runtime.accepted == 1

    uvloop.run(scenario())


def test_a_list_that_does_not_come_for_long_is_given_up_on_every_runtime(tmp_path: Path) -> None:
    async def scenario() -> None:
        behaviour = Behaviour(never_synchronize=True)
        limits: dict[str, Any] = {"list_overdue_s": 0.1, "list_given_up_s": 0.3}
        async with Scene(tmp_path, profiles.B, behaviour, **limits) as scene:
            await scene.runtime.wait(lambda: scene.runtime.registrations >= 2)
            scene.runtime.behaviour = Behaviour()
            await scene.synchronized()

    uvloop.run(scenario())


def test_attempts_without_a_list_become_rarer_than_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest: list[float] = []

    def note(failures: int, first_s: float, longest_s: float, chance: float) -> float:
        longest.append(longest_s)
        return first_s

    monkeypatch.setattr(supervisor, "back_off_s", note)

    async def scenario() -> None:
        behaviour = Behaviour(never_synchronize=True)
        limits: dict[str, Any] = {
            "list_overdue_s": 0.05,
            "longest_backoff_s": 0.5,
            "first_backoff_s": 0.01,
        }
        async with Scene(tmp_path, profiles.A, behaviour, **limits) as scene:
            await until(lambda: len(longest) >= 2)
            scene.runtime.behaviour = Behaviour()
            await scene.synchronized()
            scene.runtime.plugins[0].trunk.close()
            before = len(longest)
            await until(lambda: len(longest) > before)

    uvloop.run(scenario())
    assert longest[0] == longest[1] == 300.0
    assert longest[-1] == 0.5


def test_the_missing_list_stays_the_problem_while_the_plugin_connects_again(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        behaviour = Behaviour(never_synchronize=True)
        limits: dict[str, Any] = {"list_overdue_s": 0.05, "first_backoff_s": 0.01}
        limits["longest_unlisted_backoff_s"] = 0.05
        async with Scene(tmp_path, profiles.A, behaviour, **limits) as scene:
            await until(lambda: "sends no list" in scene.supervisor.status.problem)
            problems: set[str] = set()

            def connected_again() -> bool:
                problems.add(scene.supervisor.status.problem)
                return scene.runtime.accepted >= 4

            await until(connected_again)
            assert all("sends no list" in problem for problem in problems)
            scene.runtime.behaviour = Behaviour()
            await scene.synchronized()
            assert scene.supervisor.status.problem == ""

    uvloop.run(scenario())
