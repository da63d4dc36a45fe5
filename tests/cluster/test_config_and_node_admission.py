"""Admission of configuration, nodes, bindings and reservations; gates and flags."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import pytest

from apis.core import Node, Pod
from apis.errors import InputError
from apis.meta import LabelSelector
from apis.slo_config import SLOConfig, load_slo_config
from cluster.flags import FlagError, chosen
from cluster.gates import parse_gates
from cluster.manager.flags import FLAGS, help_text, parse
from cluster.manager.node_offer import PLUGINS
from cluster.webhook.binding import BindingAdmission, BindingRules
from cluster.webhook.configmap import ConfigMapAdmission, overlapping, virtual_nodes
from cluster.webhook.node import NodeValidation, mutate_node_status
from cluster.webhook.reservation import ReservationAdmission
from kube.resources import PODS
from kube.webhook import Verdict
from tests.cluster.admission import admission, convert, filled, patched, request

NAME, NAMESPACE = "slo-controller-config", "koordinator-system"
DB = {"matchLabels": {"pool": "db"}}


def config_map(**keys: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "data": {
            key.replace("_", "-"): value if isinstance(value, str) else json.dumps(value)
            for key, value in keys.items()
        },
    }


def judged(
    new: dict[str, Any],
    old: dict[str, Any] | None = None,
    *,
    nodes: list[dict[str, Any]] | None = None,
    names: bool = False,
) -> str:
    judge = ConfigMapAdmission(
        namespace=NAMESPACE,
        name=NAME,
        nodes=lambda: [convert(node, Node) for node in nodes or ()],
        names_required=names,
    )
    verdict = judge.validate(
        request(
            new,
            old=old,
            kind="ConfigMap",
            resource="configmaps",
            operation="UPDATE" if old is not None else "CREATE",
            namespace=NAMESPACE,
        )
    )
    return "" if verdict.allowed else verdict.message


def entries(*strategies: dict[str, Any]) -> dict[str, Any]:
    return {"clusterStrategy": {"enable": True}, "nodeStrategies": list(strategies)}


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"colocation_config": {"enable": True}}, ""),
        ({"colocation_config": "{"}, "ParseConfigFail"),
        ({"cpu_normalization_config": "{"}, "ParseConfigFail"),
        ({"colocation_config": {"resourceDiffThreshold": 1.5}}, "resourceDiffThreshold"),
        ({"colocation_config": {"degradeTimeMinutes": 0}}, "degradeTimeMinutes"),
        ({"cpu_burst_config": {"clusterStrategy": {"cpuBurstPercent": 0}}}, "cpuBurstPercent"),
        ({"system_config": {"clusterStrategy": {"watermarkScaleFactor": 500}}}, "watermarkScale"),
        # One of a pair may rely on the other's default; both together must make sense.
        (
            {"resource_threshold_config": {"clusterStrategy": {"memoryEvictThresholdPercent": 60}}},
            "",
        ),
        (
            {"resource_threshold_config": {"clusterStrategy": {"memoryEvictLowerPercent": 75}}},
            "75 is not below memoryEvictThresholdPercent 70",
        ),
        (
            {
                "resource_threshold_config": {
                    "clusterStrategy": {"cpuEvictBESatisfactionLowerPercent": 40}
                }
            },
            "goes together with",
        ),
        (
            {
                "resource_qos_config": {
                    "clusterStrategy": {
                        "beClass": {
                            "resctrlQOS": {"catRangeStartPercent": 40, "catRangeEndPercent": 30}
                        }
                    }
                }
            },
            "40 is not below 30",
        ),
        (
            {"cpu_normalization_config": {"enable": True, "defaultRatio": 0.9}},
            'cluster: defaultRatio":"0.9 is outside 1.0..5.0',
        ),
        (
            {"cpu_normalization_config": {"ratioModel": {"X": {"turboEnabledRatio": 5.5}}}},
            'ratioModel[X].turboEnabledRatio":"5.5 is outside 1.0..5.0',
        ),
        (
            {"resource_amplification_config": {"resourceAmplificationRatio": {"cpu": -0.5}}},
            'resourceAmplificationRatio.cpu":"-0.5 is outside 0.0..1000.0',
        ),
        (
            {"resource_amplification_config": {"resourceAmplificationRatio": {"memory": 1001}}},
            'resourceAmplificationRatio.memory":"1001 is outside 0.0..1000.0',
        ),
        # Multiplied with a normalisation ratio it may still be above 1.
        ({"resource_amplification_config": {"resourceAmplificationRatio": {"cpu": 0.5}}}, ""),
        # resource-qos-config alone is judged without system-config.
        (
            {
                "resource_qos_config": {
                    "clusterStrategy": {"lsClass": {"networkQOS": {"egressRequest": "100M"}}}
                }
            },
            "",
        ),
        (
            {
                "resource_qos_config": {
                    "clusterStrategy": {
                        "lsClass": {"networkQOS": {"egressRequest": "800M"}},
                        "beClass": {"networkQOS": {"egressRequest": "300M"}},
                    }
                },
                "system_config": {"clusterStrategy": {"totalNetworkBandwidth": "1000M"}},
            },
            "exceed the bandwidth 1G",
        ),
        ({"colocation_config": {"Enable": True, "enabled": 1}}, ""),
        (
            {
                "system_config": {"clusterStrategy": {"totalNetworkBandwidth": "1G"}},
                "resource_qos_config": {
                    "clusterStrategy": {
                        "lsClass": {"networkQOS": {"egressRequest": 70, "egressLimit": "900M"}},
                        "beClass": {"networkQOS": {"egressRequest": "300M", "egressLimit": 50}},
                    }
                },
            },
            "",
        ),
        (
            {
                "system_config": {"clusterStrategy": {"totalNetworkBandwidth": "1G"}},
                "resource_qos_config": {
                    "clusterStrategy": {
                        "lsClass": {"networkQOS": {"egressRequest": 71, "egressLimit": "900M"}},
                        "beClass": {"networkQOS": {"egressRequest": "300M", "egressLimit": 50}},
                    }
                },
            },
            "requests of all classes exceed the bandwidth 1G",
        ),
        (
            {
                "resource_qos_config": {
                    "clusterStrategy": {
                        "lsClass": {"networkQOS": {"ingressRequest": 80}},
                        "beClass": {"networkQOS": {"ingressRequest": 30}},
                    }
                }
            },
            "sum up to 110 percent",
        ),
        ({"resource_threshold_config": entries({"name": "a"})}, "selects nothing in particular"),
        (
            {
                "resource_threshold_config": entries(
                    {"name": "a", "nodeSelector": DB},
                    {
                        "name": "b",
                        "nodeSelector": {
                            "matchExpressions": [
                                {"key": "pool", "operator": "In", "values": ["x", "db"]}
                            ]
                        },
                    },
                )
            },
            "NodeStrategiesOverlap",
        ),
        (
            {
                "host_application_config": {
                    "applications": [{"name": "x", "cgroupPath": {"relativePath": "../.."}}]
                }
            },
            "must not contain . or ..",
        ),
    ],
)
def test_a_config_map_is_validated(keys: dict[str, Any], problem: str) -> None:
    got = judged(config_map(**keys))
    assert problem in got
    assert bool(got) is bool(problem)


def test_only_changed_keys_and_only_this_config_map_are_validated() -> None:
    broken = config_map(colocation_config="{")
    assert judged(broken, broken) == ""
    both = config_map(colocation_config="{", cpu_burst_config="{")
    assert "cpu-burst-config" in judged(both, broken)
    other = config_map(colocation_config="{")
    other["metadata"]["name"] = "other"
    assert judged(other) == ""


def test_names_are_required_by_flag() -> None:
    unnamed = config_map(resource_threshold_config=entries({"nodeSelector": DB}))
    assert judged(unnamed) == ""
    assert "must be given once" in judged(unnamed, names=True)
    web = {"matchLabels": {"pool": "web"}}
    for names, refused in ((("db", "web"), False), (("db", "db"), True)):
        strategies = [
            {"name": name, "nodeSelector": selector}
            for name, selector in zip(names, (DB, web), strict=True)
        ]
        named = config_map(resource_threshold_config=entries(*strategies))
        assert ("must be given once" in judged(named, names=True)) is refused
        assert bool(judged(named, names=True)) is refused


def test_a_node_that_matches_two_entries_is_named() -> None:
    exists = {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}
    both = config_map(
        resource_threshold_config=entries(
            {"name": "a", "nodeSelector": DB}, {"name": "b", "nodeSelector": exists}
        )
    )
    node = {"metadata": {"name": "n7", "labels": {"pool": "db", "zone": "z"}}}
    assert judged(both) == ""
    assert '"exampleNodes":["n7"]' in judged(both, nodes=[node])
    assert "ExistNodeConfict" in judged(both, nodes=[node])


def test_validation_of_many_entries_with_many_values_is_bounded_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All other reviews wait while a review is evaluated."""
    tried = 0

    def counted(*_: Any) -> bool:
        nonlocal tried
        tried += 1
        return False

    entries = [{"name": f"e{n}", "nodeSelector": {"matchLabels": {"a": f"{n}"}}} for n in range(60)]
    config, _ = load_slo_config(
        {"colocation-config": json.dumps({"nodeConfigs": entries})}, old=SLOConfig(), obj="x"
    )
    most = itertools.repeat({"a": "b"}, 4096)
    monkeypatch.setattr("cluster.webhook.configmap.virtual_nodes", lambda _: copy.copy(most))
    monkeypatch.setattr("cluster.webhook.configmap.matches", counted)
    assert overlapping(config.colocation) == []
    assert 60 * 60 <= tried <= 400_000


