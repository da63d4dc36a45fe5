"""A node's state with a running container, and its subjects."""

from __future__ import annotations

from hooks.engine import Engine
from hooks.facts import NodeInputs
from hooks.subject import ContainerSubject, Requested, Subject
from koordlet.state import NodeState
from tests.koordlet.builders import (
    container,
    runtime_pod,
    sandbox,
)

ENGINE = Engine(NodeInputs(), (), 1)
REQUESTED = Requested(cpu_shares=512, cfs_quota_us=50_000, memory_limit_bytes=1 << 30)


def subjects(state: NodeState) -> dict[str, Subject]:
    return {subject.key: subject for subject in state.snapshot(ENGINE).subjects}


def the_container(state: NodeState, id_: str) -> ContainerSubject:
    found = subjects(state)[f"container/{id_}"]
    assert isinstance(found, ContainerSubject)
    return found


def running(state: NodeState, *, requested: Requested = REQUESTED) -> None:
    pod = runtime_pod("u1")
    state.run_sandbox(sandbox(pod, "s1"))
    state.create_container(container(pod, "c1", "s1", requested=requested))
    state.start_container(container(pod, "c1", "s1"))
