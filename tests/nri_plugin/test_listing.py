"""The runtime's list within its deadline, whatever the clock does."""

from __future__ import annotations

from collections.abc import Callable

from linux.resources import Resource
from nri_plugin.options import Options
from nri_plugin.session import PLUGIN, Inventory, Session
from nri_plugin.statistics import State, Statistics
from nri_plugin.ttrpc import Call
from protos.nri.v1alpha1 import nri_pb2 as nri
from tests.nri_plugin.scenes import SHARES, RecordingHandler, Values, container, pod

COUNT = 500
TIMEOUT_S = 2.0
GPU = (Resource.ENV, "GPU")


class Machine:
    """A session on a machine so slow that `step_s` passes whenever it looks at the clock."""

    def __init__(self, step_s: float, wanted: Values | None = None) -> None:
        self.now = 1000.0
        self.step_s = step_s
        self.later: list[Callable[[], None]] = []
        self.states: list[State] = []
        self.handler = RecordingHandler(wanted or {SHARES: 1024})
        self.statistics = Statistics()
        self.session = Session(
            handler=self.handler,
            options=Options(run_dir="/nowhere", max_synchronize_updates=COUNT),
            statistics=self.statistics,
            inventory=Inventory(),
            entered=self.states.append,
            broken=lambda reason: None,
            later=self.later.append,
            clock=self.clock,
        )

    def clock(self) -> float:
        self.now += self.step_s
        return self.now

    def list(
        self, first: int = 0, end: int = COUNT, *, more: bool = False
    ) -> nri.SynchronizeResponse:
        request = nri.SynchronizeRequest(
            pods=[pod()], containers=[container(f"c{n}") for n in range(first, end)], more=more
        )
        payload = self.session.serve(
            Call(1, PLUGIN, "Synchronize", request.SerializeToString(), int(TIMEOUT_S * 1e9))
        )
        return nri.SynchronizeResponse.FromString(payload)

    def create(self, container_id: str) -> nri.CreateContainerResponse:
        request = nri.CreateContainerRequest(pod=pod(), container=container(container_id))
        payload = self.session.serve(
            Call(3, PLUGIN, "CreateContainer", request.SerializeToString(), 0)
        )
        return nri.CreateContainerResponse.FromString(payload)

    def finish(self) -> int:
        turns = 0
        while self.later:
            self.later.pop(0)()
            turns += 1
        return turns


def test_with_time_the_reply_has_all_updates_and_nothing_is_left() -> None:
    machine = Machine(step_s=0.0)
    assert len(machine.list().update) == COUNT
    assert machine.later == []
    assert machine.handler.taken_at == [None]
    assert machine.statistics.truncated_synchronizations == 0


def test_a_list_that_cannot_be_converted_in_time_is_answered_and_taken_afterwards() -> None:
    machine = Machine(step_s=0.01)
    before = machine.now
    assert not machine.list().update
    assert machine.now - before < TIMEOUT_S
    assert machine.states == [State.SYNCED]
    assert machine.handler.methods() == []
    assert machine.statistics.truncated_synchronizations == 1

    machine.step_s = 0.0005
    assert machine.finish() > COUNT / 10
    assert len(machine.handler.containers) == COUNT
    assert machine.handler.taken_at == [0]
    assert machine.statistics.updates == 0


def test_a_request_is_served_while_the_rest_of_the_list_waits() -> None:
    machine = Machine(step_s=0.01)
    machine.list()
    machine.later.pop(0)()
    created = machine.create("new")
    assert created.adjust.linux.resources.cpu.shares.value == 1024
    machine.finish()
    assert machine.handler.methods() == ["create_container", "synchronize"]
    # The mark is older than the creation: the handler keeps the container that the list lacks.
    assert machine.handler.taken_at == [0]
    assert machine.statistics.created_while_away == 0
    machine.list(0, COUNT)
    assert machine.statistics.created_while_away == 0


def test_decisions_that_come_too_late_are_left_out_and_what_all_lack_is_reported() -> None:
    machine = Machine(step_s=0.0, wanted={SHARES: 1024, GPU: "1"})
    machine.handler.disturb = lambda method: setattr(machine, "step_s", 0.01)
    before = machine.now
    made = len(machine.list().update)
    assert 50 < made < COUNT
    assert machine.now - before < TIMEOUT_S
    machine.step_s = 0.0
    machine.finish()
    assert len(machine.handler.lacking) == COUNT
    assert machine.statistics.updates == made
    assert machine.handler.taken_at == [None]


def test_all_slices_share_the_deadline_of_the_first() -> None:
    machine = Machine(step_s=0.0)
    assert machine.list(0, 100, more=True).more
    machine.now += 1.9
    assert not machine.list(100, COUNT).update
    machine.finish()
    assert len(machine.handler.containers) == COUNT


def test_the_rest_of_a_list_ends_with_its_connection() -> None:
    machine = Machine(step_s=0.01)
    machine.list()
    machine.session.retire()
    machine.finish()
    assert machine.handler.methods() == []


def test_a_newer_list_ends_the_rest_of_the_older() -> None:
    machine = Machine(step_s=0.01)
    machine.list(0, COUNT)
    machine.step_s = 0.0
    machine.list(0, 10)
    machine.finish()
    assert machine.handler.methods() == ["synchronize"]
    assert len(machine.handler.containers) == 10
