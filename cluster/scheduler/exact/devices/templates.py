"""Templates of shared GPUs: the sizes in which a vendor's device can be divided.

A ConfigMap has them by "<vendor>-<model>". A share of such a device is exactly one template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from apis.decode import decode_field, field_decoder
from apis.keys import HUAWEI_NPU_CORE
from apis.quantity import ResourceList
from cluster.scheduler.tables.amounts import Amounts, amounts_of
from cluster.scheduler.tables.devices.request import TypeRequest

DATA_KEY: Final = "data.yaml"
"""Key of the ConfigMap's data. Its text is JSON, which is YAML too."""

_templates = field_decoder(dict[str, dict[str, ResourceList]])


@dataclass(frozen=True, slots=True)
class SharedTemplates:
    """by_model: "<vendor>-<model>" -> template -> amounts of one device.

    resources: a shared request that names one of these needs a template.
    """

    by_model: Mapping[str, Mapping[str, Amounts]] = field(default_factory=dict)
    resources: frozenset[str] = frozenset({HUAWEI_NPU_CORE})

    def concern(self, request: TypeRequest) -> bool:
        """Return whether the request needs a template."""
        return request.shared and not self.resources.isdisjoint(request.each)

    def of(self, request: TypeRequest, *, vendor: str, model: str) -> str | None:
        """Return the name of the template that equals the request, None if there is none.

        Of several equal ones the first by name.
        """
        templates = self.by_model.get(f"{vendor}-{model}", {})
        return min((name for name, has in templates.items() if has == request.each), default=None)


NO_TEMPLATES: Final = SharedTemplates()


def parse_templates(text: str, *, obj: str) -> Mapping[str, Mapping[str, Amounts]]:
    """Return the templates of the ConfigMap's text. Raises InputError that names `obj`."""
    read = decode_field(_templates, text, obj=obj, field=f"data.{DATA_KEY}")
    return MappingProxyType(
        {
            model: {name: amounts_of(resources) for name, resources in templates.items()}
            for model, templates in read.items()
        }
    )