def test_every_combination_of_values_is_tried() -> None:
    selector = convert(
        {
            "matchExpressions": [
                {"key": "a", "operator": "In", "values": ["1", "2"]},
                {"key": "b", "operator": "In", "values": ["1", "2"]},
                {"key": "c", "operator": "NotIn", "values": ["other0"]},
                {"key": "d", "operator": "DoesNotExist"},
            ]
        },
        LabelSelector,
    )
    made = list(virtual_nodes(selector))
    assert {(labels["a"], labels["b"]) for labels in made} == {
        ("1", "1"),
        ("1", "2"),
        ("2", "1"),
        ("2", "2"),
    }
    assert {labels.get("c") for labels in made} == {None, "other1"}
    assert all("d" not in labels for labels in made)


# --- nodes -------------------------------------------------------------------------------------


def node(cpu: str, memory: str, *, ratio: str = "", raw: str = "", **labels: str) -> dict[str, Any]:
    annotations = {}
    if ratio:
        annotations["node.koordinator.sh/resource-amplification-ratio"] = ratio
    if raw:
        annotations["node.koordinator.sh/raw-allocatable"] = raw
    return {
        "metadata": {"name": "n1", "labels": labels, "annotations": annotations},
        "status": {"allocatable": {"cpu": cpu, "memory": memory, "pods": "110"}},
    }


