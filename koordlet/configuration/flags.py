"""Upstream's command line flags, parsed as Go's flag package parses them.

One or two dashes, `-name=value` or `-name value`; a boolean stands alone or with `=`. A flag either
sets a field of the configuration, or is accepted without effect, so that the arguments of existing
charts and units keep working. The daemon logs the flags without effect once.

Facts: docs/facts/koordlet.md, "Flags".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from apis.flags import bad_flag, read_flags
from apis.gates import parse_bool


class Kind(StrEnum):
    """The form of a flag's value."""

    TEXT = "text"
    BOOL = "bool"
    INT = "int"
    DURATION = "duration"
    SECONDS = "seconds"  # an integer that upstream counts in seconds
    LIST = "list"  # texts, with commas between them


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag. target: the dotted field of the configuration; "" for a flag without effect."""

    kind: Kind
    target: str = ""
    help: str = ""


Value = str | bool | int | list[str]


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed command line.

    values: field of the configuration -> value. config: the configuration file; None if not given.
    gates: the texts of all -feature-gates, joined.
    """

    values: Mapping[str, Value]
    config: str | None
    without_effect: tuple[str, ...]
    gates: str
    positional: tuple[str, ...]


_T, _B, _I, _D, _S = Kind.TEXT, Kind.BOOL, Kind.INT, Kind.DURATION, Kind.SECONDS
_L = Kind.LIST

