"""Memory bandwidth of best-effort pods in a whole daemon: from counters to schemata."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from linux.resctrl import parse_schemata
from tests.koordlet.daemon.bed import SLO, Node, node, run, until
from tests.simulated import INTEL_RDT, Profile
from tests.simulated.profiles import Rdt
from tests.simulated.resctrl import U32_UNLIMITED, Counters

GB = 10**9
MBPS = replace(INTEL_RDT, name="intel-mba-mbps", rdt=Rdt(mba_mbps=True))


@asynccontextmanager
async def traffic(n: Node, **rates: int) -> AsyncIterator[None]:
    """Let the classes move so many bytes per second in domain 0."""
    began = time.monotonic()

    async def count() -> None:
        assert n.kernel.resctrl is not None
        while True:
            for group, rate in rates.items():
                moved = int((time.monotonic() - began) * rate)
                n.kernel.resctrl.counters[group, 0] = Counters(0, moved, moved)
            await asyncio.sleep(0.02)

    task = asyncio.ensure_future(count())
    try:
        yield
    finally:
        task.cancel()


def bandwidth(n: Node) -> dict[int, int]:
    if not n.kernel.is_dir("/sys/fs/resctrl/BE"):
        return {}
    return parse_schemata(n.kernel.text("/sys/fs/resctrl/BE/schemata"))["MB"]


@pytest.mark.parametrize(
    ("profile", "ceiling", "most"),
    [(INTEL_RDT, 90, 80), (MBPS, U32_UNLIMITED, (65 * GB) >> 20)],
    ids=["percent", "mba_MBps"],
)
def test_best_effort_pods_yield_bandwidth_of_a_full_domain_and_get_it_back(
    profile: Profile, ceiling: int, most: int
) -> None:
    async def test() -> None:
        gates = {"BandwidthSuppress": True, "ResctrlCollector": True}
        measuring = {"resctrl": True, "resctrlInterval": 1}
        qos = {"memoryBandwidthMbps": 100_000}
        async with node(profile, featureGates=gates, measuring=measuring, qos=qos) as n:
            classes = {
                "lsClass": {"resctrlQOS": {"enable": True}},
                "beClass": {"resctrlQOS": {"enable": True, "mbaPercent": 90}},
            }
            n.put({**SLO, "spec": {"resourceQOSStrategy": classes}})
            async with n.running() as daemon, traffic(n, LS=30 * GB, BE=65 * GB):
                await until("the class's own", lambda: bandwidth(n) == {0: ceiling, 1: ceiling})
                await until("a bound", lambda: bandwidth(n)[0] <= most, timeout_s=20)
                assert bandwidth(n)[1] == ceiling
                schemata = n.kernel.text("/sys/fs/resctrl/BE/schemata")
                assert parse_schemata(schemata)["L3"] == {0: 0xF, 1: 0xF}
                _, answer = await n.ask("GET", "/explain?kind=subject&name=node")
                assert "of 100.0 GB/s" in str(answer)
                n.tree["featureGates"] = {**gates, "BandwidthSuppress": False}
                daemon.reload()
                await until("it back", lambda: bandwidth(n) == {0: ceiling, 1: ceiling})

    run(test)
