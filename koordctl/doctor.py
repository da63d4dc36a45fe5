"""`koordctl doctor`: examines this machine for koordlet and says how to fix what it finds.

Each check is a function that yields findings; a check that fails is reported as a finding. Kernel
knobs are tried by writing into a scratch group, as the daemon does; nothing else is changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from apis.errors import InputError, InputErrors
from koordctl.client import Client, Refused, Silent, Unreachable
from koordctl.finding import Check, Finding, Patient
from koordctl.neighbours import NEIGHBOURS, NRI_TABLE
from koordctl.offline import config_in_force, load_config
from koordctl.processes import running
from koordlet.configuration.config import Config
from koordlet.executor.journal import FILE_NAME
from koordlet.node.machine import CGROUP_ROOT, layout_of, local_host
from koordlet.node.probe import probe_kernel
from linux.discovery import DiscoveryError
from linux.resources import Resource
from service.append_log import files_aside

_LEAST_WATCHES: Final = 16384
"""Chosen: koordlet watches each cgroup directory, on cgroup v1 in three hierarchies, so this is
enough for some 5,000 pods and containers."""

# What a missing knob costs, where a person would not guess.
_WITHOUT: Final = {
    Resource.CPU_BVT: "GroupIdentity uses cpu.idle and cpu.weight instead (degraded)",
    Resource.CPU_IDLE: "best-effort pods cannot be made idle",
    Resource.CPU_CFS_BURST: "no CPU burst",
    Resource.RESCTRL_GROUP: "no cache and memory bandwidth isolation",
    Resource.CORE_SCHED_COOKIE: "no core scheduling",
}


def examine(
    *, config_path: str | None, run_dir: str | None, client: Client
) -> list[dict[str, Any]]:
    """Return all findings, as plain data.

    config_path: None for what the running daemon uses, and the default file's where none runs.
    """
    try:
        config = _config(config_path, run_dir, client)
    except (InputError, InputErrors) as error:
        return [asdict(Finding("configuration", "fail", str(error), "koordlet check-config"))]
    findings: list[Finding] = []
    try:
        processes = running(config.proc_root)
    except OSError as error:
        processes = ()
        findings.append(
            Finding("processes", "warn", f"cannot be listed: {error}", "check procRoot")
        )
    patient = Patient(config, local_host(config), client, processes)
    checks: tuple[Check, ...] = (_user, _cgroups, _daemon, *NEIGHBOURS, _limits, _originals, _files)
    for check in checks:
        try:
            findings += check(patient)
        except OSError as error:
            findings.append(Finding(check.__name__.strip("_"), "warn", f"check failed: {error}"))
        except (LookupError, TypeError) as error:
            # During an upgrade koordctl and the daemon may be of different versions.
            problem = f"cannot understand the daemon's answer: {type(error).__name__}: {error}"
            findings.append(Finding(check.__name__.strip("_"), "warn", problem))
    return [asdict(finding) for finding in findings]


def _config(path: str | None, run_dir: str | None, client: Client) -> Config:
    if path is None:
        try:
            return config_in_force(client.get("/config"))
        except (Unreachable, Refused):
            pass  # no daemon, or an older one: the check of the daemon reports it
    return load_config(path, run_dir=run_dir)


def _user(patient: Patient) -> Iterator[Finding]:
    if os.geteuid() == 0:
        yield Finding("user", "ok", "root")
    else:
        yield Finding("user", "fail", "not root: most checks need root", "run as root")


def _cgroups(patient: Patient) -> Iterator[Finding]:
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
    probed = probe_kernel(patient.host, layout)
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
            "other knobs", "info", f"this kernel has no {names}: claims on these are unsupported"
        )


def _daemon(patient: Patient) -> Iterator[Finding]:
    try:
        status = patient.client.get("/status")
    except Silent as error:
        yield Finding("daemon", "fail", str(error), "systemctl restart koordlet")
        return
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
        origin = "reported" if runtime["nriReported"] else "inferred"
        yield Finding(
            "NRI",
            "ok",
            f"{runtime['name']} {runtime['version']}, NRI {runtime['nri']} ({origin}), time-outs:"
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
                f'set plugin_request_timeout = "2s" in [plugins."{NRI_TABLE}"]',
            )
    if status["unprotected"]:
        yield Finding(
            "containers",
            "info",
            f"{len(status['unprotected'])} were not seen at creation; koordctl status names them",
        )
    for source in status["sources"]:
        if source["problem"] and source["failures"]:
            yield Finding(f"source {source['name']}", "warn", source["problem"])
    for report in status["reports"]["objects"]:
        if report["problem"]:
            yield Finding(f"report {report['kind']}", "warn", report["problem"])
    for problem in status["objects"]["problems"]:
        yield Finding("objects", "warn", f"{problem['file']}: {problem['message']}")


def _limits(patient: Patient) -> Iterator[Finding]:
    path = "/proc/sys/fs/inotify/max_user_watches"
    watches = int(patient.host.read(path))
    if watches < _LEAST_WATCHES:
        yield Finding(
            "inotify",
            "warn",
            f"{watches} watches for each user: outside changes may be found only by the timer",
            f"sysctl fs.inotify.max_user_watches={_LEAST_WATCHES}",
        )
    else:
        yield Finding("inotify", "ok", f"{watches} watches")


def _originals(patient: Patient) -> Iterator[Finding]:
    try:
        kept = files_aside(f"{patient.config.run_dir}/{FILE_NAME}")
    except FileNotFoundError:
        return  # no daemon has run since the node started
    if kept:
        yield Finding(
            "originals",
            "warn",
            f"a start could not read {', '.join(kept)}: the originals in there are not restored",
            "restore them with the version that wrote them (docs/install.md, Upgrading), or remove"
            " the files",
        )


def _files(patient: Patient) -> Iterator[Finding]:
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
        return
    exposed = [path for path in _manifests(directory) if _others_may_write(path)]
    if exposed:
        yield Finding(
            "objects",
            "warn",
            f"users other than root may write {', '.join(exposed[:5])}"
            f"{', ...' if len(exposed) > 5 else ''}, and so decide what koordlet writes as root",
            "chown root and chmod go-w them",
        )


def _manifests(directory: str) -> list[str]:
    """Return the objects directory and the files in it."""
    names = [name for name in sorted(os.listdir(directory)) if not name.startswith(".")]
    return [directory, *(f"{directory}/{name}" for name in names)]


def _others_may_write(path: str) -> bool:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return False
    return bool(status.st_mode & 0o022) or status.st_uid not in (0, os.geteuid())
