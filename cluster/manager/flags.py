"""Flags of koord-manager: upstream's names and defaults, so that its manifests work unchanged.

Go's flag syntax is accepted: one or two dashes, `-flag=value`, `-flag value`, bare booleans.
Environment variables and ports: docs/facts/manager.md, "Flags and environment".
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from apis.errors import InputError, InputErrors
from apis.flags import bad_flag, read_flags
from apis.gates import parse_bool
from apis.meta import parse_duration
from cluster.gates import Gates, parse_gates
from cluster.manager.node_offer import PLUGINS
from cluster.webhook.binding import name_list
from service.addresses import parse_address

CONTROLLERS: Final = ("colocationprofile", "nodemetric", "noderesource", "nodeslo", "quotaprofile")


class Kind(StrEnum):
    """Type of a flag's value."""

    TEXT = "text"
    BOOL = "bool"
    NUMBER = "number"
    DURATION = "duration"
    ADDRESS = "address"


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag with upstream's default. help: "" for a flag without effect here."""

    default: str
    kind: Kind
    help: str = ""


_T, _B, _N, _D, _A = Kind.TEXT, Kind.BOOL, Kind.NUMBER, Kind.DURATION, Kind.ADDRESS

FLAGS: Final[Mapping[str, Flag]] = {
    # the process
    "kubeconfig": Flag(
        "", _T, "file that names the API server; default: the pod's service account"
    ),
    "master": Flag("", _T, "address of the API server, overrides the kubeconfig's"),
    "namespace": Flag("", _T, "watch pods of this namespace only"),
    "rest-config-qps": Flag("30", _N, "requests to the API server per second"),
    "rest-config-burst": Flag("50", _N, "requests to the API server in one burst"),
    "workers": Flag("16", _N, "keys that a controller reconciles concurrently; not upstream's"),
    "metrics-addr": Flag(":8080", _A, "address of /metrics; 0: not served"),
    "health-probe-addr": Flag(":8000", _A, "address of /healthz and /readyz; 0: not served"),
    "enable-leader-election": Flag("true", _B, "run the controllers on one replica only"),
    "leader-election-namespace": Flag("koordinator-system", _T, "namespace of the lease"),
    "feature-gates": Flag("", _T, "Name=true,Name=false,..."),
    "v": Flag("0", _N, "log level; 5 and above: debug"),
    # controllers and admission
    "controllers": Flag("*", _T, f"*, name or -name of {', '.join(CONTROLLERS)}"),
    "noderesource-plugins": Flag("*", _T, f"*, name or -name of {', '.join(PLUGINS)}"),
    "config-namespace": Flag("koordinator-system", _T, "namespace of slo-controller-config"),
    "slo-config-name": Flag("slo-controller-config", _T, "name of that ConfigMap"),
    "node-strategy-name-need-check": Flag(
        "false", _T, "true: node entries of the ConfigMap must have unique names"
    ),
    "colocation-profile-reconcile-by-default": Flag(
        "false", _B, "reconcile also profiles without the label controller-managed"
    ),
    "colocation-profile-reconcile-interval": Flag(
        "30s", _D, "interval between reconciles of a profile"
    ),
    "colocation-profile-force-update-pod-duration": Flag(
        "5m", _D, "time until a profile may patch the same pod again"
    ),
    "colocation-profile-update-pod-qps": Flag("10", _N, "pods that are patched per second"),
    "colocation-profile-update-pod-qps-burst": Flag(
        "100", _N, "pods that are patched in one burst"
    ),
    "pod-enhanced-validator-config-namespace": Flag(
        "koordinator-system", _T, "namespace of the ConfigMap with the rules of enhanced validation"
    ),
    "pod-enhanced-validator-config-name": Flag(
        "pod-enhanced-validator-config", _T, "name of that ConfigMap"
    ),
    "quota-update-max-retries": Flag("3", _N, "retries of a quota's update after a conflict"),
    "quota-update-retry-jitter": Flag("0", _D, "longest pause before such a retry"),
    "quota-update-max-total-jitter": Flag("1s", _D, "longest sum of these pauses for one request"),
    "binding-admission-user-name": Flag("", _T, "users that may bind pods; empty: not checked"),
    "binding-admission-dry-run": Flag("false", _B, "count refusals, but allow every binding"),
    "binding-admission-namespaces": Flag(
        "", _T, "namespaces that are checked; *: all; empty: none"
    ),
    "binding-admission-exclude-namespaces": Flag(
        "kube-system", _T, "namespaces that are not checked"
    ),
    "binding-admission-bypass-labels": Flag(
        "koordinator.sh/binding-admission-bypass",
        _T,
        "pods with one of these labels are not checked",
    ),
    "binding-admission-bypass-annotations": Flag(
        "", _T, "pods with one of these annotations are not checked"
    ),
    # without effect: accepted, so that upstream's manifests start
    "leader-elect-resource-lock": Flag("leases", _T),
    "enable-pprof": Flag("true", _B),
    "pprof-addr": Flag(":8090", _A),
    "sync-period": Flag("", _T),
    "disable-no-deepcopy": Flag("false", _B),
    "colocation-profile-expire-pod-cache-duration": Flag("10m", _D),
    "pod-enhanced-validator-reconcile-interval": Flag("5m", _D),
    "quota-update-conflict-fresh-get": Flag("false", _B),
    # klog's, except -v: logs are always JSON lines on standard error
    "logtostderr": Flag("true", _B),
    "stderrthreshold": Flag("0", _T),
    "alsologtostderr": Flag("false", _B),
    "log_dir": Flag("", _T),
    "log_file": Flag("", _T),
    "log_file_max_size": Flag("1800", _N),
    "log_backtrace_at": Flag(":0", _T),
    "add_dir_header": Flag("false", _B),
    "one_output": Flag("false", _B),
    "skip_headers": Flag("false", _B),
    "skip_log_headers": Flag("false", _B),
    "vmodule": Flag("", _T),
}
_BOOLEANS: Final = frozenset(name for name, flag in FLAGS.items() if flag.kind is Kind.BOOL)

