"""What filter, score and allocator of DeviceShare have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from apis.keys import HUAWEI_NPU_CORE
from cluster.scheduler.configuration.koordinator_arguments import (
    AllocationStrategy,
    DeviceShareArgs,
)
from cluster.scheduler.exact.devices.allocate import Rules
from cluster.scheduler.exact.devices.candidates import Scoring
from cluster.scheduler.exact.devices.templates import SharedTemplates
from cluster.scheduler.plugins.contract import Refusal
from cluster.scheduler.tables.devices.request import (
    BadDeviceRequest,
    DeviceRequest,
    device_request,
)
from cluster.scheduler.tables.devices.table import DeviceTable
from cluster.scheduler.tables.shapes import PodShape

NAME: Final = "DeviceShare"


@dataclass(frozen=True, slots=True)
class Settings:
    """unshareable: (vendor, model) of GPUs that cannot be shared. align: devices come from the NUMA
    nodes of the pod's NUMA allocation. templated: a share that requests one of these resources
    is one template. adaption: the gate DevicePluginAdaption. follows_hints: a pod's scheduling hint
    may ask for the devices that are recorded on the pod.
    """

    scoring: Scoring = field(default_factory=Scoring)
    unshareable: tuple[tuple[str, str], ...] = ()
    align: bool = True
    templated: frozenset[str] = frozenset({HUAWEI_NPU_CORE})
    adaption: bool = False
    follows_hints: bool = False


DEFAULT: Final = Settings()


def settings_of(
    arguments: DeviceShareArgs, *, adaption: bool = False, follows_hints: bool = False
) -> Settings:
    """Return the settings that the plugin's arguments and the gate DevicePluginAdaption mean.

    follows_hints: the profile has SchedulingHint.
    """
    strategy = arguments.scoring_strategy
    return Settings(
        scoring=Scoring(
            weights={resource.name: resource.weight for resource in strategy.resources},
            most=strategy.type is AllocationStrategy.MOST_ALLOCATED,
        ),
        unshareable=tuple(
            (one.vendor, one.model) for one in arguments.gpu_share_unsupported_models
        ),
        align=not arguments.disable_device_numa_topology_alignment,
        templated=frozenset(arguments.gpu_shared_resource_templates_config.matched_resources),
        adaption=adaption,
        follows_hints=follows_hints,
    )


def requested(pod: PodShape) -> DeviceRequest | None:
    """Return what a pod requests of devices. Raises Refusal for a request that cannot be met."""
    found = pod.derived(device_request)
    if isinstance(found, BadDeviceRequest):
        raise Refusal(NAME, str(found))
    return found


def rules_of(settings: Settings, devices: DeviceTable) -> Rules:
    """Return how devices are chosen on a node, with the templates in force."""
    return Rules(settings.scoring, SharedTemplates(devices.templates, settings.templated))
