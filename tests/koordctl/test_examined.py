"""Whole findings of `koordctl doctor`: check, state, text and fix, for processes and machines."""

from __future__ import annotations

import os
import stat
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from koordctl import doctor
from koordctl.client import Client, Refused, Silent, Unreachable
from koordctl.finding import Finding, Patient
from koordctl.neighbours import NEIGHBOURS, NRI_TABLE
from koordctl.processes import NotOurs, Process
from koordlet.configuration.config import Config, Cri, Nri
from linux.discovery import DiscoveryError
from linux.local import LocalHost
from linux.resources import Resource
from tests.simulated import DEBIAN_12_V1, UBUNTU_24_04, SimulatedKernel

_CONFIG = Config(
    node_name="n1",
    nri=Nri(enabled=True, socket="/nowhere/nri.sock"),
    cri=Cri(enabled=True, socket="/run/containerd/containerd.sock"),
)
_SWITCH_OFF = (
    "let only one of the two set them: featureGates switch koordlet's policies off one by one"
)


def _process(*command: str, pid: int = 7) -> Process:
    return Process(pid, os.path.basename(command[0]), command, 0, "/proc")


def _about(
    *processes: Process, config: Config = _CONFIG, leave: tuple[str, ...] = ("NRI socket",)
) -> list[Finding]:
    patient = Patient(config, LocalHost({}), Client("/nowhere"), processes)
    found = [each for check in NEIGHBOURS for each in check(patient)]
    no_kubelet = () if any(each.name == "kubelet" for each in processes) else ("kubelet",)
    return [each for each in found if each.check not in (*leave, *no_kubelet)]


# --- agents --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "writes"),
    [
        ("crane-agent", "CPU quotas and CPU sets of best-effort pods"),
        ("katalyst-agent", "CPU sets and memory of pods"),
        ("vc-agent", "CPU and memory knobs of best-effort pods"),
        ("cri-resmgr", "CPU sets, cache and memory bandwidth of containers"),
        ("nri-resource-policy-topology-aware", "CPU sets and shares of containers, over NRI too"),
        ("nri-memory-qos", "memory.high of containers, over NRI too"),
        ("nri-memtierd", "memory of containers, over NRI too"),
    ],
)
def test_each_rival_is_known_by_its_name(name: str, writes: str) -> None:
    said = f"process 7 /bin/{name} sets {writes}"
    assert _about(_process(f"/bin/{name}")) == [Finding("other agents", "warn", said, _SWITCH_OFF)]
    assert _about(_process(f"/bin/my-{name}")) == []


@pytest.mark.parametrize("name", ["koordlet", "koordlet.main"])
def test_a_second_daemon_is_a_failure(name: str) -> None:
    assert _about(_process(name)) == []
    assert _about(_process(name), _process("koordlet", "run", pid=8)) == [
        Finding(
            "duplicates",
            "fail",
            f"several daemons run: 7 {name}; 8 koordlet run",
            "stop all but one of them",
        )
    ]


@pytest.mark.parametrize("name", ["koord-runtime-proxy", "runtime_proxy.main"])
def test_a_proxy_beside_nri_is_said(name: str) -> None:
    off = msgspec.structs.replace(_CONFIG, nri=Nri(enabled=False))
    assert _about(_process(name), config=off, leave=("NRI",)) == []
    assert _about(_process(name)) == [
        Finding(
            "runtime proxy",
            "info",
            "koord-runtime-proxy runs beside NRI: each container is decided twice, with one result",
            "use one of the two paths",
        )
    ]


def test_without_nri_values_come_after_the_creation() -> None:
    off = msgspec.structs.replace(_CONFIG, nri=Nri(enabled=False))
    said = "switched off in the configuration: values are set after a container's creation"
    assert _about(config=off) == [Finding("NRI", "info", said)]


def test_the_nri_socket_has_to_be_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "nri.sock"
    fix = (
        f'containerd 1.7: disable = false in [plugins."{NRI_TABLE}"] of its configuration, then'
        " restart containerd; other runtimes: docs/install.md"
    )
    config = msgspec.structs.replace(_CONFIG, nri=Nri(enabled=True, socket=str(path)))
    missing = [Finding("NRI socket", "fail", f"no socket at {path}", fix)]
    assert _about(config=config, leave=()) == missing
    path.write_text("")
    assert _about(config=config, leave=()) == missing
    path.unlink()
    os.mknod(path, stat.S_IFSOCK | 0o600)
    assert _about(config=config, leave=()) == [Finding("NRI socket", "ok", str(path))]


