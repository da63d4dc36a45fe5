"""The daemon's configuration: its sections, their fields and defaults.

`config_file` reads it, and `config_rules` checks what types cannot express. The reference for
operators, with the meaning and origin of each default, is docs/configuration.md. Most defaults are
upstream's: docs/facts/koordlet.md, "Paths" and "Flags".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from apis.meta import parse_duration
from hooks.facts import Settings


class Seconds(float):
    """A duration in seconds, written as a number of seconds or as Go writes it: 10s, 1m30s."""


RUN_DIR: Final = "/run/koordlet"
STATE_DIR: Final = "/var/lib/koordlet"
"""The directories of the service; the unit creates them."""


class Mode(StrEnum):
    """Selects the default paths: the host's own, or those in upstream's DaemonSet."""

    HOST = "hostMode"
    DAEMON_SET = "dsMode"


class Section(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True
):
    """Base of all sections: frozen, strict, with camelCase names in the file."""


class Nri(Section, frozen=True):
    """Connection to the container runtime. All defaults are upstream's."""

    enabled: bool = True
    socket: str = "nri/nri.sock"  # relative to var_run_root
    plugin_name: str = "koordlet_nri"
    plugin_index: str = "00"
    backoff: Seconds = Seconds(1)
    failure_policy: str = "Ignore"  # empty is Ignore, as upstream's flag may be


class Cri(Section, frozen=True):
    """The runtime's CRI socket as a source of pods and containers.

    interval: as for kubelet's list. timeout: chosen above kubelet's, since the runtime may have to
    query a shim; twice the value doubles how long a shim that hangs delays a list.
    """

    enabled: bool = False
    socket: str = "/run/containerd/containerd.sock"
    interval: Seconds = Seconds(10)
    timeout: Seconds = Seconds(5)


class Kubelet(Section, frozen=True):
    """Kubelet's pod list as a source of pods.

    port, read_only_port: kubelet's defaults. interval, timeout: upstream's.
    directory: kubelet's own, with the state of its CPU manager.
    """

    enabled: bool = False
    address: str = "127.0.0.1"
    port: int = 10250
    read_only: bool = False
    read_only_port: int = 10255
    token_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    ca_file: str = ""
    client_cert_file: str = ""
    client_key_file: str = ""
    insecure_skip_tls_verify: bool = False
    interval: Seconds = Seconds(10)
    timeout: Seconds = Seconds(3)
    directory: str = "/var/lib/kubelet"


class Kubernetes(Section, frozen=True):
    """The API server as a source of this node's NodeSLO, Node, topology and Device.

    enabled: if unset, it is enabled where a kubeconfig is set.
    kubeconfig: "" means the pod's service account, then $KUBECONFIG, then ~/.kube/config.
    pods: of this node's pods too.
    """

    enabled: bool | None = None
    kubeconfig: str = ""
    pods: bool = False

    @property
    def wanted(self) -> bool:
        return bool(self.kubeconfig) if self.enabled is None else self.enabled

    @property
    def gives_pods(self) -> bool:
        return self.wanted and self.pods


POD_STAGES = (
    "PreRunPodSandbox",
    "PostStopPodSandbox",
    "PreRemoveRunPodSandbox",
    "PreUpdatePodSandboxResources",
)
CONTAINER_STAGES = (
    "PreCreateContainer",
    "PreStartContainer",
    "PostStartContainer",
    "PostStopContainer",
    "PreUpdateContainerResources",
)
"""The stages of the hook service (docs/facts/runtime-proxy.md, "Stages"), and one of our own:
`PreUpdatePodSandboxResources`."""


class HookService(Section, frozen=True):
    """The gRPC service that koord-runtime-proxy calls."""

    enabled: bool = False
    socket: str = "/run/koordlet/koordlet.sock"
    host_endpoint: str = "/var/run/koordlet/koordlet.sock"
    registration_dir: str = "/etc/runtime/hookserver.d"
    failure_policy: str = "Ignore"
    disabled_stages: tuple[str, ...] = ()


class PodResources(Section, frozen=True):
    """The stand-in for kubelet's pod resources socket, with gate PodResourcesProxy.

    directory: upstream's. kubelet_socket: kubelet's default.
    """

    directory: str = "/var/run/koordlet/pod-resources"
    kubelet_socket: str = "/var/lib/kubelet/pod-resources/kubelet.sock"


