"""The node's store ends in one state whatever way events come."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hooks.observed import Container, ContainerState, Sandbox
from hooks.subject import QosSubject
from koordlet.state import NodeState
from tests.koordlet.builders import (
    LAYOUT,
    container,
    runtime_pod,
    sandbox,
)
from tests.koordlet.state.states import subjects

Event = tuple[str, str]
PODS = {uid: runtime_pod(uid, qos=qos) for uid, qos in (("u1", "burstable"), ("u2", ""))}
SANDBOXES = {"s1": "u1", "s2": "u1", "s3": "u2"}
CONTAINERS = {"c1": "s1", "c2": "s1", "c3": "s2", "c4": "s3"}


def deliver(state: NodeState, event: Event) -> None:
    verb, id_ = event
    if id_ in SANDBOXES:
        made = sandbox(PODS[SANDBOXES[id_]], id_)
        match verb:
            case "start":
                state.run_sandbox(made)
            case "stop":
                state.stop_sandbox(id_)
            case "remove":
                state.remove_sandbox(id_)
        return
    state_told = ContainerState.UNKNOWN if verb == "create" else ContainerState.RUNNING
    one = container(PODS[SANDBOXES[CONTAINERS[id_]]], id_, CONTAINERS[id_], state=state_told)
    match verb:
        case "create":
            state.create_container(one)
        case "start":
            state.start_container(one)
        case "stop" | "remove":
            state.remove_container(id_)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Event], list[Sandbox], list[Container]]:
    """What really happened on the node, in order, and what is there at the end."""
    events: list[Event] = []
    sandboxes: list[Sandbox] = []
    containers: list[Container] = []
    for sandbox_id, uid in SANDBOXES.items():
        end = draw(st.sampled_from(["absent", "running", "stopped", "removed"]))
        if end == "absent":
            continue
        events.append(("start", sandbox_id))
        for container_id in (c for c, s in CONTAINERS.items() if s == sandbox_id):
            fate = draw(st.sampled_from(["absent", "created", "running", "stopped", "removed"]))
            if fate == "absent":
                continue
            if end != "running" and fate in ("created", "running"):
                fate = "removed"
            steps = ["create", "start", "stop", "remove"]
            last = {"created": 1, "running": 2, "stopped": 3, "removed": 4}[fate]
            events += [(verb, container_id) for verb in steps[:last]]
            if fate in ("created", "running"):
                state = ContainerState.CREATED if fate == "created" else ContainerState.RUNNING
                containers.append(container(PODS[uid], container_id, sandbox_id, state=state))
        if end in ("stopped", "removed"):
            events.append(("stop", sandbox_id))
        if end == "removed":
            events.append(("remove", sandbox_id))
        else:
            sandboxes.append(sandbox(PODS[uid], sandbox_id, pid=0 if end == "stopped" else 7))
    return events, sandboxes, containers


def picture(state: NodeState) -> dict[str, Any]:
    """What a reader sees, without its order and without earlier requests."""
    return {
        key: sorted(pod.uid for pod in subject.pods)
        if isinstance(subject, QosSubject)
        else subject.cgroup
        for key, subject in subjects(state).items()
    }


@given(histories(), st.data())
@settings(max_examples=150, deadline=None)
def test_any_events_and_then_a_full_list_give_the_listed_state(
    history: tuple[list[Event], list[Sandbox], list[Container]], data: st.DataObject
) -> None:
    events, sandboxes, containers = history
    heard = data.draw(st.lists(st.sampled_from(events), max_size=40)) if events else []
    state = NodeState(layout=LAYOUT)
    for event in heard:
        deliver(state, event)
    state.runtime_list(sandboxes, containers)
    fresh = NodeState(layout=LAYOUT)
    fresh.runtime_list(sandboxes, containers)
    assert picture(state) == picture(fresh)
    assert state.counts == fresh.counts


@given(histories(), st.data())
@settings(max_examples=150, deadline=None)
def test_all_events_in_any_order_with_repeats_give_the_listed_state(
    history: tuple[list[Event], list[Sandbox], list[Container]], data: st.DataObject
) -> None:
    events, sandboxes, containers = history
    repeats = data.draw(st.lists(st.sampled_from(events), max_size=10)) if events else []
    heard = data.draw(st.permutations([*events, *repeats]))
    state = NodeState(layout=LAYOUT)
    for event in heard:
        deliver(state, event)
    listed = NodeState(layout=LAYOUT)
    listed.runtime_list(sandboxes, containers)
    assert picture(state) == picture(listed)
