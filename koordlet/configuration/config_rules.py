"""Checks what the configuration's types cannot express: names, paths, ports and minimum values.

Each rule names the field as the file writes it. Root opens, creates and runs files at these paths,
so a path must be absolute and without `..`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Final

from apis.errors import InputError
from hooks.compat import SWITCHES
from koordlet.configuration.config import CONTAINER_STAGES, POD_STAGES, Config
from service.addresses import parse_address
from service.unix import LONGEST_PATH

_ADMIN_SOCKET: Final = "/admin.sock"

Wrong = tuple[str, object, str] | tuple[str, object, str, str]
"""Field, value, problem, and a hint where one helps."""

_LEAST_INTERVAL_S: Final = 0.5
_LEAST_POLL_S: Final = 1
_LEAST_PROBE_S: Final = 10
_LEAST_TIMEOUT_S: Final = 0.1
"""Minimum values. Chosen: half of each keeps a full node busy with periodic work alone, and a
time-out below 100 ms fails on a loaded node."""
_LEAST_ROUND_S: Final = 1
"""Upstream's minimum of a collector's interval, below which it does not start. A cgroup's CPU
counter over half a second has an error of several percent."""
_MOST_MARGIN_PERCENT: Final = 1000
"""Chosen: eleven times the peak; more is a typing error."""
_LEAST_TRAINING_S: Final = 5
"""Chosen: a percentile of fewer than five samples is not one."""
_LEAST_HALF_LIFE_S: Final = 60
"""Chosen: models that forget within a minute predict nothing."""
_MOST_MBPS: Final = 10_000_000
"""Chosen: 10 TB/s, above any memory."""
_MOST_EVICTIONS: Final = 1000
"""Chosen: more pods than a node has. A larger number is a mistake in a unit."""
_LONGEST_STOP_GRACE_S: Final = 600
"""Chosen: twenty times Kubernetes' default grace. A larger number is a mistake in a unit."""
_LONGEST_REBUILD_S: Final = 60
"""Chosen: an operator who changes a NodeSLO and sees nothing for a minute believes it lost."""
_LONGEST_SITE_CALL_S: Final = 0.5
"""A quarter of the runtime's time limit for a hook (docs/facts/nri.md, "Failures"), since several
policies share it."""


def check(config: Config, obj: str) -> list[InputError]:
    """Return the errors of a configuration. obj: where it comes from."""
    return [
        InputError(obj=obj, field=field, value=value, problem=problem, hint="".join(hint) or None)
        for rule in (_names, _paths, _sockets, _addresses, _numbers, _choices)
        for field, value, problem, *hint in rule(config)
    ]


def _names(config: Config) -> Iterator[Wrong]:
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", config.node_name):
        hint = "lower-case DNS name, as kubectl get nodes shows it; set nodeName"
        yield "nodeName", config.node_name, "not a node name", hint
    if not re.fullmatch(r"[A-Za-z0-9_.+-]{1,64}", config.nri.plugin_name):
        yield "nri.pluginName", config.nri.plugin_name, "only letters, digits and _ . + - are taken"
    if not re.fullmatch(r"[0-9]{2}", config.nri.plugin_index):
        yield "nri.pluginIndex", config.nri.plugin_index, "two digits", 'write it quoted: "00"'


