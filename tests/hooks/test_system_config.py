"""SystemConfig: settings of the host, each from one field of the NodeSLO."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from apis.effective_nodeslo import decode_nodeslo
from hooks.check import claim_problem
from hooks.engine import Engine
from hooks.facts import KernelFacts, NodeInputs, Settings
from hooks.policies.group_identity import POLICY as GROUP_IDENTITY_POLICY
from hooks.policies.system_config import POLICY
from hooks.policy import OffBecause
from hooks.subject import Level, NodeSubject
from linux.resources import Resource

_64_GIB = 64 << 30


def _inputs(**strategy: Any) -> NodeInputs:
    slo = decode_nodeslo({"spec": {"systemStrategy": strategy}}, obj="NodeSLO n1")
    return NodeInputs(
        slo=slo,
        kernel=KernelFacts(memory_bytes=_64_GIB),
        settings=Settings(feature_gates={"SystemConfig": True}),
    )


def _engine(*, previous: Engine | None = None, **strategy: Any) -> Engine:
    return Engine.build([POLICY], _inputs(**strategy), previous=previous)


def _values(engine: Engine) -> dict[str, object]:
    decision = engine.decide(NodeSubject())
    for outcome in decision.outcomes.values():
        assert claim_problem(outcome.winner, Level.NODE) == ""
    return {key: outcome.value for (_, key), outcome in decision.outcomes.items()}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        # 64 GiB are 67108864 KiB; one hundredth of them
        ({"minFreeKbytesFactor": 100}, {"vm.min_free_kbytes": "671088"}),
        ({"watermarkScaleFactor": 150}, {"vm.watermark_scale_factor": "150"}),
        ({"memcgReapBackGround": 1}, {"memcg_reaper.reap_background": "1"}),
        ({"schedIdleSaverWmark": 0}, {"kernel.sched_idle_saver_wmark": "0"}),
        ({"pageCacheLimitEnabled": 1}, {"pagecache_limit.enabled": "1"}),
        ({"schedGroupIdentityEnabled": 1}, {"kernel.sched_group_identity_enabled": "1"}),
        (
            {"schedFeatures": {"WAKEUP_PREEMPTION": False, "HRTICK": True}},
            {"sched_feature.WAKEUP_PREEMPTION": "0", "sched_feature.HRTICK": "1"},
        ),
    ],
)
def test_a_field_becomes_one_setting(strategy: dict[str, Any], expected: dict[str, str]) -> None:
    assert _values(_engine(**strategy)) == expected


def test_without_a_field_the_policy_is_off_and_claims_nothing() -> None:
    engine = _engine()
    state = engine.state("SystemConfig")
    assert state is not None and state.off is not None
    assert state.off.because is OffBecause.NODESLO
    assert _values(engine) == {}


@pytest.mark.parametrize(
    ("strategy", "field"),
    [
        ({"minFreeKbytesFactor": 1}, "minFreeKbytesFactor"),  # 6710 KiB: below 10 MiB
        ({"minFreeKbytesFactor": 9000}, "minFreeKbytesFactor"),  # 57 GiB: above 10 GiB
        ({"minFreeKbytesFactor": -5}, "minFreeKbytesFactor"),
        ({"watermarkScaleFactor": 401}, "watermarkScaleFactor"),
        ({"memcgReapBackGround": 2}, "memcgReapBackGround"),
        ({"schedIdleSaverWmark": -1}, "schedIdleSaverWmark"),
        ({"schedGroupIdentityEnabled": 7}, "schedGroupIdentityEnabled"),
        ({"schedFeatures": {"NO_HRTICK": True}}, "schedFeatures.NO_HRTICK"),
        ({"schedFeatures": {"../x": True}}, "schedFeatures.../x"),
    ],
)
def test_a_value_out_of_range_is_named_and_the_others_hold(
    strategy: dict[str, Any], field: str
) -> None:
    good: dict[str, Any] = {}
    if field != "watermarkScaleFactor":
        good = {"watermarkScaleFactor": 20}
    engine = _engine(**strategy, **good)
    state = engine.state("SystemConfig")
    assert state is not None
    assert f"spec.systemStrategy.{field}" in state.problem
    assert _values(engine) == ({"vm.watermark_scale_factor": "20"} if good else {})


def test_a_bad_value_keeps_the_last_good_one_of_its_field() -> None:
    before = _engine(watermarkScaleFactor=20, minFreeKbytesFactor=100)
    after = _engine(previous=before, watermarkScaleFactor=9999, minFreeKbytesFactor=200)
    assert _values(after) == {
        "vm.watermark_scale_factor": "20",
        "vm.min_free_kbytes": "1342177",
    }


def test_a_share_of_an_unknown_memory_is_an_error() -> None:
    inputs = replace(_inputs(minFreeKbytesFactor=100), kernel=KernelFacts())
    state = Engine.build([POLICY], inputs).state("SystemConfig")
    assert state is not None and "not known" in state.problem


def test_group_identity_on_by_its_policy_is_not_switched_off_here() -> None:
    """Both claims are of one rank; identities without their switch would have no effect."""
    slo = decode_nodeslo(
        {
            "spec": {
                "systemStrategy": {"schedGroupIdentityEnabled": 0},
                "resourceQOSStrategy": {"lsClass": {"cpuQOS": {"enable": True}}},
            }
        },
        obj="NodeSLO n1",
    )
    inputs = replace(
        _inputs(),
        slo=slo,
        kernel=KernelFacts(group_identity_sysctl=True, supported=frozenset({Resource.CPU_BVT})),
    )
    engine = Engine.build([POLICY, GROUP_IDENTITY_POLICY], inputs)
    assert _values(engine)["kernel.sched_group_identity_enabled"] == "1"
