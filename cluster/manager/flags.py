"""Flags of koord-manager: upstream's names and defaults, so that its manifests work unchanged.

Go's flag syntax is accepted: one or two dashes, `-flag=value`, `-flag value`, bare booleans.
Environment variables and ports: docs/facts/manager.md, "Flags and environment".
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from apis.errors import InputError, InputErrors
from cluster.flags import (
    Flag,
    FlagError,
    Kind,
    Values,
    check_values,
    chosen,
    describe,
    read_values,
)
from cluster.gates import Gates, parse_gates
from cluster.manager.node_offer import PLUGINS

CONTROLLERS: Final = ("colocationprofile", "nodemetric", "noderesource", "nodeslo", "quotaprofile")


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
    flags, without_effect = describe(FLAGS)
    return _HELP.format(flags=flags, without_effect=without_effect)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Values):
    """The parsed command line and environment of one manager process."""

    gates: Gates
    controllers: frozenset[str]
    plugins: frozenset[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    def env(self, name: str, default: str) -> str:
        return self.environment.get(name) or default

    def env_port(self, name: str, default: int) -> int:
        """Return the port that an environment variable names."""
        text = self.env(name, str(default))
        if not (text.isascii() and text.isdigit() and int(text) <= 65535):
            raise FlagError(f"{name}={text}: expected a port number from 0 to 65535")
        return int(text)


def parse(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Settings:
    """Return the settings that a command line gives. Raises FlagError."""
    try:
        words = read_values(arguments, FLAGS, program="koord-manager")
        gates = parse_gates(words.text("feature-gates"))
    except (InputError, InputErrors) as error:
        raise FlagError(str(error)) from None
    settings = Settings(
        values=words.values,
        given=words.given,
        without_effect=words.without_effect,
        gates=gates,
        controllers=chosen(words.text("controllers"), CONTROLLERS, "controllers"),
        plugins=chosen(words.text("noderesource-plugins"), PLUGINS, "noderesource-plugins"),
        environment=os.environ if environment is None else environment,
    )
    check_values(settings, FLAGS)
    settings.env_port("WEBHOOK_PORT", 9876)
    return settings