def _paths(config: Config) -> Iterator[Wrong]:
    for field, path in (
        ("cgroupRoot", config.cgroup_root),
        ("sysRoot", config.sys_root),
        ("sysFsRoot", config.sys_fs_root),
        ("procRoot", config.proc_root),
        ("varRunRoot", config.var_run_root),
        ("objectsDir", config.objects_dir),
        ("runDir", config.run_dir),
        ("hamiCoreLibrary", config.hami_core_library),
        ("sitePolicies.directory", config.site_policies.directory),
        ("hookService.registrationDir", config.hook_service.registration_dir),
        ("kubelet.directory", config.kubelet.directory),
    ):
        yield from _absolute(field, path)
    yield from _absolute("reports.acceleratorFiles", config.reports.accelerator_files)
    for field, path in (("objectsDir", config.objects_dir), ("runDir", config.run_dir)):
        if path == "/":
            yield field, path, "not a directory of its own"
    for field, path in (
        ("kubernetes.kubeconfig", config.kubernetes.kubeconfig),
        ("kubelet.caFile", config.kubelet.ca_file),
        ("kubelet.clientCertFile", config.kubelet.client_cert_file),
        ("kubelet.clientKeyFile", config.kubelet.client_key_file),
        ("kubelet.tokenFile", config.kubelet.token_file),
        ("reports.directory", config.reports.directory),
        ("prediction.directory", config.prediction.directory),
    ):
        if path:
            yield from _absolute(field, path)
    root = config.kubepods_root
    if root and not all(part not in ("", ".", "..") for part in root.split("/")):
        hint = "below a hierarchy: kubepods.slice, or a/b/kubepods"
        yield "kubepodsRoot", root, "not a cgroup's path", hint


def _sockets(config: Config) -> Iterator[Wrong]:
    yield from _socket("nri.socket", config.nri.socket)
    yield from _socket("cri.socket", config.cri.socket)
    yield from _socket("hookService.socket", config.hook_service.socket)
    if len(os.fsencode(config.run_dir + _ADMIN_SOCKET)) > LONGEST_PATH:
        most = LONGEST_PATH - len(_ADMIN_SOCKET)
        yield "runDir", config.run_dir, f"longer than the {most} bytes that its sockets allow"


def _socket(field: str, path: str) -> Iterator[Wrong]:
    yield from _absolute(field, path)
    if len(os.fsencode(path)) > LONGEST_PATH:
        yield field, path, f"longer than the {LONGEST_PATH} bytes of a socket's address"


def _absolute(field: str, path: str) -> Iterator[Wrong]:
    if not path.startswith("/"):
        yield field, path, "not an absolute path"
    elif ".." in path.split("/") or "\0" in path:
        yield field, path, "contains ..: write the path without it"


def _addresses(config: Config) -> Iterator[Wrong]:
    if config.http.address:
        try:
            parse_address(config.http.address)
        except ValueError as error:
            yield "http.address", config.http.address, str(error)
    if not re.fullmatch(r"[A-Za-z0-9.-]+|\[?[0-9A-Fa-f:.]+\]?", config.kubelet.address):
        yield "kubelet.address", config.kubelet.address, "not a host", "a name or an IP address"
    for field, port in (
        ("kubelet.port", config.kubelet.port),
        ("kubelet.readOnlyPort", config.kubelet.read_only_port),
    ):
        if not 0 < port < 65536:
            yield field, port, "not a port"


