"""Staying connected: missing sockets, restarts, locks, silence, and the wait between dials."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from apis.errors import InputError
from nri_plugin.handler import Refused
from nri_plugin.options import FailurePolicy, Launch, Options, launch_of
from nri_plugin.session import PLUGIN, Inventory, Session
from nri_plugin.statistics import Missed, State, Statistics
from nri_plugin.supervisor import LOCK_FILE, Supervisor, back_off_s
from nri_plugin.ttrpc import Call, Code, RpcError
from protos.nri.v1alpha1 import nri_pb2 as nri
from service.locks import LockHeld, node_lock
from tests.fake_runtime import profiles
from tests.fake_runtime.adaptation import Behaviour, FakeRuntime
from tests.nri_plugin.scenes import SHARES, RecordingHandler, container, options, pod, running
from tests.waiting import until


def test_a_socket_that_is_missing_at_the_start_is_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        supervisor = Supervisor(options(tmp_path), RecordingHandler())
        async with running(supervisor):
            await until(lambda: supervisor.statistics.dials >= 3)
            assert not supervisor.status.protects
            assert "does not exist" in supervisor.status.problem
            runtime = FakeRuntime(str(tmp_path / "nri.sock"), profiles.B)
            async with runtime.running():
                await runtime.synchronized()
                await until(lambda: supervisor.status.protects)
                assert supervisor.status.problem == ""

    uvloop.run(scenario())


def test_a_restarted_runtime_is_found_again_without_waiting_out_the_back_off(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        handler = RecordingHandler()
        supervisor = Supervisor(options(tmp_path, longest_backoff_s=3600.0), handler)
        runtime = FakeRuntime(str(tmp_path / "nri.sock"), profiles.B)
        async with running(supervisor):
            for restart in range(6):
                await runtime.start()
                await runtime.synchronized()
                await until(lambda: supervisor.status.protects)
                assert handler.methods().count("synchronize") == restart + 1
                await runtime.stop()
                await until(lambda: not supervisor.status.protects)
            assert handler.methods().count("disconnected") >= 5

    uvloop.run(scenario())


@pytest.mark.parametrize(
    "behaviour",
    [
        Behaviour(close_instead_of="register-reply"),
        Behaviour(close_instead_of="Configure"),
        Behaviour(close_instead_of="Synchronize"),
        Behaviour(cut_frame_of="Configure"),
        Behaviour(cut_frame_of="Synchronize"),
        Behaviour(never_accept=True),
    ],
    ids=lambda b: f"{b.close_instead_of or b.cut_frame_of or 'silent'}",
)
def test_a_runtime_that_dies_at_any_step_is_dialled_again(
    tmp_path: Path, behaviour: Behaviour
) -> None:
    async def scenario() -> None:
        runtime = FakeRuntime(str(tmp_path / "nri.sock"), profiles.B, behaviour)
        patience_s = 0.5 if behaviour.never_accept else 30.0
        supervisor = Supervisor(
            options(tmp_path, register_timeout_s=patience_s), RecordingHandler({SHARES: 3})
        )
        async with runtime.running(), running(supervisor):
            await runtime.wait(lambda: runtime.accepted >= 3)
            assert supervisor.statistics.state is not State.SYNCED
            runtime.behaviour = Behaviour()
            await runtime.wait(lambda: any(not active.trunk.closed for active in runtime.plugins))
            created = await runtime.create_container(container())
            assert created.adjust.linux.resources.cpu.shares.value == 3

    uvloop.run(scenario())


def test_a_frame_cut_by_the_runtimes_death_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        behaviour = Behaviour(cut_frame_of="Configure")
        runtime = FakeRuntime(str(tmp_path / "nri.sock"), profiles.B, behaviour)
        supervisor = Supervisor(options(tmp_path), RecordingHandler())
        async with runtime.running(), running(supervisor):
            await until(lambda: "middle of a frame" in supervisor.status.problem)

    uvloop.run(scenario())


def test_a_slow_registration_and_a_slow_synchronize_are_awaited(tmp_path: Path) -> None:
    async def scenario() -> None:
        behaviour = Behaviour(register_reply_after_s=0.5, synchronize_after_s=0.7)
        runtime = FakeRuntime(str(tmp_path / "nri.sock"), profiles.B, behaviour)
        supervisor = Supervisor(options(tmp_path), RecordingHandler())
        async with runtime.running(), running(supervisor):
            await until(lambda: supervisor.status.state is State.CONFIGURED)
            await runtime.synchronized()
            assert runtime.accepted == runtime.registrations == 1

    uvloop.run(scenario())


def test_a_runtime_that_never_configures_us_is_dialled_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        behaviour = Behaviour(never_configure=True)
        runtime = FakeRuntime(str(tmp_path / "nri.sock"), profiles.A, behaviour)
        supervisor = Supervisor(options(tmp_path, register_timeout_s=0.5), RecordingHandler())
        async with runtime.running(), running(supervisor):
            await until(lambda: "did not configure the plugin" in supervisor.status.problem)
            runtime.behaviour = Behaviour()
            await runtime.synchronized()

    uvloop.run(scenario())


def test_a_refused_identity_closes_the_connection_that_the_runtime_leaves_open(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        runtime = FakeRuntime(str(tmp_path / "nri.sock"), profiles.D)
        # A name that the product refuses by itself, put past its check.
        handler, given = RecordingHandler(), options(tmp_path)
        supervisor = Supervisor(given, handler, launch=Launch(-1, "", ""))
        supervisor._launch = None
        supervisor._options = options(tmp_path, name="nri/nri.sock")
        async with runtime.running(), running(supervisor):
            await runtime.wait(lambda: runtime.accepted >= 2)
            assert runtime.failures[0] == 'invalid plugin name: "nri/nri.sock"'
            assert "invalid plugin name" in supervisor.status.problem

    uvloop.run(scenario())


def test_two_daemons_never_both_register(tmp_path: Path) -> None:
    async def scenario() -> None:
        runtime = FakeRuntime(str(tmp_path / "nri.sock"), profiles.B)
        first = Supervisor(options(tmp_path), RecordingHandler())
        second = Supervisor(options(tmp_path), RecordingHandler())
        async with runtime.running():
            async with running(first):
                await runtime.synchronized()
                async with running(second):
                    await until(lambda: "holds" in second.status.problem)
                    assert str(os.getpid()) in second.status.problem
                    assert runtime.accepted == 1
                    first.stop()
                    await until(lambda: second.status.protects)
            assert runtime.accepted == 2

    uvloop.run(scenario())


def test_daemons_with_run_directories_of_their_own_never_both_register(tmp_path: Path) -> None:
    async def scenario() -> None:
        runtime = FakeRuntime(str(tmp_path / "nri.sock"), profiles.B)
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        first = Supervisor(options(tmp_path, run_dir=str(tmp_path / "one")), RecordingHandler())
        second = Supervisor(options(tmp_path, run_dir=str(tmp_path / "two")), RecordingHandler())
        async with runtime.running():
            async with running(first):
                await runtime.synchronized()
                async with running(second):
                    await until(lambda: f"holds {tmp_path}" in second.status.problem)
                    assert f"process {os.getpid()} " in second.status.problem
                    assert runtime.accepted == 1
                    first.stop()
                    await until(lambda: second.status.protects)
            assert runtime.accepted == 2

    uvloop.run(scenario())


def test_the_lock_file_is_private_and_follows_no_link(tmp_path: Path) -> None:
    path = str(tmp_path / LOCK_FILE)
    with node_lock(path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with pytest.raises(LockHeld), node_lock(path):
            pass
    os.unlink(path)
    os.symlink(tmp_path / "elsewhere", path)
    with pytest.raises(OSError, match="symbolic links"), node_lock(path):
        pass


def test_a_full_disk_does_not_keep_a_daemon_from_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    path = str(tmp_path / LOCK_FILE)
    held = pytest.raises(LockHeld, match="another process holds")
    with node_lock(path), held, node_lock(path):
        pass


def test_a_run_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        given = options(tmp_path, run_dir=str(tmp_path / "gone"))
        supervisor = Supervisor(given, RecordingHandler())
        async with running(supervisor):
            await until(lambda: "gone/nri.lock" in supervisor.status.problem)

    uvloop.run(scenario())


def test_connected_and_unprotected_time_add_up() -> None:
    now = [100.0]
    statistics = Statistics(clock=lambda: now[0])
    for state, seconds in (
        (State.DIALING, 1.0),
        (State.SYNCED, 10.0),
        (State.DISCONNECTED, 4.0),
        (State.SYNCED, 5.0),
    ):
        statistics.enter(state)
        now[0] += seconds
    assert statistics.connected_s == 15.0
    assert statistics.unprotected_s == 5.0
    assert statistics.in_state_s == 5.0


def test_hook_latency_is_counted_in_buckets() -> None:
    statistics = Statistics()
    for seconds in (0.00001, 0.0003, 9.0):
        statistics.observe("CreateContainer", seconds)
    histogram = statistics.hook_latency["CreateContainer"]
    assert histogram.count == sum(histogram.counts) == 3
    assert histogram.counts[0] == histogram.counts[-1] == 1
    assert histogram.largest == 9.0


def session(
    handler: RecordingHandler,
    statistics: Statistics,
    policy: FailurePolicy = FailurePolicy.IGNORE,
) -> Session:
    return Session(
        handler=handler,
        options=Options(run_dir="/nowhere", failure_policy=policy),
        statistics=statistics,
        inventory=Inventory(),
        entered=lambda state: None,
        broken=lambda reason: None,
    )


def event(kind: nri.Event) -> Call:
    message = nri.StateChangeEvent(event=kind, pod=pod(), container=container())
    return Call(1, PLUGIN, "StateChange", message.SerializeToString(), 0)


def test_the_handler_gets_an_event_once_its_reply_is_written() -> None:
    handler, statistics = RecordingHandler(), Statistics()
    serving = session(handler, statistics)
    for kind in (nri.RUN_POD_SANDBOX, nri.POST_START_CONTAINER, nri.REMOVE_CONTAINER):
        told = len(handler.told)
        assert serving.serve(event(kind)) == b""
        assert len(handler.told) == told
        serving.reply_written()
        assert len(handler.told) == told + 1
        serving.reply_written()
        assert len(handler.told) == told + 1
    assert statistics.hook_latency["StateChange"].count == 3


def test_an_event_that_the_handler_fails_at_is_counted_and_spoils_no_other() -> None:
    handler, statistics = RecordingHandler(), Statistics()
    serving = session(handler, statistics)

    def fail(method: str) -> None:
        raise RuntimeError(method)

    handler.disturb = fail
    serving.serve(event(nri.STOP_CONTAINER))
    serving.reply_written()
    assert statistics.handler_faults == 1
    handler.disturb = lambda method: None
    serving.serve(event(nri.REMOVE_CONTAINER))
    serving.reply_written()
    assert handler.methods()[-1] == "remove_container"
    assert statistics.handler_faults == 1


def test_a_sandbox_that_must_not_run_without_its_values_waits_for_the_handler() -> None:
    handler = RecordingHandler()
    strict = session(handler, Statistics(), FailurePolicy.FAIL)
    strict.serve(event(nri.RUN_POD_SANDBOX))
    assert handler.methods() == ["run_sandbox"]
    strict.reply_written()
    assert handler.methods() == ["run_sandbox"]
    strict.serve(event(nri.STOP_POD_SANDBOX))
    assert handler.methods() == ["run_sandbox"]


def test_a_refusal_is_a_reply_like_all_others_to_the_handler() -> None:
    handler = RecordingHandler()
    serving = session(handler, Statistics())

    def refuse(method: str) -> None:
        raise Refused("no such GPU")

    handler.disturb = refuse
    request = nri.CreateContainerRequest(container=container()).SerializeToString()
    with pytest.raises(RpcError, match="no such GPU"):
        serving.serve(Call(1, PLUGIN, "CreateContainer", request, 0))
    serving.reply_written()
    assert handler.replies == 1


def test_a_superseded_connection_answers_with_nothing() -> None:
    statistics = Statistics()
    old = session(RecordingHandler({SHARES: 9}), statistics)
    request = nri.CreateContainerRequest(container=container()).SerializeToString()
    assert old.serve(Call(1, PLUGIN, "CreateContainer", request, 0))
    old.retire()
    assert old.serve(Call(3, PLUGIN, "CreateContainer", request, 0)) == b""
    assert statistics.missed[Missed.SUPERSEDED] == 1
    with pytest.raises(RpcError, match="given up"):
        old.serve(Call(5, PLUGIN, "Configure", b"", 0))


@pytest.mark.parametrize(
    ("service", "method", "text"),
    [
        ("nri.pkg.api.v1alpha1.Runtime", "CreateContainer", "service nri.pkg.api.v1alpha1.Runtime"),
        (PLUGIN, "Brew", "method Brew"),
        (PLUGIN, "", "method "),
    ],
)
def test_what_is_not_served_is_unimplemented(service: str, method: str, text: str) -> None:
    with pytest.raises(RpcError) as failed:
        session(RecordingHandler(), Statistics()).serve(Call(1, service, method, b"", 0))
    assert (failed.value.code, failed.value.message) == (Code.UNIMPLEMENTED, text)


def test_a_payload_that_does_not_parse_is_an_internal_error() -> None:
    with pytest.raises(RpcError) as failed:
        session(RecordingHandler(), Statistics()).serve(
            Call(1, PLUGIN, "CreateContainer", b"\xff\xff", 0)
        )
    assert failed.value.code == Code.INTERNAL


@given(failures=st.integers(0, 10**6), chance=st.floats(0, 1))
def test_the_back_off_grows_and_stays_within_its_bounds(failures: int, chance: float) -> None:
    delay = back_off_s(failures, 1.0, 30.0, chance)
    assert 1.0 <= delay <= 30.0
    assert back_off_s(failures + 1, 1.0, 30.0, chance) >= delay


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", ""), ("name", "nri/nri.sock"), ("name", "a b"), ("index", "0"), ("index", "٠١")],
)
def test_an_identity_that_a_runtime_would_refuse_is_refused_here(field: str, value: str) -> None:
    given_options = Options(run_dir="/x", **{field: value})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=field):
        given_options.checked()


def test_how_a_runtime_launches_a_plugin() -> None:
    assert launch_of({}) is None
    environment = {"NRI_PLUGIN_SOCKET": "3", "NRI_PLUGIN_NAME": "n", "NRI_PLUGIN_IDX": "42"}
    assert launch_of(environment) == Launch(3, "n", "42")
    with pytest.raises(InputError, match="NRI_PLUGIN_SOCKET"):
        launch_of({"NRI_PLUGIN_SOCKET": "/run/x"})
