"""koordctl status: what it shows of a daemon in memory."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path

import pytest
import yaml

from koordctl.main import main
from koordctl.status import network_rows, status_text
from tests.koordctl.asked import Ask, with_daemon
from tests.koordlet.daemon.bed import Node, events, node, node_object, until


def test_status_events_and_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "node.yaml").write_text(yaml.safe_dump(node_object("2.0")))

    async def test(n: Node, ask: Ask) -> None:
        assert await ask("status") == 0
        shown = capsys.readouterr().out
        assert "connected to containerd" in shown
        assert "CPUNormalization" in shown
        assert "objects     NodeSLO, Node\n" in shown
        assert "CoreSched         off       feature gate CoreSched=false\n" in shown
        assert await ask("events") == 0
        assert "nri-configured" in capsys.readouterr().out
        writes = len(n.kernel.writes)
        assert await ask("plan", "--objects", str(tmp_path)) == 0
        shown = capsys.readouterr().out
        assert "NodeSLO n1  there is none of this name" in shown
        assert "1 writes" in shown
        assert "Pod default/pod-aaaa" in shown
        assert "50000" in shown
        assert len(n.kernel.writes) == writes

    with_daemon(test)


def test_status_names_the_values_that_are_not_in_force(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def test(n: Node, ask: Ask) -> None:
        n.kernel.faults.fail("write", errno.EINVAL, path="*/cpu.max", nth=0)
        n.put(node_object("2.0"))

        def troubled() -> bool:
            reconciler = n.daemon.parts.passes.reconciler
            return reconciler is not None and any(s == "failed" for _, s in reconciler.states())

        await until("a refused write", troubled)
        assert await ask("status") == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "values that are not in force" in shown
        assert "Pod default/pod-aaaa cpu.cfs_quota_us 50000 80000 failed" in shown
        await ask("status", "-o", "json")
        (told,) = json.loads(capsys.readouterr().out)["reconciler"]["troubled"]
        assert (told["name"], told["desired"], told["state"]) == (
            "Pod default/pod-aaaa",
            "50000",
            "failed",
        )

    with_daemon(test)


def test_status_shows_the_last_eviction_and_what_is_short(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def test(n: Node, ask: Ask) -> None:
        await ask("status", "-o", "json")
        answer = json.loads(capsys.readouterr().out)
        assert "evictions" not in status_text(answer)
        answer["evictions"] |= {
            "evictions": 1,
            "heldBack": "kubelet evicts pods itself: the Node has MemoryPressure",
            "short": [{"gate": "BEMemoryEvict", "why": "no pod is left"}],
            "last": [
                {"pod": "Pod default/hog", "outcome": "evicted", "at": 0.0, "gate": "CPUEvict"}
            ],
        }
        shown = " ".join(status_text(answer).split())
        assert "evictions 1; last Pod default/hog, evicted, at" in shown
        assert "for CPUEvict kubelet evicts pods itself: the Node has MemoryPressure" in shown
        assert "BEMemoryEvict is not covered: no pod is left" in shown
        # Also before the first eviction a row says what it is about.
        answer["evictions"] |= {"evictions": 0, "heldBack": "", "last": []}
        shown = " ".join(status_text(answer).split())
        assert "evictions BEMemoryEvict is not covered: no pod is left" in shown
        del answer["evictions"]
        assert "evictions" not in status_text(answer)

    with_daemon(test)


def test_status_shows_as_many_containers_as_a_person_reads_those_that_miss_something_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def test(n: Node, ask: Ask) -> None:
        await ask("status", "-o", "json")
        answer = json.loads(capsys.readouterr().out)
        unseen = [
            {"pod": "default/many", "container": f"c{i}", "id": "", "lacks": []} for i in range(30)
        ]
        answer["unprotected"] = [*unseen, {**unseen[0], "container": "bare", "lacks": ["env"]}]
        shown = status_text(answer)
        assert "default/many  bare" in shown
        assert "default/many  c18" in shown
        assert "default/many  c19" not in shown
        assert "... and 11 more: koordctl status -o json" in shown

    with_daemon(test)


def test_status_shows_strategies_and_the_collectors_that_have_no_samples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def test(n: Node, ask: Ask) -> None:
        await ask("status", "-o", "json")
        answer = json.loads(capsys.readouterr().out)
        strategy = {**answer["strategies"][0], "name": "CPUEvict", "stepAgeSeconds": 61.0}
        answer["strategies"] = [
            {**strategy, "summary": "nothing is short", "why": "", "problem": ""}
        ]
        collector = {**answer["measuring"]["collectors"][0], "name": "pods", "ageSeconds": 5.0}
        answer["measuring"]["collectors"] = [
            {**collector, "state": "failing", "error": "EIO: cpuacct.usage"},
            {**collector, "name": "node", "state": "ready", "error": ""},
        ]
        shown = " ".join(status_text(answer).split())
        assert "CPUEvict" in shown and "1m1s ago nothing is short" in shown
        assert "pods failing 5s ago EIO: cpuacct.usage" in shown
        assert "measuring 1 collectors" in shown
        answer["measuring"] |= {"running": False, "enabled": False, "collectors": []}
        assert "nothing: no strategy runs (measuring.enabled)" in " ".join(
            status_text(answer).split()
        )

    with_daemon(test)


def test_originals_in_a_journal_of_another_version_are_named_until_it_is_removed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def run() -> None:
        async with node() as n:
            journal = n.folder / "run" / "journal"
            journal.write_bytes(b"another version's\n")
            n.daemon = n.new_daemon()
            kept = n.folder / "run" / "journal.unread-1"

            async def shown(*arguments: str) -> str:
                run_dir = str(n.folder / "run")
                await asyncio.to_thread(main, ["--run-dir", run_dir, *arguments])
                return capsys.readouterr().out

            async with n.running() as daemon:
                for _ in range(2):
                    daemon.parts.health.report_journal()
                (message,) = events(n, "run-dir")
                assert f"the file is kept as {kept}; originals that only it held" in message
                assert daemon.parts.health.not_ready() == []
                assert f"the file is kept as {kept}" in " ".join((await shown("status")).split())
                reconciler = json.loads(await shown("status", "-o", "json"))["reconciler"]
                assert reconciler["journalLost"].endswith(f"the file is kept as {kept}")
                for state in (["warn"], []):
                    findings = json.loads(await shown("doctor", "-o", "json"))
                    found = [each for each in findings if each["check"] == "originals"]
                    assert [each["state"] for each in found] == state
                    assert all(str(kept) in each["found"] for each in found)
                    kept.unlink(missing_ok=True)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_status_reports_a_missing_nodeslo(capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        async with node() as n, n.running():
            await asyncio.to_thread(main, ["--run-dir", str(n.folder / "run"), "status"])
            shown = " ".join(capsys.readouterr().out.split())
            assert f"no NodeSLO of this node in {n.folder}/objects.d: its defaults apply" in shown
            assert "NodeMetric: " in shown
            assert "NodeResourceTopology: " in shown
            assert "models, trained " in shown

    asyncio.run(asyncio.wait_for(run(), 30))


def test_status_says_what_happens_to_containers_while_koordlet_is_away(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def test(n: Node, ask: Ask) -> None:
        await ask("status", "-o", "json")
        answer = json.loads(capsys.readouterr().out)
        assert "on failure" not in status_text(answer)
        policy = {"configured": "Fail", "inForce": "creations wait for koordlet"}
        answer["nri"]["failurePolicy"] = policy
        answer["hookService"] = {"enabled": False, "failurePolicy": policy}
        shown = status_text(answer)
        assert "on failure" in shown and "Fail: creations wait for koordlet\n" in shown
        assert "proxy" not in shown
        answer["hookService"]["enabled"] = True
        assert "on failure Fail: creations wait for koordlet\n" in status_text(answer)

    with_daemon(test)


def test_status_shows_what_is_shaped_and_what_is_not() -> None:
    classes = [
        {"name": "system", "rateBits": 9 * 10**9, "ceilBits": 10**10, "members": 0},
        {"name": "be", "rateBits": 8_000, "ceilBits": 2_500_000, "members": 3},
        {"name": "pod", "rateBits": 8_000, "ceilBits": 8_000, "members": 1},
    ]
    shown = network_rows(
        {
            "why": "gate TCNetworkQoS",
            "device": "eth0",
            "bitsPerSecond": 10**10,
            "classes": classes,
            "problems": ["the kernel refuses to add class 108: no"],
        }
    )
    assert shown == [
        ("network", "eth0, 10 Gbit/s; 1 pods limited"),
        ("", "system: 9 Gbit/s guaranteed, up to 10 Gbit/s, 0 members"),
        ("", "be: 8 kbit/s guaranteed, up to 2.5 Mbit/s, 3 members"),
        ("", "the kernel refuses to add class 108: no"),
    ]
