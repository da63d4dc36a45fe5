"""What is written about ElasticQuotas: statuses, the built-in quotas, and evictions in overuse."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from apis.meta import ObjectReference
from apis.quantity import Quantity
from apis.quota import ElasticQuota, decode_elastic_quota
from cluster.scheduler.binding.events import Event
from cluster.scheduler.binding.quota_statuses import QuotaStatuses, built_in_maxima
from cluster.scheduler.binding.quota_upkeep import QuotaUpkeep
from cluster.scheduler.configuration.koordinator_arguments import ElasticQuotaArgs
from cluster.scheduler.plugins.quotas.overuse import Revoked
from kube.cache import Change
from kube.cache import Event as Seen
from kube.client import ApiError
from kube.resources import ELASTIC_QUOTAS, PODS
from tests.cluster.fake_api import FakeApi, in_virtual_time
from tests.cluster.scheduler.quotas.making import Bed as Quotas

_KEY = "team/a"
_ROOT, _DEFAULT, _SYSTEM = (
    f"koordinator-{each}-quota" for each in ("root", "default", "system")
)  # fmt: skip
_PREFIX = "quota.scheduling.koordinator.sh/"


class _Bed:
    """A quota, team/a, of which a pod uses 3 CPUs, in an API server."""

    def __init__(self) -> None:
        self.api = FakeApi()
        self.quotas: dict[str, ElasticQuota] = {}
        self.table = Quotas("10")
        self.table.quota("a", {"cpu": "2"}, {"cpu": "6"})
        self.table.place("1", "a", "3")
        self.put("team", "a")
        self.took: list[float] = []
        self.statuses = QuotaStatuses(
            self.api.client(),
            self.table.table,
            self.quotas,
            namespace="koordinator-system",
            built_in=built_in_maxima({"cpu": Quantity.of(7)}, {}),
            observe=self.took.append,
        )

    def put(self, namespace: str, name: str) -> None:
        stored = self.api.put(
            ELASTIC_QUOTAS, {"metadata": {"namespace": namespace, "name": name}, "spec": {}}
        )
        self.show(f"{namespace}/{name}", stored)

    def show(self, key: str, stored: Mapping[str, Any]) -> None:
        old = self.quotas.get(key)
        self.quotas[key] = new = decode_elastic_quota(msgspec.json.encode(stored))
        if old is not None:
            self.statuses.seen(Seen(Change.MODIFIED, old, new))

    @property
    def path(self) -> str:
        return ELASTIC_QUOTAS.path(namespace="team", name="a")

    @property
    def stored(self) -> dict[str, Any]:
        return self.api.objects[self.path]

    def write(self, key: str = _KEY) -> list[tuple[str, str, Any]]:
        """Write one status; return the requests."""
        before = len(self.api.writes)
        in_virtual_time(lambda: self.statuses.write(key))
        return self.api.writes[before:]


def test_a_status_is_one_patch_of_this_very_quota_and_not_repeated() -> None:
    bed = _Bed()
    figures = {"child-request": {"cpu": "3"}, "request": {"cpu": "3"}, "runtime": {"cpu": "3"}}
    ((method, path, body),) = bed.write()
    assert (method, path) == ("PATCH", bed.path)
    assert body["metadata"]["uid"] == bed.stored["metadata"]["uid"]
    assert body["status"] == {"used": {"cpu": "3"}}
    shown = bed.stored["metadata"]["annotations"]
    assert {key: msgspec.json.decode(text) for key, text in shown.items()} == {
        _PREFIX + key: amounts for key, amounts in figures.items()
    }
    # The watch has not shown the write yet: the answer to it counts.
    assert bed.write() == []
    assert (bed.statuses.written, len(bed.took)) == (1, 1)
    assert all(0 <= each < 60 for each in bed.took)


def test_a_resource_that_is_used_no_more_is_removed_from_the_status() -> None:
    bed = _Bed()
    stored = bed.api.put(
        ELASTIC_QUOTAS,
        {
            "metadata": {"namespace": "team", "name": "a"},
            "status": {"used": {"cpu": "1", "memory": "1Gi"}},
        },
    )
    bed.show(_KEY, stored)
    ((_, _, body),) = bed.write()
    assert body["status"] == {"used": {"cpu": "3", "memory": None}}


@pytest.mark.parametrize("namespace", ["team", "other"])
def test_a_quota_that_is_gone_or_does_not_count_is_not_written(namespace: str) -> None:
    bed = _Bed()
    bed.quotas.pop(_KEY)
    if namespace == "other":
        # The name is that of a quota in another namespace.
        bed.put("other", "a")
    assert bed.write(f"{namespace}/a") == []
    bed.put("team", "unknown")
    assert bed.write("team/unknown") == []


@pytest.mark.parametrize(
    ("code", "message", "raised"),
    [
        (404, "", False),
        (422, "metadata.uid: immutable", False),
        (422, "spec", True),
        (503, "", True),
    ],
)
def test_a_write_about_a_quota_that_was_deleted_is_dropped_and_another_is_tried_again(
    code: int, message: str, raised: bool
) -> None:
    bed = _Bed()

    async def refuse(method: str, path: str, data: bytes | None) -> dict[str, Any]:
        raise ApiError(status=code, reason="NotFound" if code == 404 else "", message=message,
                       what=path)  # fmt: skip

    bed.api.handle = refuse  # type: ignore[method-assign]
    if raised:
        with pytest.raises(ApiError):
            bed.write()
    else:
        assert bed.write() == []
    assert (bed.statuses.written, bed.took) == (0, [])


def _created(bed: _Bed, seconds: float, *, afterwards: float = 0.0) -> dict[str, dict[str, Any]]:
    """Return the built-in quotas that are stored after some seconds, by name."""

    async def run() -> None:
        task = asyncio.create_task(bed.statuses.run())
        await asyncio.sleep(seconds)
        bed.api.refuse.clear()
        await asyncio.sleep(afterwards)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])

    in_virtual_time(run)
    place = ELASTIC_QUOTAS.path(namespace="koordinator-system")
    return {each["metadata"]["name"]: each for each in bed.api.collection(place)}


def test_the_built_in_quotas_are_created_with_what_the_arguments_say() -> None:
    found = _created(_Bed(), 5)
    assert found.keys() == {_ROOT, _DEFAULT, _SYSTEM}
    assert {name: each["spec"] for name, each in found.items()} == {
        _ROOT: {"max": {}},
        _DEFAULT: {"max": {"cpu": "7"}},
        _SYSTEM: {"max": {}},
    }
    assert {name: each["metadata"]["labels"] for name, each in found.items()} == {
        _ROOT: {
            _PREFIX + "is-parent": "true",
            _PREFIX + "allow-lent-resource": "false",
            _PREFIX + "parent": "",
        },
        _DEFAULT: {},
        _SYSTEM: {},
    }


@pytest.mark.parametrize(("code", "again"), [(409, 0), (404, 1)])
def test_a_built_in_quota_that_cannot_be_created_is_tried_again_after_half_a_minute(
    caplog: pytest.LogCaptureFixture, code: int, again: int
) -> None:
    bed = _Bed()
    place = ELASTIC_QUOTAS.path(namespace="koordinator-system")
    if code == 409:
        # Another process made it; the watch has not shown that yet.
        bed.api.put(
            ELASTIC_QUOTAS, {"metadata": {"namespace": "koordinator-system", "name": _ROOT}}
        )
    else:
        bed.api.refuse[place] = 404
    _created(bed, 29)
    assert ("is not created yet" in caplog.text) == bool(again)
    assert len([1 for method, path, _ in bed.api.writes if method == "POST"]) == 3
    bed = _Bed()
    bed.api.refuse[place] = 404
    assert _created(bed, 29, afterwards=2).keys() == {_ROOT, _DEFAULT, _SYSTEM}


def _upkeep(api: FakeApi, events: list[Event]) -> QuotaUpkeep:
    return QuotaUpkeep(
        api.client(),
        Quotas().table,
        {},
        ElasticQuotaArgs(monitor_all_quotas=True),
        record=events.append,
        observe=lambda seconds: None,
    )


def test_pods_of_a_quota_in_overuse_are_evicted_and_have_an_event_that_says_why() -> None:
    api, events, quotas = FakeApi(), list[Event](), Quotas()
    bookings = tuple(quotas.place(uid, "a", "3") for uid in ("1", "2", "gone"))
    evicted: list[dict[str, Any]] = []

    async def handle(method: str, path: str, data: bytes | None) -> dict[str, Any]:
        if method == "GET":
            resource = {"name": "pods/eviction", "kind": "Eviction", "namespaced": True}
            return {"resources": [{**resource, "group": "policy", "version": "v1"}]}
        body = msgspec.json.decode(data or b"")
        name = body["metadata"]["name"]
        assert path == PODS.path(namespace="default", name=name, subresource="eviction")
        evicted.append(body)
        code = {"1": 429, "gone": 404}.get(name)
        if code is not None:
            reason = "NotFound" if code == 404 else "TooManyRequests"
            raise ApiError(status=code, reason=reason, message="a budget", what=path)
        return {}

    api.handle = handle  # type: ignore[method-assign]
    upkeep = _upkeep(api, events)
    revoked = Revoked("a", bookings, {"cpu": 9000}, {"cpu": 6000})
    in_virtual_time(lambda: upkeep.revoke(revoked))
    assert [each["deleteOptions"] for each in evicted] == [
        {"preconditions": {"uid": uid}} for uid in ("1", "2", "gone")
    ]
    # The first is protected by a budget; the last is gone, as it should be.
    assert upkeep.evicted == 2
    assert events[0] == Event(
        about=ObjectReference(api_version="v1", kind="Pod", namespace="default", name="2", uid="2"),
        kind="Warning",
        reason="QuotaOverused",
        action="Evicting",
        note="Evicted: quota a uses cpu:9, and its runtime is cpu:6",
        controller=bookings[1].shape.scheduler_name,
    )
    assert [each.about.name for each in events] == ["2", "gone"]


def test_what_the_monitor_revokes_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    upkeep = _upkeep(FakeApi(), [])
    assert upkeep.monitor is not None
    due = [Revoked(name, (), {}, {}) for name in ("a", "b")]
    taken: list[str] = []

    async def revoke(revoked: Revoked) -> None:
        taken.append(revoked.quota)

    monkeypatch.setattr(type(upkeep.monitor), "look", lambda monitor, now: [due.pop()])
    monkeypatch.setattr(upkeep, "revoke", revoke)

    async def run() -> None:
        task = asyncio.create_task(upkeep.run())
        await asyncio.sleep(1.5)
        task.cancel()
        await asyncio.wait([task])

    in_virtual_time(run)
    assert taken == ["b", "a"]
