"""Configuration: strict, with all errors at once, and upstream's flags over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from apis.errors import InputError, InputErrors
from apis.gates import Stage, parse_gates, resolve_gates
from hooks.policies import BUILTIN
from koordlet.configuration.config import Config, Mode, parse_seconds
from koordlet.configuration.config_file import build, describe, load, mode_of
from koordlet.configuration.flags import FLAGS, help_text, parse_flags
from koordlet.configuration.gates import GATES
from koordlet.qos.strategies.registry import STRATEGIES


def config(text: str = "", *flags: str, mode: Mode = Mode.HOST, **environment: str) -> Config:
    return build(
        yaml.safe_load(text) or {},
        obj="c.yaml",
        flags=parse_flags(flags),
        environment={"NODE_NAME": "n1", **environment},
        mode=mode,
    )


def errors(text: str = "", *flags: str) -> list[str]:
    with pytest.raises(InputErrors) as caught:
        config(text, *flags)
    return [str(error) for error in caught.value.errors]


# --- the file ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nri: {enabld: true}", "nri.enabld = 'True': unknown field (did you mean enabled?)"),
        ("nodename: x", "nodename = 'x': unknown field (did you mean nodeName?)"),
        ("nri: {pluginIndex: 0}", "nri.pluginIndex = '0': expected text, got a whole number"),
        ('nri: {pluginIndex: "7"}', "nri.pluginIndex = '7': two digits"),
        ("nri: {pluginName: a/b}", "nri.pluginName = 'a/b': only letters"),
        ("intervals: {reconcile: 5x}", "intervals.reconcile = '5x': not a duration"),
        ("intervals: {reconcile: 1ms}", "intervals.reconcile = '0.001': shorter than 0.5 s"),
        ("http: {address: 9316}", "http.address = '9316': expected text"),
        ("http: {address: nine}", "http.address = 'nine': expected host:port"),
        ("cgroupRoot: cgroup", "cgroupRoot = 'cgroup': not an absolute path"),
        ("nodeName: Not_A_Name", "nodeName = 'Not_A_Name': not a node name"),
        ("kubelet: {port: 0}", "kubelet.port = '0': not a port"),
        ("writes: {budgetPerSecond: 0}", "writes.budgetPerSecond = '0': less than 1"),
        ("qos: {evictMostPerRound: 0}", "qos.evictMostPerRound = '0': not between 1 and 1000"),
        ("qos: {evictStopGrace: 11m}", "qos.evictStopGrace = '660.0': longer than 600 s"),
        ("qos: {evictStopGrace: -1s}", "qos.evictStopGrace"),
        ("sitePolicies: {timeLimit: 3s}", "sitePolicies.timeLimit = '3.0': not between"),
        ("log: {level: loud}", "log.level = 'loud': one of debug"),
        ("log: {format: xml}", "log.format = 'xml': one of text, json"),
        (
            "hookService: {disabledStages: [PreCreateContainer, PreCreateContainers]}",
            "hookService.disabledStages = 'PreCreateContainers': not a stage of the hook service",
        ),
        ("hookService: {disabledStages: [x]}", "known: PreRunPodSandbox, PostStopPodSandbox, Pre"),
        ("hookService: {failurePolicy: Maybe}", "hookService.failurePolicy = 'Maybe'"),
        ("compat: [GPUMinorNumber]", "did you mean GPUMinorNumbers?"),
        ("featureGates: {GroupIdentty: true}", "did you mean GroupIdentity?"),
        (
            "featureGates: {CoreSched: true, GroupIdentity: 1}",
            "featureGates.GroupIdentity = '1': expected true or false, got a whole number",
        ),
        ("nri: [1]", "nri = '[1]': expected an object, got a list"),
        ("objectsDir: ''", "objectsDir = '': not an absolute path"),
        ("objectsDir: /", "objectsDir = '/': not a directory of its own"),
        ("runDir: ''", "runDir = '': not an absolute path"),
        ("runDir: /run/../etc", "runDir = '/run/../etc': contains .."),
        (f"runDir: /{'x' * 100}", "longer than the 96 bytes that its sockets allow"),
        ("nri: {socket: ''}", "nri.socket = '': not an absolute path"),
        (f"nri: {{socket: /{'x' * 107}}}", "longer than the 107 bytes"),
        ("cri: {socket: here}", "cri.socket = 'here': not an absolute path"),
        ("hookService: {socket: here}", "hookService.socket = 'here': not an absolute path"),
        ("sitePolicies: {directory: here}", "sitePolicies.directory = 'here': not an absolute"),
        ("kubelet: {caFile: ca.crt}", "kubelet.caFile = 'ca.crt': not an absolute path"),
        ("kubelet: {address: a b}", "kubelet.address = 'a b': not a host"),
        ("kubelet: {timeout: 0}", "kubelet.timeout = '0.0': shorter than 0.1 s"),
        ("kubepodsRoot: ../../etc", "kubepodsRoot = '../../etc': not a cgroup's path"),
    ],
)
def test_a_mistake_is_named_with_field_value_and_what_to_do(text: str, expected: str) -> None:
    found = errors(text)
    assert len(found) == 1
    assert found[0].startswith("c.yaml: ")
    assert expected in found[0]


def test_all_mistakes_come_at_once() -> None:
    found = errors("{nri: {enabld: true, backoff: soon}, http: {address: 1}, foo: 1}")
    assert len(found) == 4


def test_an_empty_file_gives_the_defaults() -> None:
    made = config()
    assert made.node_name == "n1"
    assert made.nri.socket == "/var/run/nri/nri.sock"
    assert made.http.address == "127.0.0.1:9316"
    assert made.feature_gates["GroupIdentity"] is True
    assert made.feature_gates["CoreSched"] is False


def test_a_section_with_all_its_lines_commented_out_is_left_out() -> None:
    text = "nri:\n#  enabled: false\nhttp: {address: null}\nlog:\n"
    assert config(text) == config()


@pytest.mark.parametrize("endpoint", ["", "unix:///run/containerd/containerd.sock"])
def test_a_runtimes_endpoint_is_taken_as_upstreams_flag_has_it(endpoint: str) -> None:
    made = config("", f"-containerd-endpoint={endpoint}")
    assert made.cri.socket == "/run/containerd/containerd.sock"


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("-runtime-hooks-reconcile-interval=abc", "not a duration"),
        ("-runtime-hooks-nri-plugin-index=7", "two digits"),
        ("-runtime-hooks-failure-policy=ignore", "Fail or Ignore"),
        ("-runtime-hooks-plugin-failure-policy=fail", "Fail or Ignore"),
        ("-run-dir=run", "not an absolute path"),
        ("-runtime-hooks-disable-stages=PreCreate", "not a stage of the hook service"),
    ],
)
def test_a_mistake_in_a_flag_is_not_blamed_on_the_file(flag: str, expected: str) -> None:
    name, _, value = flag.partition("=")
    (found,) = errors("", flag)
    assert found.startswith(f"command line: {name} = {value!r}: {expected}")


@pytest.mark.parametrize("policy", ["Fail", "Ignore", ""])
def test_the_failure_policy_over_nri_is_upstreams_flag(policy: str) -> None:
    made = config("", f"-runtime-hooks-plugin-failure-policy={policy}")
    assert made.nri.failure_policy == policy


def test_a_bad_node_name_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "My_Host")
    for environment, source in (
        ({}, "this machine's host name"),
        ({"NODE_NAME": "My_Host"}, "environment variable NODE_NAME"),
    ):
        with pytest.raises(InputErrors, match=source):
            build({}, obj="c.yaml", flags=parse_flags([]), environment=environment, mode=Mode.HOST)


def test_the_file_goes_before_the_environment() -> None:
    assert config("nodeName: from-file").node_name == "from-file"


def test_the_description_is_a_configuration_again() -> None:
    made = config("{intervals: {reconcile: 1m30s}, compat: [GPUMinorNumbers]}", "-addr=:1")
    again = build(
        yaml.safe_load("\n".join(describe(made))),
        obj="again",
        flags=parse_flags([]),
        environment={},
        mode=Mode.HOST,
    )
    assert again == made


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a: [", "expected node content at line"),
        (b"- 1", "not a mapping"),
        (b"nodeName: a\nnodeName: b", "the key 'nodeName' stands twice at line 2, column 1"),
        (b"[" * 10_000, "nested deeper"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"x" * (1 << 20) + b"x", "larger than 1 MiB"),
    ],
)
def test_a_file_that_is_no_configuration_says_so(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=problem):
        load(path=str(path), flags=parse_flags([]), environment={}, mode=Mode.HOST)


def test_a_named_file_must_exist_and_the_default_one_need_not(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load(path=str(tmp_path / "no"), flags=parse_flags([]), environment={}, mode=Mode.HOST)


# --- flags -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ("-addr=:9316", "http.address", ":9316"),
        ("--addr=:9316", "http.address", ":9316"),
        ("-cgroup-root-dir=/host-cgroup/", "cgroup_root", "/host-cgroup"),
        ("-enable-nri-runtime-hook=false", "nri.enabled", False),
        ("-enable-nri-runtime-hook", "nri.enabled", True),
        ("-runtime-hooks-nri-socket-path=nri/x.sock", "nri.socket", "/var/run/nri/x.sock"),
        ("-var-run-root-dir=/x/", "nri.socket", "/x/nri/nri.sock"),
        ("-runtime-hooks-nri-plugin-index=07", "nri.plugin_index", "07"),
        ("-runtime-hooks-reconcile-interval=1m30s", "intervals.reconcile", 90.0),
        ("-kubelet-insecure-tls=T", "kubelet.read_only", True),
        ("-kubelet-read-only-port=10256", "kubelet.read_only_port", 10256),
        ("-disable-unset-cpu-quota", "disable_unset_cpu_quota", True),
        ("--v=5", "log.level", "debug"),
        ("--v=4", "log.level", "info"),
    ],
)
def test_upstreams_flags_override_the_file(flag: str, field: str, value: Any) -> None:
    text = "{http: {address: '127.0.0.1:1'}, intervals: {reconcile: 3}, nri: {pluginIndex: '03'}}"
    found: Any = config(text, flag)
    for name in field.split("."):
        found = getattr(found, name)
    assert found == value


def test_the_charts_arguments_are_taken() -> None:
    made = config(
        "",
        "-addr=:9316",
        "-cgroup-root-dir=/host-cgroup/",
        "-feature-gates=BECPUEvict=true,BEMemoryEvict=true,CgroupReconcile=true,Accelerators=true",
        "-runtime-hooks-host-endpoint=/var/run/koordlet/koordlet.sock",
        "--logtostderr=true",
        "--v=4",
        mode=Mode.DAEMON_SET,
    )
    assert made.feature_gates["CgroupReconcile"] is True
    assert made.nri.socket == "/host-var-run/nri/nri.sock"
    assert made.kubelet.enabled
    assert made.hook_service.socket == "/host-var-run-koordlet/koordlet.sock"
    assert made.prediction_directory == "/prediction-checkpoints"


@pytest.mark.parametrize(
    ("text", "directory"),
    [
        ("", "/var/lib/koordlet/prediction"),
        ("runDir: /run/koordlet-2", "/run/koordlet-2/prediction"),
        ("prediction: {directory: /srv/models}", "/srv/models"),
    ],
)
def test_predictions_models_outlive_a_reboot(text: str, directory: str) -> None:
    assert config(text).prediction_directory == directory


def test_a_flag_may_stand_before_its_value() -> None:
    parsed = parse_flags(["-addr", ":1", "--feature-gates", "A=true"])
    assert parsed.values == {"http.address": ":1"}
    assert parsed.gates == "A=true"


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("-addrr=:1", "unknown flag"),
        ("-addrr=:1", "did you mean -addr"),
        ("-addr", "needs a value"),
        ("-enable-nri-runtime-hook=maybe", "not a boolean"),
        ("-kubelet-read-only-port=ten", "not an integer"),
    ],
)
def test_a_bad_flag_says_what_is_wrong(argument: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_flags([argument])


def test_flags_without_effect_are_known_and_named() -> None:
    parsed = parse_flags(["-tsdb-path=/x", "--logtostderr", "-metric-expire-seconds=10"])
    assert parsed.without_effect == ("tsdb-path", "metric-expire-seconds")
    assert parsed.values == {}


def test_every_flag_with_an_effect_leads_to_a_field_and_is_in_the_help() -> None:
    plain = yaml.safe_load("\n".join(describe(config())))
    for name, flag in FLAGS.items():
        if flag.target:
            found: Any = plain
            for step in flag.target.split("."):
                assert step in found, name
                found = found[step]
            assert f"-{name}" in help_text()


@pytest.mark.parametrize(
    ("agent_mode", "default", "mode"),
    [
        ("hostMode", Mode.DAEMON_SET, Mode.HOST),
        ("dsMode", Mode.HOST, Mode.DAEMON_SET),
        ("anything", Mode.HOST, Mode.DAEMON_SET),
        ("", Mode.HOST, Mode.HOST),
        ("", Mode.DAEMON_SET, Mode.DAEMON_SET),
    ],
)
def test_agent_mode_selects_the_paths(agent_mode: str, default: Mode, mode: Mode) -> None:
    assert mode_of({"agent_mode": agent_mode}, default=default) is mode


# --- gates -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "on", "off"),
    [
        ("", ["GroupIdentity", "CPUBurst"], ["CoreSched", "OOMScoreAdj"]),
        ("AllAlpha=true", ["CoreSched", "OOMScoreAdj", "GroupIdentity"], []),
        ("AllAlpha=true,AllBeta=true", ["CPUBurst", "OOMScoreAdj"], ["PressureSuppress"]),
        ("PressureSuppress=true", ["PressureSuppress"], ["OOMScoreAdj"]),
        ("AllBeta=false", [], ["GroupIdentity", "CPUBurst", "CoreSched"]),
        ("AllAlpha=true,CoreSched=false", ["OOMScoreAdj"], ["CoreSched"]),
        ("CoreSched=false,AllAlpha=true", ["OOMScoreAdj"], ["CoreSched"]),
        ("CoreSched=t, OOMScoreAdj=1", ["CoreSched", "OOMScoreAdj"], []),
    ],
)
def test_gates_are_set_by_name_and_by_stage(text: str, on: list[str], off: list[str]) -> None:
    parsed = parse_gates(text, obj="o", field="f")
    gates = resolve_gates(GATES, ("o", "f", parsed))
    assert all(gates[name] for name in on)
    assert not any(gates[name] for name in off)


def test_gates_of_the_command_line_go_before_the_files() -> None:
    made = config(
        "featureGates: {CoreSched: true, Resctrl: true}", "-feature-gates=CoreSched=false"
    )
    assert (made.feature_gates["CoreSched"], made.feature_gates["Resctrl"]) == (False, True)


@pytest.mark.parametrize("text", ["CoreSched", "CoreSched=yes", "=true", "CoreSched="])
def test_a_gate_setting_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputErrors):
        resolve_gates(GATES, ("o", "f", parse_gates(text, obj="o", field="f")))


def test_betas_are_on_and_alphas_are_off() -> None:
    assert all(gate.default is (gate.stage is Stage.BETA) for gate in GATES.values())


# --- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(10, 10.0), (0.5, 0.5), ("10s", 10.0), ("1m30s", 90.0), ("500ms", 0.5), ("1.5h", 5400.0)],
)
def test_durations_are_numbers_of_seconds_or_gos_texts(value: Any, seconds: float) -> None:
    assert parse_seconds(value) == seconds


@pytest.mark.parametrize("value", ["", "10", "s", "-1s", -1, float("inf"), True, None, "1s 2s"])
def test_what_is_no_duration(value: Any) -> None:
    with pytest.raises(ValueError):
        parse_seconds(value)


def test_every_policys_gate_is_known_with_its_default() -> None:
    for policy in BUILTIN:
        assert GATES[policy.gate].default is policy.gate_default, policy.name


def test_every_strategys_gates_are_known_with_their_defaults() -> None:
    for strategy in STRATEGIES:
        for gate, default in strategy.gates.items():
            assert GATES[gate].default is default, strategy.name


def test_the_reference_names_every_field_and_every_flag_with_an_effect() -> None:
    text = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()

    def fields(tree: Any, prefix: str = "") -> list[str]:
        found = []
        for name, value in tree.items():
            nested = isinstance(value, dict) and name != "featureGates"
            found += fields(value, f"{name}.") if nested else [f"{prefix}{name}"]
        return found

    for field in fields(yaml.safe_load("\n".join(describe(config())))):
        assert f"`{field}`" in text or field == "log.verbosity", field
    for name, flag in FLAGS.items():
        if flag.target and flag.target != "log.verbosity":
            assert f"`-{name}`" in text, name
