"""Kubelet's requests that came through the proxy, by pod, name and attempt."""

from __future__ import annotations

import pytest

from apis.cpuset import CpuSet
from hooks.subject import NOTHING_REQUESTED, Requested
from koordlet.state import NodeState, proxy_requests
from koordlet.state.proxy_requests import ProxyKey, ProxyRequests
from koordlet.state.requests_log import Remembered
from tests.koordlet.builders import LAYOUT, container, runtime_pod, sandbox
from tests.koordlet.state.states import the_container

KUBELETS = Requested(cpu_shares=1024, cfs_quota_us=100_000, cfs_period_us=100_000)
OURS = Requested(cpu_shares=1024, cfs_quota_us=80_000, cfs_period_us=100_000, cpus=CpuSet([1]))
KEY = ProxyKey("u1", "main", 0)


@pytest.mark.parametrize(
    ("reported", "requested"),
    [
        pytest.param(OURS, KUBELETS, id="ours"),
        pytest.param(KUBELETS, KUBELETS, id="kubelet's, as of an answer that came too late"),
        pytest.param(
            Requested(cpu_shares=512, cfs_quota_us=80_000),
            Requested(cpu_shares=512, cfs_quota_us=100_000),
            id="one that was resized since",
        ),
        pytest.param(NOTHING_REQUESTED, NOTHING_REQUESTED, id="nothing"),
    ],
)
def test_delivered_values_in_a_first_report_are_no_request(
    reported: Requested, requested: Requested
) -> None:
    state = NodeState(layout=LAYOUT)
    state.proxy_requests.note(KEY, KUBELETS, OURS)
    pod = runtime_pod("u1")
    state.runtime_list([sandbox(pod, "s1")], [container(pod, "c1", "s1", current=reported)])
    assert the_container(state, "c1").requested == requested
    # The records keep it: what is noted later is of another container, and lists show ours.
    state.proxy_requests.forget(KEY)
    state.runtime_list([sandbox(pod, "s1")], [container(pod, "c1", "s1", current=OURS)])
    expected = KUBELETS if requested == NOTHING_REQUESTED else requested
    assert the_container(state, "c1").requested == (
        OURS if requested == NOTHING_REQUESTED else expected
    )


@pytest.mark.parametrize("other", [ProxyKey("u2", "main", 0), ProxyKey("u1", "side", 0)])
def test_requests_of_other_containers_do_not_count(other: ProxyKey) -> None:
    requests = ProxyRequests({})
    requests.note(other, KUBELETS, OURS)
    assert requests.requested("u1", "main", OURS) == OURS
    assert requests.get(KEY) is None
    assert not requests.forget(KEY)
    assert requests.of_pod("u1") == ([other] if other.uid == "u1" else [])


def test_the_newest_attempt_is_the_one_that_a_list_names() -> None:
    requests = ProxyRequests({})
    requests.note(KEY, Requested(cfs_quota_us=10_000), Requested(cfs_quota_us=80_000))
    requests.note(ProxyKey("u1", "main", 1), KUBELETS, OURS)
    assert requests.requested("u1", "main", OURS) == KUBELETS
    requests.forget(KEY)
    assert requests.requested("u1", "main", OURS) == KUBELETS
    requests.forget(ProxyKey("u1", "main", 1))
    assert requests.requested("u1", "main", OURS) == OURS


def test_requests_are_kept_over_a_restart() -> None:
    requests = ProxyRequests({})
    requests.note(KEY, KUBELETS, OURS)
    kept = dict(requests.remembered())
    assert kept == {"proxy/u1/main/0": Remembered(KUBELETS, hooked=True, delivered=OURS)}
    ended = {"proxy/u1/side/0": Remembered(NOTHING_REQUESTED, hooked=True)}
    others = {
        one: Remembered(KUBELETS, hooked=True, delivered=OURS)
        for one in ("c1", "proxy/u1/main", "proxy/u1/main/x", "other/u1/main/0", "proxy/u/m/0/1")
    }
    again = ProxyRequests({**kept, **ended, **others})
    assert dict(again.remembered()) == kept
    assert again.get(KEY) == (KUBELETS, OURS)


def test_requests_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_requests, "_MOST", 2)
    requests = ProxyRequests({})
    for attempt in (0, 1, 0, 2):
        requests.note(ProxyKey("u1", "main", attempt), KUBELETS, OURS)
    assert requests.of_pod("u1") == [ProxyKey("u1", "main", 0), ProxyKey("u1", "main", 2)]
    for name in ("a", "b"):
        requests.note(ProxyKey("u1", name, 0), KUBELETS, OURS)
    assert requests.requested("u1", "main", OURS) == OURS
    assert requests.requested("u1", "a", OURS) == KUBELETS