def judged_status(new: dict[str, Any], old: dict[str, Any]) -> Verdict:
    verdict = mutate_node_status(
        request(
            new,
            old=old,
            kind="Node",
            resource="nodes",
            sub_resource="status",
            operation="UPDATE",
            namespace="",
        )
    )
    assert verdict.allowed
    return verdict


def status_update(new: dict[str, Any], old: dict[str, Any]) -> Any:
    return patched(new, judged_status(new, old))


RATIO = '{"cpu":1.80,"memory":1.50}'
RAW = '{"cpu":"15500m","memory":"62Gi"}'


def test_allocatable_is_amplified_and_the_kubelets_value_remembered() -> None:
    first = status_update(node("15500m", "62Gi", ratio=RATIO), node("15500m", "62Gi"))
    assert first["status"]["allocatable"] == {"cpu": "27900m", "memory": "93Gi", "pods": "110"}
    assert first["metadata"]["annotations"]["node.koordinator.sh/raw-allocatable"] == RAW
    # A heartbeat that carries the amplified value changes nothing.
    assert status_update(first, first) == first
    # The kubelet reports its own value again: amplified again, not twice.
    again = status_update(node("15500m", "62Gi", ratio=RATIO, raw=RAW), first)
    assert again == first
    # The kubelet's value changes.
    smaller = status_update(node("14", "62Gi", ratio=RATIO, raw=RAW), first)
    assert smaller["status"]["allocatable"]["cpu"] == "25200m"