FLAGS: Final[Mapping[str, Flag]] = {
    # ours
    "config": Flag(_T, "", "the configuration file (default /etc/koordlet/config.yaml)"),
    "node-name": Flag(_T, "nodeName", "this node's name (default: $NODE_NAME, the host name)"),
    "objects-dir": Flag(_T, "objectsDir", "directory of manifests that stand for an API server"),
    "run-dir": Flag(_T, "runDir", "lock, admin socket and journal live here"),
    "feature-gates": Flag(_T, "", "Name=true,Name=false,...; AllAlpha and AllBeta set a stage"),
    # paths
    "cgroup-root-dir": Flag(_T, "cgroupRoot", "where the cgroup hierarchies are mounted"),
    "sys-root-dir": Flag(_T, "sysRoot", "where sysfs is mounted"),
    "sys-fs-root-dir": Flag(_T, "sysFsRoot", "/sys/fs; resctrl is mounted below it"),
    "proc-root-dir": Flag(_T, "procRoot", "where the host's procfs is mounted"),
    "var-run-root-dir": Flag(_T, "varRunRoot", "/var/run of the host"),
    "run-root-dir": Flag(_T),
    "var-lib-kubelet-dir": Flag(
        _T, "kubelet.directory", "kubelet's directory, with cpu_manager_state"
    ),
    "hami-core-library-directory-path": Flag(_T, "hamiCoreLibrary", "HAMi core library"),
    "containerd-endpoint": Flag(_T, "cri.socket", "the runtime's CRI socket"),
    "docker-endpoint": Flag(_T),
    "pouch-endpoint": Flag(_T),
    "default-runtime-type": Flag(_T),
    "pod-resources-proxy-path": Flag(
        _T, "podResources.directory", "where the pod resources proxy listens"
    ),
    "xpu-device-infos-dir": Flag(
        _T, "reports.acceleratorFiles", "directory of files that describe accelerators"
    ),
    # NRI and hooks
    "enable-nri-runtime-hook": Flag(_B, "nri.enabled", "register with the runtime over NRI"),
    "runtime-hooks-nri-socket-path": Flag(
        _T, "nri.socket", "NRI socket; relative to var-run-root-dir"
    ),
    "runtime-hooks-nri-plugin-name": Flag(_T, "nri.pluginName", "name to register with"),
    "runtime-hooks-nri-plugin-index": Flag(_T, "nri.pluginIndex", "two digits: order of plugins"),
    "runtime-hooks-nri-backoff-duration": Flag(_D, "nri.backoff", "first pause before a reconnect"),
    "runtime-hooks-nri-backoff-cap": Flag(_T),
    "runtime-hooks-nri-backoff-factor": Flag(_T),
    "runtime-hooks-nri-backoff-steps": Flag(_T),
    "runtime-hooks-nri-connect-timeout": Flag(_D),
    "runtime-hooks-reconcile-interval": Flag(
        _D, "intervals.reconcile", "how often the kernel is compared with the decisions"
    ),
    "runtime-hooks-network": Flag(_T),
    "runtime-hooks-addr": Flag(_T, "hookService.socket", "hook service socket (runtime proxy)"),
    "runtime-hooks-host-endpoint": Flag(
        _T, "hookService.hostEndpoint", "the hook service socket as the host sees it"
    ),
    "runtime-hooks-failure-policy": Flag(
        _T, "hookService.failurePolicy", "Fail or Ignore, for the runtime proxy"
    ),
    "runtime-hooks-plugin-failure-policy": Flag(
        _T, "nri.failurePolicy", "Fail or Ignore, for requests of the runtime over NRI"
    ),
    "runtime-hooks-config-path": Flag(
        _T, "hookService.registrationDir", "where the registration file for the proxy goes"
    ),
    "runtime-hooks-disable-stages": Flag(
        _L, "hookService.disabledStages", "stages that are not registered with the proxy"
    ),
    "disable-unset-cpu-quota": Flag(_B, "disableUnsetCpuQuota", "cpuset pods keep their quota"),
    # HTTP, API server, kubelet
    "addr": Flag(_T, "http.address", "address of /metrics, /healthz and /readyz"),
    "enable-pprof": Flag(_B),
    "pprof-addr": Flag(_T),
    "kube-api-qps": Flag(_T),
    "kube-api-burst": Flag(_I),
    "kubeconfig": Flag(_T, "kubernetes.kubeconfig", "watch this node's objects on that server"),
    "configmap-name": Flag(_T),
    "configmap-namespace": Flag(_T),
    "kubelet-preferred-address-type": Flag(_T),
    "kubelet-sync-interval": Flag(_D, "kubelet.interval", "how often kubelet's pods are listed"),
    "kubelet-sync-timeout": Flag(_D, "kubelet.timeout", "time limit of one request to kubelet"),
    "kubelet-insecure-tls": Flag(_B, "kubelet.readOnly", "use kubelet's plain read-only port"),
    "kubelet-read-only-port": Flag(_I, "kubelet.readOnlyPort", "kubelet's plain read-only port"),
    "node-topology-sync-interval": Flag(
        _D, "reports.topologyInterval", "how often topology and devices are compared"
    ),
    "disable-query-kubelet-config": Flag(
        _B, "reports.disableQueryKubeletConfig", "do not ask kubelet for its configuration"
    ),
    # reporting, collectors, dynamic QoS
    "report-interval": Flag(_D),
    "enable-node-metric-report": Flag(_B, "reports.nodeMetric", "report the NodeMetric"),
    "enable-pod-taskids": Flag(_B),
    "xpu-enforce-collect-from-device-infos": Flag(
        _B, "reports.acceleratorsFromFilesOnly", "report no GPUs from NVML"
    ),
    "collect-res-used-interval": Flag(_D, "measuring.interval", "how often is measured"),
    "collect-sys-metric-outdated-interval": Flag(_D),
    "collect-node-cpu-info-interval": Flag(_D),
    "collect-node-storage-info-interval": Flag(
        _D, "measuring.storageInterval", "how often disks and file systems are measured"
    ),
    "cpi-collector-interval": Flag(_D, "measuring.cpiInterval", "how often CPI is measured"),
    "psi-collector-interval": Flag(_D, "measuring.psiInterval", "how often pressure is measured"),
    "collect-cpi-timewindow": Flag(
        _D, "measuring.cpiWindow", "how long CPI is counted for a sample"
    ),
    "coldpage-collector-interval": Flag(
        _D, "measuring.coldPageInterval", "how often cold memory is measured"
    ),
    "enable-pagecache-collector": Flag(_B),
    "enable-resctrl-collector": Flag(
        _B, "measuring.resctrl", "measure cache and memory bandwidth; needs gate ResctrlCollector"
    ),
    "resctrl-collector-interval": Flag(
        _D, "measuring.resctrlInterval", "how often these are measured"
    ),
    "metric-gc-interval-seconds": Flag(_S),
    "metric-expire-seconds": Flag(_S),
    "tsdb-path": Flag(_T),
    "tsdb-retention-duration": Flag(_D),
    "tsdb-enable-prometheus-metric": Flag(_B),
    "tsdb-stripe-size": Flag(_I),
    "tsdb-max-bytes": Flag(_I),
    "tsdb-wal-segment-size": Flag(_I),
    "tsdb-max-block-chunk-segment-size": Flag(_I),
    "tsdb-min-block-duration": Flag(_D),
    "tsdb-max-block-duration": Flag(_D),
    "tsdb-head-chunks-write-buffer-size": Flag(_I),
    "reconcile-interval-seconds": Flag(_S, "qos.interval", "between two steps of a QoS strategy"),
    "cpu-suppress-interval-seconds": Flag(
        _S, "qos.cpuSuppressInterval", "between two steps of CPU suppression"
    ),
    "cpu-evict-interval-seconds": Flag(
        _S, "qos.cpuEvictInterval", "between two steps of CPU eviction"
    ),
    "memory-evict-interval-seconds": Flag(
        _S, "qos.memoryEvictInterval", "between two steps of memory eviction"
    ),
    "memory-evict-cool-time-seconds": Flag(
        _S, "qos.memoryEvictCoolDown", "after evictions for memory, before the next ones"
    ),
    "cpu-evict-cool-time-seconds": Flag(
        _S, "qos.cpuEvictCoolDown", "after evictions for CPU, before the next ones"
    ),
    "only-evict-by-api": Flag(_B, "qos.onlyEvictByApi", "evictions stop no container"),
    "qos-extension-plugins": Flag(_T),
    "audit-log-dir": Flag(_T, "audit.directory", "where the audit log is written"),
    "audit-verbose": Flag(_I, "audit.verbosity", "entries above are left out; 0: none"),
    "audit-max-disk-space-mb": Flag(_I, "audit.maxDiskSpaceMb", "of all files of the audit log"),
    "audit-max-concurrent-readers": Flag(
        _I, "audit.maxConcurrentReaders", "of /events; beyond, the oldest expires"
    ),
    "audit-max-events-limit": Flag(_I, "audit.maxEvents", "of one page of /events"),
    "prediction-checkpoint-filepath": Flag(
        _T, "prediction.directory", "where prediction keeps its models"
    ),
    "prediction-cold-start-duration": Flag(
        _D, "prediction.coldStart", "age from which a pod is predicted"
    ),
    "prediction-safety-margin-percent": Flag(
        _I, "prediction.safetyMarginPercent", "added to each predicted peak"
    ),
    "prediction-memory-histogram-decay-halflife": Flag(
        _D, "prediction.memoryHalfLife", "after which memory samples weigh half"
    ),
    "prediction-cpu-histogram-decay-halflife": Flag(
        _D, "prediction.cpuHalfLife", "after which CPU samples weigh half"
    ),
    "prediction-training-interval": Flag(
        _D, "prediction.trainingInterval", "between two samples of each model"
    ),
    "prediction-model-expiration-duration": Flag(
        _D, "prediction.modelExpiration", "after which an untrained model goes"
    ),
    "prediction-model-checkpoint-interval": Flag(
        _D, "prediction.checkpointInterval", "how often the models are written"
    ),
    "prediction-model-checkpoint-max-per-step": Flag(_I),
    "resource-force-update-seconds": Flag(_S),
    # logging (klog)
    "v": Flag(_I, "log.verbosity", "5 and above: debug"),
    "logtostderr": Flag(_B),
    "alsologtostderr": Flag(_B),
    "stderrthreshold": Flag(_T),
    "legacy_stderr_threshold_behavior": Flag(_B),
    "vmodule": Flag(_T),
    "log_dir": Flag(_T),
    "log_file": Flag(_T),
    "log_file_max_size": Flag(_I),
    "one_output": Flag(_B),
    "skip_headers": Flag(_B),
    "skip_log_headers": Flag(_B),
    "add_dir_header": Flag(_B),
    "log_backtrace_at": Flag(_T),
}

