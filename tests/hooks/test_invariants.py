"""What holds for all built-in policies together, whatever a pod or a NodeSLO says."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from apis import keys
from apis.effective_nodeslo import decode_nodeslo, default_nodeslo
from apis.errors import InputErrors
from apis.nodeslo import (
    NodeSLOSpec,
)
from apis.qos import KubeQoS, QoSClass
from hooks.check import LEVELS, claim_problem
from hooks.compat import SWITCHES
from hooks.engine import Engine
from hooks.facts import Disk, KernelFacts, NodeInputs, NodeMeta, ResctrlFacts, Settings
from hooks.policies import BUILTIN
from hooks.policy import Policy
from hooks.shape import shape_of
from hooks.subject import (
    Amounts,
    ContainerSubject,
    HostAppSubject,
    Level,
    NodeSubject,
    Pod,
    QosSubject,
    Subject,
)
from linux.resources import DeviceNode, Resource
from tests.hooks.making import (
    EVERYTHING,
    GIB,
    MAINLINE,
    a_container,
    a_directory,
    a_pod,
    a_pod_subject,
    a_sandbox,
    batch,
    claims_of,
    plain,
    slo,
    topology,
    values,
)

DOCS = Path(__file__).parents[2] / "docs"

ALL_ON: dict[str, Any] = {
    "resourceQOSStrategy": {
        f"{name}Class": {
            "cpuQOS": {"enable": True, "schedIdle": int(name == "be")},
            "memoryQOS": {"enable": True, "minLimitPercent": 50, "throttlingPercent": 80},
            "resctrlQOS": {"enable": True},
            "blkioQOS": {
                "enable": True,
                "blocks": [{"name": "/dev/sda", "type": "device", "ioCfg": {"readBPS": 1000}}],
            },
        }
        for name in ("lsr", "ls", "be")
    },
    "systemStrategy": {"watermarkScaleFactor": 20, "schedFeatures": {"HRTICK": True}},
}
CORE_SCHED = {
    "resourceQOSStrategy": ALL_ON["resourceQOSStrategy"] | {"policies": {"cpuPolicy": "coreSched"}}
}
KERNEL = KernelFacts(
    supported=EVERYTHING,
    core_sched=True,
    group_identity_sysctl=True,
    sched_core_sysctl=True,
    resctrl=ResctrlFacts(l3_domains=(0,), mb_domains=(0,), cbm_mask=0xFFF),
    gpus={0: DeviceNode("/dev/nvidia0", "c", 195, 0, 0o666)},
    gpu_control=(DeviceNode("/dev/nvidiactl", "c", 195, 255, 0o666),),
    disks={"/dev/sda": (Disk("8:0"),)},
    rdma={"0000:09:00.0": DeviceNode("/dev/infiniband/uverbs0", "c", 231, 192, 0o666)},
)
RATIO = {keys.ANNOTATION_CPU_NORMALIZATION_RATIO: "2.00"}
POOLS = {keys.ANNOTATION_CPU_SHARED_POOLS: [{"socket": 0, "node": 0, "cpuset": "0-3"}]}


def _engine(
    spec: dict[str, Any] | None = None,
    kernel: KernelFacts = KERNEL,
    compat: frozenset[str] = frozenset(),
) -> Engine:
    return Engine.build(
        BUILTIN,
        NodeInputs(
            slo=slo(ALL_ON if spec is None else spec),
            topology=topology(POOLS),
            kernel=kernel,
            settings=Settings(
                feature_gates={policy.gate: True for policy in BUILTIN}, compat=compat
            ),
        ),
    )


ENGINES = [
    _engine(),
    _engine(CORE_SCHED),
    _engine(kernel=KernelFacts(supported=MAINLINE)),
    _engine({}, KernelFacts()),
    _engine(compat=frozenset(SWITCHES)),
    _engine(CORE_SCHED, compat=frozenset(SWITCHES)),
]

ANNOTATIONS = (
    keys.ANNOTATION_RESOURCE_STATUS,
    keys.ANNOTATION_CPU_QOS,
    keys.ANNOTATION_MEMORY_QOS,
    keys.ANNOTATION_RESCTRL,
    keys.ANNOTATION_EXTENDED_RESOURCE_SPEC,
    keys.ANNOTATION_DEVICE_ALLOCATED,
    keys.ANNOTATION_OOM_SCORE_ADJ,
    keys.ANNOTATION_OOM_SCORE_ADJ_SPEC,
)
GOOD = {
    keys.ANNOTATION_RESOURCE_STATUS: '{"cpuset":"4-5"}',
    keys.ANNOTATION_CPU_QOS: '{"enable":true,"groupIdentity":1}',
    keys.ANNOTATION_MEMORY_QOS: '{"policy":"auto","minLimitPercent":30}',
    keys.ANNOTATION_RESCTRL: '{"llc":{"schemata":{"range":[0,30]}}}',
    keys.ANNOTATION_EXTENDED_RESOURCE_SPEC: (
        '{"containers":{"main":{"limits":{"kubernetes.io/batch-cpu":"1k"}}}}'
    ),
    keys.ANNOTATION_DEVICE_ALLOCATED: '{"gpu":[{"minor":0}],"rdma":[{"id":"0000:09:00.0"}]}',
    keys.ANNOTATION_OOM_SCORE_ADJ: "100",
    keys.ANNOTATION_OOM_SCORE_ADJ_SPEC: '{"main":200}',
    keys.ANNOTATION_BLKIO_QOS: (
        '{"blocks":[{"name":"/dev/sda","type":"device","ioCfg":{"ioWeightPercent":30}}]}'
    ),
}

LABELS: tuple[dict[str, str], ...] = (
    {},
    {keys.LABEL_GPU_ISOLATION_PROVIDER: "HAMi-core"},
    {keys.LABEL_CORE_SCHED_POLICY: "exclusive"},
    {keys.LABEL_CORE_SCHED_GROUP_ID: "a group"},
)

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["cpuset", "enable", "groupIdentity", "gpu", "llc", "main", "policy"])
            | st.text(max_size=5),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
_TEXTS = st.text(max_size=20) | _JSON.map(lambda value: json.dumps(value))


@st.composite
def _subjects(draw: st.DrawFn) -> Subject:
    annotations = draw(
        st.dictionaries(
            st.sampled_from(ANNOTATIONS),
            _TEXTS | st.sampled_from(sorted(GOOD.values())),
            max_size=len(ANNOTATIONS),
        )
        | st.just(GOOD)
    )
    kube_qos = draw(st.sampled_from(KubeQoS))
    amounts = st.integers(-5, 1 << 50) | st.none()
    pair = st.tuples(amounts, amounts)
    make = draw(st.sampled_from([batch, plain]))
    pod = a_pod(
        draw(st.sampled_from(["LSE", "LSR", "LS", "BE", "SYSTEM", "", "x"])),
        kube_qos,
        annotations=annotations,
        labels=draw(st.sampled_from(LABELS)),
        specs=[make("main", cpu=draw(pair), memory=draw(pair))] if draw(st.booleans()) else (),
    )
    subjects: list[Subject] = [
        a_pod_subject(pod, cfs_quota_us=200000),
        a_container(pod, cfs_quota_us=200000),
        a_sandbox(pod),
        a_directory(kube_qos, pod),
        HostAppSubject(name="nginx", qos=pod.qos, cgroup="system.slice/nginx.service"),
        NodeSubject(),
    ]
    return draw(st.sampled_from(subjects))


@given(_subjects(), st.sampled_from(ENGINES))
@settings(max_examples=300, deadline=None)
def test_any_input_gives_a_decision_whose_claims_can_be_carried_out(
    subject: Subject, engine: Engine
) -> None:
    decision = engine.decide(subject)
    assert engine.decide(subject) == decision
    assert all(fault.input_error for fault in decision.faults), decision.faults
    for claim in claims_of(decision):
        assert claim.reason and claim.source and claim.policy
        assert claim_problem(claim, subject.level) == ""
    for fault in decision.faults:
        assert len(fault.message) < 1000 and fault.message.isprintable()


@given(_subjects(), st.sampled_from(ENGINES))
@settings(max_examples=150, deadline=None)
def test_what_was_decided_for_a_container_of_the_same_shape_changes_no_decision(
    subject: Subject, engine: Engine
) -> None:
    asked_first = Engine.build(BUILTIN, engine.inputs)
    if isinstance(subject, ContainerSubject):
        pod = subject.pod
        other = replace(
            pod,
            uid="another",
            name="another",
            namespace="elsewhere",
            cgroup="kubepods/podanother",
            labels={**pod.labels, "app": "another"},
            created_at=1.0,
        )
        asked_first.decide(replace(subject, pod=other, id="another", cgroup="another"))
    assert asked_first.decide(subject) == Engine.build(BUILTIN, engine.inputs).decide(subject)


_WHICH_POD = {"namespace", "name", "uid", "cgroup", "phase", "created_at"} | {
    "restart_policy",
    "status_reason",
}
"""What distinguishes a pod from its replicas, and what policies do not read."""


@pytest.mark.parametrize("field", list(Pod.__struct_fields__))
def test_a_shape_holds_all_of_a_pod_but_which_one_it_is(field: str) -> None:
    """A field that is new has to be put in one of the two places."""
    pod = a_pod("LS")
    other = {
        "labels": {keys.LABEL_CORE_SCHED_GROUP_ID: "g"},
        "annotations": {keys.ANNOTATION_OOM_SCORE_ADJ: "5"},
        "kube_qos": KubeQoS.GUARANTEED,
        "qos": QoSClass.BE,
        "specs": (plain("main"),),
        "resources": Amounts(cpu_limit_milli=1),
        "overhead": Amounts(cpu_request_milli=1),
        "priority": 9000,
        "host_network": True,
        "created_at": 1.0,
    }.get(field, "another")
    changed = a_container(replace(pod, **{field: other}))
    assert getattr(changed.pod, field) != getattr(pod, field)
    same = shape_of(pod) == shape_of(changed.pod)
    assert same == (field in _WHICH_POD)


@given(_subjects(), st.permutations(BUILTIN))
@settings(max_examples=40, deadline=None)
def test_the_order_in_which_policies_are_listed_does_not_matter(
    subject: Subject, policies: list[Policy]
) -> None:
    engine = ENGINES[0]
    assert Engine.build(policies, engine.inputs).decide(subject) == engine.decide(subject)


# --- what is withdrawn -------------------------------------------------------------------------

SUBJECTS = (a_pod_subject, a_container, a_sandbox, lambda pod: a_directory(pod.kube_qos, pod))


@pytest.mark.parametrize("key", ANNOTATIONS)
def test_an_annotation_that_is_removed_leaves_no_claim_behind(key: str) -> None:
    """A claim that is gone gives back what was there before: the executor needs no more."""
    engine, untouched, claimed = _engine(), _engine(), False
    for qos, make in itertools.product(("LS", "BE"), SUBJECTS):
        before = engine.decide(make(a_pod(qos, annotations={key: GOOD[key]})))
        plain_pod = make(a_pod(qos))
        after = engine.decide(plain_pod, before=before)
        assert after == untouched.decide(plain_pod)
        claimed |= before != after
    assert claimed


@pytest.mark.parametrize("policy", BUILTIN, ids=lambda policy: policy.name)
def test_a_gate_that_is_switched_off_leaves_no_claim_behind(policy: Policy) -> None:
    claimed = False
    for inputs in (engine.inputs for engine in ENGINES[:2]):
        inputs = replace(inputs, node=NodeMeta(annotations=RATIO))
        gates = inputs.settings.feature_gates
        off = replace(inputs.settings, feature_gates={**gates, policy.gate: False})
        on = Engine.build(BUILTIN, inputs)
        without = Engine.build(BUILTIN, replace(inputs, settings=off), previous=on)
        pods = [a_pod(qos, annotations=GOOD) for qos in ("LS", "BE")]
        pods.append(a_pod("LS", specs=[plain("main", cpu=(100, 200), memory=(GIB, GIB))]))
        subjects: list[Subject] = [NodeSubject()]
        subjects += [make(pod) for make in SUBJECTS for pod in pods]
        subjects += [a_container(pod, cfs_quota_us=200000) for pod in pods]
        for subject in subjects:
            before = on.decide(subject)
            claimed |= any(claim.policy == policy.name for claim in claims_of(before))
            after = claims_of(without.decide(subject, before=before))
            assert policy.name not in {claim.policy for claim in after}
    assert claimed


# --- bad input, one annotation at a time -------------------------------------------------------

OWNER = {
    keys.ANNOTATION_RESOURCE_STATUS: "CPUSetAllocator",
    keys.ANNOTATION_CPU_QOS: "GroupIdentity",
    keys.ANNOTATION_MEMORY_QOS: "MemoryQOS",
    keys.ANNOTATION_RESCTRL: "Resctrl",
    keys.ANNOTATION_DEVICE_ALLOCATED: None,  # two policies read it
    keys.ANNOTATION_OOM_SCORE_ADJ_SPEC: "OOMScoreAdj",
}


@pytest.mark.parametrize("broken", sorted(OWNER))
@pytest.mark.parametrize("text", ["{", "[1", "\x00", "7", "x" * 300000])
def test_a_broken_annotation_costs_its_own_policy_and_no_other(broken: str, text: str) -> None:
    engine = _engine()
    good = engine.decide(a_container(a_pod("LS", annotations=GOOD)))
    bad = engine.decide(a_container(a_pod("LS", annotations=GOOD | {broken: text})))
    assert good.faults == () and len(good.outcomes) > 8
    owners = {OWNER[broken]} if OWNER[broken] else {"GPUEnvInject", "RDMADeviceInject"}
    assert {fault.policy for fault in bad.faults} == owners
    for fault in bad.faults:
        assert broken in fault.message and "Pod default/web" in fault.message
    for key, outcome in good.outcomes.items():
        if outcome.winner.policy not in owners:
            assert bad.outcomes[key] == outcome


# --- bad input, one NodeSLO field at a time ----------------------------------------------------


def _fields(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the path of every scalar of a NodeSLO spec."""
    if isinstance(value, dict):
        return [found for key, inner in value.items() for found in _fields(inner, (*path, key))]
    return [path]


