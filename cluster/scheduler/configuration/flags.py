"""Flags of koord-scheduler: kube-scheduler's of version 1.35 and 1.36, and Koordinator's own.

Which flags count beside a file is decided in `loading`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from apis.errors import InputError, InputErrors
from apis.flags import COMMAND_LINE
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
from cluster.scheduler.configuration.auditing import AuditorSettings, read_auditor
from cluster.scheduler.configuration.gates import SchedulerGates, read_gates

CONTROLLERS: Final = ("Coscheduling", "ElasticQuota", "Reservation")
"""Plugins with controllers, which --controller-plugins chooses from."""

_T, _B, _N, _W, _P, _D = (
    Kind.TEXT,
    Kind.BOOL,
    Kind.NUMBER,
    Kind.WHOLE,
    Kind.PORT,
    Kind.DURATION,
)

FLAGS: Final[Mapping[str, Flag]] = {
    # what is scheduled, and how
    "config": Flag("", _T, "file with a KubeSchedulerConfiguration"),
    "feature-gates": Flag("", _T, "Name=true,Name=false,...; may be repeated"),
    "pod-max-in-unschedulable-pods-duration": Flag(
        "5m", _D, "time until an unschedulable pod is tried again without any event"
    ),
    # API server and leader election; see docs/scheduler.md for what counts beside --config
    "kubeconfig": Flag(
        "",
        _T,
        "file that names the API server; default: the pod's service account. Without --config only",
    ),
    "master": Flag("", _T, "address of the API server, overrides the kubeconfig's"),
    "kube-api-qps": Flag("50", _N, "requests to the API server per second. Without --config only"),
    "kube-api-burst": Flag(
        "100", _W, "requests to the API server in one burst. Without --config only"
    ),
    "leader-elect": Flag("true", _B, "schedule on one replica only; overrides --config"),
    "leader-elect-lease-duration": Flag("15s", _D, "overrides --config"),
    "leader-elect-renew-deadline": Flag("10s", _D, "overrides --config"),
    "leader-elect-retry-period": Flag("2s", _D, "overrides --config"),
    "leader-elect-resource-lock": Flag("leases", _T, "overrides --config"),
    "leader-elect-resource-name": Flag("kube-scheduler", _T, "overrides --config"),
    "leader-elect-resource-namespace": Flag("kube-system", _T, "overrides --config"),
    # what is shown
    "port": Flag("10251", _P, "HTTP port; 0: not served"),
    "address": Flag(
        "0.0.0.0",
        _T,
        "address of that port. Unless it is given, others than this machine see health and metrics"
        " alone",
    ),
    "secure-port": Flag(
        "10259", _P, "HTTPS port, for clients that the API server allows; 0: not served"
    ),
    "bind-address": Flag("0.0.0.0", _T, "address of that port"),
    "tls-cert-file": Flag("", _T, "certificate of that port; default: a self-signed one"),
    "tls-private-key-file": Flag("", _T, "its key. Both are read again when they change"),
    "tls-min-version": Flag("", _T, "VersionTLS12 (default) or VersionTLS13"),
    "client-ca-file": Flag(
        "", _T, "CA of client certificates; default: the API server's, looked up when it starts"
    ),
    "authentication-skip-lookup": Flag("false", _B, "do not look it up"),
    "authentication-tolerate-lookup-failure": Flag(
        "true", _B, "start if it cannot be looked up; clients then need tokens"
    ),
    "authentication-kubeconfig": Flag(
        "", _T, "API server that knows tokens; default: as for scheduling"
    ),
    "authentication-token-webhook-cache-ttl": Flag("10s", _D, "how long its answers are kept"),
    "authorization-kubeconfig": Flag(
        "", _T, "API server that knows rights; default: as for scheduling"
    ),
    "authorization-always-allow-paths": Flag(
        "/healthz,/readyz,/livez", _T, "paths that need no right"
    ),
    "authorization-webhook-cache-authorized-ttl": Flag(
        "10s", _D, "how long its permissions are kept"
    ),
    "authorization-webhook-cache-unauthorized-ttl": Flag(
        "10s", _D, "how long its refusals are kept"
    ),
    "v": Flag("0", _N, "log level; 5 and above: debug"),
    "controller-plugins": Flag(
        "*", _T, "plugins that also write the status of their objects, such as Coscheduling"
    ),
    "enable-network-topology-manager": Flag(
        "false", _B, "write the domains of the network into the ClusterNetworkTopology"
    ),
    # the workload auditor: metrics scheduler_workload_auditor_*, and what is logged beside them
    "enable-workload-auditor": Flag(
        "false", _B, "count what becomes of workloads until they are scheduled"
    ),
    "workload-auditor-metric-labels": Flag(
        "", _T, "metricLabel=podLabelKey,...: labels of pods that its metrics have"
    ),
    "workload-auditor-victim-reschedule-duration": Flag(
        "10s", _D, "log workloads without a result so long after their victims are gone"
    ),
    "workload-auditor-victim-deletion-duration": Flag(
        "30s", _D, "log workloads whose victims take longer to end"
    ),
    "workload-auditor-victim-deleting-retries": Flag(
        "3", _W, "log workloads that are tried more often while their victims end"
    ),
    "workload-auditor-scheduling-event-interval": Flag(
        "5m", _D, "log workloads that wait longer for their next scheduling event"
    ),
    # without effect: accepted, so that manifests start
    "sync-barrier-pod-namespace": Flag("kube-system", _T),
    "sync-barrier-pod-name": Flag("koord-scheduler-sync-barrier", _T),
    "sync-hard-timeout": Flag("1m", _D),
    "debug-scores": Flag("0", _W),
    "debug-filters": Flag("false", _B),
    "debug-diagnosis": Flag("false", _B),
    "scheduler-monitor-period": Flag("10s", _D),
    "scheduling-timeout": Flag("30s", _D),
    "scheduling-drop-unhandled-timeout": Flag("5s", _D),
    "debug-diagnosis-blocking": Flag("false", _B),
    "debug-diagnosis-queue-size": Flag("1000", _W),
    "debug-diagnosis-worker-count": Flag("10", _W),
    "async-log": Flag("false", _B),
    "async-log-queue-length": Flag("10000", _W),
    "kube-api-content-type": Flag("application/vnd.kubernetes.protobuf", _T),
    "profiling": Flag("true", _B),
    "contention-profiling": Flag("true", _B),
    "emulated-version": Flag("", _T),
    "min-compatibility-version": Flag("", _T),
    # of kube-scheduler's HTTPS port, without effect
    "cert-dir": Flag("", _T),
    "tls-cipher-suites": Flag("", _T),
    "tls-curve-preferences": Flag("", _T),
    "tls-sni-cert-key": Flag("", _T),
    "disable-http2-serving": Flag("false", _B),
    "http2-max-streams-per-connection": Flag("0", _W),
    "permit-address-sharing": Flag("false", _B),
    "permit-port-sharing": Flag("false", _B),
    "requestheader-allowed-names": Flag("", _T),
    "requestheader-client-ca-file": Flag("", _T),
    "requestheader-extra-headers-prefix": Flag("x-remote-extra-", _T),
    "requestheader-group-headers": Flag("x-remote-group", _T),
    "requestheader-uid-headers": Flag("", _T),
    "requestheader-username-headers": Flag("x-remote-user", _T),
    # metrics and klog's, except -v: logs are always JSON lines on standard error
    "allow-metric-labels": Flag("", _T),
    "allow-metric-labels-manifest": Flag("", _T),
    "disabled-metrics": Flag("", _T),
    "show-hidden-metrics-for-version": Flag("", _T),
    "log-flush-frequency": Flag("5s", _D),
    "log-json-info-buffer-size": Flag("0", _T),
    "log-json-split-stream": Flag("false", _B),
    "log-text-info-buffer-size": Flag("0", _T),
    "log-text-split-stream": Flag("false", _B),
    "logging-format": Flag("text", _T),
    "vmodule": Flag("", _T),
}

_SHORT: Final[Mapping[str, str]] = {
    "s": "debug-scores",
    "f": "debug-filters",
    "d": "debug-diagnosis",
    "db": "debug-diagnosis-blocking",
}
_JOINED: Final = re.compile(r"-([vs])(\d+)")
"""A short flag and its number in one word: -v4."""
_REPEATED: Final = frozenset({"feature-gates", "controller-plugins"})

_HELP: Final = """\
koord-scheduler: places pods on nodes, in place of upstream's koord-scheduler or of kube-scheduler.

