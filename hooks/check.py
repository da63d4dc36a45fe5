"""Checks of a claim: on which levels a resource can be set, and which values it accepts.

Tests hold the built-in policies to these checks, and `hooks.site` runs them on every claim of a
site policy. An effector therefore never sees a value of a wrong type or a path outside its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from hooks.claim import Claim, Op
from hooks.subject import Level
from linux.block_io import BLOCK_FILES, OF_ROOT, check_block_value
from linux.cgroup_files import FILES, in_range
from linux.kernel_settings import check_value
from linux.resctrl import check_group, parse_schemata
from linux.resources import DeviceNode, Mount, Resource, Value

_DIRECTORIES: Final = frozenset(
    {Level.QOS, Level.POD, Level.SANDBOX, Level.CONTAINER, Level.HOST_APP}
)
_NODE: Final = frozenset({Level.NODE})
_CREATED: Final = frozenset({Level.CONTAINER})
_TASKS: Final = frozenset({Level.SANDBOX, Level.CONTAINER})

LEVELS: Final[Mapping[Resource, frozenset[Level]]] = MappingProxyType(
    dict.fromkeys(FILES, _DIRECTORIES)
    | {
        resource: _NODE if file.form in OF_ROOT else _DIRECTORIES
        for resource, file in BLOCK_FILES.items()
    }
    | {
        Resource.OOM_SCORE_ADJ: _CREATED,
        Resource.CORE_SCHED_COOKIE: _TASKS,
        Resource.RESCTRL_GROUP: _TASKS,
        Resource.RESCTRL_SCHEMATA: frozenset({Level.NODE, Level.POD}),
        Resource.ENV: _CREATED,
        Resource.MOUNT: _CREATED,
        Resource.DEVICE: _CREATED,
        Resource.HOST_DIRECTORY: _CREATED,
        Resource.SYSCTL: frozenset({Level.NODE}),
        Resource.KERNEL_SETTING: frozenset({Level.NODE}),
    }
)
"""Resource -> levels on which it can be claimed."""

KEYED: Final = frozenset(
    {
        Resource.RESCTRL_SCHEMATA,
        Resource.ENV,
        Resource.MOUNT,
        Resource.DEVICE,
        Resource.HOST_DIRECTORY,
        Resource.SYSCTL,
        Resource.KERNEL_SETTING,
        *BLOCK_FILES,
    }
)
"""Resources that need a key; the others must not have one."""

_LONGEST_TEXT: Final = 128 * 1024
"""The kernel's limit of one environment variable (MAX_ARG_STRLEN). Other texts are far shorter."""
_LONGEST_PATH: Final = 4096
"""The kernel's PATH_MAX, also far above any sysctl's value."""
_LONGEST_KEY: Final = 256
"""Chosen, for names of variables and of core scheduling groups; label values have at most 63."""
LARGEST_FACTOR: Final = 1000.0
"""As `apis.annotations.parse_cpu_normalization_ratio`: no CPU is this much faster than another. For
a multiplied quota, chosen: a larger factor gives more than a node has."""
_LARGEST_DEVICE_NUMBER: Final = (1 << 20) - 1
"""A minor number has 20 bits. A major has 12; the runtime refuses larger ones."""


def claim_problem(claim: Claim, level: Level) -> str:
    """Return why the claim cannot be carried out on `level`, "" when it can."""
    resource = claim.resource
    if level not in LEVELS[resource]:
        allowed = ", ".join(sorted(LEVELS[resource]))
        return f"{resource} cannot be claimed for a {level}, only for: {allowed}"
    if bool(claim.key) != (resource in KEYED):
        return f"{resource} {'needs a key' if resource in KEYED else 'takes no key'}"
    if claim.op in (Op.DIVIDE, Op.MULTIPLY):
        done = "divided" if claim.op is Op.DIVIDE else "multiplied"
        if resource is not Resource.CPU_CFS_QUOTA:
            return f"only {Resource.CPU_CFS_QUOTA} can be {done}"
        if not 1.0 <= claim.factor <= LARGEST_FACTOR:
            return f"a quota is {done} by 1 to {LARGEST_FACTOR:g}, not by {claim.factor}"
        return ""
    if claim.op is Op.WITHIN and resource is Resource.RESCTRL_SCHEMATA:
        return value_problem(resource, claim.key, claim.value)
    if claim.op is not Op.SET and resource not in FILES and resource is not Resource.OOM_SCORE_ADJ:
        return f"{resource} can only be set, not bounded"
    return value_problem(resource, claim.key, claim.value)