def _with(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    made: Any = value
    for key in reversed(path):
        made = {key: made}
    return made  # type: ignore[no-any-return]


_CLASS: dict[str, Any] = {
    "cpuQOS": {"enable": True, "groupIdentity": 2, "schedIdle": 0, "coreExpeller": True},
    "memoryQOS": {
        "enable": True,
        "minLimitPercent": 1,
        "lowLimitPercent": 1,
        "throttlingPercent": 1,
        "wmarkRatio": 1,
        "wmarkScalePermill": 1,
        "wmarkMinAdj": 1,
        "priorityEnable": 1,
        "priority": 1,
        "oomKillGroup": 1,
        "pageCacheEnable": True,
        "pageCacheLimitPercent": 1,
        "pageCacheLimitSize": 1,
        "pageCacheReclaimSync": True,
    },
    "resctrlQOS": {
        "enable": True,
        "catRangeStartPercent": 0,
        "catRangeEndPercent": 9,
        "mbaPercent": 10,
    },
}
_WHOLE: dict[str, Any] = {
    "resourceUsedThresholdWithBE": {"enable": True, "cpuSuppressPolicy": "cpuset"},
    "resourceQOSStrategy": {
        "policies": {"cpuPolicy": "groupIdentity"},
        "lsrClass": _CLASS,
        "lsClass": _CLASS,
        "beClass": _CLASS,
    },
}
_MALFORMED: tuple[Any, ...] = ({"a": 1}, "sometimes", 4096000000000000000000, -77)


@pytest.mark.parametrize(
    ("path", "value"),
    [(path, value) for path in _fields(_WHOLE) for value in _MALFORMED],
    ids=str,
)
def test_a_malformed_nodeslo_field_is_named_and_nothing_of_it_reaches_a_rule(
    path: tuple[str, ...], value: Any
) -> None:
    """The object is refused as a whole, so the rules of the last good one stay in force."""
    with pytest.raises(InputErrors) as refused:
        decode_nodeslo({"spec": _with(path, value)}, obj="NodeSLO n1")
    message = str(refused.value)
    assert "NodeSLO n1" in message and "spec." + ".".join(path) in message


def test_the_malformed_fields_are_all_that_the_policies_read() -> None:
    assert len(_fields(_WHOLE)) == 3 + 3 * (4 + 14 + 4)
    assert isinstance(decode_nodeslo({"spec": _WHOLE}, obj="x"), NodeSLOSpec)


# --- the table of policies ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", BUILTIN, ids=lambda policy: policy.name)
def test_every_policy_is_documented(policy: Policy) -> None:
    page = (DOCS / "policies.md").read_text()
    assert re.search(rf"^## .*{policy.name}", page, re.MULTILINE), policy.name
    assert f"`{policy.gate}`" in page
    assert policy.summary and set(policy.claims) <= set(Level)


@pytest.mark.parametrize("switch", sorted(SWITCHES))
def test_every_compat_switch_is_documented(switch: str) -> None:
    assert f"`{switch}`" in (DOCS / "compatibility.md").read_text()


def test_upstreams_gates_and_defaults() -> None:
    assert {policy.gate: policy.gate_default for policy in BUILTIN} == {
        "GroupIdentity": True,
        "CPUSetAllocator": True,
        "BatchResource": True,
        "GPUEnvInject": False,
        "RDMADeviceInject": False,
        "CPUNormalization": False,
        "CoreSched": False,
        "Resctrl": False,
        "OOMScoreAdj": False,
        "RdtResctrl": True,
        "CgroupReconcile": False,
        "SystemConfig": False,
        "BlkIOReconcile": False,
    }


def test_names_are_unique_and_every_resource_has_a_level() -> None:
    assert len({policy.name for policy in BUILTIN}) == len(BUILTIN)
    assert set(LEVELS) == set(Resource)


def test_without_any_object_nothing_is_claimed_on_a_mainline_kernel() -> None:
    inputs = NodeInputs(kernel=KernelFacts(supported=MAINLINE))
    assert inputs.slo == default_nodeslo()
    engine = Engine.build(BUILTIN, inputs)
    pod = a_pod("LS", specs=[plain("main", cpu=(100, 200), memory=(GIB, GIB))])
    subjects: list[Subject] = [
        NodeSubject(),
        a_pod_subject(pod),
        a_container(pod),
        a_sandbox(pod),
    ]
    subjects += [QosSubject(kube_qos=kube_qos, cgroup="x", pods=(pod,)) for kube_qos in KubeQoS]
    for subject in subjects:
        assert values(engine.decide(subject)) == {}
