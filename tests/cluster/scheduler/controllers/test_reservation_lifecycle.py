"""When a Reservation ends, what its status says, and when it is deleted."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.decode import json_decoder
from apis.meta import ObjectReference, format_time
from apis.quantity import parse_quantity
from apis.scheduling import Reservation
from cluster.scheduler.controllers.reservation_lifecycle import (
    Delete,
    Keep,
    Owner,
    Step,
    Write,
    expires_at,
    next_step,
)
from tests.cluster.fake_api import merged

BORN = 1_800_000_000.0
HOUR = 3600.0
_decode = json_decoder(Reservation)


def at(seconds: float) -> str:
    return format_time(datetime.fromtimestamp(seconds, UTC))


def plain(spec: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "r", "uid": "u", "creationTimestamp": at(BORN)},
        "spec": {"template": {}, "owners": [{}], "ttl": "24h", **(spec or {})},
        "status": status,
    }


def available(**status: Any) -> dict[str, Any]:
    return {"phase": "Available", "nodeName": "n", "allocatable": {"cpu": "4"}, **status}


def read(obj: dict[str, Any]) -> Reservation:
    return _decode(msgspec.json.encode(obj))


def owner(name: str, cpu: str = "1", memory: str = "1Gi") -> Owner:
    reference = ObjectReference(namespace="default", name=name, uid=f"uid-{name}")
    return Owner(reference, {"cpu": parse_quantity(cpu), "memory": parse_quantity(memory)})


def step(
    obj: dict[str, Any],
    *owners: Owner,
    after: float = 0.0,
    node_exists: bool = True,
    collect_after_s: float | None = 24 * HOUR,
    pending_expire: bool = True,
) -> Step:
    return next_step(
        read(obj),
        owners=owners,
        node_exists=node_exists,
        now=BORN + after,
        collect_after_s=collect_after_s,
        pending_expire=pending_expire,
    )


@pytest.mark.parametrize(
    ("spec", "hours"),
    [
        ({}, 24),
        ({"ttl": "30m"}, 0.5),
        ({"ttl": "0s"}, None),
        ({"ttl": "0s", "expires": at(BORN + 2 * HOUR)}, 2),
        ({"ttl": "1h", "expires": at(BORN + 2 * HOUR)}, 1),
        ({"ttl": "4h", "expires": at(BORN + 2 * HOUR)}, 2),
        ({"ttl": None, "expires": at(BORN + 2 * HOUR)}, 2),
        ({"ttl": None}, None),
        ({"ttl": "soon"}, None),
        ({"ttl": "1h", "expires": "tomorrow"}, 1),
        ({"ttl": "-1h"}, -1),
    ],
)
def test_the_earlier_of_ttl_and_expires_counts(spec: dict[str, Any], hours: float | None) -> None:
    found = expires_at(read(plain(spec)))
    assert found == (None if hours is None else BORN + hours * HOUR)


@pytest.mark.parametrize("status", [{"phase": "Pending"}, {}, available()])
def test_an_expired_reservation_fails_whether_it_has_a_node_or_not(status: dict[str, Any]) -> None:
    scheduled = {"type": "Scheduled", "status": "True"}
    obj = plain({"ttl": "1h"}, **status, conditions=[scheduled, {"type": "Ready"}])
    assert step(obj, after=HOUR - 1) == Keep(BORN + HOUR)
    found = step(obj, after=HOUR)
    assert isinstance(found, Write)
    assert found.status == {
        "phase": "Failed",
        "conditions": [
            scheduled,
            {
                "type": "Ready",
                "status": "False",
                "reason": "Expired",
                "message": "The time of the reservation is over.",
                "lastProbeTime": at(BORN + HOUR),
                "lastTransitionTime": at(BORN + HOUR),
            },
        ],
    }


def test_a_reservation_without_a_node_waits_for_ever_where_that_is_wanted() -> None:
    spec = {"ttl": "1h", "expires": at(BORN + 2 * HOUR)}
    for status in ({"phase": "Pending"}, {}):
        assert step(plain(spec, **status), after=9 * HOUR, pending_expire=False) == Keep(None)
    found = step(plain(spec, **available()), after=HOUR, pending_expire=False)
    assert isinstance(found, Write)
    assert found.status["phase"] == "Failed"


def test_a_reservation_fails_with_its_node() -> None:
    found = step(plain(**available()), node_exists=False)
    assert isinstance(found, Write)
    assert found.status["phase"] == "Failed"
    assert found.why == "Node n does not exist any more."
    assert step(plain(phase="Pending"), node_exists=True) == Keep(BORN + 24 * HOUR)


def test_the_only_owner_makes_it_succeed() -> None:
    found = step(plain(**available()), owner("web", cpu="3"))
    assert isinstance(found, Write)
    assert found.status["phase"] == "Succeeded"
    assert found.status["conditions"][-1]["reason"] == "Succeeded"
    assert found.status["currentOwners"] == [
        {"namespace": "default", "name": "web", "uid": "uid-web"}
    ]
    assert found.status["allocated"] == {"cpu": "3"}
    assert step(plain(**available())) == Keep(BORN + 24 * HOUR)


def test_the_status_of_a_shared_reservation_follows_its_owners_with_minimal_patches() -> None:
    obj = plain({"allocateOnce": False}, **available())

    def write(*owners: Owner) -> Any:
        found = step(obj, *owners)
        if isinstance(found, Keep):
            return None
        assert isinstance(found, Write)
        obj["status"] = merged(obj["status"], found.status)
        return dict(found.status)

    assert write(owner("b"), owner("a")) == {
        "currentOwners": [
            {"namespace": "default", "name": "a", "uid": "uid-a"},
            {"namespace": "default", "name": "b", "uid": "uid-b"},
        ],
        "allocated": {"cpu": "2"},
    }
    assert write(owner("a"), owner("b")) is None
    assert write(owner("a"), owner("b", cpu="2")) == {"allocated": {"cpu": "3"}}
    assert write() == {"currentOwners": None, "allocated": {"cpu": None}}
    assert write() is None
    assert obj["status"] == {**available(), "allocated": {}}


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
@pytest.mark.parametrize(
    ("ready", "since"),
    [
        ({"lastTransitionTime": at(BORN + HOUR), "lastProbeTime": at(BORN + 3 * HOUR)}, 1),
        ({"lastProbeTime": at(BORN + 3 * HOUR)}, 3),
        ({}, 0),
    ],
)
def test_an_ended_one_is_deleted_after_a_while(
    phase: str, ready: dict[str, Any], since: int
) -> None:
    condition = {"type": "Ready", "status": "False", **ready}
    obj = plain(phase=phase, nodeName="n", conditions=[condition])
    end = (since + 24) * HOUR
    assert step(obj, after=end - 1) == Keep(BORN + end)
    assert isinstance(step(obj, after=end), Delete)
    assert step(obj, after=end, collect_after_s=None) == Keep(None)
    assert step(obj, after=0, node_exists=False) == Keep(BORN + end)
    obj["metadata"]["deletionTimestamp"] = at(BORN)
    assert step(obj, after=end) == Keep(None)


_OWNERS = st.lists(
    st.builds(owner, st.sampled_from("abc"), st.sampled_from(["1", "500m", "0"])),
    unique_by=lambda each: each.reference.name,
    max_size=3,
)


@given(
    times=st.lists(st.tuples(st.floats(0, 90 * HOUR), _OWNERS, st.booleans()), max_size=8),
    once=st.booleans(),
    ttl=st.sampled_from(["0s", "1h", "24h"]),
)
def test_every_life_ends_once_and_a_second_look_changes_nothing(
    times: list[tuple[float, list[Owner], bool]], once: bool, ttl: str
) -> None:
    obj = plain({"allocateOnce": once, "ttl": ttl}, **available())
    ended = ""
    for after, owners, node_exists in sorted(times, key=lambda each: each[0]):
        for look in range(3):
            found = step(obj, *owners, after=after, node_exists=node_exists)
            if not isinstance(found, Write):
                break
            assert look == 0, "what was written is written again"
            assert not ended, "an ended reservation changes"
            obj["status"] = merged(obj["status"], found.status)
            ended = found.status.get("phase", "")
        if isinstance(found, Delete):
            assert ended
            return
        assert isinstance(found, Keep)
        if not ended:
            assert found.until is None or found.until > BORN + after
            names = {each["name"] for each in obj["status"].get("currentOwners", [])}
            assert names == {each.reference.name for each in owners}