def _numbers(config: Config) -> Iterator[Wrong]:
    for field, seconds, least in (
        ("intervals.reconcile", config.intervals.reconcile, _LEAST_INTERVAL_S),
        ("intervals.objects", config.intervals.objects, _LEAST_INTERVAL_S),
        ("intervals.facts", config.intervals.facts, _LEAST_PROBE_S),
        ("kubelet.interval", config.kubelet.interval, _LEAST_POLL_S),
        ("kubelet.timeout", config.kubelet.timeout, _LEAST_TIMEOUT_S),
        ("cri.interval", config.cri.interval, _LEAST_POLL_S),
        ("cri.timeout", config.cri.timeout, _LEAST_TIMEOUT_S),
        ("nri.backoff", config.nri.backoff, _LEAST_TIMEOUT_S),
        ("measuring.interval", config.measuring.interval, _LEAST_ROUND_S),
        ("measuring.storageInterval", config.measuring.storage_interval, _LEAST_ROUND_S),
        ("measuring.psiInterval", config.measuring.psi_interval, _LEAST_ROUND_S),
        ("measuring.cpiInterval", config.measuring.cpi_interval, _LEAST_ROUND_S),
        ("measuring.coldPageInterval", config.measuring.cold_page_interval, _LEAST_ROUND_S),
        ("measuring.resctrlInterval", config.measuring.resctrl_interval, _LEAST_ROUND_S),
        ("qos.interval", config.qos.interval, _LEAST_ROUND_S),
        ("qos.cpuSuppressInterval", config.qos.cpu_suppress_interval, _LEAST_ROUND_S),
        ("qos.cpuEvictInterval", config.qos.cpu_evict_interval, _LEAST_ROUND_S),
        ("qos.memoryEvictInterval", config.qos.memory_evict_interval, _LEAST_ROUND_S),
        ("prediction.trainingInterval", config.prediction.training_interval, _LEAST_TRAINING_S),
        ("prediction.cpuHalfLife", config.prediction.cpu_half_life, _LEAST_HALF_LIFE_S),
        ("prediction.memoryHalfLife", config.prediction.memory_half_life, _LEAST_HALF_LIFE_S),
        ("prediction.checkpointInterval", config.prediction.checkpoint_interval, _LEAST_PROBE_S),
    ):
        if seconds < least:
            yield field, float(seconds), f"shorter than {least} s"
    if config.intervals.rebuild_delay > _LONGEST_REBUILD_S:
        delay = float(config.intervals.rebuild_delay)
        problem = f"longer than {_LONGEST_REBUILD_S} s: changes would seem lost"
        yield "intervals.rebuildDelay", delay, problem
    if config.writes.budget_per_second < 1:
        yield "writes.budgetPerSecond", config.writes.budget_per_second, "less than 1"
    if not 0 <= config.qos.memory_bandwidth_mbps <= _MOST_MBPS:
        found = config.qos.memory_bandwidth_mbps
        yield "qos.memoryBandwidthMbps", found, f"not between 0 and {_MOST_MBPS} MB/s"
    if not 0 < config.qos.evict_most_per_round <= _MOST_EVICTIONS:
        most = config.qos.evict_most_per_round
        yield "qos.evictMostPerRound", most, f"not between 1 and {_MOST_EVICTIONS}"
    if config.qos.evict_stop_grace > _LONGEST_STOP_GRACE_S:
        problem = f"longer than {_LONGEST_STOP_GRACE_S} s: the node would stay short as long"
        yield "qos.evictStopGrace", float(config.qos.evict_stop_grace), problem
    if config.prediction.model_expiration < config.prediction.training_interval:
        expiration = float(config.prediction.model_expiration)
        problem = "shorter than prediction.trainingInterval: models would go between two samples"
        yield "prediction.modelExpiration", expiration, problem
    if not 0 <= config.prediction.safety_margin_percent <= _MOST_MARGIN_PERCENT:
        margin = config.prediction.safety_margin_percent
        yield "prediction.safetyMarginPercent", margin, f"not between 0 and {_MOST_MARGIN_PERCENT}"
    if not 0 < config.site_policies.time_limit <= _LONGEST_SITE_CALL_S:
        yield (
            "sitePolicies.timeLimit",
            float(config.site_policies.time_limit),
            "not between 0 and 500ms",
            "a reply later than 2 s costs the connection to the runtime",
        )


def _choices(config: Config) -> Iterator[Wrong]:
    for switch in config.compat:
        if switch not in SWITCHES:
            close = get_close_matches(switch, SWITCHES, n=2)
            hint = (
                f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(SWITCHES)}"
            )
            yield "compat", switch, "not a compatible switch", hint
    for stage in config.hook_service.disabled_stages:
        if stage not in (*POD_STAGES, *CONTAINER_STAGES):
            known = f"known: {', '.join((*POD_STAGES, *CONTAINER_STAGES))}"
            yield "hookService.disabledStages", stage, "not a stage of the hook service", known
    if config.log.level not in ("debug", "info", "warning", "error"):
        yield "log.level", config.log.level, "one of debug, info, warning, error"
    if config.log.format not in ("text", "json"):
        yield "log.format", config.log.format, "one of text, json"
    if config.nri.failure_policy not in ("Fail", "Ignore", ""):
        yield "nri.failurePolicy", config.nri.failure_policy, "Fail or Ignore"
    if config.hook_service.failure_policy not in ("Fail", "Ignore"):
        yield "hookService.failurePolicy", config.hook_service.failure_policy, "Fail or Ignore"
