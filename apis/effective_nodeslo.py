"""The effective spec of a NodeSLO: what holds on a node once defaults are filled in.

The stored object is sparse. `decode_nodeslo` overlays it field by field on the default table, lets
null and absent mean "default", replaces blocks that are switched off by the values that undo them,
and names every field that cannot be used. docs/facts/apis.md, "Effective NodeSLO".
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from apis.decode import decode_leniently, parse_json_object, without_nulls
from apis.errors import InputError, InputErrors
from apis.nodeslo import (
    CPUQOS,
    MemoryQOS,
    NodeSLOSpec,
    ResctrlQOS,
    ResourceQOS,
    bandwidth_bits,
)
from apis.quantity import ZERO


def _class_defaults(
    *, group_identity: int, core_expeller: bool, wmark_ratio: int, wmark_min_adj: int, cat_end: int
) -> dict[str, Any]:
    wmark_scale = 20 if wmark_ratio else 50
    return {
        "cpuQOS": {"groupIdentity": group_identity, "coreExpeller": core_expeller},
        "memoryQOS": {
            "wmarkRatio": wmark_ratio,
            "wmarkScalePermill": wmark_scale,
            "wmarkMinAdj": wmark_min_adj,
        },
        "resctrlQOS": {"catRangeEndPercent": cat_end},
    }


# Only what differs from the field defaults above, which are the values that undo a block.
_DEFAULT_SPEC: Final[dict[str, Any]] = {
    "resourceQOSStrategy": {
        "lsrClass": _class_defaults(
            group_identity=2, core_expeller=True, wmark_ratio=95, wmark_min_adj=-25, cat_end=100
        ),
        "lsClass": _class_defaults(
            group_identity=2, core_expeller=True, wmark_ratio=95, wmark_min_adj=-25, cat_end=100
        ),
        "beClass": _class_defaults(
            group_identity=-1, core_expeller=False, wmark_ratio=95, wmark_min_adj=50, cat_end=30
        ),
    }
}

_LARGEST_NODESLO: Final = 2 * 1024 * 1024
"""Bytes; chosen: the API server stores objects of at most 1.5 MiB."""
_MOST_HOST_APPLICATIONS: Final = 1024
"""Chosen: ten times the pods that a node usually has; each costs work in every pass."""
_LONGEST_PATH: Final = 2048
"""Characters; chosen: half of the kernel's PATH_MAX, which leaves room for the cgroup root."""


def decode_nodeslo(raw: bytes | str | dict[str, Any], *, obj: str) -> NodeSLOSpec:
    """Return the effective spec of a NodeSLO object, or of a bare spec.

    Absent and null fields take their defaults; blocks of LSR, LS and BE whose merged `enable` is
    false become the values that undo them. Raises InputErrors that names every unusable field.
    """
    plain = parse_json_object(raw, obj=obj, largest=_LARGEST_NODESLO)
    prefix = ""
    if "spec" in plain or "apiVersion" in plain or "kind" in plain:
        prefix = "spec"
        spec_given = plain.get("spec")
        plain = {} if spec_given is None else spec_given
        if not isinstance(plain, dict):
            raise InputErrors(
                [InputError(obj=obj, field="spec", value=plain, problem="expected an object")]
            )
    merged = overlay(_DEFAULT_SPEC, plain)
    spec, errors = decode_leniently(merged, NodeSLOSpec, obj=obj, largest=_LARGEST_NODESLO)
    # With an element of a list left out the indices of what decoded are not the object's.
    if spec is not None and not any(error.field.endswith("]") for error in errors):
        errors.extend(_beyond_types(spec, obj))
    if errors or spec is None:
        raise InputErrors([_prefixed(error, prefix) for error in errors])
    return switched_off_undone(spec)


def default_nodeslo() -> NodeSLOSpec:
    """Return the spec that holds on a node without a NodeSLO."""
    return _DEFAULT


