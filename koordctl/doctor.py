"""`koordctl doctor`: examines this machine for koordlet and says how to mend what it finds.

Each check is a function that yields findings; one that fails is a finding itself. Kernel knobs are
tried by writing into a scratch group of our own, as the daemon does; nothing else is changed.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import yaml

from apis.errors import InputError, InputErrors
from koordctl.client import Client, Refused, Unreachable
from koordctl.offline import config_in_force, load_config
from koordlet.config import Config
from koordlet.kernel import probe
from koordlet.machine import CGROUP_ROOT, layout_of, local_host
from linux.discovery import DiscoveryError
from linux.host import Host
from linux.resources import Resource

_CONTAINERD_CONFIG: Final = "/etc/containerd/config.toml"
_KUBELET_CONFIG: Final = "/var/lib/kubelet/config.yaml"
_NRI_TABLE: Final = "io.containerd.nri.v1.nri"
_LEAST_WATCHES: Final = 16384

# What a missing knob costs, where a person would not guess.
_WITHOUT: Final = {
    Resource.CPU_BVT: "GroupIdentity uses cpu.idle and cpu.weight instead (degraded)",
    Resource.CPU_IDLE: "best-effort pods cannot be made idle",
    Resource.CPU_CFS_BURST: "no CPU burst",
    Resource.RESCTRL_GROUP: "no cache and memory bandwidth isolation",
    Resource.CORE_SCHED_COOKIE: "no core scheduling",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. fix: what to do, "" when nothing needs to be done."""

    check: str
    state: Literal["ok", "info", "warn", "fail"]
    found: str
    fix: str = ""