@pytest.mark.parametrize(
    ("ratio", "cpu", "memory", "warnings"),
    [
        ('{"cpu":0.50,"memory":2}', "10", "128Gi", []),
        ('{"cpu":1.00}', "10", "64Gi", []),
        ('{"cpu":0}', "10", "64Gi", []),
        ('{"cpu":1000}', "10k", "64Gi", []),
        ('{"cpu":"2","memory":2}', "10", "128Gi", ["cpu = '2': expected a number"]),
        ('{"cpu":true,"memory":2}', "10", "128Gi", ["cpu = 'True': expected a number"]),
        ('{"cpu":2,"memory":-1}', "20", "64Gi", ["memory = '-1': expected 0..1000"]),
        ('{"cpu":2,"memory":1001}', "20", "64Gi", ["memory = '1001': expected 0..1000"]),
        ('{"cpu":2,"memory":1e400}', "10", "64Gi", ["Number out of range"]),
        ('{"cpu":null,"memory":2}', "10", "128Gi", ["cpu is not set: expected a number"]),
        ('{"pods":2,"nvidia.com/gpu":"x"}', "10", "64Gi", []),
        ("[]", "10", "64Gi", ["resource-amplification-ratio"]),
        ("{", "10", "64Gi", ["resource-amplification-ratio"]),
    ],
)
def test_an_unusable_ratio_affects_neither_other_ratios_nor_the_status(
    ratio: str, cpu: str, memory: str, warnings: list[str]
) -> None:
    new = node("10", "64Gi", ratio=ratio)
    verdict = judged_status(new, node("10", "64Gi"))
    got = patched(new, verdict)
    assert got["status"]["allocatable"] == {"cpu": cpu, "memory": memory, "pods": "110"}
    raw = got["metadata"]["annotations"]["node.koordinator.sh/raw-allocatable"]
    assert json.loads(raw) == {"cpu": "10", "memory": "64Gi"}
    assert len(verdict.warnings) == len(warnings)
    for said, expected in zip(verdict.warnings, warnings, strict=True):
        assert said.startswith("Node n1: metadata.annotations") and expected in said


def test_an_unreadable_raw_value_waits_for_the_kubelets_next_report() -> None:
    amplified = node("20", "64Gi", ratio='{"cpu":2}', raw="{")
    verdict = judged_status(amplified, amplified)
    assert patched(amplified, verdict) == amplified
    assert "raw-allocatable" in verdict.warnings[0]
    healed = status_update(node("10", "64Gi", ratio='{"cpu":2}', raw="{"), amplified)
    assert healed["status"]["allocatable"]["cpu"] == "20"
    assert json.loads(healed["metadata"]["annotations"]["node.koordinator.sh/raw-allocatable"]) == {
        "cpu": "10",
        "memory": "64Gi",
    }


def test_memory_alone_brings_a_new_raw_value() -> None:
    first = status_update(node("10", "64Gi", ratio='{"memory":2}'), node("10", "64Gi"))
    again = node("10", "32Gi", ratio='{"memory":2}', raw='{"cpu":"10","memory":"64Gi"}')
    assert status_update(again, first)["status"]["allocatable"]["memory"] == "64Gi"


