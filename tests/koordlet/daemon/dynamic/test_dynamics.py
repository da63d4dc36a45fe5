"""Strategies in a whole daemon, on a simulated kernel: what they claim, say and cost."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from apis.qos import KubeQoS
from hooks.claim import Claim, Rank
from hooks.standing import Standing
from hooks.subject import Level
from koordlet.configuration.gates import GATES
from koordlet.daemon import parts
from koordlet.daemon.serving.readings import DaemonReadings
from koordlet.exposition.metrics import Registries
from koordlet.qos.strategy import Note, Situation, Strategy, Verdict
from linux.resources import Resource
from tests.koordlet.daemon.bed import NODE, ONE_CPU, SLO, Node, node, run, until
from tests.simulated import DEBIAN_12_V1, DEBIAN_12_V2, Profile

GATE = "CPUBurst"
BOTH = pytest.mark.parametrize(
    "profile", [DEBIAN_12_V1, DEBIAN_12_V2], ids=lambda profile: profile.name
)


def claims(quota_us: int) -> tuple[Claim, ...]:
    return (
        Claim(
            resource=Resource.CPU_CFS_QUOTA,
            value=quota_us,
            policy="tested",
            reason=f"node 62 % x 16 gives {quota_us}",
            source="NodeSLO spec.tested",
            rank=Rank.EMERGENCY,
        ),
    )


def standing(quota_us: int) -> Standing:
    """The quota for all Burstable pods, their containers included, also new ones."""
    wanted = claims(quota_us)
    return Standing(
        by_class={
            (Level.POD, KubeQoS.BURSTABLE): wanted,
            (Level.CONTAINER, KubeQoS.BURSTABLE): wanted,
        }
    )


class Steered:
    """A strategy that a test steers."""

    def __init__(self) -> None:
        self.quota_us = 0
        self.broken = False
        self.unmeasured = False
        self.stalls_s = 0.0
        self.situations: list[Situation] = []

    def step(self, state: int, situation: Situation) -> tuple[int, Verdict]:
        self.situations.append(situation)
        if self.stalls_s:
            time.sleep(self.stalls_s)
        if self.broken:
            raise RuntimeError("a defect")
        return state + 1, Verdict(
            standing=standing(self.quota_us) if self.quota_us else Standing(),
            gauges={("tested_quota", (("class", "ls"),)): float(self.quota_us)},
            notes=(Note(0, "Tested", f"step {state}"),),
            summary=f"quota {self.quota_us}",
            unmeasured=self.unmeasured,
        )


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> Steered:
    made = Steered()
    one = Strategy(
        name="tested",
        gates={GATE: GATES[GATE].default},
        interval_s=1.0,
        ttl_s=3.0,
        initial=lambda: 0,
        step=made.step,
    )
    monkeypatch.setattr(parts, "STRATEGIES", (one,))
    return made


def test_claims_reach_running_and_new_containers_and_go_with_the_gate(tested: Steered) -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO)
            pod = n.kubelet.add_pod(ONE_CPU)
            path = n.kubelet.path(pod.cgroup, "cpu.max")
            async with n.running() as daemon:
                await n.run_pod(pod)
                tested.quota_us = 40_000
                await until("the claim", lambda: n.kernel.text(path) == "40000 100000")
                created = await n.create(pod, "c1")
                assert created.adjust.linux.resources.cpu.quota.value == 40_000
                tested.quota_us = 60_000
                await until("another claim", lambda: n.kernel.text(path) == "60000 100000")
                n.tree["featureGates"] = {GATE: False}
                daemon.reload()
                await until("the original", lambda: n.kernel.text(path) == "100000 100000")
                reconciler = daemon.parts.passes.reconciler
                assert reconciler is not None
                # Counted a moment after the write.
                await until("updates", lambda: reconciler.stats.standing_updates >= 3)

    run(test)


@BOTH
def test_claims_outlast_a_restart_until_the_strategy_can_judge(
    tested: Steered, profile: Profile
) -> None:
    """Neither the kernel's value nor the replies to the runtime change in between."""

    async def test() -> None:
        async with node(profile, intervals={"reconcile": 0.5}) as n:
            n.put(SLO)
            pod = n.kubelet.add_pod(ONE_CPU)
            name = "cpu.cfs_quota_us" if profile.cgroup == 1 else "cpu.max"
            path = n.kubelet.path(pod.cgroup, name)

            def quota() -> str:
                return n.kernel.text(path).split()[0]

            async with n.running():
                await n.run_pod(pod)
                tested.quota_us = 40_000
                await until("the claim", lambda: quota() == "40000")
                kept = n.folder / "run/leases"
                await until("it is kept", lambda: b"40000" in kept.read_bytes())
                old = n.runtime.plugins[0]
            before = len(n.kernel.writes)
            n.daemon = n.new_daemon()
            tested.quota_us = 0
            tested.unmeasured = True
            steps = len(tested.situations)
            async with n.running() as daemon:
                reconciler = daemon.parts.passes.reconciler
                assert reconciler is not None
                await until(
                    "the new plugin", lambda: [x for x in n.runtime.plugins if x is not old]
                )
                created = await n.create(pod, "c1")
                assert created.adjust.linux.resources.cpu.quota.value == 40_000
                await until("a complete pass", lambda: reconciler.stats.passes > 3)
                await until("a step with the pod", lambda: len(tested.situations) > steps)
                assert tested.situations[steps].pods
                assert [one for one in n.kernel.writes[before:] if one.path == path] == []
                status = await strategy_status(n, lambda one: one["steps"])
                assert status["claims"] and "before the restart" in status["summary"]
                tested.unmeasured = False
                await until("the original", lambda: quota() == "100000")

    run(test)