def value_problem(resource: Resource, key: str, value: Value) -> str:
    """Return why `resource` does not accept `value`, "" when it does."""
    try:
        file = FILES.get(resource)
        if file is not None:
            _, note = in_range(file, value)
            return f"{resource}: {note}" if note else ""
        if resource in BLOCK_FILES:
            check_block_value(resource, key, value)
        else:
            _CHECKS[resource](key, value)
    except (TypeError, ValueError) as error:
        return f"{resource}: {error}"
    return ""


def _integer(value: Value, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected a number, not {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{value} is outside {low}..{high}")


def _text(value: Value, *, longest: int = _LONGEST_TEXT) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, not {type(value).__name__}")
    if len(value) > longest or "\0" in value:
        raise ValueError(f"expected a text of at most {longest} characters without NUL")
    return value


def _path(path: str) -> None:
    """Raise ValueError unless `path` is absolute and has no `.`, `..` or empty part."""
    _text(path, longest=_LONGEST_PATH)
    if not path.startswith("/") or any(part in ("", ".", "..") for part in path[1:].split("/")):
        raise ValueError(f"{path[:64]!r} is not an absolute path without . and ..")


def _env(key: str, value: Value) -> None:
    _text(key, longest=_LONGEST_KEY)
    if "=" in key or not key.isprintable():
        raise ValueError(f"{key[:64]!r} cannot name a variable")
    _text(value)


def _mount(key: str, value: Value) -> None:
    if not isinstance(value, Mount):
        raise TypeError(f"expected a Mount, not {type(value).__name__}")
    if value.destination != key:
        raise ValueError("the key of a mount is its destination")
    _path(key)
    if value.type == "bind" or "bind" in value.options or "rbind" in value.options:
        _path(value.source)
    for text in (value.type, value.source, *value.options):
        _text(text, longest=_LONGEST_PATH)


def _device(key: str, value: Value) -> None:
    if not isinstance(value, DeviceNode):
        raise TypeError(f"expected a DeviceNode, not {type(value).__name__}")
    if value.path != key or not key.startswith("/dev/"):
        raise ValueError("the key of a device is its path, below /dev/")
    _path(key)
    if value.type not in ("c", "b"):
        raise ValueError(f"{value.type[:8]!r} is not c or b")
    for number in (value.major, value.minor):
        _integer(number, 0, _LARGEST_DEVICE_NUMBER)
    _integer(value.file_mode, 0, 0o777)


def _schemata(key: str, value: Value) -> None:
    check_group(key)
    if not parse_schemata(_text(value)):
        raise ValueError("the schemata is empty")


def _sysctl(key: str, value: Value) -> None:
    if not key.replace(".", "").replace("_", "").replace("-", "").isalnum() or ".." in key:
        raise ValueError(f"{key[:64]!r} cannot name a sysctl")
    _text(value, longest=_LONGEST_PATH)


def _host_directory(key: str, value: Value) -> None:
    _path(key)
    _integer(value, 0, 0o7777)


def _cookie(key: str, value: Value) -> None:
    _text(value, longest=_LONGEST_KEY)


def _group(key: str, value: Value) -> None:
    check_group(_text(value))


_CHECKS: Final[Mapping[Resource, Callable[[str, Value], None]]] = {
    Resource.OOM_SCORE_ADJ: lambda key, value: _integer(value, -1000, 1000),
    Resource.CORE_SCHED_COOKIE: _cookie,
    Resource.RESCTRL_GROUP: _group,
    Resource.RESCTRL_SCHEMATA: _schemata,
    Resource.ENV: _env,
    Resource.MOUNT: _mount,
    Resource.DEVICE: _device,
    Resource.SYSCTL: _sysctl,
    Resource.KERNEL_SETTING: lambda key, value: check_value(key, _text(value)),
    Resource.HOST_DIRECTORY: _host_directory,
}
