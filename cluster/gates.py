"""The feature gates of the manager.

Names and defaults are upstream's: docs/facts/manager.md, "Feature gates".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from apis import gates
from apis.gates import OFF, ON, Gate

GATES: Final[Mapping[str, Gate]] = {
    "WebhookFramework": ON,
    "PodMutatingWebhook": ON,
    "PodValidatingWebhook": ON,
    "ElasticMutatingWebhook": ON,
    "ElasticValidatingWebhook": ON,
    "NodeMutatingWebhook": OFF,
    "NodeValidatingWebhook": OFF,
    "ConfigMapValidatingWebhook": OFF,
    "ReservationMutatingWebhook": OFF,
    "ColocationProfileSkipMutatingResources": OFF,
    "ColocationProfileSkipValidatingPriority": OFF,
    "ColocationProfileController": OFF,
    "MultiQuotaTree": OFF,
    "ElasticQuotaGuaranteeUsage": OFF,
    "ElasticQuotaIgnorePodOverhead": OFF,
    "ElasticQuotaEnableUpdateResourceKey": OFF,
    "ElasticQuotaEvaluationTransformPod": OFF,
    "DisableDefaultQuota": OFF,
    "SupportParentQuotaSubmitPod": OFF,
    "EnableQuotaAdmission": OFF,
    "EnableQuotaAdmissionOnUpdate": OFF,
    "ValidatePodDeviceResource": OFF,
    "EnablePodEnhancedValidator": OFF,
    "DisableExtendedResourceSpec": OFF,
    "DisableDeviceResourceSpec": OFF,
    "BindingAdmissionWebhook": OFF,
    "EnableSyncGPUSharedResource": OFF,
    "ReplaceResourcesTransformer": OFF,
    "DisablePVCReservation": OFF,
    "PriorityTransformer": OFF,
    "PreemptionPolicyTransformer": OFF,
}


@dataclass(frozen=True, slots=True)
class Gates:
    """The gates of one process: name -> on or off."""

    values: Mapping[str, bool]

    def on(self, name: str) -> bool:
        """Return whether `name`, a known gate, is on."""
        return self.values[name]


def parse_gates(text: str) -> Gates:
    """Return the defaults with the settings of `A=true,B=false` applied. Raises InputErrors."""
    obj, field = "command line", "--feature-gates"
    said = gates.parse_gates(text, obj=obj, field=field)
    return Gates(gates.resolve_gates(GATES, (obj, field, said)))
