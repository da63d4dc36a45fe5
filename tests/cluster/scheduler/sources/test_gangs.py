"""Gangs as pods and PodGroups define them: what is taken over, refused and forgotten."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from apis.decode import json_decoder
from apis.quota import PodGroup
from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.cycle.permit import Decisions, Permit
from cluster.scheduler.sources.gangs import GangSource
from cluster.scheduler.tables.gang_definitions import GangDefaults, GangDefinition
from cluster.scheduler.tables.shapes import PodShape
from kube.cache import Change, Event
from tests.cluster.scheduler.making import make_pod

_GANG = "gang.scheduling.koordinator.sh/"
_LABEL = {"pod-group.scheduling.sigs.k8s.io": "g"}
_BAD_GROUPS = "[1"
_decode = json_decoder(PodGroup)
_DEFAULTS = {"first": GangDefaults(wait_s=60.0), "second": GangDefaults(wait_s=90.0)}


class _Permit:
    """Keeps which gangs are defined."""

    def __init__(self) -> None:
        self.defined: dict[str, GangDefinition] = {}

    def define(self, definition: GangDefinition, now: float) -> Decisions:
        assert now == 5.0
        self.defined[definition.id] = definition
        return Decisions()

    def undefine(self, gang: str, now: float) -> Decisions:
        assert now == 5.0
        self.defined.pop(gang, None)
        return Decisions()


class _Bed:
    def __init__(self, defaults: dict[str, GangDefaults] | None = None) -> None:
        self.permit = _Permit()
        self.followed: list[Decisions] = []
        self.gangs = defaults != {}
        self.source = GangSource(
            cast(Permit[PodShape], self.permit),
            _DEFAULTS if defaults is None else defaults,
            clock=lambda: 5.0,
            follow=self.followed.append,
        )

    def group(self, change: Change = Change.MODIFIED, *, groups: str = "", **spec: Any) -> None:
        made = {
            "metadata": {
                "name": "g",
                "namespace": "default",
                "annotations": {f"{_GANG}groups": groups} if groups else {},
            },
            "spec": {"minMember": 3, **spec},
        }
        followed = len(self.followed)
        self.source.pod_group_event(Event(change, None, _decode(msgspec.json.encode(made))))
        assert len(self.followed) == followed + self.gangs


def _pod(scheduler: str = "first", **annotations: str) -> SchedulingPod:
    found = {f"{_GANG}{key}".replace("_", "-"): text for key, text in annotations.items()}
    return make_pod("p", annotations=found, schedulerName=scheduler)


def test_a_pod_group_defines_a_gang_by_the_defaults_of_the_first_profile() -> None:
    bed = _Bed()
    bed.group()
    defined = bed.permit.defined["default/g"]
    assert (defined.min_member, defined.wait_s) == (3, 60.0)
    bed.group(minMember=2, scheduleTimeoutSeconds=7)
    defined = bed.permit.defined["default/g"]
    assert (defined.min_member, defined.wait_s) == (2, 7.0)
    bed.group(Change.DELETED)
    assert not bed.permit.defined


def test_without_a_profile_for_gangs_nothing_is_a_gang() -> None:
    bed = _Bed({})
    bed.group()
    assert not bed.permit.defined
    assert not bed.followed
    pod = make_pod("p", labels=_LABEL, schedulerName="first")
    assert bed.source.gang_of(pod) == ""
    assert bed.source.pod_groups_of(pod) == ()
    assert bed.source.defined_by(_pod(name="g", min_available="2")) is None


def test_what_cannot_be_used_of_a_pod_group_is_logged_once_and_named_until_it_is_right_or_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bed = _Bed()
    bed.group(groups=_BAD_GROUPS)
    (problem,) = bed.source.complaints.held["PodGroup default/g"]
    assert "groups" in problem
    bed.group(groups=_BAD_GROUPS)
    assert [record.getMessage() for record in caplog.records] == [problem]
    assert bed.permit.defined["default/g"].group == ("default/g",)
    bed.group()
    assert not bed.source.complaints.held
    bed.group(groups=_BAD_GROUPS)
    bed.group(Change.DELETED)
    assert not bed.source.complaints.held


def test_an_unusable_minimum_takes_the_definition_back() -> None:
    bed = _Bed()
    bed.group()
    bed.group(minMember=-1)
    assert not bed.permit.defined
    assert bed.source.complaints.held


@pytest.mark.parametrize(
    ("pod", "gang", "pod_groups"),
    [
        (make_pod("p", schedulerName="first"), "", ()),
        (make_pod("p", labels=_LABEL, schedulerName="first"), "default/g", ("default/g",)),
        (make_pod("p", labels=_LABEL, schedulerName="other"), "", ()),
        (_pod(name="h"), "default/h", ()),
        (_pod("other", name="h"), "", ()),
    ],
)
def test_the_gang_of_a_pod(pod: SchedulingPod, gang: str, pod_groups: tuple[str, ...]) -> None:
    source = _Bed().source
    assert source.gang_of(pod) == gang
    assert source.pod_groups_of(pod) == pod_groups


def test_annotations_define_a_gang_by_the_defaults_of_the_pods_profile() -> None:
    bed = _Bed()
    defined = bed.source.defined_by(_pod("second", name="g", min_available="2"))
    assert defined is not None
    assert (defined.id, defined.min_member, defined.wait_s) == ("default/g", 2, 90.0)
    assert bed.source.defined_by(_pod(name="g", min_available="many")) is None
    assert "many" in bed.source.complaints.held["Pod default/p"][0]
    bed.source.forget(_pod())
    assert not bed.source.complaints.held
