"""Feature gates: their names and defaults are upstream's. Source: manager.md section 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

DEFAULTS: Final[Mapping[str, bool]] = {
    "WebhookFramework": True,
    "PodMutatingWebhook": True,
    "PodValidatingWebhook": True,
    "ElasticMutatingWebhook": True,
    "ElasticValidatingWebhook": True,
    "NodeMutatingWebhook": False,
    "NodeValidatingWebhook": False,
    "ConfigMapValidatingWebhook": False,
    "ReservationMutatingWebhook": False,
    "ColocationProfileSkipMutatingResources": False,
    "ColocationProfileSkipValidatingPriority": False,
    "ColocationProfileController": False,
    "MultiQuotaTree": False,
    "ElasticQuotaGuaranteeUsage": False,
    "ElasticQuotaIgnorePodOverhead": False,
    "ElasticQuotaEnableUpdateResourceKey": False,
    "ElasticQuotaEvaluationTransformPod": False,
    "DisableDefaultQuota": False,
    "SupportParentQuotaSubmitPod": False,
    "EnableQuotaAdmission": False,
    "EnableQuotaAdmissionOnUpdate": False,
    "ValidatePodDeviceResource": False,
    "EnablePodEnhancedValidator": False,
    "DisableExtendedResourceSpec": False,
    "DisableDeviceResourceSpec": False,
    "BindingAdmissionWebhook": False,
    "EnableSyncGPUSharedResource": False,
    "ReplaceResourcesTransformer": False,
    "DisablePVCReservation": False,
    "PriorityTransformer": False,
    "PreemptionPolicyTransformer": False,
}

_BETA: Final = frozenset(name for name, on in DEFAULTS.items() if on)


@dataclass(frozen=True, slots=True)
class Gates:
    """Which features are on."""

    values: Mapping[str, bool]

    def on(self, name: str) -> bool:
        """Return whether `name`, a known gate, is on."""
        return self.values[name]


def parse_gates(text: str) -> Gates:
    """Return the gates that `A=true,B=false` sets over the defaults.

    AllAlpha and AllBeta set their group first, as the component base does. Raises ValueError.
    """
    said: dict[str, bool] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or value.lower() not in ("true", "false"):
            raise ValueError(f"feature gate {part!r}: write Name=true or Name=false")
        if name not in DEFAULTS and name not in ("AllAlpha", "AllBeta"):
            raise ValueError(f"feature gate {name!r} is not known")
        said[name] = value.lower() == "true"
    values = dict(DEFAULTS)
    if "AllAlpha" in said:
        values.update({name: said["AllAlpha"] for name in DEFAULTS if name not in _BETA})
    if "AllBeta" in said:
        values.update(dict.fromkeys(_BETA, said["AllBeta"]))
    values.update({name: on for name, on in said.items() if name in DEFAULTS})
    return Gates(values)
