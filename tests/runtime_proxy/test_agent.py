"""What an operator sees of a proxy in CRI mode: pages, metrics and health, each with its cause."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime_proxy import options
from runtime_proxy.agent import CriAgent
from runtime_proxy.breaker import State
from runtime_proxy.hook_registry import HookRegistry
from runtime_proxy.model import Container, Pod
from runtime_proxy.stages import Stage
from runtime_proxy.status import Figures, Gauge, pages
from tests.runtime_proxy.http2.h2_server import H2Server
from tests.runtime_proxy.listed import ListingRuntime
from tests.waiting import until

PREFIX = "koord_runtime_proxy_"


def chosen(folder: Path, **fields: Any) -> options.Options:
    made = replace(
        options.parse([]),
        backend=str(folder / "cri.sock"),
        hook_server_dir=str(folder / "hooks"),
        state_dir=str(folder / "state"),
    )
    return replace(made, **fields)


def register(folder: Path, name: str, policy: str = "Ignore") -> None:
    hooks = folder / "hooks"
    hooks.mkdir(exist_ok=True)
    document = {
        "remote-endpoint": str(folder / name) + ".sock",
        "failure-policy": policy,
        "runtime-hooks": ["PreRunPodSandbox", "PostStopContainer"],
    }
    (hooks / name).write_text(json.dumps(document))


def with_agent(folder: Path, test: Callable[[CriAgent], Awaitable[None]], **fields: Any) -> None:
    async def main() -> None:
        agent = CriAgent(chosen(folder, **fields), Figures(lambda: 0.0))
        async with asyncio.timeout(30):
            await agent.start()
            try:
                await test(agent)
            finally:
                await agent.close()

    asyncio.run(main())


def shown(agent: CriAgent) -> dict[str, float]:
    """The gauges and counters by the names under which /metrics has them."""
    return {
        gauge.name.removeprefix(PREFIX) + ("_total" if gauge.counter else ""): gauge.read()
        for gauge in agent.gauges
    }


def test_a_proxy_that_has_done_nothing_counts_nothing(tmp_path: Path) -> None:
    """The names are those of docs/runtime-proxy.md; dashboards and alerts use them."""

    async def test(agent: CriAgent) -> None:
        assert shown(agent) == dict.fromkeys(
            (
                "connections",
                "open_calls",
                "refused_calls_total",
                "protocol_faults_total",
                "stored_pods",
                "stored_containers",
                "journal_errors_total",
                "hook_servers",
                "hook_servers_given_up",
                "hook_server_trips_total",
                "hooks_skipped_unreadable_total",
                "hooks_skipped_labelled_total",
                "hooks_skipped_unknown_object_total",
                "hooks_skipped_runtime_away_total",
                "hooks_skipped_fault_total",
            ),
            0,
        ) | {"runtime_up": 1}
        assert all(gauge.name.startswith(PREFIX) for gauge in agent.gauges)

    with_agent(tmp_path, test)


def test_each_figure_counts_its_own_cause(tmp_path: Path) -> None:
    register(tmp_path, "a.json")
    register(tmp_path, "b.json", "Fail")
    register(tmp_path, "c.json")

    async def test(agent: CriAgent) -> None:
        before = shown(agent)
        agent._store.put_pod(Pod(id="p"))
        for identifier in ("c1", "c2"):
            agent._store.put_container(Container(id=identifier, pod_id="p"))
        agent._traffic.refused_calls, agent._traffic.faults = 3, 4
        skipped = agent._hooks.skipped
        skipped.unreadable, skipped.labelled, skipped.unknown_object = 5, 6, 7
        skipped.runtime_away, skipped.fault = 8, 9
        a, b, _ = agent._registry.servers.all
        a.breaker.unreachable("gone")
        assert a.breaker.alive(0.0)
        a.breaker.unreachable("gone again")
        b.breaker.unreachable("away")
        after = shown(agent)
        assert {name: value for name, value in after.items() if before[name] != value} == {
            "stored_pods": 1,
            "stored_containers": 2,
            "refused_calls_total": 3,
            "protocol_faults_total": 4,
            "hooks_skipped_unreadable_total": 5,
            "hooks_skipped_labelled_total": 6,
            "hooks_skipped_unknown_object_total": 7,
            "hooks_skipped_runtime_away_total": 8,
            "hooks_skipped_fault_total": 9,
            "hook_servers_given_up": 2,
            "hook_server_trips_total": 3,
        }
        assert after["hook_servers"] == 3
        # Calls fail for b alone: the policies of the others are Ignore.
        assert agent.health() == ["b.json: calls fail (failure policy Fail): away"]
        assert agent._registry.status() == [
            {
                "name": name,
                "socket": f"{tmp_path}/{name}.sock",
                "failurePolicy": policy,
                "stages": ["PostStopContainer", "PreRunPodSandbox"],
                "state": state,
                "reason": reason,
                "trips": trips,
            }
            for name, policy, state, reason, trips in (
                ("a.json", "Ignore", "open", "gone again", 2),
                ("b.json", "Fail", "open", "away", 1),
                ("c.json", "Ignore", "closed", "", 0),
            )
        ]
        b.breaker.timed_out("slow", 0.0)
        assert b.breaker.alive(100.0)
        assert agent.health() == [], "a trial is a call that may succeed"

    with_agent(tmp_path, test)


def test_readiness_names_what_calls_wait_for(tmp_path: Path) -> None:
    async def main() -> None:
        server = H2Server(tmp_path / "cri.sock")
        server.reply = ListingRuntime()
        agent = CriAgent(chosen(tmp_path), Figures(lambda: 0.0))
        async with asyncio.timeout(30), server:
            assert agent.readiness() == ["recovery has not finished"]
            assert agent.status()["recovered"] is False
            await agent.start()
            await until(lambda: not agent.readiness(), "recovery")
            status = agent.status()
            assert status == {
                "runtime": {"socket": f"{tmp_path}/cri.sock", "up": True},
                "recovered": True,
                "hookServers": [],
                "unusableRegistrations": {},
                "pods": 1,
                "containers": 1,
                "journalProblem": "",
            }
            await agent.close()

    asyncio.run(main())


def test_a_state_folder_that_cannot_be_made_costs_the_journal_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    folder = f"{tmp_path}/file/state"
    problem = f"no journal: {folder} cannot be made: Not a directory"

    async def test(agent: CriAgent) -> None:
        assert agent.health() == [problem]
        assert agent.status()["journalProblem"] == problem
        assert shown(agent)["journal_errors_total"] == 0
        agent._store.put_pod(Pod(id="p"))
        agent._records.catch_up()
        agent.stand_back()
        assert agent._records.reread().identifiers == set()

    with_agent(tmp_path, test, state_dir=folder)
    assert f"{problem}; a restart recovers from the runtime alone" in caplog.text


def test_a_state_folder_of_no_name_is_no_problem(tmp_path: Path) -> None:
    async def test(agent: CriAgent) -> None:
        assert agent.health() == []
        assert agent.status()["journalProblem"] == ""

    with_agent(tmp_path, test, state_dir="")


# -- the folder of registrations ------------------------------------------------------------------


def with_registry(folder: Path, test: Callable[[HookRegistry], Awaitable[None]]) -> None:
    async def main() -> None:
        made = HookRegistry(chosen(folder, hook_timeout_s=0.75), Figures(lambda: 0.0))
        async with asyncio.timeout(30):
            made.start()
            try:
                await test(made)
            finally:
                made.close()
            assert made.servers.all == ()

    asyncio.run(main())


def test_a_missing_registration_folder_is_made_for_root_to_write(tmp_path: Path) -> None:
    folder = tmp_path / "hooks"

    async def test(registry: HookRegistry) -> None:
        assert stat.S_IMODE(folder.stat().st_mode) & 0o022 == 0
        register(tmp_path, "late.json")
        await until(lambda: registry.servers.all, "the registration")
        (server,) = registry.servers.all
        assert server._timeout_s == 0.75
        assert registry.servers.serving(Stage.PRE_RUN_POD_SANDBOX) == (server,)
        assert server.breaker.state is State.CLOSED
        (folder / "late.json").unlink()
        await until(lambda: not registry.servers.all, "its end")

    with_registry(tmp_path, test)


def test_a_registration_folder_that_cannot_be_made_is_looked_for_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A proxy without hooks still starts pods."""
    folder = tmp_path / "hooks"
    folder.write_text("in the way")

    async def test(registry: HookRegistry) -> None:
        assert registry.servers.all == ()
        assert registry.troubles() == [f"{folder}: Not a directory"]
        folder.unlink()
        register(tmp_path, "late.json")
        await until(lambda: registry.servers.all, "the registration")
        assert registry.troubles() == []

    with_registry(tmp_path, test)
    (line,) = [r for r in caplog.records if "folder cannot be made" in r.message]
    assert (line.__dict__["folder"], line.__dict__["reason"]) == (str(folder), "File exists")