# --- containerd ----------------------------------------------------------------------------------


class _Files(Process):
    """A process of the node that sees these files alone."""

    __slots__ = ("files",)
    files: dict[str, str | Exception]

    def __init__(self, *command: str, **files: str | Exception) -> None:
        super().__init__(7, os.path.basename(command[0]), command, 0, "/proc")
        object.__setattr__(self, "files", files)

    def require_of_node(self) -> None:
        return

    def read(self, path: str) -> bytes:
        found = self.files.get(os.path.basename(path).partition(".")[0])
        if isinstance(found, Exception):
            raise found
        if found is None:
            raise FileNotFoundError(2, "No such file", path)
        return str(found).encode()

    def glob(self, pattern: str) -> list[str]:
        assert pattern == "/etc/containerd/conf.d/*.toml"
        return [f"/etc/containerd/conf.d/{name}.toml" for name in ("a", "b") if name in self.files]


_NRI = f'[plugins."{NRI_TABLE}"]\n'
_MOVE = f'move it into [plugins."{NRI_TABLE}"]'
_ON = f'disable = false, disable_connections = false in [plugins."{NRI_TABLE}"]; restart it'
_PATH = "/etc/containerd/config.toml"


@pytest.mark.parametrize(
    ("files", "findings"),
    [
        ({}, [("info", f"no {_PATH}: NRI is off in 1.7, on in 2.x", "")]),
        ({"config": "version = 3"}, []),
        ({"config": f"version = 2\n{_NRI}disable = false"}, []),
        (
            {"config": "version = 2"},
            [("info", f"{_PATH} does not set NRI: off in containerd 1.7, on in 2.x", "")],
        ),
        (
            {"config": ""},
            [("info", f"{_PATH} does not set NRI: off in containerd 1.7, on in 2.x", "")],
        ),
        (
            {"config": f"version = 3\n{_NRI}disable_connections = true"},
            [("fail", f"NRI connections are switched off in {_PATH}", _ON)],
        ),
        (
            {"config": f"{_NRI}disable = false"},
            [
                (
                    "warn",
                    f'{_PATH} has no "version" line: containerd 1.7 ignores'
                    f' [plugins."{NRI_TABLE}"] in it',
                    "put version = 2 on its first line; see containerd config dump",
                )
            ],
        ),
        (
            {"config": "version = 3\nplugin_request_timeout = 1\nplugin_registration_timeout = 2"},
            [
                (
                    "warn",
                    "plugin_registration_timeout, plugin_request_timeout at the top level of"
                    f" {_PATH} is ignored",
                    _MOVE,
                )
            ],
        ),
        ({"config": 'version = 2\ndisabled_plugins = ["cri"]'}, []),
        (
            {"config": 'version = 2\ndisabled_plugins = ["aufs"]'},
            [("info", f"{_PATH} does not set NRI: off in containerd 1.7, on in 2.x", "")],
        ),
        (
            {
                "config": 'version = 3\nimports = ["conf.d/*.toml"]',
                "a": f"{_NRI}disable = true",
                "b": f"{_NRI}disable = false",
            },
            [],
        ),
        (
            {
                "config": f'version = 3\nimports = ["conf.d/*.toml"]\n{_NRI}disable = false',
                "a": f"{_NRI}disable = false",
                "b": f"{_NRI}disable = true",
            },
            [("fail", f"NRI connections are switched off in {_PATH}", _ON)],
        ),
        (
            {"config": NotOurs("it is theirs")},
            [("info", "configuration not read: it is theirs", "")],
        ),
        ({"config": OSError("EIO")}, [("warn", f"{_PATH}: EIO", "")]),
    ],
)
def test_what_containerds_configuration_means_for_nri(
    files: dict[str, Any], findings: list[tuple[str, str, str]]
) -> None:
    found = [asdict(each) for each in _about(_Files("containerd", **files))]
    assert found == [
        dict(zip(("check", "state", "found", "fix"), ("containerd", *each), strict=True))
        for each in findings
    ]


