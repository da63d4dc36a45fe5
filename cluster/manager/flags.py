"""Flags of koord-manager: upstream's names and defaults, so its manifests work unchanged.

Go's flag syntax is accepted: one or two dashes, `-flag=value`, `-flag value`, bare booleans.
Sources: manager.md 1.1 and 1.2, deploy.md 11.2.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

_DEFAULTS: Final[Mapping[str, str]] = {
    "metrics-addr": ":8080",
    "health-probe-addr": ":8000",
    "enable-leader-election": "true",
    "leader-election-namespace": "koordinator-system",
    "leader-elect-resource-lock": "leases",
    "namespace": "",
    "enable-pprof": "true",
    "pprof-addr": ":8090",
    "sync-period": "",
    "rest-config-qps": "30",
    "rest-config-burst": "50",
    "controllers": "*",
    "noderesource-plugins": "*",
    "disable-no-deepcopy": "false",
    "slo-config-name": "slo-controller-config",
    "config-namespace": "koordinator-system",
    "node-strategy-name-need-check": "false",
    "colocation-profile-reconcile-by-default": "false",
    "colocation-profile-reconcile-interval": "30s",
    "colocation-profile-force-update-pod-duration": "5m",
    "colocation-profile-expire-pod-cache-duration": "10m",
    "colocation-profile-update-pod-qps": "10",
    "colocation-profile-update-pod-qps-burst": "100",
    "pod-enhanced-validator-config-namespace": "koordinator-system",
    "pod-enhanced-validator-config-name": "pod-enhanced-validator-config",
    "pod-enhanced-validator-reconcile-interval": "5m",
    "quota-update-max-retries": "3",
    "quota-update-retry-jitter": "0",
    "quota-update-max-total-jitter": "1s",
    "quota-update-conflict-fresh-get": "false",
    "binding-admission-user-name": "",
    "binding-admission-dry-run": "false",
    "binding-admission-namespaces": "",
    "binding-admission-exclude-namespaces": "kube-system",
    "binding-admission-bypass-labels": "koordinator.sh/binding-admission-bypass",
    "binding-admission-bypass-annotations": "",
    "feature-gates": "",
    "kubeconfig": "",
    "master": "",
    "v": "0",
    "logtostderr": "true",
    "stderrthreshold": "0",
    "alsologtostderr": "false",
    "log_dir": "",
    "log_file": "",
    "vmodule": "",
    "workers": "16",
}
_BOOLEANS: Final = frozenset(
    name for name, value in _DEFAULTS.items() if value in ("true", "false")
) - {"node-strategy-name-need-check"}
_NUMBERS: Final = (
    "rest-config-qps",
    "rest-config-burst",
    "workers",
    "quota-update-max-retries",
    "colocation-profile-update-pod-qps",
    "colocation-profile-update-pod-qps-burst",
    "v",
)

HELP: Final = """\
koord-manager: tells nodes what to do and report, what they offer, and what may be admitted.

usage: koord-manager [flags]

flags (upstream's; defaults in brackets):
{flags}

environment: POD_NAMESPACE, SERVICE_NAME, SECRET_NAME, MUTATING_WEBHOOK_NAME,
VALIDATING_WEBHOOK_NAME, WEBHOOK_PORT, WEBHOOK_CERT_DIR, WEBHOOK_CERT_WRITER, WEBHOOK_HOST
"""


def help_text() -> str:
    """Return what --help prints."""
    lines = [f"  --{name} [{value}]" for name, value in sorted(_DEFAULTS.items())]
    return HELP.format(flags="\n".join(lines))


class FlagError(ValueError):
    """A flag cannot be used; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What one manager process does."""

    values: Mapping[str, str]
    gates: Gates
    controllers: frozenset[str]
    plugins: frozenset[str]
    environment: Mapping[str, str] = field(default_factory=dict)

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
            raise FlagError(f"{name}={text}: expected a port")
        return int(text)

    def address(self, name: str) -> tuple[str, int] | None:
        """Return (host, port) of a listening address, None for "0" (off)."""
        text = self.values[name]
        if text in ("0", ""):
            return None
        try:
            host, port = parse_address(text)
        except ValueError as error:
            raise FlagError(f"--{name}={text}: {error}") from None
        return host or "0.0.0.0", port


def parse(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Settings:
    """Return the settings that a command line gives. Raises FlagError."""
    try:
        words = read_flags(arguments, known=_DEFAULTS, booleans=_BOOLEANS, program="koord-manager")
        if words.positional:
            raise FlagError(f"{words.positional[0]!r} is no flag")
        values = {**_DEFAULTS, **dict(words.flags)}
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
    )
    for name in ("metrics-addr", "health-probe-addr", "pprof-addr"):
        settings.address(name)
    for name in _NUMBERS:
        settings.number(name)
    settings.env_port("WEBHOOK_PORT", 9876)
    for name in _DEFAULTS:
        if name.endswith(("-interval", "-duration", "-jitter")):
            settings.seconds(name)
    return settings


def chosen(text: str, known: Sequence[str], flag: str) -> frozenset[str]:
    """Return the names that a list picks; the first entry that fits a name decides.

    `*` picks all, `name` picks one, `-name` leaves one out.
    """
    entries = name_list(text)
    for entry in entries:
        if entry != "*" and entry.removeprefix("-") not in known:
            raise FlagError(f"--{flag}: {entry!r} is none of {', '.join(known)}")
    picked = set()
    for name in known:
        for entry in entries:
            if entry == f"-{name}":
                break
            if entry in (name, "*"):
                picked.add(name)
                break
    return frozenset(picked)