# -- the pages ------------------------------------------------------------------------------------


def get(path: str, figures: Figures, troubles: list[str]) -> tuple[str, str]:
    """The head and the body of a page over HTTP."""

    async def asked() -> tuple[str, str]:
        server = pages(
            figures,
            (Gauge(f"{PREFIX}up", "One", lambda: 1.0), Gauge(f"{PREFIX}n", "Two", lambda: 2, True)),
            health=lambda: troubles,
            readiness=lambda: [f"not ready: {trouble}" for trouble in troubles],
            status=lambda: {"known": 1},
        )
        await server.listen_tcp("127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*address[:2])
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        async with asyncio.timeout(10):
            octets = await reader.read()
        head, _, body = octets.decode().partition("\r\n\r\n")
        writer.close()
        await server.close()
        return head.lower(), body

    return asyncio.run(asked())


def test_a_page_is_red_with_a_line_for_each_trouble() -> None:
    figures = Figures(lambda: 0.0)
    for path, line in (("/healthz", "a"), ("/readyz", "not ready: a")):
        head, body = get(path, figures, [])
        assert (head.split("\r\n")[0], body) == ("http/1.1 200 ", "ok\n")
        head, body = get(path, figures, ["a", "b"])
        assert head.startswith("http/1.1 503 ")
        assert body == f"{line}\n{line[:-1]}b\n"
    head, body = get("/status", figures, ["a"])
    assert "content-type: application/json" in head
    assert json.loads(body) == {"known": 1}


def test_the_exposition_has_every_duration_in_its_bucket() -> None:
    """Bounds from half a millisecond, what a call without hooks costs, to a minute."""
    figures = Figures(lambda: 100.0)
    for seconds in (0.0004, 0.02, 0.02, 61.0):
        figures.call_finished(b"/runtime.v1.RuntimeService/Version", 100.0 - seconds)
    figures.call_finished(b"/runtime.v1.ImageService/PullImage", 99.0)
    figures.call_finished(b"/runtime.v1alpha2.RuntimeService/Version", 100.0)
    figures.call_finished(b"/runtime.v1alpha2.ImageService/ListImages", 100.0)
    figures.call_finished(b"/elsewhere/x", 100.0)
    for server, stage, outcome in (
        ("b.json", Stage.PRE_CREATE_CONTAINER, "ok"),
        ("a.json", Stage.PRE_RUN_POD_SANDBOX, "timeout"),
        ("a.json", Stage.POST_STOP_CONTAINER, "ok"),
        ("a.json", Stage.POST_STOP_CONTAINER, "ok"),
    ):
        figures.hook_called(server, stage, outcome, 0.5)
    head, body = get("/metrics", figures, [])
    assert "content-type: text/plain; version=" in head
    lines = [line for line in body.splitlines() if f" {PREFIX}" in f" {line}"]
    samples = [line.removeprefix(PREFIX) for line in lines if not line.startswith("#")]
    version = (
        'call_duration_seconds_bucket{le="%s",method="Version",service="runtime.v1.RuntimeService"}'
    )
    of_version = [s for s in samples if 'method="Version",service="runtime.v1.R' in s]
    bounds = ["0.0005", "0.001", "0.0025", "0.005", "0.01", "0.025"]
    bounds += ["0.1", "0.5", "2.5", "10", "60", "+Inf"]
    counts = [1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 4]
    assert of_version[:12] == [
        f"{version % bound} {float(count)}" for bound, count in zip(bounds, counts, strict=True)
    ]
    services = {s.partition("service=")[2].split('"')[1] for s in samples if "call_duration" in s}
    assert services == {
        "runtime.v1.RuntimeService",
        "runtime.v1.ImageService",
        "runtime.v1alpha2.RuntimeService",
        "runtime.v1alpha2.ImageService",
        "other",
    }
    assert (
        'call_duration_seconds_sum{method="PullImage",service="runtime.v1.ImageService"} 1.0'
        in samples
    )
    hooks = [s for s in samples if s.startswith("hook_duration_seconds_count")]
    assert hooks == [
        'hook_duration_seconds_count{server="a.json",stage="PostStopContainer"} 2.0',
        'hook_duration_seconds_count{server="a.json",stage="PreRunPodSandbox"} 1.0',
        'hook_duration_seconds_count{server="b.json",stage="PreCreateContainer"} 1.0',
    ]
    assert [s for s in samples if s.startswith("hook_calls_total")] == [
        'hook_calls_total{outcome="ok",server="b.json",stage="PreCreateContainer"} 1.0',
        'hook_calls_total{outcome="timeout",server="a.json",stage="PreRunPodSandbox"} 1.0',
        'hook_calls_total{outcome="ok",server="a.json",stage="PostStopContainer"} 2.0',
    ]
    assert {"up 1.0", "n_total 2.0"} <= set(samples)
    assert {f"# TYPE {PREFIX}up gauge", f"# TYPE {PREFIX}n_total counter"} <= set(lines)