FLAG_OF: Final[Mapping[str, str]] = {
    flag.target: name for name, flag in FLAGS.items() if flag.target
}
"""Field of the configuration -> the flag that sets it."""

_BOOLEANS: Final = frozenset(name for name, flag in FLAGS.items() if flag.kind is Kind.BOOL)

_QUIET: Final = frozenset({"logtostderr", "stderrthreshold", "alsologtostderr"})
"""Flags without effect that most manifests pass, so that they are not worth a line in the log."""


def parse_flags(arguments: Sequence[str]) -> Parsed:
    """Read a command line; raises InputError for an unknown flag or a bad value."""
    words = read_flags(arguments, known=FLAGS, booleans=_BOOLEANS, program="koordlet")
    values: dict[str, Value] = {}
    config: str | None = None
    without_effect: list[str] = []
    gates: list[str] = []
    for name, text in words.flags:
        flag = FLAGS[name]
        value = _value(name, flag, text)
        if name == "feature-gates":
            gates.append(text)
        elif name == "config":
            config = text
        elif flag.target:
            values[flag.target] = value
        elif name not in _QUIET:
            without_effect.append(name)
    return Parsed(values, config, tuple(without_effect), ",".join(gates), words.positional)


def help_text() -> str:
    """Return one line for each flag that has an effect."""
    width = max(len(name) for name, flag in FLAGS.items() if flag.help)
    lines = [f"  -{name:<{width}}  {flag.help}" for name, flag in FLAGS.items() if flag.help]
    return "\n".join(lines)


def _value(name: str, flag: Flag, text: str) -> Value:
    if flag.kind is Kind.BOOL:
        on = parse_bool(text)
        if on is None:
            raise bad_flag(name, text, "not a boolean: write true or false")
        return on
    if flag.kind in (Kind.INT, Kind.SECONDS):
        try:
            return int(text)
        except ValueError:
            raise bad_flag(name, text, "not an integer") from None
    if flag.kind is Kind.LIST:
        return [one for one in text.split(",") if one]
    return text
