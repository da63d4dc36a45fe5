"""Checks of `koordctl doctor` on other programs: runtime, kubelet, and agents that set the same.

The configuration of each is read from the file that its own command line names.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from koordctl.finding import Check, Finding, Patient
from koordctl.processes import NotOurs, Process
from koordlet.configuration.config import Config
from runtime_proxy.options import LISTEN
from service.manifest import NotYaml, document

NRI_TABLE: Final = "io.containerd.nri.v1.nri"
_CONTAINERD_CONFIG: Final = "/etc/containerd/config.toml"
_CRI_PLUGINS: Final = frozenset({"cri", "io.containerd.grpc.v1.cri"})
_MOST_VALUES: Final = 10_000
"""Chosen: bounds the YAML of a kubelet's configuration, which has some hundred values."""
_KUBELETS_RUNTIME: Final = "unix:///run/containerd/containerd.sock"

_DAEMONS: Final = frozenset({"koordlet", "koordlet.main"})
_PROXIES: Final = frozenset({"koord-runtime-proxy", "runtime_proxy.main"})

# Programs, by the beginning of their name, that write the same files as koordlet.
_RIVALS: Final = {
    "crane-agent": "CPU quotas and CPU sets of best-effort pods",
    "katalyst-agent": "CPU sets and memory of pods",
    "vc-agent": "CPU and memory knobs of best-effort pods",
    "cri-resmgr": "CPU sets, cache and memory bandwidth of containers",
    "nri-resource-policy-": "CPU sets and shares of containers, over NRI too",
    "nri-memory-qos": "memory.high of containers, over NRI too",
    "nri-memtierd": "memory of containers, over NRI too",
}


def _other_agents(patient: Patient) -> Iterator[Finding]:
    """Find programs that set the same values: over NRI ('both tried to set ...') or in files."""
    daemons = _named(patient, _DAEMONS)
    if len(daemons) > 1:
        named = "; ".join(each.shown for each in daemons)
        yield Finding(
            "duplicates", "fail", f"several daemons run: {named}", "stop all but one of them"
        )
    if _named(patient, _PROXIES) and patient.config.nri.enabled:
        yield Finding(
            "runtime proxy",
            "info",
            "koord-runtime-proxy runs beside NRI: each container is decided twice, with one result",
            "use one of the two paths",
        )
    for process in patient.processes:
        for name, writes in _RIVALS.items():
            if process.name.startswith(name):
                yield Finding(
                    "other agents",
                    "warn",
                    f"process {process.shown} sets {writes}",
                    "let only one of the two set them: featureGates switch koordlet's policies off"
                    " one by one",
                )


def _nri_socket(patient: Patient) -> Iterator[Finding]:
    path = patient.config.nri.socket
    if not patient.config.nri.enabled:
        yield Finding(
            "NRI",
            "info",
            "switched off in the configuration: values are set after a container's creation",
        )
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
            f'containerd 1.7: disable = false in [plugins."{NRI_TABLE}"] of its configuration,'
            " then restart containerd; other runtimes: docs/install.md",
        )


def _containerd(patient: Patient) -> Iterator[Finding]:
    if not patient.config.nri.enabled:
        return
    for process in _named(patient, {"containerd"}):
        path = process.flag("config", "c") or _CONTAINERD_CONFIG
        try:
            config = _toml(process, path)
            if _CRI_PLUGINS.isdisjoint(config.get("disabled_plugins", ())):  # else dockerd's
                yield from _containerd_config(path, config, _nri_table(process, path, config))
        except NotOurs as reason:
            yield Finding("containerd", "info", f"configuration not read: {reason}")
        except FileNotFoundError:
            yield Finding("containerd", "info", f"no {path}: NRI is off in 1.7, on in 2.x")
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            yield Finding("containerd", "warn", f"{path}: {error}")


def _containerd_config(
    path: str, config: Mapping[str, Any], nri: Mapping[str, Any]
) -> Iterator[Finding]:
    if nri.get("disable") is True or nri.get("disable_connections") is True:
        yield Finding(
            "containerd",
            "fail",
            f"NRI connections are switched off in {path}",
            f'disable = false, disable_connections = false in [plugins."{NRI_TABLE}"]; restart it',
        )
    version = config.get("version", 1)
    if nri and version == 1:
        yield Finding(
            "containerd",
            "warn",
            f'{path} has no "version" line: containerd 1.7 ignores [plugins."{NRI_TABLE}"] in it',
            "put version = 2 on its first line; see containerd config dump",
        )
    if version in (1, 2) and "disable" not in nri:
        yield Finding(
            "containerd", "info", f"{path} does not set NRI: off in containerd 1.7, on in 2.x"
        )
    misplaced = {"plugin_registration_timeout", "plugin_request_timeout"} & config.keys()
    if misplaced:
        yield Finding(
            "containerd",
            "warn",
            f"{', '.join(sorted(misplaced))} at the top level of {path} is ignored",
            f'move it into [plugins."{NRI_TABLE}"]',
        )


