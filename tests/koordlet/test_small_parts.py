"""Events, remembered requests, host applications, Pod objects."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.cpuset import CpuSet
from apis.nodeslo import CgroupBase, CgroupPath, HostApplication
from apis.qos import KubeQoS, QoSClass
from hooks.subject import ContainerKind, Requested
from koordlet.node.host_apps import host_app_subjects
from koordlet.state.requests_log import Remembered, RequestsLog, load_requests
from service.append_log import encode_line
from service.events import CAPACITY, Events, Severity
from tests.koordlet.builders import LAYOUT, known, pod_manifest

# --- events ------------------------------------------------------------------------------------


def test_an_event_that_repeats_counts_up_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [1000.0]
    events = Events(clock=lambda: now[0], monotonic=lambda: now[0])
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            events.add("bad-object", "x", "broken")
            now[0] += 1
    (event,) = events.latest()
    assert (event.count, event.first_at, event.last_at) == (5, 1000.0, 1004.0)
    assert len(caplog.records) == 1
    assert events.totals == {"bad-object": 5}


def test_events_of_one_kind_leave_room_for_others_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A broken Deployment has an event for each of its pods."""
    now = [0.0]
    events = Events(monotonic=lambda: now[0])
    for number in range(100):
        events.add("bad-input", f"Pod default/web-{number}", f"web-{number} is broken")
    events.add("source-failed", "kubelet", "does not answer")
    assert len(caplog.records) == 21
    assert caplog.records[-1].getMessage() == "does not answer"
    assert events.totals["bad-input"] == len(events.latest()) - 1 == 100
    now[0] = 300.0
    events.add("bad-input", "Pod default/api", "api is broken")
    assert caplog.records[-1].getMessage() == "api is broken"


def test_an_event_that_repeats_is_logged_again_though_the_clock_was_put_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now, passed = [1000.0], [0.0]
    events = Events(clock=lambda: now[0], monotonic=lambda: passed[0])
    with caplog.at_level(logging.INFO):
        events.add("bad-object", "x", "broken")
        now[0] -= 86400.0
        passed[0] += 301.0
        events.add("bad-object", "x", "broken")
    assert [record.__dict__["count"] for record in caplog.records] == [1, 2]


def test_events_are_bounded_and_the_oldest_go() -> None:
    events = Events()
    for number in range(CAPACITY + 10):
        events.add("k", "o", f"m{number}", severity=Severity.INFO)
    kept = events.latest()
    assert len(kept) == CAPACITY
    assert kept[0].message == "m10"


# --- remembered requests -----------------------------------------------------------------------

numbers = st.none() | st.integers(-1, 1 << 40)
sets = st.none() | st.sets(st.integers(0, 200), min_size=1).map(CpuSet)
requests = st.builds(
    Requested,
    cpu_shares=numbers,
    cfs_quota_us=numbers,
    cfs_period_us=numbers,
    memory_limit_bytes=numbers,
    cpus=sets,
    mems=sets,
    oom_score_adj=numbers,
)


memories = st.builds(
    Remembered, requests, st.booleans(), delivered=st.none() | requests, reported=requests
)


@given(st.dictionaries(st.text(min_size=1, max_size=10), memories, max_size=8))
@settings(max_examples=50, deadline=None)
def test_requests_are_remembered(
    tmp_path_factory: pytest.TempPathFactory, requests_of: dict[str, Remembered]
) -> None:
    path = str(tmp_path_factory.mktemp("log") / "requests.log")
    existing: dict[str, Remembered] = {}
    log = RequestsLog(path, lambda: existing)
    for container_id, remembered in requests_of.items():
        for one in (_request(cpu_shares=1), remembered):
            existing[container_id] = one
            log.keep(container_id, *one)
    log.close()
    assert load_requests(path) == requests_of
    existing = dict(list(requests_of.items())[:2])
    log.rewrite()
    log.close()
    assert load_requests(path) == existing


def _request(cpu_shares: int | None = None) -> Remembered:
    return Remembered(Requested(cpu_shares=cpu_shares), hooked=True)


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    existing = {"a": _request(cpu_shares=2)}
    log = RequestsLog(str(path), lambda: existing)
    log.keep("a", *existing["a"])
    log.keep("b", *_request(cpu_shares=3))
    log.close()
    path.write_bytes(path.read_bytes()[:-5])
    assert load_requests(str(path)) == {"a": _request(cpu_shares=2)}


def test_damaged_requests_are_left_out_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "requests.log"
    existing = {"a": _request(cpu_shares=2), "b": _request(cpu_shares=3)}
    log = RequestsLog(str(path), lambda: existing)
    log.rewrite()
    log.close()
    header, first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(header + first.replace(b"2", b"4") + second + encode_line(b'{"id":7}'))
    assert load_requests(str(path)) == {"b": _request(cpu_shares=3)}
    assert "2 lines cannot be read" in caplog.text


def test_a_log_that_cannot_be_written_harms_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "no" / "such" / "folder")
    log = RequestsLog(path, dict)
    log.keep("a", *_request())
    log.rewrite()
    assert "No such file or directory" in log.problem
    assert load_requests(path) == {}