def test_a_node_may_lack_a_resource() -> None:
    new = node("10", "64Gi", ratio=RATIO)
    del new["status"]["allocatable"]["memory"]
    got = status_update(new, {"metadata": {"name": "n1"}})
    assert got["status"]["allocatable"] == {"cpu": "18", "pods": "110"}


def test_without_a_ratio_the_raw_value_is_forgotten() -> None:
    got = status_update(node("16", "64Gi", raw=RAW), node("16", "64Gi", raw=RAW))
    assert "node.koordinator.sh/raw-allocatable" not in got["metadata"]["annotations"]
    assert got["status"]["allocatable"]["cpu"] == "16"


def test_a_label_that_two_entries_select_is_refused() -> None:
    config, _ = load_slo_config(
        {
            "cpu-burst-config": json.dumps(
                {
                    "nodeStrategies": [
                        {"name": "a", "nodeSelector": DB},
                        {"name": "b", "nodeSelector": {"matchLabels": {"zone": "z"}}},
                    ]
                }
            )
        },
        old=SLOConfig(),
        obj="ConfigMap",
    )
    judge = NodeValidation(lambda: config)

    def verdict(new: dict[str, Any], old: dict[str, Any]) -> Any:
        return judge.validate(
            request(new, old=old, kind="Node", resource="nodes", operation="UPDATE", namespace="")
        )

    one, both = node("1", "1", pool="db"), node("1", "1", pool="db", zone="z")
    assert verdict(one, node("1", "1")).allowed
    refused = verdict(both, one)
    assert not refused.allowed
    assert '"strategies":["a","b"]' in refused.message
    # An unrelated change of a node that competed before passes.
    assert verdict(node("1", "1", pool="db", zone="z", x="y"), both).allowed


# --- bindings, reservations --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "user", "namespace", "allowed", "decision"),
    [
        (BindingRules(), "x", "default", True, ""),
        (
            BindingRules(("koord-scheduler",), namespaces=("*",)),
            "koord-scheduler",
            "default",
            True,
            "allowed_username",
        ),
        (
            BindingRules(("koord-scheduler",), namespaces=("*",)),
            "system:serviceaccount:ns:koord-scheduler",
            "default",
            True,
            "allowed_username",
        ),
        (
            BindingRules(("koord-scheduler",), namespaces=("*",)),
            "x-koord-scheduler-y",
            "default",
            False,
            "denied",
        ),
        (BindingRules(("s",), namespaces=("*",), dry_run=True), "x", "default", True, "dry_run"),
        (BindingRules(("s",)), "x", "default", True, "out_of_scope"),
        (BindingRules(("s",), namespaces=("*",)), "x", "kube-system", True, "excluded_ns"),
        (
            BindingRules(("s",), namespaces=("default",), bypass_labels=("pass",)),
            "x",
            "default",
            True,
            "bypass_label",
        ),
    ],
)
def test_a_binding_is_decided_by_user_namespace_and_bypass(
    rules: BindingRules, user: str, namespace: str, allowed: bool, decision: str
) -> None:
    made: list[str] = []
    pods = filled(
        PODS,
        Pod,
        {"metadata": {"name": "p", "namespace": "default", "labels": {"pass": ""}}},
    )
    verdict = BindingAdmission(rules, pods, made.append).validate(
        request({}, sub_resource="binding", name="p", user=user, namespace=namespace)
    )
    assert verdict.allowed is allowed
    assert made == ([decision] if decision else [])


