"""Defaults of gates and flags: those of upstream."""

from __future__ import annotations

import pytest

from cluster.gates import GATES, parse_gates
from cluster.manager.flags import CONTROLLERS, parse
from cluster.manager.node_offer import PLUGINS

ON_BY_DEFAULT = {
    "WebhookFramework",
    "PodMutatingWebhook",
    "PodValidatingWebhook",
    "ElasticMutatingWebhook",
    "ElasticValidatingWebhook",
}


OFF_BY_DEFAULT = {
    *("NodeMutatingWebhook", "NodeValidatingWebhook", "ConfigMapValidatingWebhook"),
    *("ReservationMutatingWebhook", "BindingAdmissionWebhook"),
    *("ColocationProfileSkipMutatingResources", "ColocationProfileSkipValidatingPriority"),
    *("ColocationProfileController", "EnableSyncGPUSharedResource"),
    *("MultiQuotaTree", "DisableDefaultQuota", "SupportParentQuotaSubmitPod"),
    *("ElasticQuotaGuaranteeUsage", "ElasticQuotaIgnorePodOverhead"),
    *("ElasticQuotaEnableUpdateResourceKey", "ElasticQuotaEvaluationTransformPod"),
    *("EnableQuotaAdmission", "EnableQuotaAdmissionOnUpdate", "ReplaceResourcesTransformer"),
    *("ValidatePodDeviceResource", "EnablePodEnhancedValidator"),
    *("DisableExtendedResourceSpec", "DisableDeviceResourceSpec"),
    *("DisablePVCReservation", "PriorityTransformer", "PreemptionPolicyTransformer"),
}


def test_the_gates_and_which_are_on_by_default() -> None:
    gates = parse_gates("")
    assert {name for name in GATES if gates.on(name)} == ON_BY_DEFAULT
    assert set(GATES) == ON_BY_DEFAULT | OFF_BY_DEFAULT
    for name in GATES:
        turned = parse_gates(f"{name}={'false' if name in ON_BY_DEFAULT else 'true'}")
        assert turned.on(name) is not gates.on(name)


TEXTS = {
    "leader-election-namespace": "koordinator-system",
    "config-namespace": "koordinator-system",
    "slo-config-name": "slo-controller-config",
    "namespace": "",
    "kubeconfig": "",
    "master": "",
    "feature-gates": "",
    "node-strategy-name-need-check": "false",
    "pod-enhanced-validator-config-namespace": "koordinator-system",
    "pod-enhanced-validator-config-name": "pod-enhanced-validator-config",
    "binding-admission-user-name": "",
    "binding-admission-namespaces": "",
    "binding-admission-exclude-namespaces": "kube-system",
    "binding-admission-bypass-labels": "koordinator.sh/binding-admission-bypass",
    "binding-admission-bypass-annotations": "",
    "leader-elect-resource-lock": "leases",
}
NUMBERS = {
    "rest-config-qps": 30,
    "rest-config-burst": 50,
    "v": 0,
    "quota-update-max-retries": 3,
    "colocation-profile-update-pod-qps": 10,
    "colocation-profile-update-pod-qps-burst": 100,
}
SECONDS = {
    "colocation-profile-reconcile-interval": 30,
    "colocation-profile-force-update-pod-duration": 300,
    "colocation-profile-expire-pod-cache-duration": 600,
    "pod-enhanced-validator-reconcile-interval": 300,
    "quota-update-retry-jitter": 0,
    "quota-update-max-total-jitter": 1,
}
SWITCHES = {
    "enable-leader-election": True,
    "enable-pprof": True,
    "logtostderr": True,
    "colocation-profile-reconcile-by-default": False,
    "binding-admission-dry-run": False,
    "disable-no-deepcopy": False,
    "quota-update-conflict-fresh-get": False,
    "alsologtostderr": False,
}


def test_the_defaults_of_the_flags() -> None:
    settings = parse([], {})
    assert {name: settings.text(name) for name in TEXTS} == TEXTS
    assert {name: settings.number(name) for name in NUMBERS} == NUMBERS
    assert {name: settings.seconds(name) for name in SECONDS} == SECONDS
    assert {name: settings.on(name) for name in SWITCHES} == SWITCHES
    assert settings.address("metrics-addr") == ("", 8080)
    assert settings.address("health-probe-addr") == ("", 8000)
    assert settings.controllers == frozenset(CONTROLLERS)
    assert settings.plugins == frozenset(PLUGINS)
    assert settings.number("workers") >= 1


@pytest.mark.parametrize("text", ["0", ""])
def test_an_address_can_be_switched_off(text: str) -> None:
    assert parse([f"--metrics-addr={text}"], {}).address("metrics-addr") is None


def test_an_empty_environment_variable_counts_as_absent() -> None:
    settings = parse([], {"POD_NAMESPACE": "mine", "SECRET_NAME": "", "WEBHOOK_PORT": "0"})
    assert settings.env("POD_NAMESPACE", "default") == "mine"
    assert settings.env("SECRET_NAME", "default") == "default"
    assert settings.env("SERVICE_NAME", "default") == "default"
    assert settings.env_port("WEBHOOK_PORT", 9876) == 0
    assert parse([], {}).env_port("WEBHOOK_PORT", 9876) == 9876
    assert parse([], {"WEBHOOK_PORT": "65535"}).env_port("WEBHOOK_PORT", 1) == 65535


def test_the_last_of_a_flag_counts_and_lists_are_trimmed() -> None:
    settings = parse(["--config-namespace=a", "--config-namespace=b"], {})
    assert settings.text("config-namespace") == "b"
    settings = parse(["--binding-admission-user-name= a, b ,,c "], {})
    assert settings.names("binding-admission-user-name") == ("a", "b", "c")