Check = Callable[["_Patient"], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class _Patient:
    config: Config
    host: Host
    client: Client


def examine(*, config_path: str | None, client: Client) -> list[dict[str, Any]]:
    """Return all findings, as plain data.

    config_path: None for what the running daemon uses, and the default file's where none runs.
    """
    try:
        config = _config(config_path, client)
    except (InputError, InputErrors) as error:
        return [asdict(Finding("configuration", "fail", str(error), "koordlet check-config"))]
    patient = _Patient(config, local_host(config), client)
    findings: list[Finding] = []
    for check in (_user, _cgroups, _daemon, _others, _runtime, _plugins, _kubelet, _limits, _files):
        try:
            findings += check(patient)
        except OSError as error:
            findings.append(Finding(check.__name__.strip("_"), "warn", f"cannot look: {error}"))
    return [asdict(finding) for finding in findings]


def _config(path: str | None, client: Client) -> Config:
    if path is None:
        try:
            return config_in_force(client.get("/config"))
        except (Unreachable, Refused):
            pass  # none runs, or an older one: the check of the daemon says so
    return load_config(path, run_dir=os.path.dirname(client.socket_path))


def _user(patient: _Patient) -> Iterator[Finding]:
    if os.geteuid() == 0:
        yield Finding("user", "ok", "root")
    else:
        yield Finding("user", "fail", "not root: most checks cannot look", "run as root")


def _cgroups(patient: _Patient) -> Iterator[Finding]:
    try:
        layout = layout_of(patient.config, patient.host)
    except DiscoveryError as error:
        yield Finding("cgroups", "fail", str(error))
        return
    root = layout.kubepods or "no pod has run yet"
    yield Finding(
        "cgroups",
        "ok" if layout.kubepods else "info",
        f"version {layout.version}, {layout.driver.value} driver, pods' root: {root}",
    )
    missing = [name for name in ("cpu", "cpuset", "memory") if not layout.has(name)]
    if missing:
        yield Finding(
            "controllers",
            "fail",
            f"not mounted below {CGROUP_ROOT}: {', '.join(missing)}",
            "mount them, or set cgroupRoot",
        )
    if layout.version == 1:
        yield Finding(
            "cgroup version",
            "info",
            "version 1: supported, but kubelet refuses it by default from Kubernetes 1.35 on",
        )
    probed = probe(patient.host, layout)
    facts = probed.facts
    supported = sorted(resource.value for resource in facts.supported)
    yield Finding(
        "kernel", "ok", f"{facts.kernel_release}; tried and working: {', '.join(supported)}"
    )
    without = {r: why for r, why in probed.reasons.items() if r not in facts.supported}
    for resource in [each for each in without if each in _WITHOUT]:
        fix = ""
        if resource is Resource.RESCTRL_GROUP:
            fix = "mount -t resctrl resctrl /sys/fs/resctrl, if the processor has RDT"
        yield Finding(
            f"knob {resource.value}", "info", f"{without.pop(resource)}: {_WITHOUT[resource]}", fix
        )
    if without:
        names = ", ".join(resource.value for resource in without)
        yield Finding(
            "other knobs", "info", f"this kernel has no {names}: claims on them show as unsupported"
        )


def _daemon(patient: _Patient) -> Iterator[Finding]:
    try:
        status = patient.client.get("/status")
    except Unreachable as error:
        yield Finding("daemon", "warn", str(error), "systemctl start koordlet")
        return
    except Refused as error:
        yield Finding("daemon", "fail", str(error))
        return
    if status["unhealthy"]:
        yield Finding("daemon", "fail", status["unhealthy"], "systemctl restart koordlet")
    elif status["ready"]:
        yield Finding("daemon", "ok", f"running as process {status['pid']} and ready")
    else:
        yield Finding("daemon", "warn", "not ready: " + "; ".join(status["notReady"]))
    nri = status["nri"]
    if runtime := nri.get("runtime"):
        told = "told" if runtime["nriTold"] else "inferred"
        yield Finding(
            "NRI",
            "ok",
            f"{runtime['name']} {runtime['version']}, NRI {runtime['nri']} ({told}), time-outs:"
            f" request {runtime['requestTimeoutSeconds']:g} s,"
            f" registration {runtime['registrationTimeoutSeconds']:g} s",
        )
        for warning in runtime["warnings"]:
            yield Finding("NRI", "warn", warning)
        if runtime["requestTimeoutSeconds"] < 1:
            yield Finding(
                "NRI time-out",
                "warn",
                f"a request time-out of {runtime['requestTimeoutSeconds']:g} s is easily missed",
                f'set plugin_request_timeout = "2s" in [plugins."{_NRI_TABLE}"]',
            )
    if status["unprotected"]:
        yield Finding(
            "containers",
            "info",
            f"{len(status['unprotected'])} were not seen at creation; koordctl status names them",
        )
    for problem in status["objects"]["problems"]:
        yield Finding("objects", "warn", f"{problem['file']}: {problem['message']}")


def _others(patient: _Patient) -> Iterator[Finding]:
    """Two daemons on one node fight: over NRI ('both tried to set ...') and over files."""
    found = []
    for name in os.listdir(patient.config.proc_root):
        if not name.isdigit():
            continue
        try:
            with open(f"{patient.config.proc_root}/{name}/cmdline", "rb") as file:
                words = file.read(4096).split(b"\0")
        except OSError:
            continue
        if any(
            os.path.basename(word) in (b"koordlet", b"koord-runtime-proxy") for word in words[:3]
        ):
            command = b" ".join(words[:4]).decode(errors="replace").strip()
            found.append((int(name), command))
    daemons = [(pid, command) for pid, command in found if "koord-runtime-proxy" not in command]
    if len(daemons) > 1:
        named = "; ".join(f"{pid} {command}" for pid, command in daemons)
        yield Finding(
            "duplicates", "fail", f"several daemons run: {named}", "stop all but one of them"
        )
    if len(found) > len(daemons) and patient.config.nri.enabled:
        yield Finding(
            "runtime proxy",
            "info",
            "koord-runtime-proxy runs beside NRI: each container is decided twice, with one result",
            "use one of the two paths",
        )


def _runtime(patient: _Patient) -> Iterator[Finding]:
    path = patient.config.nri.socket
    if not patient.config.nri.enabled:
        yield Finding("NRI", "info", "switched off in the configuration: values follow creation")
        return
    try:
        present = stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        present = False
    if present:
        yield Finding("NRI socket", "ok", path)
    else:
        yield Finding(
            "NRI socket",
            "fail",
            f"no socket at {path}",
            f'containerd 1.7: disable = false in [plugins."{_NRI_TABLE}"] of {_CONTAINERD_CONFIG},'
            " then restart containerd; other runtimes: docs/install.md",
        )
    yield from _containerd_config()


def _containerd_config() -> Iterator[Finding]:
    try:
        with open(_CONTAINERD_CONFIG, "rb") as file:
            config = tomllib.load(file)
    except FileNotFoundError:
        return
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        yield Finding("containerd", "warn", f"{_CONTAINERD_CONFIG}: {error}")
        return
    table = config.get("plugins", {}).get(_NRI_TABLE, {})
    if table.get("disable") is True or table.get("disable_connections") is True:
        yield Finding(
            "containerd",
            "fail",
            f"NRI connections are switched off in {_CONTAINERD_CONFIG}",
            f'disable = false, disable_connections = false in [plugins."{_NRI_TABLE}"]; restart it',
        )
    if int(config.get("version", 2)) < 3 and "disable" not in table:
        yield Finding(
            "containerd",
            "info",
            f"{_CONTAINERD_CONFIG} does not name NRI: off in containerd 1.7, on in 2.x",
        )
    misplaced = {"plugin_registration_timeout", "plugin_request_timeout"} & config.keys()
    if misplaced:
        yield Finding(
            "containerd",
            "warn",
            f"{', '.join(sorted(misplaced))} at the top level of {_CONTAINERD_CONFIG} is ignored",
            f'move it into [plugins."{_NRI_TABLE}"]',
        )


def _plugins(patient: _Patient) -> Iterator[Finding]:
    directory = "/opt/nri/plugins"
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return
    for name in names:
        status = os.stat(f"{directory}/{name}")
        runnable = stat.S_ISREG(status.st_mode) and status.st_mode & 0o111
        if runnable and not (name[:2].isdigit() and name[2:3] == "-" and name[3:]):
            yield Finding(
                "NRI plugins",
                "fail",
                f"{directory}/{name} is not named NN-name: the runtime's CRI fails to start",
                "rename it or take away its execute bits",
            )


def _kubelet(patient: _Patient) -> Iterator[Finding]:
    try:
        with open(_KUBELET_CONFIG, encoding="utf-8") as file:
            config = yaml.safe_load(file)
    except FileNotFoundError:
        yield Finding("kubelet", "info", f"no {_KUBELET_CONFIG} on this machine")
        return
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        yield Finding("kubelet", "warn", f"{_KUBELET_CONFIG}: {error}")
        return
    if not isinstance(config, dict):
        return
    if config.get("cpuManagerPolicy") == "static":
        yield Finding(
            "kubelet CPU manager",
            "info",
            "static: kubelet owns the CPU sets of Guaranteed pods with whole CPUs, and koordlet"
            " leaves them alone; the NodeResourceTopology must carry its policy",
        )
    gates = config.get("featureGates")
    if isinstance(gates, dict) and gates.get("MemoryQoS"):
        yield Finding(
            "kubelet MemoryQoS",
            "warn",
            "kubelet writes memory.min and memory.high too",
            "switch off kubelet's MemoryQoS or koordlet's memory QoS (gate CgroupReconcile)",
        )
    yield Finding("kubelet", "ok", f"cgroup driver {config.get('cgroupDriver', 'cgroupfs')}")


def _limits(patient: _Patient) -> Iterator[Finding]:
    path = "/proc/sys/fs/inotify/max_user_watches"
    watches = int(patient.host.read(path))
    if watches < _LEAST_WATCHES:
        yield Finding(
            "inotify",
            "warn",
            f"{watches} watches for each user: outside changes may be found by the timer only",
            f"sysctl fs.inotify.max_user_watches={_LEAST_WATCHES}",
        )
    else:
        yield Finding("inotify", "ok", f"{watches} watches")


def _files(patient: _Patient) -> Iterator[Finding]:
    directory = patient.config.objects_dir
    if os.path.isdir(directory):
        yield Finding("objects", "ok", directory)
    else:
        yield Finding(
            "objects",
            "info",
            f"{directory} does not exist: no NodeSLO, so policies that need one are off",
            f"mkdir -p {directory}, and put a NodeSLO there",
        )