class Intervals(Section, frozen=True):
    """Intervals of periodic work. Changes take effect at once, without waiting for an interval.

    reconcile: upstream's. objects: chosen, for file systems without inotify; twice the value
    doubles how late a change is noticed there. rebuild_delay: chosen to gather a burst of changes;
    twice the value delays every change by that much. facts: chosen, as modules and switches of the
    kernel change rarely; twice the value doubles how late that is noticed.
    """

    reconcile: Seconds = Seconds(10)
    objects: Seconds = Seconds(30)
    rebuild_delay: Seconds = Seconds(0.02)
    facts: Seconds = Seconds(300)


class Writes(Section, frozen=True):
    """Limits on kernel writes. budget_per_second: see `koordlet.executor.table.Limits`."""

    budget_per_second: int = 200


class Http(Section, frozen=True):
    """The server of metrics and health checks. An empty address disables it."""

    address: str = "127.0.0.1:9316"


class Audit(Section, frozen=True):
    """The audit log, with gate AuditEvents, and its pages over HTTP, with AuditEventsHTTPHandler.

    All defaults are upstream's. verbosity: entries of a higher one are left out; 0 keeps all.
    max_events: of one page.
    """

    directory: str = "/var/log/koordlet"
    verbosity: int = 3
    max_disk_space_mb: int = 16
    max_concurrent_readers: int = 4
    max_events: int = 2048


class Measuring(Section, frozen=True):
    """The collectors. All defaults are upstream's.

    enabled: measure; without measurements no strategy runs and nothing is reported.
    interval: of rounds, and of every collector without an interval of its own. resctrl: run the
    collector of cache and memory bandwidth. cpi_window: how long events are counted for a sample.
    """

    enabled: bool = True
    interval: Seconds = Seconds(1)
    storage_interval: Seconds = Seconds(1)
    psi_interval: Seconds = Seconds(10)
    cpi_interval: Seconds = Seconds(60)
    cpi_window: Seconds = Seconds(10)
    cold_page_interval: Seconds = Seconds(5)
    resctrl: bool = False
    resctrl_interval: Seconds = Seconds(10)


class Qos(Section, frozen=True):
    """The strategies. All defaults are upstream's, except those of `koordlet.qos.eviction.evictor`.

    interval: between two steps of every strategy without an interval of its own. cool_down: after
    evictions for a resource, before the next ones. only_evict_by_api: stop no container. The
    fields evict_*: see `koordlet.qos.eviction.evictor.EvictionOptions`. memory_bandwidth_mbps: what
    the memory of one resctrl domain carries; 0 is learnt (`koordlet.qos.strategies.bandwidth`).
    """

    interval: Seconds = Seconds(1)
    cpu_suppress_interval: Seconds = Seconds(1)
    cpu_evict_interval: Seconds = Seconds(1)
    cpu_evict_cool_down: Seconds = Seconds(20)
    memory_evict_interval: Seconds = Seconds(1)
    memory_evict_cool_down: Seconds = Seconds(4)
    only_evict_by_api: bool = False
    evict_dry_run: bool = False
    evict_most_per_round: int = 10
    evict_stop_grace: Seconds = Seconds(10)
    memory_bandwidth_mbps: int = 0


class Reports(Section, frozen=True):
    """What the node reports to the cluster, or to files on a node without an API server.

    node_metric, topology_interval, disable_query_kubelet_config: upstream's flags and defaults.
    directory: where reports are kept as files; "" is `reports` in the run directory on a node
        without an API server, and nowhere with one.
    accelerator_files, accelerators_from_files_only: upstream's flags xpu-device-infos-dir and
        xpu-enforce-collect-from-device-infos.
    """

    node_metric: bool = True
    topology_interval: Seconds = Seconds(3)
    disable_query_kubelet_config: bool = False
    directory: str = ""
    accelerator_files: str = "/var/run/koordlet/xpu-device-infos"
    accelerators_from_files_only: bool = False