usage: koord-scheduler [flags]

flags, with one or two dashes; names and defaults (in brackets) are upstream's:
{flags}
flags that are accepted without effect here:
{without_effect}

The file of --config, its plugins and their arguments: docs/scheduler.md."""


def help_text() -> str:
    """Return what --help prints."""
    flags, without_effect = describe(FLAGS)
    return _HELP.format(flags=flags, without_effect=without_effect)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Values):
    """The parsed command line of one scheduler process. controllers: of plugins that run. auditor:
    None while the workload auditor is off."""

    gates: SchedulerGates
    controllers: frozenset[str]
    auditor: AuditorSettings | None = None


def parse(arguments: Sequence[str]) -> Settings:
    """Return the settings that a command line gives. Raises FlagError."""
    try:
        words = read_values(
            list(_long(arguments)), FLAGS, program="koord-scheduler", lists=_REPEATED
        )
        gates = read_gates(words.text("feature-gates"), obj=COMMAND_LINE, field="-feature-gates")
    except (InputError, InputErrors) as error:
        raise FlagError(str(error)) from None
    settings = Settings(
        values=words.values,
        given=words.given,
        without_effect=words.without_effect,
        gates=gates,
        controllers=chosen(words.text("controller-plugins"), CONTROLLERS, "controller-plugins"),
        auditor=read_auditor(words),
    )
    check_values(settings, FLAGS)
    return settings


def _long(arguments: Sequence[str]) -> Sequence[str]:
    """Return the command line with short flags in their long form."""
    result: list[str] = []
    for argument in arguments:
        joined = _JOINED.fullmatch(argument)
        if joined is not None:
            argument = f"-{joined[1]}={joined[2]}"
        name, equals, text = argument.partition("=")
        long = _SHORT.get(name.removeprefix("-")) if name.startswith("-") else None
        result.append(f"--{long}{equals}{text}" if long is not None else argument)
    return result