def test_a_profile_shapes_a_reservation() -> None:
    profile = {
        "metadata": {"name": "p"},
        "spec": {
            "selector": {"matchLabels": {"kind": "batch"}},
            "qosClass": "BE",
            "priorityClassName": "koord-batch",
            "schedulerName": "koord-scheduler",
        },
    }
    judge = ReservationAdmission(admission(profiles=[profile]).caches)
    obj: dict[str, Any] = {
        "metadata": {"name": "r", "labels": {"kind": "batch"}},
        "spec": {"template": {"spec": {"containers": [{"name": "a"}]}}, "owners": [{}]},
    }
    verdict = judge.mutate(request(obj, kind="Reservation", resource="reservations", namespace=""))
    got = patched(obj, verdict)
    assert got["metadata"]["labels"]["koordinator.sh/qosClass"] == "BE"
    template = got["spec"]["template"]["spec"]
    assert (template["priority"], template["schedulerName"]) == (5000, "koord-scheduler")
    # No schema checks templates, so this reaches admission.
    odd = {**obj, "spec": {**obj["spec"], "template": {"spec": []}}}
    review = request(odd, kind="Reservation", resource="reservations", namespace="")
    with pytest.raises(InputError, match=r"^Reservation r: spec\.template\.spec: Expected"):
        judge.mutate(review)


def test_a_bad_profile_keeps_no_reservation_from_another_and_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = {"metadata": {"name": "bad"}, "spec": {"probability": "x", "labels": {"bad": "1"}}}
    broken = {
        "metadata": {"name": "broken"},
        "spec": {"selector": {"matchExpressions": [{"key": "x", "operator": "Near"}]}},
    }
    good = {"metadata": {"name": "good"}, "spec": {"labels": {"good": "1"}}}
    judge = ReservationAdmission(admission(profiles=[bad, broken, good]).caches)
    obj = {"metadata": {"name": "r"}, "spec": {"template": {}}}
    review = request(obj, kind="Reservation", resource="reservations", namespace="")
    for _ in range(3):
        assert patched(obj, judge.mutate(review))["metadata"]["labels"] == {"good": "1"}
    lines = sorted(record.getMessage() for record in caplog.records)
    assert len(lines) == 2
    assert lines[0].startswith("ClusterColocationProfile bad: spec.probability = 'x'")
    assert lines[1].startswith("ClusterColocationProfile broken: selector = ")


@pytest.mark.parametrize(
    ("profile", "namespace", "applies"),
    [
        ({"namespaceSelector": {"matchLabels": {"tier": "batch"}}}, "ml", True),
        ({"namespaceSelector": {"matchLabels": {"tier": "batch"}}}, "default", False),
        ({"namespaceSelector": {"matchLabels": {"tier": "batch"}}}, "gone", False),
        ({"namespaceSelector": {"matchLabels": {"tier": "batch"}}}, None, False),
        ({"namespaceSelector": {"matchLabels": {"tier": "batch"}}}, 7, False),
        ({"namespaceSelector": {}}, None, True),
        ({}, None, True),
        # With a selector the labels alone decide.
        (
            {
                "namespaceSelector": {"matchLabels": {"tier": "batch"}},
                "selector": {"matchLabels": {"kind": "r"}},
            },
            "default",
            True,
        ),
        ({"selector": {"matchLabels": {"kind": "s"}}}, "ml", False),
    ],
)
def test_a_namespace_selects_a_reservation_by_its_template(
    profile: dict[str, Any], namespace: Any, applies: bool
) -> None:
    stored = {"metadata": {"name": "p"}, "spec": {**profile, "labels": {"chosen": "yes"}}}
    judge = ReservationAdmission(admission(profiles=[stored]).caches)
    template = {} if namespace is None else {"metadata": {"namespace": namespace}}
    obj = {"metadata": {"name": "r", "labels": {"kind": "r"}}, "spec": {"template": template}}
    verdict = judge.mutate(request(obj, kind="Reservation", resource="reservations", namespace=""))
    assert ("chosen" in patched(obj, verdict)["metadata"]["labels"]) is applies


# --- gates and flags ---------------------------------------------------------------------------