class Counted(msgspec.Struct, frozen=True):
    steps: int = 0


def test_states_outlast_a_restart_also_over_a_daemon_that_measures_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun_from: list[int] = []

    def step(state: Counted, situation: Situation) -> tuple[Counted, Verdict]:
        begun_from.append(state.steps)
        return Counted(state.steps + 1), Verdict()

    one = Strategy(
        name="tested",
        gates={GATE: GATES[GATE].default},
        interval_s=1.0,
        ttl_s=3.0,
        initial=Counted,
        step=step,
        kept=Counted,
    )
    monkeypatch.setattr(parts, "STRATEGIES", (one,))

    async def test() -> None:
        async with node() as n:
            async with n.running():
                await until("three steps", lambda: len(begun_from) >= 3)
            n.tree["measuring"] = {"enabled": False}
            n.daemon = n.new_daemon()
            async with n.running():
                pass
            del n.tree["measuring"]
            n.daemon = n.new_daemon()
            before = len(begun_from)
            async with n.running():
                await until("a step", lambda: len(begun_from) > before)

    run(test)
    assert begun_from == list(range(len(begun_from)))


def test_claims_of_before_a_restart_end_if_the_strategy_never_steps(tested: Steered) -> None:
    async def test() -> None:
        async with node() as n:
            pod = n.kubelet.add_pod(ONE_CPU)
            path = n.kubelet.path(pod.cgroup, "cpu.max")
            async with n.running():
                await n.run_pod(pod)
                tested.quota_us = 40_000
                await until("the claim", lambda: n.kernel.text(path) == "40000 100000")
            n.daemon = n.new_daemon()
            tested.broken = True
            async with n.running():
                status = await strategy_status(n, lambda one: one["failures"] > 0)
                assert status["claims"]
                assert n.kernel.text(path) == "40000 100000"
                await until("the original", lambda: n.kernel.text(path) == "100000 100000")

                def leases() -> object:
                    return json.loads((n.folder / "run/leases").read_text())["leases"]

                # Written by a thread of its own.
                await until("no lease in the file", lambda: leases() == {})

    run(test)


def test_claims_of_before_a_restart_do_not_return_to_what_is_switched_off(tested: Steered) -> None:
    async def test() -> None:
        async with node() as n:
            pod = n.kubelet.add_pod(ONE_CPU)
            path = n.kubelet.path(pod.cgroup, "cpu.max")
            async with n.running():
                await n.run_pod(pod)
                tested.quota_us = 40_000
                await until("the claim", lambda: n.kernel.text(path) == "40000 100000")
            n.tree["featureGates"] = {GATE: False}
            n.daemon = n.new_daemon()
            async with n.running():
                await until("the original", lambda: n.kernel.text(path) == "100000 100000")

    run(test)