# --- host applications -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("application", "cgroup"),
    [
        (HostApplication(name="a", qos=QoSClass.LS), "host-latency-sensitive/a"),
        (HostApplication(name="a", qos=QoSClass.BE), "host-best-effort/a"),
        (HostApplication(name="a"), "a"),
        (
            HostApplication(
                name="a",
                cgroup_path=CgroupPath(
                    base=CgroupBase.KUBEPODS_BESTEFFORT, parent_dir="p", relative_path="r"
                ),
            ),
            "kubepods/besteffort/p/r",
        ),
    ],
)
def test_host_applications_lie_where_they_are_declared(
    application: HostApplication, cgroup: str
) -> None:
    (subject,), errors = host_app_subjects([application], LAYOUT)
    assert subject.cgroup == cgroup
    assert errors == ()


@pytest.mark.parametrize(
    ("applications", "words"),
    [
        ([HostApplication(name="")], "has no name"),
        ([HostApplication(name="a"), HostApplication(name="a")], "is declared twice"),
        ([HostApplication(name="../x")], "is not a host application name"),
        ([HostApplication(name="a", cgroup_path=CgroupPath(relative_path="../.."))], "not a plain"),
        ([HostApplication(name="a", cgroup_path=CgroupPath())], "the path is empty"),
        *(
            ([HostApplication(name="a", cgroup_path=CgroupPath(relative_path=path))], "kubelet's")
            for path in (
                "kubepods",
                "kubepods/burstable",
                "kubepods/burstable/pod0b8c2a49-2b1e-4b5c-9d7e-6a1f5a0e9c11/x",
            )
        ),
    ],
)
def test_a_host_application_without_a_place_is_left_out(
    applications: list[HostApplication], words: str
) -> None:
    subjects, (error,) = host_app_subjects(applications, LAYOUT)
    assert len(subjects) == len(applications) - 1
    assert words in str(error)


# --- Pod objects -------------------------------------------------------------------------------


def resources(**amounts: str) -> dict[str, Any]:
    return {"requests": dict(amounts), "limits": dict(amounts)}


def test_a_specification_becomes_what_kubelet_asks_for() -> None:
    manifest = pod_manifest(
        uid="u",
        spec={
            "overhead": {"cpu": "100m", "memory": "10Mi"},
            "initContainers": [
                {"name": "side", "restartPolicy": "Always", "resources": resources(cpu="250m")},
                {"name": "init", "resources": resources(cpu="2", memory="1Gi")},
            ],
            "containers": [{"name": "main", "resources": resources(cpu="500m", memory="64Mi")}],
        },
    )
    made = known(manifest)
    kinds = {spec.name: spec.kind for spec in made.pod.specs}
    assert kinds == {
        "main": ContainerKind.REGULAR,
        "side": ContainerKind.SIDECAR,
        "init": ContainerKind.INIT,
    }
    assert made.by_container["main"] == Requested(
        cpu_shares=512, cfs_quota_us=50_000, memory_limit_bytes=64 << 20
    )
    # Initialising takes most: the sidecar and the init container together, and the overhead.
    assert made.requested.cpu_shares == (2250 + 100) * 1024 // 1000
    assert made.requested.cfs_quota_us == 235_000
    assert made.requested.memory_limit_bytes == -1  # the sidecar has no memory limit


def test_resources_of_the_whole_pod_replace_the_sum_and_limit_containers_without_a_limit() -> None:
    manifest = pod_manifest(
        uid="u",
        spec={
            "overhead": {"cpu": "100m", "memory": "10Mi"},
            "resources": resources(cpu="2", memory="1Gi"),
            "containers": [
                {"name": "open"},
                {"name": "own", "resources": resources(cpu="500m", memory="64Mi")},
            ],
        },
    )
    made = known(manifest)
    assert made.requested == Requested(
        cpu_shares=2100 * 1024 // 1000, cfs_quota_us=210_000, memory_limit_bytes=1034 << 20
    )
    assert made.by_container["own"] == Requested(
        cpu_shares=512, cfs_quota_us=50_000, memory_limit_bytes=64 << 20
    )
    assert made.by_container["open"] == Requested(
        cpu_shares=2048, cfs_quota_us=200_000, memory_limit_bytes=1 << 30
    )


def test_batch_resources_are_milli_cores_and_bytes() -> None:
    batch = {"kubernetes.io/batch-cpu": "1500", "kubernetes.io/batch-memory": "1Gi"}
    container = {"name": "main", "resources": {"requests": batch, "limits": batch}}
    made = known(pod_manifest(uid="u", spec={"containers": [container]}))
    amounts = made.pod.specs[0].amounts
    assert amounts.batch_cpu_limit_milli == 1500
    assert amounts.batch_memory_request_bytes == 1 << 30
    assert made.pod.kube_qos is KubeQoS.BESTEFFORT
    assert made.by_container["main"].cpu_shares == 2


@pytest.mark.parametrize("container_id", ["", "containerd://", "no-scheme", "://"])
def test_a_status_without_an_id_names_no_container(container_id: str) -> None:
    status = {"containerStatuses": [{"name": "main", "containerID": container_id}]}
    found = known(pod_manifest(uid="u", status=status)).containers
    assert not [each for each in found if each.runtime]