def test_a_broken_configuration_of_containerd_is_named() -> None:
    [found] = _about(_Files("containerd", "-c", "/x/mine.toml", mine="a = "))
    assert (found.check, found.state) == ("containerd", "warn")
    assert found.found.startswith("/x/mine.toml: ")


@pytest.mark.parametrize(
    ("name", "mode", "bad"),
    [
        ("10-koordlet", 0o755, False),
        ("koordlet", 0o755, True),
        ("1-koordlet", 0o755, True),
        ("10koordlet", 0o755, True),
        ("10-", 0o755, True),
        ("readme", 0o644, False),
        ("for-group", 0o610, True),
    ],
)
def test_a_file_that_the_runtime_would_start_has_to_be_named_for_it(
    name: str, mode: int, bad: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text("")
    (tmp_path / name).chmod(mode)
    real = os.stat
    monkeypatch.setattr("koordctl.neighbours.os.listdir", lambda _: [name])
    monkeypatch.setattr(
        "koordctl.neighbours.os.stat",
        lambda path: real(path.replace("/opt/nri/plugins", str(tmp_path))),
    )
    found = [each for each in _about() if each.check == "NRI plugins"]
    assert found == (
        [
            Finding(
                "NRI plugins",
                "fail",
                f"/opt/nri/plugins/{name} is not named NN-name: the runtime's CRI fails to start",
                "rename it, or remove its execute bits",
            )
        ]
        if bad
        else []
    )


# --- kubelet -------------------------------------------------------------------------------------

_OK = ("kubelet", "ok", "process 7, cgroup driver cgroupfs", "")
_STATIC = (
    "kubelet CPU manager",
    "info",
    "static: kubelet owns the CPU sets of Guaranteed pods with whole CPUs, and koordlet leaves them"
    " alone; the NodeResourceTopology must state this policy",
    "",
)
_MEMORY = (
    "kubelet MemoryQoS",
    "warn",
    "kubelet writes memory.min and memory.high too",
    "switch off kubelet's MemoryQoS or koordlet's memory QoS (gate CgroupReconcile)",
)


def _cri(asked: str) -> tuple[str, str, str, str]:
    return (
        "CRI socket",
        "warn",
        f"kubelet uses the runtime at {asked}, koordlet lists the containers of"
        " /run/containerd/containerd.sock",
        f"cri.socket: {asked} in koordlet's configuration",
    )


@pytest.mark.parametrize(
    ("arguments", "config", "findings"),
    [
        ([], "x: 1", [_OK]),
        (["--config=/k.yaml"], "", [_OK]),
        (["--config=/k.yaml"], "- a", [_OK]),
        (
            ["--config=/k.yaml"],
            "cgroupDriver: systemd",
            [("kubelet", "ok", "process 7, cgroup driver systemd", "")],
        ),
        (
            ["--config=/k.yaml", "--cgroup-driver=flag"],
            "cgroupDriver: systemd",
            [("kubelet", "ok", "process 7, cgroup driver flag", "")],
        ),
        (["--config=/k.yaml"], "cpuManagerPolicy: static", [_STATIC, _OK]),
        (["--config=/k.yaml", "--cpu-manager-policy=none"], "cpuManagerPolicy: static", [_OK]),
        (["--config=/k.yaml"], "featureGates: {MemoryQoS: true}", [_MEMORY, _OK]),
        (["--config=/k.yaml"], "featureGates: {MemoryQoS: false, Other: true}", [_OK]),
        (["--config=/k.yaml"], "featureGates: [MemoryQoS]", [_OK]),
        (["--feature-gates=A=true,MemoryQoS=true"], "", [_MEMORY, _OK]),
        (["--feature-gates=A=true,MemoryQoS=false"], "", [_OK]),
        (["--container-runtime-endpoint=unix:///var/run/containerd/containerd.sock"], "", [_OK]),
        (["--container-runtime-endpoint=/run/containerd//containerd.sock"], "", [_OK]),
        (
            ["--config=/k.yaml"],
            "containerRuntimeEndpoint: unix:///run/crio/crio.sock",
            [_cri("/run/crio/crio.sock"), _OK],
        ),
        (
            ["--container-runtime-endpoint=/varx/run/c.sock"],
            "",
            [_cri("/varx/run/c.sock"), _OK],
        ),
        (["--hostname-override=n1"], "", [_OK]),
        (
            ["--hostname-override=n2"],
            "",
            [
                (
                    "node name",
                    "warn",
                    "kubelet's node is n2, koordlet's is n1: koordlet ignores the objects of n2",
                    "nodeName: n2 in koordlet's configuration",
                ),
                _OK,
            ],
        ),
        (
            ["--config=/none.yaml"],
            "",
            [
                (
                    "kubelet",
                    "warn",
                    "process 7 kubelet --config=/none.yaml: [Errno 2] No such file: '/none.yaml'",
                    "",
                )
            ],
        ),
    ],
)
def test_what_a_kubelets_flags_and_file_mean_for_koordlet(
    arguments: list[str], config: str, findings: list[tuple[str, str, str, str]]
) -> None:
    found = _about(_Files("kubelet", *arguments, k=config))
    assert [(each.check, each.state, each.found, each.fix) for each in found] == findings


_LISTEN = "/run/koord-runtimeproxy/runtimeproxy.sock"


@pytest.mark.parametrize(
    ("proxy", "endpoint", "past"),
    [
        ([], "/run/containerd/containerd.sock", _LISTEN),
        ([], _LISTEN, None),
        (["--koord-runtimeproxy-endpoint=/run/p.sock"], "unix:///run/p.sock", None),
        (["--koord-runtimeproxy-endpoint=/run/p.sock"], "/run/containerd/containerd.sock",
         "/run/p.sock"),
        (["--backend-runtime-mode=Docker"], "/run/containerd/containerd.sock", None),
        (["--backend-runtime-mode=Containerd"], "/run/containerd/containerd.sock", _LISTEN),
    ],
)  # fmt: skip
def test_a_kubelet_past_the_proxy_is_said(
    proxy: list[str], endpoint: str, past: str | None
) -> None:
    kubelet = _Files("kubelet", f"--container-runtime-endpoint={endpoint}")
    found = _about(kubelet, _process("koord-runtime-proxy", *proxy, pid=8))
    warned = [(each.check, each.found, each.fix) for each in found if each.state == "warn"]
    assert warned == (
        [
            (
                "runtime proxy",
                f"kubelet uses {endpoint}, past koord-runtime-proxy at {past}",
                f"--container-runtime-endpoint=unix://{past} for kubelet, or stop the proxy",
            )
        ]
        if past
        else []
    )


def test_koordlet_without_cri_may_have_another_runtime_than_kubelet() -> None:
    config = msgspec.structs.replace(_CONFIG, cri=Cri(enabled=False))
    kubelet = _Files("kubelet", "--container-runtime-endpoint=/run/crio/crio.sock")
    assert [each.check for each in _about(kubelet, config=config)] == ["kubelet"]


# --- the machine ---------------------------------------------------------------------------------


def _found(check: Any, host: Any = None, **config: Any) -> list[tuple[str, str, str, str]]:
    changed = msgspec.structs.replace(_CONFIG, **config)
    patient = Patient(changed, host or LocalHost({}), Client("/nowhere"), ())
    return [(each.check, each.state, each.found, each.fix) for each in check(patient)]


@pytest.mark.parametrize(
    ("user", "finding"),
    [
        (0, ("user", "ok", "root", "")),
        (1000, ("user", "fail", "not root: most checks need root", "run as root")),
    ],
)
def test_doctor_wants_to_be_root(
    user: int, finding: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koordctl.doctor.os.geteuid", lambda: user)
    assert _found(doctor._user) == [finding]


@pytest.mark.parametrize(
    ("watches", "enough"), [("16383\n", False), ("16384\n", True), ("1000000\n", True)]
)
def test_the_machines_watches_have_to_be_enough(watches: str, enough: bool) -> None:
    host = SimpleNamespace(read=lambda path: {_WATCHES: watches}[path])
    number = watches.strip()
    assert _found(doctor._limits, host) == [
        ("inotify", "ok", f"{number} watches", "")
        if enough
        else (
            "inotify",
            "warn",
            f"{number} watches for each user: outside changes may be found only by the timer",
            "sysctl fs.inotify.max_user_watches=16384",
        )
    ]


_WATCHES = "/proc/sys/fs/inotify/max_user_watches"


def test_no_objects_directory_is_said_with_what_to_do(tmp_path: Path) -> None:
    path = f"{tmp_path}/objects.d"
    assert _found(doctor._files, objects_dir=path) == [
        (
            "objects",
            "info",
            f"{path} does not exist: no NodeSLO, so policies that need one are off",
            f"mkdir -p {path}, and put a NodeSLO there",
        )
    ]


@pytest.mark.parametrize(("count", "dots"), [(5, ""), (6, ", ...")])
def test_objects_that_others_may_write_are_named_up_to_five(
    count: int, dots: str, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    names = [f"{tmp_path}/{number}.yaml" for number in range(count)]
    for name in [*names, f"{tmp_path}/.hidden"]:
        Path(name).write_text("")
        Path(name).chmod(0o622)
    assert _found(doctor._files, objects_dir=str(tmp_path)) == [
        ("objects", "ok", str(tmp_path), ""),
        (
            "objects",
            "warn",
            f"users other than root may write {', '.join(names[:5])}{dots}, and so decide what"
            " koordlet writes as root",
            "chown root and chmod go-w them",
        ),
    ]


def test_an_objects_directory_that_others_may_write_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "gone.yaml").symlink_to("nowhere")
    [_, (_, state, found, _)] = _found(doctor._files, objects_dir=str(tmp_path))
    assert (state, found.split(",")[0]) == ("warn", f"users other than root may write {tmp_path}")


@pytest.mark.parametrize(
    ("error", "finding"),
    [
        (Silent("it hangs"), ("daemon", "fail", "it hangs", "systemctl restart koordlet")),
        (Unreachable("no socket"), ("daemon", "warn", "no socket", "systemctl start koordlet")),
        (Refused("not now"), ("daemon", "fail", "not now", "")),
    ],
)
def test_a_daemon_that_does_not_answer(
    error: Exception, finding: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Client, "get", fail)
    assert _found(doctor._daemon) == [finding]


def test_a_cgroup_tree_that_is_not_found_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise DiscoveryError("no cgroup file system")

    monkeypatch.setattr(doctor, "layout_of", fail)
    assert _found(doctor._cgroups) == [("cgroups", "fail", "no cgroup file system", "")]


def _tree(**changes: Any) -> Any:
    there = {"cpu", "cpuset", "memory"} - set(changes.pop("missing", ()))
    driver = SimpleNamespace(value="systemd")
    made = {"kubepods": "/kubepods", "version": 2, "driver": driver, "has": there.__contains__}
    return SimpleNamespace(**made | changes)


_KERNEL = ("kernel", "ok", "6.12; tried and working: cpu.shares, memory.high", "")


@pytest.mark.parametrize(
    ("tree", "reasons", "findings"),
    [
        (
            {},
            {},
            [("cgroups", "ok", "version 2, systemd driver, pods' root: /kubepods", ""), _KERNEL],
        ),
        (
            {"kubepods": "", "version": 1},
            {},
            [
                (
                    "cgroups",
                    "info",
                    "version 1, systemd driver, pods' root: no pod has run yet",
                    "",
                ),
                (
                    "cgroup version",
                    "info",
                    "version 1: supported, but kubelet refuses it by default from Kubernetes 1.35"
                    " on",
                    "",
                ),
                _KERNEL,
            ],
        ),
        (
            {"missing": ("cpu", "memory")},
            {},
            [
                ("cgroups", "ok", "version 2, systemd driver, pods' root: /kubepods", ""),
                (
                    "controllers",
                    "fail",
                    "not mounted below /sys/fs/cgroup: cpu, memory",
                    "mount them, or set cgroupRoot",
                ),
                _KERNEL,
            ],
        ),
        (
            {},
            {
                Resource.CPU_SHARES: "it is supported",
                Resource.CPU_IDLE: "no file",
                Resource.CPU_BVT: "not Anolis",
                Resource.CPU_CFS_BURST: "too old",
                Resource.CORE_SCHED_COOKIE: "not built in",
                Resource.RESCTRL_GROUP: "not mounted",
                Resource.MEMORY_MIN: "x",
                Resource.MEMORY_LOW: "y",
            },
            [
                ("cgroups", "ok", "version 2, systemd driver, pods' root: /kubepods", ""),
                _KERNEL,
                (
                    f"knob {Resource.CPU_IDLE.value}",
                    "info",
                    "no file: best-effort pods cannot be made idle",
                    "",
                ),
                (
                    f"knob {Resource.CPU_BVT.value}",
                    "info",
                    "not Anolis: GroupIdentity uses cpu.idle and cpu.weight instead (degraded)",
                    "",
                ),
                (f"knob {Resource.CPU_CFS_BURST.value}", "info", "too old: no CPU burst", ""),
                (
                    f"knob {Resource.CORE_SCHED_COOKIE.value}",
                    "info",
                    "not built in: no core scheduling",
                    "",
                ),
                (
                    f"knob {Resource.RESCTRL_GROUP.value}",
                    "info",
                    "not mounted: no cache and memory bandwidth isolation",
                    "mount -t resctrl resctrl /sys/fs/resctrl, if the processor has RDT",
                ),
                (
                    "other knobs",
                    "info",
                    f"this kernel has no {Resource.MEMORY_MIN.value}, {Resource.MEMORY_LOW.value}:"
                    " claims on these are unsupported",
                    "",
                ),
            ],
        ),
    ],
)
def test_what_the_cgroup_tree_and_the_kernel_lack_is_said(
    tree: dict[str, Any],
    reasons: dict[Resource, str],
    findings: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supported = frozenset({Resource.MEMORY_HIGH, Resource.CPU_SHARES})
    facts = SimpleNamespace(supported=supported, kernel_release="6.12")
    probed = SimpleNamespace(facts=facts, reasons=reasons)
    monkeypatch.setattr(doctor, "layout_of", lambda *_: _tree(**tree))
    monkeypatch.setattr(doctor, "probe_kernel", lambda *_: probed)
    assert _found(doctor._cgroups) == findings


@pytest.mark.parametrize(("profile", "version"), [(DEBIAN_12_V1, 1), (UBUNTU_24_04, 2)])
def test_a_simulated_machine_is_examined(profile: Any, version: int) -> None:
    found = _found(doctor._cgroups, SimulatedKernel(profile))
    assert found[0][2].startswith(f"version {version}, ")
    assert ("cgroup version" in [each[0] for each in found]) is (version == 1)


def test_processes_that_cannot_be_listed_are_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> None:
        raise OSError("EIO")

    monkeypatch.setattr(doctor, "running", fail)
    (tmp_path / "c.yaml").write_text("{nodeName: n1, kubepodsRoot: koordctl-test-none}")
    found = doctor.examine(
        config_path=f"{tmp_path}/c.yaml", run_dir=None, client=Client(str(tmp_path))
    )
    assert found[0] == {
        "check": "processes",
        "state": "warn",
        "found": "cannot be listed: EIO",
        "fix": "check procRoot",
    }
    assert {"user", "daemon", "kubelet"} <= {each["check"] for each in found}


# --- processes -----------------------------------------------------------------------------------


def test_a_process_is_shown_by_four_words_and_120_characters() -> None:
    assert _process("a", "b", "c", "d", "e").shown == "7 a b c d"
    assert _process("x" * 200).shown == f"7 {'x' * 120}"


def test_a_file_is_read_up_to_a_mebibyte_and_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(7, "kubelet", ("kubelet",), 0, str(tmp_path))
    monkeypatch.setattr(Process, "require_of_node", lambda _: None)
    root = tmp_path / "7" / "root"
    root.mkdir(parents=True)
    (root / "a").write_bytes(b"x" * (1 << 20))
    assert len(process.read("/a")) == 1 << 20
    (root / "a").write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(NotOurs, match=r"^/a has more than 1 MiB$"):
        process.read("/a")
    with pytest.raises(NotOurs, match="names the file by a relative path, 'a'"):
        process.read("a")
    (root / "b").write_bytes(b"")
    assert process.glob("/*") == ["/a", "/b"]
