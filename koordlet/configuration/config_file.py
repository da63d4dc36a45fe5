"""Reads the configuration: a YAML file, overridden by upstream's flags.

Precedence, lowest first: defaults of the mode, the environment, the file, flags. Parsing is strict:
an unknown or ill-typed field is an error that names field and value, and all errors of a file are
reported together.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import yaml

from apis.errors import InputError, InputErrors
from apis.fields import parse_dotted, set_field
from apis.flags import COMMAND_LINE
from apis.gates import parse_gates, resolve_gates
from apis.lenient import convert_leniently
from koordlet.configuration.config import Config, Cri, Log, Mode, Seconds, parse_seconds
from koordlet.configuration.config_rules import check
from koordlet.configuration.flags import FLAG_OF, Parsed
from koordlet.configuration.gates import GATES
from service.manifest import NotYaml, document

DEFAULT_PATH: Final = "/etc/koordlet/config.yaml"

_DAEMON_SET_DEFAULTS: Final[Mapping[str, Any]] = {
    "cgroupRoot": "/host-cgroup",
    "sysRoot": "/host-sys",
    "sysFsRoot": "/host-sys-fs",
    "varRunRoot": "/host-var-run",
    "runDir": "/host-var-run-koordlet",
    "http": {"address": ":9316"},
    "kubernetes": {"enabled": True},
    "kubelet": {"enabled": True},
    "hookService": {
        "enabled": True,
        "socket": "/host-var-run-koordlet/koordlet.sock",
        "registrationDir": "/host-etc-hookserver",
    },
    "prediction": {"directory": "/prediction-checkpoints"},
    "terwayQos": {"directory": "/host-var-lib/terway/qos"},
}
"""Where upstream's DaemonSet mounts the host's directories, and which sources it uses:
docs/facts/koordlet.md, "Paths"."""

_MAX_FILE_BYTES: Final = 1 << 20
_MAX_VALUES: Final = 10_000
"""Bounds of the file. Chosen: a hundred times a file with every field, so that a wrong path or a
YAML alias bomb is an error and not a full memory."""
_DEBUG_VERBOSITY: Final = 5
"""klog's -v from which upstream's components log details of each object."""


def load(
    *,
    path: str | None,
    flags: Parsed,
    environment: Mapping[str, str],
    mode: Mode,
) -> Config:
    """Return the configuration; raises InputError or InputErrors.

    path: the file; None for the default path, which may be missing.
    """
    tree: dict[str, Any] = {}
    obj = path or DEFAULT_PATH
    text = _read_file(path)
    if text is not None:
        tree = _parse_yaml(text, obj)
    return build(tree, obj=obj, flags=flags, environment=environment, mode=mode)


def build(
    tree: Mapping[str, Any],
    *,
    obj: str,
    flags: Parsed,
    environment: Mapping[str, str],
    mode: Mode,
) -> Config:
    """Return the configuration of a parsed file, or raise InputErrors with all errors."""
    tree = _without_nulls(tree)
    # The file alone first, so that its errors show its own values.
    from_file, errors = convert_leniently(tree, Config, obj=obj, dec_hook=_dec_hook)
    if from_file is None:
        raise InputErrors(errors)
    merged = _overlay(_DAEMON_SET_DEFAULTS if mode is Mode.DAEMON_SET else {}, tree)
    for target, value in flags.values.items():
        steps = parse_dotted(target)
        assert steps is not None, target  # FLAGS names it
        set_field(merged, steps, value)
    config, merged_errors = convert_leniently(merged, Config, obj=obj, dec_hook=_dec_hook)
    errors += [_of_flag(one) for one in merged_errors if one.field in flags.values]
    if config is None or errors:
        raise InputErrors(errors)
    try:
        gates = resolve_gates(
            GATES,
            (obj, "featureGates", config.feature_gates),
            (
                COMMAND_LINE,
                "-feature-gates",
                parse_gates(flags.gates, obj=COMMAND_LINE, field="-feature-gates"),
            ),
        )
    except InputErrors as bad:
        errors += bad.errors
        gates = {}
    node_name, named_by = _node_name(config, obj, environment)
    config = msgspec.structs.replace(
        config,
        node_name=node_name,
        feature_gates=gates,
        nri=msgspec.structs.replace(config.nri, socket=_below(config, config.nri.socket)),
        # The default of upstream's flag is empty, and manifests pass an empty value.
        cri=msgspec.structs.replace(
            config.cri, socket=config.cri.socket.removeprefix("unix://") or Cri().socket
        ),
        kubepods_root=config.kubepods_root.strip("/"),
        log=_log(config.log),
        **{name: _trimmed(getattr(config, name)) for name in _DIRECTORIES},
    )
    for one in check(config, obj):
        if one.field == "nodeName":
            one = one.about(named_by)
        errors.append(_of_flag(one) if one.field in flags.values else one)
    if errors:
        raise InputErrors(errors)
    return config


_DIRECTORIES: Final = (
    "cgroup_root",
    "sys_root",
    "sys_fs_root",
    "proc_root",
    "var_run_root",
    "objects_dir",
    "run_dir",
)


def _without_nulls(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree without nulls: a section whose lines are all commented out is null."""
    return {
        name: _without_nulls(value) if isinstance(value, Mapping) else value
        for name, value in tree.items()
        if value is not None
    }