def _toml(process: Process, path: str) -> dict[str, Any]:
    return tomllib.loads(process.read(path).decode())


def _nri_table(process: Process, path: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the NRI table, overlaid with those of the imported files (patterns, in order)."""
    table = dict(config.get("plugins", {}).get(NRI_TABLE, {}))
    for pattern in config.get("imports", ()):
        for name in process.glob(os.path.join(os.path.dirname(path), pattern)):
            table |= _toml(process, name).get("plugins", {}).get(NRI_TABLE, {})
    return table


def _plugins(patient: Patient) -> Iterator[Finding]:
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
                "rename it, or remove its execute bits",
            )


def _kubelet(patient: Patient) -> Iterator[Finding]:
    kubelets = _named(patient, {"kubelet"})
    if not kubelets:
        yield Finding(
            "kubelet", "info", "no process of this name runs (in k3s it is part of another)"
        )
    for kubelet in kubelets:
        try:
            kubelet.require_of_node()
            config = _kubelet_config(kubelet)
        except NotOurs as reason:
            yield Finding("kubelet", "info", f"not examined: {reason}")
        except (OSError, NotYaml, UnicodeDecodeError) as error:
            yield Finding("kubelet", "warn", f"process {kubelet.shown}: {error}")
        else:
            yield from _managers(kubelet, config)
            yield from _runtime_endpoint(patient, kubelet, config)
            yield from _node_name(patient.config, kubelet)
            driver = kubelet.flag("cgroup-driver") or config.get("cgroupDriver", "cgroupfs")
            yield Finding("kubelet", "ok", f"process {kubelet.pid}, cgroup driver {driver}")


def _kubelet_config(kubelet: Process) -> Mapping[str, Any]:
    path = kubelet.flag("config")
    config = document(kubelet.read(path).decode(), most_values=_MOST_VALUES) if path else {}
    return config if isinstance(config, dict) else {}


def _managers(kubelet: Process, config: Mapping[str, Any]) -> Iterator[Finding]:
    if (kubelet.flag("cpu-manager-policy") or config.get("cpuManagerPolicy")) == "static":
        yield Finding(
            "kubelet CPU manager",
            "info",
            "static: kubelet owns the CPU sets of Guaranteed pods with whole CPUs, and koordlet"
            " leaves them alone; the NodeResourceTopology must state this policy",
        )
    gates = config.get("featureGates")
    in_file = isinstance(gates, dict) and gates.get("MemoryQoS") is True
    if in_file or "MemoryQoS=true" in (kubelet.flag("feature-gates") or "").split(","):
        yield Finding(
            "kubelet MemoryQoS",
            "warn",
            "kubelet writes memory.min and memory.high too",
            "switch off kubelet's MemoryQoS or koordlet's memory QoS (gate CgroupReconcile)",
        )


def _runtime_endpoint(
    patient: Patient, kubelet: Process, config: Mapping[str, Any]
) -> Iterator[Finding]:
    """Check that kubelet's calls pass a running proxy, and that koordlet asks the same runtime."""
    endpoint = kubelet.flag("container-runtime-endpoint") or config.get("containerRuntimeEndpoint")
    asked = _socket(str(endpoint or _KUBELETS_RUNTIME))
    proxies = [
        each
        for each in _named(patient, _PROXIES)
        if each.flag("backend-runtime-mode") != "Docker"  # that one is for dockerd's clients
    ]
    sockets = [_socket(each.flag("koord-runtimeproxy-endpoint") or LISTEN) for each in proxies]
    if sockets and asked not in sockets:
        yield Finding(
            "runtime proxy",
            "warn",
            f"kubelet uses {asked}, past koord-runtime-proxy at {sockets[0]}",
            f"--container-runtime-endpoint=unix://{sockets[0]} for kubelet, or stop the proxy",
        )
    cri = patient.config.cri
    if cri.enabled and asked not in (_socket(cri.socket), *sockets):
        yield Finding(
            "CRI socket",
            "warn",
            f"kubelet uses the runtime at {asked}, koordlet lists the containers of {cri.socket}",
            f"cri.socket: {asked} in koordlet's configuration",
        )


def _node_name(config: Config, kubelet: Process) -> Iterator[Finding]:
    name = kubelet.flag("hostname-override")
    if name and name != config.node_name:
        yield Finding(
            "node name",
            "warn",
            f"kubelet's node is {name}, koordlet's is {config.node_name}: koordlet ignores the"
            f" objects of {name}",
            f"nodeName: {name} in koordlet's configuration",
        )


def _socket(endpoint: str) -> str:
    """Return an endpoint's path in one spelling: /var/run is /run everywhere."""
    path = os.path.normpath(endpoint.removeprefix("unix://"))
    return path.removeprefix("/var") if path.startswith("/var/run/") else path


def _named(patient: Patient, names: frozenset[str] | set[str]) -> list[Process]:
    return [process for process in patient.processes if process.name in names]


NEIGHBOURS: Final[tuple[Check, ...]] = (_other_agents, _nri_socket, _containerd, _plugins, _kubelet)