class Prediction(Section, frozen=True):
    """The prediction of the peak of prod pods. All defaults but the directory are upstream's.

    directory: where models are kept over a restart; "": see `Config.prediction_directory`.
    """

    directory: str = ""
    training_interval: Seconds = Seconds(60)
    cold_start: Seconds = Seconds(24 * 3600)
    safety_margin_percent: int = 10
    cpu_half_life: Seconds = Seconds(12 * 3600)
    memory_half_life: Seconds = Seconds(24 * 3600)
    model_expiration: Seconds = Seconds(1800)
    checkpoint_interval: Seconds = Seconds(600)


class Recording(Section, frozen=True):
    """A recording of what the strategies see, for `koordctl replay`. Off by default.

    max_disk_space_mb: chosen: about ten hours of a node with 110 pods; twice the value keeps twice
    as long.
    """

    enabled: bool = False
    directory: str = "/var/log/koordlet/recording"
    max_disk_space_mb: int = 64


class TerwayQos(Section, frozen=True):
    """The agent terway-qos. directory: where it looks for its files."""

    directory: str = "/var/lib/terway/qos"


class NetworkQos(Section, frozen=True):
    """Network QoS over tc. device: the network device to shape; "": that of the default route."""

    device: str = ""


class SitePolicies(Section, frozen=True):
    """An operator's own policies from files. Off by default: they run as root inside the daemon.

    time_limit: of one call. Chosen: many times what a policy takes, and small beside the runtime's
    time limit for a hook. Twice the value doubles how long a pod waits for a policy that hangs.
    """

    enabled: bool = False
    directory: str = "/etc/koordlet/policies.d"
    time_limit: Seconds = Seconds(0.005)


class Log(Section, frozen=True):
    """Logging to standard error."""

    level: str = "info"
    format: str = "text"
    verbosity: int = 0


class Config(Section, frozen=True):
    """The whole configuration."""

    node_name: str = ""
    nri: Nri = Nri()
    cgroup_root: str = "/sys/fs/cgroup"
    kubepods_root: str = ""
    sys_root: str = "/sys"
    sys_fs_root: str = "/sys/fs"
    proc_root: str = "/proc"
    var_run_root: str = "/var/run"
    objects_dir: str = "/etc/koordlet/objects.d"
    run_dir: str = RUN_DIR
    feature_gates: Mapping[str, bool] = {}
    intervals: Intervals = Intervals()
    writes: Writes = Writes()
    measuring: Measuring = Measuring()
    qos: Qos = Qos()
    http: Http = Http()
    kubernetes: Kubernetes = Kubernetes()
    kubelet: Kubelet = Kubelet()
    cri: Cri = Cri()
    hook_service: HookService = HookService()
    pod_resources: PodResources = PodResources()
    site_policies: SitePolicies = SitePolicies()
    compat: tuple[str, ...] = ()
    disable_unset_cpu_quota: bool = False
    hami_core_library: str = "/usr/local/vgpu/libvgpu.so"
    audit: Audit = Audit()
    recording: Recording = Recording()
    reports: Reports = Reports()
    prediction: Prediction = Prediction()
    terway_qos: TerwayQos = TerwayQos()
    network_qos: NetworkQos = NetworkQos()
    log: Log = Log()

    @property
    def prediction_directory(self) -> str:
        """Where prediction keeps its models.

        The state directory, which a reboot leaves; a daemon with a run directory of its own shares
        it with no other daemon, and keeps them there.
        """
        if self.prediction.directory:
            return self.prediction.directory
        parent = STATE_DIR if self.run_dir == RUN_DIR else self.run_dir
        return f"{parent}/prediction"

    def settings(self) -> Settings:
        """Return the part of this configuration that policies read."""
        return Settings(
            feature_gates=self.feature_gates,
            disable_unset_cpu_quota=self.disable_unset_cpu_quota,
            hami_core_library=self.hami_core_library,
            compat=frozenset(self.compat),
            memory_bandwidth_mbps=self.qos.memory_bandwidth_mbps,
        )


def parse_seconds(value: object) -> Seconds:
    """Read a number of seconds or a Go duration; raises ValueError."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str):
        seconds = parse_duration(value) / 1e9
    else:
        raise ValueError("not a duration such as 10s, 500ms or 1m30s")
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError("a duration must be finite and not negative")
    return Seconds(seconds)