def _of_flag(error: InputError) -> InputError:
    """Return the same error for the flag that the value came from."""
    return InputError(
        obj=COMMAND_LINE,
        field=f"-{FLAG_OF[error.field]}",
        value=error.value,
        problem=error.problem,
        hint=error.hint,
    )


def _node_name(config: Config, obj: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the node's name, and where it comes from."""
    if config.node_name:
        return config.node_name, obj
    if name := environment.get("NODE_NAME", ""):
        return name, "environment variable NODE_NAME"
    return _host_name(), "this machine's host name"


def _below(config: Config, path: str) -> str:
    """Return a socket's absolute path; a relative path is below the host's /var/run."""
    if not path or path.startswith("/"):
        return path
    return f"{config.var_run_root.rstrip('/')}/{path}"


def mode_of(environment: Mapping[str, str], *, default: Mode) -> Mode:
    """Return the mode that `agent_mode` selects; unset: `default`."""
    text = environment.get("agent_mode", "")
    if not text:
        return default
    return Mode.HOST if text == Mode.HOST else Mode.DAEMON_SET


def _dec_hook(type_: type, value: Any) -> Any:
    if type_ is Seconds:
        return parse_seconds(value)
    raise NotImplementedError(f"no conversion to {type_}")  # msgspec's contract for dec_hook


def _read_file(path: str | None) -> str | None:
    chosen = path or DEFAULT_PATH
    try:
        with open(chosen, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        if path is None:
            return None
        raise _file_error(chosen, "no such file", "pass --config FILE") from None
    except OSError as error:
        raise _file_error(chosen, error.strerror or str(error), None) from None
    if len(data) > _MAX_FILE_BYTES:
        raise _file_error(chosen, "larger than 1 MiB", None)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _file_error(chosen, f"not UTF-8: {error}", None) from None


def _file_error(path: str, problem: str, hint: str | None) -> InputError:
    return InputError(obj=path, field="", value=path, problem=problem, hint=hint)


def _parse_yaml(text: str, obj: str) -> dict[str, Any]:
    try:
        tree = document(text, most_values=_MAX_VALUES)
    except NotYaml as error:
        raise InputError(obj=obj, field="", value="", problem=str(error)) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise InputError(obj=obj, field="", value="", problem="not a mapping of fields")
    return tree


def _overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `over` on `base`, mapping by mapping."""
    merged = {
        key: _overlay(value, {}) if isinstance(value, Mapping) else value
        for key, value in base.items()
    }
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = _overlay(below if isinstance(below, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def _trimmed(path: str) -> str:
    return path.rstrip("/") or path[:1]


def _host_name() -> str:
    return socket.gethostname().lower()


def _log(log: Log) -> Log:
    detailed = log.verbosity >= _DEBUG_VERBOSITY
    return msgspec.structs.replace(log, level="debug") if detailed else log


def as_tree(config: Config) -> dict[str, Any]:
    """Return the configuration in force as the tree of a file with every field."""
    tree: dict[str, Any] = msgspec.to_builtins(config, enc_hook=float)
    return tree


def describe(config: Config) -> Sequence[str]:
    """Return the configuration in force as YAML lines, for `check-config` and the log."""
    text: str = yaml.safe_dump(as_tree(config), sort_keys=False)
    return text.splitlines()