def test_gates_are_read_and_unknown_ones_refused() -> None:
    gates = parse_gates("MultiQuotaTree=true, PodMutatingWebhook=false")
    assert gates.on("MultiQuotaTree")
    assert not gates.on("PodMutatingWebhook")
    assert gates.on("PodValidatingWebhook")
    everything = parse_gates("AllAlpha=true,EnableQuotaAdmission=false")
    assert everything.on("NodeMutatingWebhook")
    assert not everything.on("EnableQuotaAdmission")
    for wrong in ("Nothing=true", "MultiQuotaTree", "MultiQuotaTree=yes"):
        with pytest.raises(ValueError, match="feature gate"):
            parse_gates(wrong)


def test_flags_as_charts_pass_them() -> None:
    settings = parse(
        [
            "--enable-leader-election",
            "--metrics-addr=:8080",
            "-health-probe-addr",
            "127.0.0.1:8000",
            "--logtostderr=true",
            "--v=4",
            "--feature-gates=NodeMutatingWebhook=true",
            "--sync-period=0",
            "--config-namespace=ns",
        ],
        {},
    )
    assert settings.on("enable-leader-election")
    assert settings.address("metrics-addr") == ("", 8080)
    assert settings.address("health-probe-addr") == ("127.0.0.1", 8000)
    assert settings.gates.on("NodeMutatingWebhook")
    assert settings.plugins == frozenset(PLUGINS)


@pytest.mark.parametrize(
    "argument",
    [
        "--what=1",
        "positional",
        "--metrics-addr=8080",
        "--rest-config-qps=many",
        "--feature-gates=X=true",
        "--controllers=nodeslos",
        "--colocation-profile-reconcile-interval=30",
        "--enable-pprof=perhaps",
        "--kubeconfig",
        "--rest-config-burst=nan",
        "--colocation-profile-update-pod-qps=inf",
        "--colocation-profile-update-pod-qps-burst=x",
    ],
)
def test_a_wrong_flag_is_named(argument: str) -> None:
    with pytest.raises(FlagError, match=argument.split("=")[0].lstrip("-")):
        parse([argument], {})


def test_help_names_every_flag_and_says_which_have_no_effect() -> None:
    effective, _, idle = help_text().partition("without effect")
    for name, flag in FLAGS.items():
        assert f"--{name}" in (effective if flag.help else idle), name


KLOG = {
    "add_dir_header": "true",
    "alsologtostderr": "true",
    "log_backtrace_at": "x.go:1",
    "log_dir": "/tmp",
    "log_file": "/tmp/x",
    "log_file_max_size": "10",
    "logtostderr": "false",
    "one_output": "true",
    "skip_headers": "true",
    "skip_log_headers": "true",
    "stderrthreshold": "INFO",
    "vmodule": "x=3",
}


def test_klogs_flags_are_taken_and_those_without_effect_are_known() -> None:
    settings = parse(["-v", "4", *(f"--{name}={text}" for name, text in KLOG.items())], {})
    assert settings.without_effect == tuple(sorted(KLOG))
    assert parse(["--skip_headers", "--one_output"], {}).without_effect == (
        "one_output",
        "skip_headers",
    )
    assert parse(["--v=5", "--metrics-addr=0"], {}).without_effect == ()
    with pytest.raises(FlagError, match="log_file_max_size"):
        parse(["--log_file_max_size=much"], {})


def test_a_wrong_port_in_the_environment_is_named() -> None:
    for wrong in ("https", "70000", "-1"):
        with pytest.raises(FlagError, match="WEBHOOK_PORT"):
            parse([], {"WEBHOOK_PORT": wrong})


def test_the_first_entry_that_fits_a_name_decides() -> None:
    assert chosen("*,-b", ("a", "b"), "f") == {"a", "b"}
    assert chosen("-b,*", ("a", "b"), "f") == {"a"}
    assert chosen("b", ("a", "b"), "f") == {"b"}
    assert chosen("", ("a", "b"), "f") == frozenset()
