"""resctrl: a pod's own group, and the groups of the classes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from apis.keys import ANNOTATION_RESCTRL
from apis.qos import KubeQoS
from hooks.facts import KernelFacts, ResctrlFacts
from hooks.policies import resctrl_class, resctrl_pod
from hooks.policy import OffBecause
from hooks.schemata import bandwidth, make_schemata
from hooks.subject import NodeSubject
from linux.resctrl import parse_schemata
from linux.resources import Resource
from tests.hooks.making import (
    a_container,
    a_pod,
    a_pod_subject,
    a_sandbox,
    be_pod,
    classes,
    decide,
    engine,
    node,
    only_fault,
    values,
)

INTEL = ResctrlFacts(
    l3_domains=(0, 1), mb_domains=(0, 1), cbm_mask=0xFFF, min_cbm_bits=2, vendor="GenuineIntel"
)
AMD = replace(INTEL, vendor="AuthenticAMD", min_cbm_bits=1, bandwidth_gran=1, min_bandwidth=1)
CACHE_ONLY = replace(INTEL, mb_domains=())
MEMORY_ONLY = replace(INTEL, l3_domains=(), cbm_mask=0)


def _node(facts: ResctrlFacts | None = INTEL, slo: Any = None) -> Any:
    return node(kernel=KernelFacts(resctrl=facts), slo=slo)


@pytest.mark.parametrize(
    ("facts", "percent", "value"),
    [
        (INTEL, 1, 10),
        (INTEL, 25, 30),
        (INTEL, 99, 100),
        (INTEL, 100, 100),
        (replace(INTEL, bandwidth_gran=5, min_bandwidth=20), 1, 20),
        (replace(INTEL, bandwidth_gran=5), 23, 25),
        (replace(INTEL, bandwidth_gran=0), 23, 23),
        (AMD, 100, 2048),
        (AMD, 30, 48),
        (AMD, 1, 1),
        (AMD, 99, 158),
        (replace(INTEL, vendor="HygonGenuine"), 25, 30),  # upstream drops the line
        (replace(INTEL, vendor=""), 25, 30),
    ],
)
def test_bandwidth_in_the_machines_own_units(facts: ResctrlFacts, percent: int, value: int) -> None:
    assert bandwidth(facts, percent) == value


@pytest.mark.parametrize(
    ("cbm_mask", "share", "mask"),
    [
        (0xFFF, (0, 30), "f"),
        (0x7FF, (0, 30), "f"),
        (0x7FF, (10, 50), "3c"),
        (0x3FF, (10, 80), "fe"),
        (0xFFF, (20, 80), "3f8"),
        (0xFFFFF, (0, 30), "3f"),
        (0xFFFFF, (0, 100), "fffff"),
        (0xFFF, (95, 96), "c00"),  # upstream: 0, which the kernel refuses
    ],
)
def test_a_range_in_percent_becomes_a_mask_that_the_machine_accepts(
    cbm_mask: int, share: tuple[int, int], mask: str
) -> None:
    facts = replace(INTEL, cbm_mask=cbm_mask)
    made = make_schemata(facts, cache={0: share, 1: share})
    assert made.text == f"L3:0={mask};1={mask}\n"


@pytest.mark.parametrize(
    ("annotation", "facts", "text"),
    [
        (
            {"llc": {"schemata": {"range": [0, 30]}}, "mb": {"schemata": {"percent": 20}}},
            INTEL,
            "L3:0=f;1=f\nMB:0=20;1=20\n",
        ),
        # what is not asked for is whole, and written: it may have been asked for before
        ({"mb": {"schemata": {"percent": 30}}}, AMD, "L3:0=fff;1=fff\nMB:0=48;1=48\n"),
        ({"mb": {"schemata": {"percent": 30}}}, MEMORY_ONLY, "MB:0=30;1=30\n"),
        (
            {"mb": {"schemata": {"percent": 30}}},
            replace(INTEL, cbm_mask=0xF0F),
            "MB:0=30;1=30\n",
        ),
        (
            {"llc": {"schemata": {"range": [20, 80]}}},
            INTEL,
            "L3:0=3f8;1=3f8\nMB:0=100;1=100\n",
        ),
        ({"llc": {"schemata": {"range": [20, 80]}}}, CACHE_ONLY, "L3:0=3f8;1=3f8\n"),
        (
            {"llc": {"schemata": {"range": [20, 80]}}},
            replace(INTEL, mba_mbps=True),
            "L3:0=3f8;1=3f8\nMB:0=4294967295;1=4294967295\n",
        ),
        (
            {
                "llc": {
                    "schemata": {"range": [0, 30]},
                    "schemataPerCache": [{"cacheID": 1, "range": [20, 80]}],
                },
                "mb": {
                    "schemata": {"percent": 20},
                    "schemataPerCache": [{"cacheID": 0, "percent": 50}],
                },
            },
            INTEL,
            "L3:0=f;1=3f8\nMB:0=50;1=20\n",
        ),
        # a share for one cache only leaves the other whole
        (
            {"llc": {"schemataPerCache": [{"cacheID": 1, "range": [0, 50]}]}},
            INTEL,
            "L3:0=fff;1=3f\nMB:0=100;1=100\n",
        ),
        (
            {"mb": {"schemataPerCache": [{"cacheID": 0, "percent": 50}]}},
            INTEL,
            "L3:0=fff;1=fff\nMB:0=50;1=100\n",
        ),
        (
            {"llc": {"schemata": {"range": [0, 30]}}},
            replace(INTEL, cdp=True),
            "L3CODE:0=f;1=f\nL3DATA:0=f;1=f\nMB:0=100;1=100\n",
        ),
    ],
)
def test_a_pods_schemata(annotation: Any, facts: ResctrlFacts, text: str) -> None:
    pod = a_pod("LS", annotations={ANNOTATION_RESCTRL: annotation})
    decision = decide(a_pod_subject(pod), _node(facts), resctrl_pod.POLICY)
    assert values(decision) == {"resctrl.schemata:koordlet-uid-web": text}
    assert decision.outcomes[Resource.RESCTRL_SCHEMATA, "koordlet-uid-web"].degraded == ""
    member = decide(a_container(pod), _node(facts), resctrl_pod.POLICY)
    assert values(member) == {"resctrl.group": "koordlet-uid-web"}


@pytest.mark.parametrize(
    ("annotation", "facts", "text", "said"),
    [
        (
            {"llc": {"schemata": {"range": [0, 30]}}, "mb": {"schemata": {"percent": 20}}},
            CACHE_ONLY,
            "L3:0=f;1=f\n",
            "memory bandwidth",
        ),
        (
            {"llc": {"schemata": {"range": [0, 30]}}, "mb": {"schemata": {"percent": 20}}},
            MEMORY_ONLY,
            "MB:0=20;1=20\n",
            "L3 cache",
        ),
        (
            {"llc": {"schemata": {"range": [0, 30]}}, "mb": {"schemata": {"percent": 20}}},
            replace(INTEL, mba_mbps=True),
            "L3:0=f;1=f\nMB:0=4294967295;1=4294967295\n",
            "mba_MBps",
        ),
        (
            {
                "llc": {
                    "schemata": {"range": [0, 30]},
                    "schemataPerCache": [{"cacheID": 9, "range": [0, 50]}],
                }
            },
            INTEL,
            "L3:0=f;1=f\nMB:0=100;1=100\n",
            "no cache 9",
        ),
        (
            {"llc": {"schemata": {"range": [0, 30]}}, "mb": {"schemata": {"percent": 20}}},
            replace(INTEL, cbm_mask=0xF0F),
            "MB:0=20;1=20\n",
            "not contiguous",
        ),
    ],
)
def test_what_this_machine_cannot_do_is_left_out_and_reported(
    annotation: Any, facts: ResctrlFacts, text: str, said: str
) -> None:
    pod = a_pod("LS", annotations={ANNOTATION_RESCTRL: annotation})
    decision = decide(a_pod_subject(pod), _node(facts), resctrl_pod.POLICY)
    (outcome,) = decision.outcomes.values()
    assert outcome.value == text
    assert said in outcome.degraded


def test_a_wish_of_which_nothing_is_possible_joins_no_group() -> None:
    pod = a_pod("LS", annotations={ANNOTATION_RESCTRL: {"mb": {"schemata": {"percent": 20}}}})
    for subject in (a_pod_subject(pod), a_container(pod)):
        assert values(decide(subject, _node(CACHE_ONLY), resctrl_pod.POLICY)) == {}


@pytest.mark.parametrize(
    ("annotation", "named"),
    [
        ("{", "not valid JSON"),
        ({"llc": {"schemata": {"range": [30, 0]}}}, "llc.schemata.range"),
        ({"llc": {"schemata": {"range": [0, 101]}}}, "llc.schemata.range"),
        ({"llc": {"schemata": {"range": [5]}}}, "llc.schemata.range"),
        ({"llc": {"schemataPerCache": [{"cacheID": 0, "range": [5, 5]}]}}, "schemataPerCache[0]"),
        ({"mb": {"schemata": {"percent": 101}}}, "mb.schemata.percent"),
        ({"mb": {"schemata": {"percent": "20"}}}, "mb.schemata.percent"),
        ({"mb": {"schemataPerCache": [{"cacheID": -1, "percent": 1}]}}, "cacheID"),
        ({}, "neither cache nor memory bandwidth"),
        ({"mb": {"schemata": {"percent": 0}}}, "neither cache nor memory bandwidth"),
    ],
)
def test_a_bad_annotation_is_named(annotation: Any, named: str) -> None:
    pod = a_pod("LS", annotations={ANNOTATION_RESCTRL: annotation})
    for subject in (a_pod_subject(pod), a_container(pod)):
        decision = decide(subject, _node(), resctrl_pod.POLICY)
        assert decision.outcomes == {}
        message = only_fault(decision)
        assert "Pod default/web" in message and ANNOTATION_RESCTRL in message and named in message


@pytest.mark.parametrize("uid", ["../../etc", "a/b", "", "x" * 200])
def test_a_uid_that_is_no_file_name_makes_no_group(uid: str) -> None:
    pod = replace(
        a_pod("LS", annotations={ANNOTATION_RESCTRL: {"mb": {"schemata": {"percent": 20}}}}),
        uid=uid,
    )
    decision = decide(a_pod_subject(pod), _node(), resctrl_pod.POLICY)
    assert decision.outcomes == {} and "metadata.uid" in only_fault(decision)


@given(
    cbm_bits=st.integers(1, 32),
    min_bits=st.integers(1, 4),
    share=st.tuples(st.integers(0, 99), st.integers(1, 100)).filter(lambda s: s[0] < s[1]),
    percent=st.integers(1, 100),
    vendor=st.sampled_from(["GenuineIntel", "AuthenticAMD", ""]),
)
@settings(max_examples=150, deadline=None)
def test_every_made_schemata_is_legal(
    cbm_bits: int, min_bits: int, share: tuple[int, int], percent: int, vendor: str
) -> None:
    facts = ResctrlFacts(
        l3_domains=(0, 3),
        mb_domains=(0, 3),
        cbm_mask=(1 << cbm_bits) - 1,
        min_cbm_bits=min(min_bits, cbm_bits),
        vendor=vendor,
    )
    made = make_schemata(facts, cache={0: share}, memory={3: percent})
    assert made.degraded == ""
    schemata = parse_schemata(made.text)
    assert set(schemata["L3"]) == set(schemata["MB"]) == {0, 3}
    for mask in schemata["L3"].values():
        run = mask >> ((mask & -mask).bit_length() - 1)
        assert mask <= facts.cbm_mask and run & (run + 1) == 0
        assert mask.bit_count() >= facts.min_cbm_bits
    assert schemata["L3"][3] == facts.cbm_mask
    for value in schemata["MB"].values():
        assert 1 <= value <= (2048 if vendor == "AuthenticAMD" else 100)


# --- classes -----------------------------------------------------------------------------------

DEFAULTS = classes("resctrlQOS", lsr={}, ls={}, be={})


def test_class_groups_get_their_defaults() -> None:
    decision = decide(NodeSubject(), _node(slo=DEFAULTS), resctrl_class.POLICY)
    assert values(decision) == {
        "resctrl.schemata:LSR": "L3:0=fff;1=fff\nMB:0=100;1=100\n",
        "resctrl.schemata:LS": "L3:0=fff;1=fff\nMB:0=100;1=100\n",
        "resctrl.schemata:BE": "L3:0=f;1=f\nMB:0=100;1=100\n",
    }


def test_amd_classes_get_amd_units() -> None:
    slo = classes("resctrlQOS", be={"mbaPercent": 30})
    decision = decide(NodeSubject(), _node(AMD, slo), resctrl_class.POLICY)
    assert values(decision) == {"resctrl.schemata:BE": "L3:0=f;1=f\nMB:0=48;1=48\n"}


@pytest.mark.parametrize(
    ("qos", "kube_qos", "group"),
    [
        ("LSE", KubeQoS.GUARANTEED, "LSR"),
        ("LSR", KubeQoS.GUARANTEED, "LSR"),
        ("LS", KubeQoS.BURSTABLE, "LS"),
        ("BE", KubeQoS.BESTEFFORT, "BE"),
        ("", KubeQoS.GUARANTEED, "LSR"),
        ("", KubeQoS.BURSTABLE, "LS"),
        ("", KubeQoS.BESTEFFORT, "BE"),
        ("SYSTEM", KubeQoS.GUARANTEED, None),
    ],
)
@pytest.mark.parametrize("make", [a_container, a_sandbox])
def test_tasks_join_the_group_of_their_class(
    make: Any, qos: str, kube_qos: KubeQoS, group: str | None
) -> None:
    decision = decide(make(a_pod(qos, kube_qos)), _node(slo=DEFAULTS), resctrl_class.POLICY)
    assert decision.value(Resource.RESCTRL_GROUP) == group


def test_a_class_that_is_off_has_no_group_and_no_tasks() -> None:
    inputs = _node(slo=classes("resctrlQOS", be={"catRangeEndPercent": 50}))
    groups = values(decide(NodeSubject(), inputs, resctrl_class.POLICY))
    assert list(groups) == ["resctrl.schemata:BE"]
    assert values(decide(a_container(a_pod("LS")), inputs, resctrl_class.POLICY)) == {}


def test_a_pod_with_its_own_annotation_stays_out_of_the_class() -> None:
    own = be_pod(annotations={ANNOTATION_RESCTRL: {"mb": {"schemata": {"percent": 20}}}})
    inputs = _node(slo=DEFAULTS)
    assert values(decide(a_container(own), inputs, resctrl_class.POLICY)) == {}
    both = decide(a_container(own), inputs, resctrl_class.POLICY, resctrl_pod.POLICY)
    assert both.value(Resource.RESCTRL_GROUP) == "koordlet-uid-web"


def test_an_empty_range_keeps_the_last_good_group_and_no_other() -> None:
    last = classes("resctrlQOS", lsr={}, ls={}, be={"catRangeEndPercent": 50})
    good = engine(_node(slo=last), resctrl_class.POLICY)
    bad_range = {"catRangeStartPercent": 60, "catRangeEndPercent": 40}
    slo = classes("resctrlQOS", ls={"catRangeEndPercent": 25}, be=bad_range)
    bad = engine(_node(slo=slo), resctrl_class.POLICY, previous=good)
    state = bad.state("RdtResctrl")
    assert state is not None and state.active
    assert "beClass.resctrlQOS.catRangeStartPercent" in state.problem and "'60'" in state.problem
    assert values(bad.decide(NodeSubject())) == {
        "resctrl.schemata:LS": "L3:0=7;1=7\nMB:0=100;1=100\n",
        "resctrl.schemata:BE": "L3:0=3f;1=3f\nMB:0=100;1=100\n",
    }


def test_an_empty_range_without_a_good_one_before_costs_this_range_alone() -> None:
    slo = classes(
        "resctrlQOS",
        lsr={"catRangeEndPercent": 50},
        be={"catRangeStartPercent": 60, "catRangeEndPercent": 40, "mbaPercent": 20},
    )
    built = engine(_node(slo=slo), resctrl_class.POLICY)
    state = built.state("RdtResctrl")
    assert state is not None and state.active
    assert "beClass.resctrlQOS.catRangeStartPercent" in state.problem
    assert values(built.decide(NodeSubject())) == {
        "resctrl.schemata:LSR": "L3:0=3f;1=3f\nMB:0=100;1=100\n",
        "resctrl.schemata:BE": "L3:0=f;1=f\nMB:0=20;1=20\n",
    }


def test_the_default_range_of_a_class_is_the_nodeslos() -> None:
    strategy = DEFAULTS.resource_qos_strategy
    for group, block in (
        ("LSR", strategy.lsr_class),
        ("LS", strategy.ls_class),
        ("BE", strategy.be_class),
    ):
        qos = block.resctrl_qos
        assert resctrl_class._DEFAULT_RANGE[group] == (
            qos.cat_range_start_percent,
            qos.cat_range_end_percent,
        )


@pytest.mark.parametrize("percent", [0, 100])
def test_no_limit_of_bandwidth_is_written_to_undo_an_earlier_one(percent: int) -> None:
    inputs = _node(slo=classes("resctrlQOS", ls={"mbaPercent": percent}))
    assert values(decide(NodeSubject(), inputs, resctrl_class.POLICY)) == {
        "resctrl.schemata:LS": "L3:0=fff;1=fff\nMB:0=100;1=100\n"
    }


@pytest.mark.parametrize("policy", [resctrl_class.POLICY, resctrl_pod.POLICY])
@pytest.mark.parametrize(
    ("facts", "why"), [(None, "not mounted"), (ResctrlFacts(), "L3 or MB allocation")]
)
def test_without_resctrl_the_policies_are_off(
    policy: Any, facts: ResctrlFacts | None, why: str
) -> None:
    state = engine(_node(facts, DEFAULTS), policy).state(policy.name)
    assert state is not None and state.off is not None
    assert state.off.because is OffBecause.UNSUPPORTED and why in state.off.detail


def test_no_class_no_policy() -> None:
    state = engine(_node(), resctrl_class.POLICY).state("RdtResctrl")
    assert state is not None and state.off is not None
    assert state.off.because is OffBecause.NODESLO and "resctrlQOS.enable" in state.off.detail
