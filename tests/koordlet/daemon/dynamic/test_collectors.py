"""The collectors in a whole daemon, on simulated machines: which run, and what status says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from koordlet.configuration.gates import BEYOND_POLICIES, GATES
from koordlet.daemon.dynamic.collectors import collectors
from tests.koordlet.daemon.bed import ONE_CPU, Node, node, request, run, until
from tests.ports import free_port
from tests.simulated import ANOLIS_8, INTEL_RDT, Profile

GATED = ("PSICollector", "CPICollector", "ColdPageCollector", "ResctrlCollector", "Accelerators")


async def states(n: Node, expected: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the collectors' status once these states are reached."""
    for _ in range(100):
        _, answer = await n.ask("GET", "/status")
        found = {each["name"]: each for each in answer["measuring"]["collectors"]}
        if {name: found[name]["state"] for name in expected if name in found} == expected:
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(found)


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        (ANOLIS_8, {"psi": "ready", "cold-memory": "ready", "resctrl": "unavailable"}),
        (INTEL_RDT, {"psi": "ready", "cold-memory": "unavailable", "resctrl": "ready"}),
    ],
    ids=lambda value: value.name if isinstance(value, Profile) else "",
)
def test_gates_switch_collectors_on_and_status_says_what_a_machine_does_not_have(
    profile: Profile, expected: dict[str, str]
) -> None:
    async def test() -> None:
        gates = dict.fromkeys(GATED, True)
        measuring = {"resctrl": True}
        async with node(profile, featureGates=gates, measuring=measuring) as n, n.running():
            found = await states(n, {**expected, "gpu": "unavailable"})
            assert "NVIDIA" in found["gpu"]["error"]

    run(test)


def test_without_their_gates_they_are_off() -> None:
    async def test() -> None:
        async with node(ANOLIS_8) as n, n.running():
            off = dict.fromkeys(("psi", "cpi", "cold-memory", "resctrl", "gpu"), "off")
            await states(n, off)
            assert n.kernel.switches["kernel/mm/kidled/scan_period_in_seconds"] == 0

    run(test)


def test_every_gate_of_a_collector_counts_as_one_with_an_effect() -> None:
    async def test() -> None:
        async with node(runtime=False) as n:
            made = collectors(n.config(), n.kernel, str, 4)
            gates = {each.gate for each in made if each.gate}
            assert gates == set(GATED)
            assert gates <= set(GATES) & BEYOND_POLICIES

    run(test)


def test_external_metrics_have_the_collectors_series_and_internal_ones_do_not() -> None:
    port = free_port()

    async def test() -> None:
        address = ("127.0.0.1", port)
        gates = {"PSICollector": True}
        http = {"address": f"127.0.0.1:{port}"}
        async with node(ANOLIS_8, featureGates=gates, http=http) as n:
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running():
                await n.run_pod(pod)
                await states(n, {"psi": "ready"})
                for path, has in (("/external", True), ("/internal", False), ("/metrics", True)):
                    path = path if path == "/metrics" else f"{path}-metrics"
                    status, body = await request(address, "GET", path)
                    assert status == 200
                    assert (b"koordlet_node_psi{" in body) is has

    run(test)


def test_a_longer_report_keeps_pods_samples_longer() -> None:
    async def test() -> None:
        async with node(ANOLIS_8) as n, n.running():
            measuring = n.daemon.parts.measuring

            def sizes() -> dict[str, int]:
                status = measuring.status()
                assert status is not None
                return {each.name: each.bytes for each in status.collectors}

            def measured() -> bool:
                status = measuring.status()
                return status is not None and status.rounds > 0

            await until("the first round, which makes the tables larger", measured)
            before = sizes()
            measuring.keep_for_reports(900.0)
            after = sizes()
            grown = {name for name in after if after[name] > before[name]}
            assert {"pods", "host-applications"} <= grown
            assert not grown & {"node", "system", "psi"}  # kept longer already
            measuring.keep_for_reports(300.0)
            assert sizes()["pods"] == before["pods"]

    run(test)