_HELP: Final = """\
koord-manager: configures nodes and their reports, sets what they offer, admits pods and quotas.

usage: koord-manager [flags]

flags, with one or two dashes; names and defaults (in brackets) are upstream's:
{flags}
flags that are accepted without effect here:
{without_effect}

environment: POD_NAMESPACE, SERVICE_NAME, SECRET_NAME, MUTATING_WEBHOOK_NAME,
VALIDATING_WEBHOOK_NAME, WEBHOOK_PORT, WEBHOOK_CERT_DIR, WEBHOOK_CERT_WRITER, WEBHOOK_HOST
More: docs/manager.md."""


def help_text() -> str:
    """Return what --help prints."""
    lines = [
        f"  --{name} [{flag.default}]\n      {flag.help}"
        for name, flag in FLAGS.items()
        if flag.help
    ]
    idle = ", ".join(f"--{name}" for name, flag in FLAGS.items() if not flag.help)
    # 96 columns: as wide as the other lines of the text.
    return _HELP.format(
        flags="\n".join(lines),
        without_effect=textwrap.fill(
            idle, 96, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        ),
    )


class FlagError(ValueError):
    """A flag cannot be used. The text names the flag and the reason."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The parsed command line and environment of one manager process."""

    values: Mapping[str, str]
    gates: Gates
    controllers: frozenset[str]
    plugins: frozenset[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    without_effect: tuple[str, ...] = ()
    """Flags on the command line that have no effect here."""

    def text(self, name: str) -> str:
        return self.values[name]

    def on(self, name: str) -> bool:
        return parse_bool(self.values[name]) is True

    def number(self, name: str) -> float:
        try:
            number = float(self.values[name])
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise FlagError(f"--{name}={self.values[name]}: expected a number")
        return number

    def seconds(self, name: str) -> float:
        try:
            return parse_duration(self.values[name]) / 1e9
        except ValueError as error:
            raise FlagError(f"--{name}={self.values[name]}: {error}") from None

    def names(self, name: str) -> tuple[str, ...]:
        return name_list(self.values[name])

    def env(self, name: str, default: str) -> str:
        return self.environment.get(name) or default

    def env_port(self, name: str, default: int) -> int:
        """Return the port that an environment variable names."""
        text = self.env(name, str(default))
        if not (text.isascii() and text.isdigit() and int(text) <= 65535):
            raise FlagError(f"{name}={text}: expected a port number from 0 to 65535")
        return int(text)

    def address(self, name: str) -> tuple[str, int] | None:
        """Return (host, port) of a listening address, None for "0" (off).

        An empty host means every address of the machine, IPv4 and IPv6.
        """
        text = self.values[name]
        if text in ("0", ""):
            return None
        try:
            host, port = parse_address(text)
        except ValueError as error:
            raise FlagError(f"--{name}={text}: {error}") from None
        return host, port


def parse(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Settings:
    """Return the settings that a command line gives. Raises FlagError."""
    try:
        words = read_flags(arguments, known=FLAGS, booleans=_BOOLEANS, program="koord-manager")
        if words.positional:
            raise FlagError(f"{words.positional[0]!r} is not a flag; see --help")
        values = {name: flag.default for name, flag in FLAGS.items()} | dict(words.flags)
        for name in _BOOLEANS:
            if parse_bool(values[name]) is None:
                raise bad_flag(name, values[name], "not a boolean: write true or false")
        gates = parse_gates(values["feature-gates"])
    except (InputError, InputErrors) as error:
        raise FlagError(str(error)) from None
    settings = Settings(
        values=values,
        gates=gates,
        controllers=chosen(values["controllers"], CONTROLLERS, "controllers"),
        plugins=chosen(values["noderesource-plugins"], PLUGINS, "noderesource-plugins"),
        environment=os.environ if environment is None else environment,
        without_effect=tuple(sorted({name for name, _ in words.flags if not FLAGS[name].help})),
    )
    for name, flag in FLAGS.items():
        match flag.kind:
            case Kind.ADDRESS:
                settings.address(name)
            case Kind.NUMBER:
                settings.number(name)
            case Kind.DURATION:
                settings.seconds(name)
    settings.env_port("WEBHOOK_PORT", 9876)
    return settings


def chosen(text: str, known: Sequence[str], flag: str) -> frozenset[str]:
    """Return the names that a list selects; for each name the first matching entry decides.

    `*` selects all, `name` selects and `-name` excludes that name.
    """
    entries = name_list(text)
    for entry in entries:
        if entry != "*" and entry.removeprefix("-") not in known:
            raise FlagError(
                f"--{flag}: {entry!r} is unknown; expected *, name or -name of {', '.join(known)}"
            )
    picked = set()
    for name in known:
        for entry in entries:
            if entry == f"-{name}":
                break
            if entry in (name, "*"):
                picked.add(name)
                break
    return frozenset(picked)