def overlay(below: Any, above: Any) -> Any:
    """Return `above` laid over `below`: objects merge by key, null and absent keep what is below.

    Scalars and lists of `above` replace. Neither argument is changed.
    """
    if isinstance(below, dict) and isinstance(above, dict):
        merged = dict(below)
        for key, value in above.items():
            if value is not None:
                merged[key] = overlay(below.get(key), value)
        return merged
    return without_nulls(above)


def switched_off_undone(spec: NodeSLOSpec) -> NodeSLOSpec:
    """Replace CPU, memory and resctrl blocks of LSR, LS and BE that are off by undoing values."""
    strategy = spec.resource_qos_strategy
    return msgspec.structs.replace(
        spec,
        resource_qos_strategy=msgspec.structs.replace(
            strategy,
            lsr_class=_undone(strategy.lsr_class),
            ls_class=_undone(strategy.ls_class),
            be_class=_undone(strategy.be_class),
        ),
    )


def _undone(block: ResourceQOS) -> ResourceQOS:
    return msgspec.structs.replace(
        block,
        cpu_qos=block.cpu_qos if block.cpu_qos.enable else CPUQOS(),
        memory_qos=block.memory_qos if block.memory_qos.enable else MemoryQOS(),
        resctrl_qos=block.resctrl_qos if block.resctrl_qos.enable else ResctrlQOS(),
    )


def path_problem(path: str) -> str | None:
    """Return why `path` cannot name a directory below a cgroup, or None if it can."""
    if len(path) > _LONGEST_PATH:
        return f"longer than {_LONGEST_PATH} characters"
    if "\0" in path or not path.isprintable():
        return "has characters that do not print"
    parts = [part for part in path.split("/") if part]
    if any(part in (".", "..") for part in parts):
        return "must not contain . or .."
    if any(len(part.encode()) > 255 for part in parts):
        return "has a component longer than 255 bytes"
    return None


def _beyond_types(spec: NodeSLOSpec, obj: str) -> list[InputError]:
    errors: list[InputError] = []

    def add(where: str, value: object, problem: str) -> None:
        errors.append(InputError(obj=obj, field=where, value=value, problem=problem))

    strategy = spec.resource_qos_strategy
    for name, block in (
        ("lsrClass", strategy.lsr_class),
        ("lsClass", strategy.ls_class),
        ("beClass", strategy.be_class),
        ("systemClass", strategy.system_class),
    ):
        network = block.network_qos
        for member, rate in (
            ("ingressRequest", network.ingress_request),
            ("ingressLimit", network.ingress_limit),
            ("egressRequest", network.egress_request),
            ("egressLimit", network.egress_limit),
        ):
            try:
                bandwidth_bits(rate, total_bits=0)
            except ValueError as error:
                add(f"resourceQOSStrategy.{name}.networkQOS.{member}", rate, str(error))
    if spec.system_strategy.total_network_bandwidth < ZERO:
        add(
            "systemStrategy.totalNetworkBandwidth",
            str(spec.system_strategy.total_network_bandwidth),
            "a bandwidth must not be negative",
        )
    if len(spec.host_applications) > _MOST_HOST_APPLICATIONS:
        add(
            "hostApplications",
            len(spec.host_applications),
            f"more than {_MOST_HOST_APPLICATIONS} applications",
        )
    for index, application in enumerate(spec.host_applications):
        if application.cgroup_path is None:
            continue
        for member, path in (
            ("parentDir", application.cgroup_path.parent_dir),
            ("relativePath", application.cgroup_path.relative_path),
        ):
            problem = path_problem(path)
            if problem:
                add(f"hostApplications[{index}].cgroupPath.{member}", path, problem)
    return errors


def _prefixed(error: InputError, prefix: str) -> InputError:
    if not prefix:
        return error
    return InputError(
        obj=error.obj,
        field=f"{prefix}.{error.field}",
        value=error.value,
        problem=error.problem,
        hint=error.hint,
    )


_DEFAULT: Final = decode_nodeslo({}, obj="NodeSLO defaults")
