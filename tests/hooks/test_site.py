"""Site policies: what a file may say, what is refused, and the documented example."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from apis.cpuset import CpuSet
from apis.errors import InputError
from hooks.check import claim_problem
from hooks.claim import Claim, Op, Rank
from hooks.engine import Engine
from hooks.policies import batch_resource, oom_score_adj
from hooks.policy import Policy
from hooks.site import MOST_CLAIMS, checked_policy, site_policy, want
from hooks.subject import Level
from linux.resources import DeviceNode, Mount, Resource
from tests.hooks.making import (
    GIB,
    a_container,
    a_pod,
    a_pod_subject,
    batch,
    be_pod,
    node,
    plain,
    values,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "policies.d" / "thread_counts.py"
SUBJECT = a_container(a_pod("LS"))


def _site(*claims: Any, name: str = "mine") -> Policy:
    return site_policy(name=name, summary="for the test", container=lambda node, subject: claims)


def _decide(*policies: Policy, subject: Any = SUBJECT, inputs: Any = None) -> Any:
    return Engine.build(policies, inputs or node()).decide(subject)


def test_a_claim_of_the_site_carries_its_name_and_overrules_the_built_in() -> None:
    pod = be_pod(specs=[batch("main", cpu=(1000, 2000))])
    site = _site(want(Resource.CPU_SHARES, 77, reason="because"))
    decision = _decide(batch_resource.POLICY, site, subject=a_container(pod))
    outcome = decision.outcomes[Resource.CPU_SHARES, ""]
    assert outcome.value == 77
    assert (outcome.winner.policy, outcome.winner.source) == ("site/mine", "site policy site/mine")
    assert [claim.policy for claim in outcome.losers] == ["BatchResource"]


def test_a_lower_rank_fills_in_only_what_is_open() -> None:
    pod = be_pod(specs=[batch("main", cpu=(1000, 2000))])
    modest = _site(want(Resource.CPU_SHARES, 77, reason="r", rank=Rank.DEFAULT - 1))
    decision = _decide(batch_resource.POLICY, modest, subject=a_container(pod))
    assert decision.value(Resource.CPU_SHARES) == 1024
    assert _decide(batch_resource.POLICY, modest).value(Resource.CPU_SHARES) == 77


GOOD: list[Claim] = [
    want(Resource.CPU_SHARES, 2, reason="r"),
    want(Resource.CPU_CFS_QUOTA, -1, reason="r"),
    want(Resource.CPU_CFS_QUOTA, 0, op=Op.DIVIDE, factor=1.5, reason="r"),
    want(Resource.CPU_CFS_QUOTA, 0, op=Op.MULTIPLY, factor=1.5, reason="r"),
    want(Resource.CPUSET_CPUS, CpuSet.parse("0-3"), op=Op.WITHIN, reason="r"),
    want(Resource.MEMORY_HIGH, GIB, op=Op.WITHIN, reason="r"),
    want(Resource.OOM_SCORE_ADJ, 1000, reason="r"),
    want(Resource.CORE_SCHED_COOKIE, "", reason="r"),
    want(Resource.RESCTRL_GROUP, "site-group", reason="r"),
    want(Resource.ENV, "", key="A", reason="r"),
    want(Resource.MOUNT, Mount("/x", "bind", "/y", ("ro", "rbind")), key="/x", reason="r"),
    want(Resource.MOUNT, Mount("/x", "tmpfs", "tmpfs"), key="/x", reason="r"),
    want(Resource.DEVICE, DeviceNode("/dev/x", "c", 1, 2, 0o660), key="/dev/x", reason="r"),
]

BAD: list[tuple[Any, str]] = [
    ("a text", "returned a str"),
    (None, "returned a NoneType"),
    ((Resource.CPU_SHARES, 2), "returned a tuple"),
    (want("cpu.shares", 2, reason="r"), "members of Resource"),  # type: ignore[arg-type]
    (want(Resource.CPU_SHARES, 2, reason=""), "needs a reason"),
    (want(Resource.CPU_SHARES, 2, reason=5), "reason must be a string"),  # type: ignore[arg-type]
    (want(Resource.CPU_SHARES, 2, reason="r", rank=Rank.EMERGENCY), "at most Rank.SITE"),
    (want(Resource.CPU_SHARES, 1, reason="r"), "raised to 2"),
    (want(Resource.CPU_SHARES, 262145, reason="r"), "lowered to 262144"),
    (want(Resource.CPU_SHARES, "2", reason="r"), "needs a number"),
    (want(Resource.CPU_SHARES, True, reason="r"), "needs a number"),
    (want(Resource.CPU_SHARES, 2, key="x", reason="r"), "takes no key"),
    (want(Resource.CPU_IDLE, 2, reason="r"), "lowered to 1"),
    (want(Resource.CPU_CFS_QUOTA, 999, reason="r"), "raised to 1000"),
    (want(Resource.CPU_CFS_QUOTA, 0, op=Op.DIVIDE, factor=0.5, reason="r"), "divided by 1 to"),
    (want(Resource.CPU_CFS_QUOTA, 0, op=Op.DIVIDE, factor=float("nan"), reason="r"), "divided by"),
    (want(Resource.CPU_SHARES, 0, op=Op.DIVIDE, factor=2.0, reason="r"), "can be divided"),
    (want(Resource.CPU_SHARES, 0, op=Op.MULTIPLY, factor=2.0, reason="r"), "can be multiplied"),
    (
        want(Resource.CPU_CFS_QUOTA, 0, op=Op.MULTIPLY, factor=1001, reason="r"),
        "multiplied by 1 to",
    ),
    (want(Resource.CPUSET_CPUS, CpuSet(), reason="r"), "empty set"),
    (want(Resource.CPUSET_CPUS, "0-3", reason="r"), "needs a CPU set"),
    (want(Resource.OOM_SCORE_ADJ, 1001, reason="r"), "outside -1000..1000"),
    (want(Resource.CORE_SCHED_COOKIE, 5, reason="r"), "expected a text"),
    (want(Resource.RESCTRL_GROUP, "../x", reason="r"), "cannot name a resctrl group"),
    (want(Resource.RESCTRL_SCHEMATA, "L3:0=f", key="g", reason="r"), "cannot be claimed for a"),
    (want(Resource.ENV, "x", reason="r"), "needs a key"),
    (want(Resource.ENV, "x", key="A=B", reason="r"), "cannot name a variable"),
    (want(Resource.ENV, "x\0", key="A", reason="r"), "without NUL"),
    (want(Resource.ENV, "x", key="A", op=Op.AT_LEAST, reason="r"), "only be set"),
    (want(Resource.ENV, 5, key="A", reason="r"), "expected a text"),
    (want(Resource.MOUNT, "/x", key="/x", reason="r"), "expected a Mount"),
    (want(Resource.MOUNT, Mount("/y", "bind", "/z"), key="/x", reason="r"), "its destination"),
    (want(Resource.MOUNT, Mount("/x/../y", "bind", "/z"), key="/x/../y", reason="r"), "absolute"),
    (want(Resource.MOUNT, Mount("/x", "bind", "z"), key="/x", reason="r"), "absolute"),
    (want(Resource.DEVICE, DeviceNode("/x", "c", 1, 2, 0), key="/x", reason="r"), "below /dev/"),
    (
        want(Resource.DEVICE, DeviceNode("/dev/x", "p", 1, 2, 0), key="/dev/x", reason="r"),
        "not c or b",
    ),
    (
        want(Resource.DEVICE, DeviceNode("/dev/x", "c", 1, -2, 0), key="/dev/x", reason="r"),
        "outside",
    ),
    (want(Resource.SYSCTL, "1", key="kernel.sched_core", reason="r"), "cannot be claimed by site"),
    (want(Resource.HOST_DIRECTORY, 0o777, key="/x", reason="r"), "cannot be claimed by site"),
]


@pytest.mark.parametrize("claim", GOOD, ids=lambda claim: f"{claim.resource.value}-{claim.op}")
def test_what_a_site_policy_may_claim(claim: Claim) -> None:
    decision = _decide(_site(claim))
    assert decision.faults == ()
    assert claim_problem(claim, Level.CONTAINER) == ""


@pytest.mark.parametrize(("claim", "problem"), BAD, ids=[problem for _, problem in BAD])
def test_a_claim_that_cannot_be_carried_out_is_a_fault_of_its_policy_alone(
    claim: Any, problem: str
) -> None:
    other = _site(want(Resource.CPU_SHARES, 50, reason="r"), name="other")
    good = want(Resource.MEMORY_LIMIT, 1 << 30, reason="r")
    decision = _decide(_site(good, claim), other)
    assert values(decision) == {"cpu.shares": 50}
    (fault,) = decision.faults
    assert fault.policy == "site/mine" and not fault.input_error
    assert problem in fault.message


def test_too_many_claims_are_a_fault() -> None:
    def endless(node: Any, subject: Any) -> Iterable[Claim]:
        number = 0
        while True:
            number += 1
            yield want(Resource.ENV, "x", key=f"A{number}", reason="r")

    decision = _decide(site_policy(name="endless", summary="s", container=endless))
    assert decision.outcomes == {}
    assert f"more than {MOST_CLAIMS}" in decision.faults[0].message


def test_returning_nothing_is_fine() -> None:
    policy = site_policy(name="n", summary="s", container=lambda node, subject: None)  # type: ignore[arg-type,return-value]
    decision = _decide(policy)
    assert decision.outcomes == {} and decision.faults == ()


def test_a_site_policy_sees_the_nodes_inputs_and_claims_on_its_levels() -> None:
    inputs = node(allocatable_memory_bytes=5 * GIB)

    def pod(node: Any, subject: Any) -> Iterable[Claim]:
        yield want(
            Resource.MEMORY_HIGH, node.node.allocatable_memory_bytes, reason="the node's memory"
        )

    policy = site_policy(name="n", summary="s", pod=pod)
    decision = _decide(policy, subject=a_pod_subject(a_pod("LS")), inputs=inputs)
    assert values(decision) == {"memory.high": 5 * GIB}
    assert _decide(policy, inputs=inputs).outcomes == {}


async def _coroutine(node: Any, subject: Any) -> list[Claim]:
    return []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"name": ""}, "letters, digits and dashes"),
        ({"name": "a/b"}, "letters, digits and dashes"),
        ({"name": "x" * 64}, "letters, digits and dashes"),
        ({"name": "ä"}, "letters, digits and dashes"),
        ({"name": "a", "container": None}, "at least one level"),
        ({"name": "a", "container": 5}, "plain function"),
        ({"name": "a", "container": _coroutine}, "not async"),
    ],
)
def test_site_policy_refuses_what_cannot_work(arguments: dict[str, Any], problem: str) -> None:
    complete: dict[str, Any] = {"summary": "s", "container": lambda node, subject: ()}
    complete |= arguments
    with pytest.raises(ValueError, match=problem):
        site_policy(**complete)


def test_admitting_what_a_file_offers() -> None:
    policy = _site()
    assert checked_policy(policy, origin="/etc/koordlet/policies.d/x.py") is policy
    for offered, taken, problem in (
        (None, (), "not a policy"),
        ("x", (), "not a policy"),
        (batch_resource.POLICY, (), "not made by hooks.site.site_policy"),
        (policy, {"site/mine"}, "has this name"),
    ):
        with pytest.raises(InputError, match=problem) as refused:
            checked_policy(offered, origin="/etc/koordlet/policies.d/x.py", taken=taken)
        assert "/etc/koordlet/policies.d/x.py: POLICY" in str(refused.value)


# --- the documented example --------------------------------------------------------------------


@pytest.fixture(name="example", scope="module")
def _example() -> Policy:
    spec = importlib.util.spec_from_file_location("thread_counts", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return checked_policy(module.POLICY, origin=str(EXAMPLE))


SIZED, DISPOSABLE = {"example.com/sized-threads": "true"}, {"example.com/disposable": "true"}


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        (a_container(a_pod("LS", specs=[plain("main", cpu=(None, 4000))])), {}),
        (
            a_container(a_pod("LS", labels=SIZED, specs=[plain("main", cpu=(100, 4500))])),
            {"env:OMP_NUM_THREADS": "4"},
        ),
        (
            a_container(be_pod(labels=SIZED, specs=[batch("main", cpu=(100, 500))])),
            {"env:OMP_NUM_THREADS": "1"},
        ),
        (a_container(a_pod("LS", labels=SIZED, specs=[plain("main")])), {}),
        (
            a_container(a_pod("LS", labels=SIZED), cfs_quota_us=150000, cfs_period_us=50000),
            {"env:OMP_NUM_THREADS": "3"},
        ),
        (a_container(a_pod("LS", labels=SIZED), cfs_quota_us=-1), {}),
        (a_container(a_pod("LS", labels=DISPOSABLE), oom_score_adj=950), {"oom_score_adj": 950}),
        (a_container(a_pod("LS", labels=DISPOSABLE), oom_score_adj=-5), {"oom_score_adj": 900}),
    ],
)
def test_the_example_claims_what_its_text_says(
    example: Policy, subject: Any, expected: dict[str, Any]
) -> None:
    decision = _decide(example, subject=subject)
    assert decision.faults == ()
    assert values(decision) == expected


def test_the_example_bounds_what_the_pod_asks_for(example: Policy) -> None:
    annotations = {"koordinator.sh/oom-score-adj": "-500"}
    subject = a_container(a_pod("LS", labels=DISPOSABLE, annotations=annotations))
    inputs = node(gates={"OOMScoreAdj": True})
    decision = _decide(example, oom_score_adj.POLICY, subject=subject, inputs=inputs)
    outcome = decision.outcomes[Resource.OOM_SCORE_ADJ, ""]
    assert outcome.value == 900 and outcome.winner.policy == "OOMScoreAdj"
    assert [claim.policy for claim in outcome.modifiers] == ["site/thread-counts"]