def test_claims_of_a_strategy_that_stalls_end_with_its_lease(tested: Steered) -> None:
    """The thread that would renew them is stuck, and the event loop ends them."""

    async def test() -> None:
        async with node() as n:
            pod = n.kubelet.add_pod(ONE_CPU)
            path = n.kubelet.path(pod.cgroup, "cpu.max")
            async with n.running():
                await n.run_pod(pod)
                tested.quota_us = 40_000
                await until("the claim", lambda: n.kernel.text(path) == "40000 100000")
                tested.stalls_s = 4.0
                await until("the original", lambda: n.kernel.text(path) == "100000 100000")
                tested.stalls_s = 0.0

    run(test)


def test_a_broken_strategy_shows_and_harms_nothing_else(tested: Steered) -> None:
    async def test() -> None:
        async with node() as n:
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running():
                tested.broken = True
                status = await strategy_status(n, lambda one: one["failures"] > 0)
                assert status["problem"] == "RuntimeError: a defect"
                assert not status["claims"]
                await n.run_pod(pod)
                created = await n.create(pod, "c1")
                assert not created.adjust.linux.resources.cpu.HasField("quota")
                assert n.daemon.parts.health.not_ready() == []

    run(test)


def test_status_explain_plan_and_metrics_show_what_strategies_do(tested: Steered) -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO)
            pod = n.kubelet.add_pod(ONE_CPU)
            path = n.kubelet.path(pod.cgroup, "cpu.max")
            async with n.running():
                await n.run_pod(pod)
                tested.quota_us = 40_000
                await until("the claim", lambda: n.kernel.text(path) == "40000 100000")
                status = await strategy_status(n, lambda one: one["claims"])
                assert (status["state"], status["summary"]) == ("on", "quota 40000")
                _, answer = await n.ask("GET", f"/explain?kind=pod&name={pod.uid}")
                (value,) = [
                    one
                    for subject in answer["subjects"]
                    for one in subject["values"]
                    if subject["level"] == "pod" and one["resource"] == "cpu.cfs_quota_us"
                ]
                assert value["winner"]["policy"] == "tested"
                assert value["why"] == "tested: node 62 % x 16 gives 40000"
                text = Registries.text(Registries(DaemonReadings(n.daemon.parts)).internal).decode()
                assert f'koordlet_tested_quota{{class="ls",node="{NODE}"}} 40000.0' in text
                assert 'koordlet_strategy_claims{strategy="tested"} 1.0' in text
                assert 'koordlet_collector_age_seconds{collector="node"}' in text
                assert 'koordlet_collector_failures_total{collector="pods"} 0.0' in text
                # The plan keeps the claims: nothing is to be written under the same objects.
                _, plan = await n.ask("POST", "/plan", {"files": {}})
                assert plan["writes"] == []

    run(test)


def test_strategies_see_pods_amounts_and_inputs(tested: Steered) -> None:
    async def test() -> None:
        async with node() as n:
            amounts = {"cpu": "3500m", "memory": "1Gi", "kubernetes.io/batch-cpu": "2000"}
            status = {"capacity": {"cpu": "4", "memory": "2Gi"}, "allocatable": amounts}
            n.put(
                {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}, "status": status}
            )
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running():
                await n.run_pod(pod)
                await until("a pod", lambda: tested.situations and tested.situations[-1].pods)
                seen = tested.situations[-1]
                assert [one.pod.uid for one in seen.pods] == [pod.uid]
                assert (seen.node.cpu_milli, seen.node.memory_bytes) == (4000, 2 << 30)
                assert seen.node.allocatable["cpu"] == 3500
                assert seen.node.allocatable["kubernetes.io/batch-cpu"] == 2000
                assert seen.inputs.node.name == NODE
                # Batch resources change every minute: they are no reason to build the rules again.
                assert n.daemon.parts.rules.inputs.node.allocatable == {}
                assert seen.measurements.now == seen.now

    run(test)


def test_nothing_is_measured_where_it_is_switched_off(tested: Steered) -> None:
    async def test() -> None:
        async with node(measuring={"enabled": False}) as n, n.running():
            _, status = await n.ask("GET", "/status")
            assert status["measuring"] == {"enabled": False, "running": False, "collectors": []}
            assert not tested.situations

    run(test)


async def strategy_status(n: Node, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Return the strategy's part of the status once the condition holds."""
    for _ in range(100):
        _, answer = await n.ask("GET", "/status")
        (found,) = answer["strategies"]
        if condition(found):
            assert isinstance(found, dict)
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(f"not in the status: {found}")
