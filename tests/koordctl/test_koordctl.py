"""The operator's command line: against a daemon in memory, and without one."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from hooks.claim import Claim
from hooks.standing import Standing
from koordctl import tables
from koordctl.client import Client
from koordctl.doctor import examine
from koordctl.main import main
from koordctl.offline import config_in_force
from koordctl.status import network_rows, status_text
from koordlet.configuration.config import Config
from koordlet.configuration.config_file import as_tree
from koordlet.qos.board import Lease
from koordlet.qos.lease_file import save
from koordlet.sources.apiserver import KEPT_FILE
from linux.procfs import boot_id
from linux.resources import Resource
from tests.answering import answering as kubelet_answering
from tests.koordlet.daemon.bed import SLO, Node, events, ls_manifest, node, node_object, until
from tests.simulated import UBUNTU_24_04, Kubelet, SimulatedKernel
from tests.simulated.kubelet import Limits

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
POD_UID = "aaaa-1111-2222"
ONE_CPU = Limits(cpu_request_milli=1000, cpu_limit_milli=1000)
Ask = Callable[..., Awaitable[int]]


def with_daemon(test: Callable[[Node, Ask], Awaitable[None]]) -> None:
    """Run `test` beside a daemon that keeps one pod of which the quota is divided by 1.25."""

    async def run() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU, uid=POD_UID)
            async with n.running():
                await n.run_pod(pod)
                await n.create(pod, "c1c1c1c1c1")
                path = n.kubelet.path(pod.cgroup, "cpu.max")
                await until("the quota", lambda: n.kernel.text(path) == "80000 100000")

                async def ask(*arguments: str) -> int:
                    # The client blocks, and the daemon lives in this loop.
                    run_dir = str(n.folder / "run")
                    return await asyncio.to_thread(main, ["--run-dir", run_dir, *arguments])

                await test(n, ask)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_pod_is_explained_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(n: Node, ask: Ask) -> None:
        assert await ask("explain", "pod", "default/pod-aaaa") == 0
        shown = capsys.readouterr().out
        assert "cpu.cfs_quota_us" in shown
        assert "applied" in shown
        assert "from Node annotation node.koordinator.sh/cpu-normalization-ratio" in shown
        assert "original 100000" in shown
        assert "written: 100000 -> 80000" in shown

    with_daemon(test)


@pytest.mark.parametrize("name", ["default/pod-aaaa/main", "c1c1c1c1", "containerd://c1c1c1c1c1"])
def test_a_container_is_found_by_name_and_by_id(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test(n: Node, ask: Ask) -> None:
        assert await ask("explain", "container", name, "-o", "json") == 0
        (subject,) = json.loads(capsys.readouterr().out)["subjects"]
        quota = next(v for v in subject["values"] if v["resource"] == "cpu.cfs_quota_us")
        assert (quota["requested"], quota["value"]) == ("100000", "80000")

    with_daemon(test)


@pytest.mark.parametrize("name", ["default/pod-aaaa", "pod-aaaa", POD_UID, POD_UID[:8]])
def test_a_pod_is_found_by_name_and_by_uid(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def test(n: Node, ask: Ask) -> None:
        assert await ask("explain", "pod", name, "-o", "json") == 0
        levels = [each["level"] for each in json.loads(capsys.readouterr().out)["subjects"]]
        assert levels == ["pod", "sandbox", "container"]

    with_daemon(test)


def test_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(n: Node, ask: Ask) -> None:
        for kind, name, words in (
            ("pod", "nope", "known pods: default/pod-aaaa"),
            ("pod", "default/pod-aa", "known pods: default/pod-aaaa"),
            ("container", "nope", "known containers: default/pod-aaaa/main;"),
            ("container", "c1c1", "an id's first 8 characters"),
            ("subject", "nope", "known subjects: container/c1c1c1c1c1, kubeqos/BestEffort,"),
        ):
            assert await ask("explain", kind, name) == 2
            assert words in capsys.readouterr().err

    with_daemon(test)


def test_status_events_and_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "node.yaml").write_text(yaml.safe_dump(node_object("2.0")))

    async def test(n: Node, ask: Ask) -> None:
        assert await ask("status") == 0
        shown = capsys.readouterr().out
        assert "connected to containerd" in shown
        assert "CPUNormalization" in shown
        assert "objects     NodeSLO, Node\n" in shown
        assert "CoreSched         off       feature gate CoreSched=false\n" in shown
        assert await ask("events") == 0
        assert "nri-configured" in capsys.readouterr().out
        writes = len(n.kernel.writes)
        assert await ask("plan", "--objects", str(tmp_path)) == 0
        shown = capsys.readouterr().out
        assert "NodeSLO n1  there is none of this name" in shown
        assert "1 writes" in shown
        assert "Pod default/pod-aaaa" in shown
        assert "50000" in shown
        assert len(n.kernel.writes) == writes

    with_daemon(test)


def test_status_names_the_values_that_are_not_in_force(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def test(n: Node, ask: Ask) -> None:
        n.kernel.faults.fail("write", errno.EINVAL, path="*/cpu.max", nth=0)
        n.put(node_object("2.0"))

        def troubled() -> bool:
            reconciler = n.daemon.parts.passes.reconciler
            return reconciler is not None and any(s == "failed" for _, s in reconciler.states())

        await until("a refused write", troubled)
        assert await ask("status") == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "values that are not in force" in shown
        assert "Pod default/pod-aaaa cpu.cfs_quota_us 50000 80000 failed" in shown
        await ask("status", "-o", "json")
        (told,) = json.loads(capsys.readouterr().out)["reconciler"]["troubled"]
        assert (told["name"], told["desired"], told["state"]) == (
            "Pod default/pod-aaaa",
            "50000",
            "failed",
        )

    with_daemon(test)


def test_status_shows_the_last_eviction_and_what_is_short(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def test(n: Node, ask: Ask) -> None:
        await ask("status", "-o", "json")
        answer = json.loads(capsys.readouterr().out)
        assert "evictions" not in status_text(answer)
        answer["evictions"] |= {
            "evictions": 1,
            "heldBack": "kubelet evicts pods itself: the Node has MemoryPressure",
            "short": [{"gate": "BEMemoryEvict", "why": "no pod is left"}],
            "last": [
                {"pod": "Pod default/hog", "outcome": "evicted", "at": 0.0, "gate": "CPUEvict"}
            ],
        }
        shown = " ".join(status_text(answer).split())
        assert "evictions 1; last Pod default/hog, evicted, at" in shown
        assert "for CPUEvict kubelet evicts pods itself: the Node has MemoryPressure" in shown
        assert "BEMemoryEvict is not covered: no pod is left" in shown
        del answer["evictions"]
        assert "evictions" not in status_text(answer)

    with_daemon(test)


def test_status_shows_as_many_containers_as_a_person_reads_those_that_miss_something_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def test(n: Node, ask: Ask) -> None:
        await ask("status", "-o", "json")
        answer = json.loads(capsys.readouterr().out)
        unseen = [
            {"pod": "default/many", "container": f"c{i}", "id": "", "lacks": []} for i in range(30)
        ]
        answer["unprotected"] = [*unseen, {**unseen[0], "container": "bare", "lacks": ["env"]}]
        shown = status_text(answer)
        assert "default/many  bare" in shown
        assert "default/many  c18" in shown
        assert "default/many  c19" not in shown
        assert "... and 11 more: koordctl status -o json" in shown

    with_daemon(test)


def test_status_shows_strategies_and_the_collectors_that_have_no_samples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def test(n: Node, ask: Ask) -> None:
        await ask("status", "-o", "json")
        answer = json.loads(capsys.readouterr().out)
        strategy = {**answer["strategies"][0], "name": "CPUEvict", "stepAgeSeconds": 61.0}
        answer["strategies"] = [
            {**strategy, "summary": "nothing is short", "why": "", "problem": ""}
        ]
        collector = {**answer["measuring"]["collectors"][0], "name": "pods", "ageSeconds": 5.0}
        answer["measuring"]["collectors"] = [
            {**collector, "state": "failing", "error": "EIO: cpuacct.usage"},
            {**collector, "name": "node", "state": "ready", "error": ""},
        ]
        shown = " ".join(status_text(answer).split())
        assert "CPUEvict" in shown and "1m1s ago nothing is short" in shown
        assert "pods failing 5s ago EIO: cpuacct.usage" in shown
        assert "measuring 1 collectors" in shown
        answer["measuring"] |= {"running": False, "enabled": False, "collectors": []}
        assert "nothing: no strategy runs (measuring.enabled)" in " ".join(
            status_text(answer).split()
        )

    with_daemon(test)


def documented(command: str) -> set[str]:
    """Return the fields that the documentation promises: `a`, `a.b`, `a[].b`."""
    section = OPERATIONS.read_text().split("## JSON")[1].split("\n## ")[0]
    (paragraph,) = (text for text in section.split("\n\n") if f"`{command}`:" in text)
    text = paragraph.split(f"`{command}`:")[1].split("; `file` is")[0].split(". `")[0]
    fields: set[str] = set()
    for quoted in re.findall(r"`([^`]+)`", text):
        head, brace, names = quoted.partition("{")
        inner = [name for name in names.rstrip("}").split(",") if name != "..."]
        fields |= {head + name for name in inner} if brace else {quoted}
    return fields


def fields(tree: Any, path: str = "") -> set[str]:
    """Return the paths of all fields of an answer."""
    found = {path.removeprefix("."), f"{path}[]".removeprefix(".")}
    if isinstance(tree, dict):
        found |= {field for key, value in tree.items() for field in fields(value, f"{path}.{key}")}
    if isinstance(tree, list):
        found |= {field for value in tree for field in fields(value, f"{path}[]")}
    return found


@pytest.mark.parametrize("command", ["status", "plan", "events"])
def test_the_documented_fields_of_an_answer_are_there(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    be = {"cpuQOS": {"enable": True, "groupIdentity": -1}}
    slo = {**SLO, "spec": {"resourceQOSStrategy": {"beClass": be}}}
    (tmp_path / "new.yaml").write_text(yaml.safe_dump_all([node_object("2.0"), slo, {}]))
    asked = [command, "-o", "json"] + (["--objects", str(tmp_path)] if command == "plan" else [])

    async def test(n: Node, ask: Ask) -> None:
        n.put_text("bad.yaml", "kind: Bad")
        await until("the bad file", lambda: n.daemon.parts.feeds.objects.problems)
        await ask(*asked)
        answer = json.loads(capsys.readouterr().out)
        promised = documented(command)
        assert len(promised) >= 7
        # Nothing is amiss with this node's containers, sources and values.
        empty = {"unprotected", "sources", "reconciler.troubled"}
        unseen = {field for field in promised if "[]." in field and field.split("[].")[0] in empty}
        assert promised - unseen - fields(answer) == set()

    with_daemon(test)


def test_a_plan_uses_objects_of_the_api_server_beside_the_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory with a NodeSLO alone does not take the server's Node away."""
    (tmp_path / "slo.yaml").write_text(yaml.safe_dump(SLO))
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text("not reachable")

    async def run() -> None:
        async with node(kubernetes={"kubeconfig": str(kubeconfig)}) as n:
            n.put(SLO)
            kept = {"Node of the API server": node_object("1.25")}
            (n.folder / "run" / KEPT_FILE).write_text(json.dumps(kept))
            async with n.running():
                run_dir = str(n.folder / "run")
                asked = ["--run-dir", run_dir, "plan", "--objects", str(tmp_path), "-o", "json"]
                assert await asyncio.to_thread(main, asked) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["policies"], answer["problems"]) == ([], [])

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubelet:
    """A simulated machine with one pod and without a CRI, for `plan --offline`."""
    kernel = SimulatedKernel(UBUNTU_24_04)
    kubelet = Kubelet(kernel)
    kubelet.add_pod(ONE_CPU, uid=POD_UID)
    config = {
        "nodeName": "n1",
        "runDir": f"{tmp_path}/run",
        "cri": {"socket": f"{tmp_path}/cri.sock"},
        "featureGates": {"CPUNormalization": True},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "node.yaml").write_text(yaml.safe_dump(node_object("2.0")))
    monkeypatch.delenv("KOORDLET_RUN_DIR", raising=False)
    monkeypatch.setattr("koordctl.offline.local_host", lambda _: kernel)
    return kubelet


def plan_offline(tmp_path: Path, *arguments: str) -> int:
    config = ["--config", str(tmp_path / "c.yaml")]
    return main(["plan", "--offline", "--objects", f"{tmp_path}/objects", *config, *arguments])


def test_an_offline_plan_without_a_source_of_pods_is_no_plan(
    tmp_path: Path, machine: Kubelet, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_offline(tmp_path) == 2
    shown = capsys.readouterr()
    assert (
        f"no pod of this node is known: the CRI gave no list, and {tmp_path}/objects" in shown.err
    )
    assert f"no socket at {tmp_path}/cri.sock" in " ".join(shown.out.split())
    assert "Nothing would be written" not in shown.out
    assert plan_offline(tmp_path, "-o", "json") == 2
    assert json.loads(capsys.readouterr().out)["pods"] is None


def test_an_offline_plan_is_made_for_the_pods_of_manifests(
    tmp_path: Path, machine: Kubelet, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "objects" / "pod.yaml"
    manifest.write_text(yaml.safe_dump(ls_manifest(POD_UID)))
    assert plan_offline(tmp_path, "-o", "json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["pods"] == 1
    (write,) = answer["writes"]
    assert (write["resource"], write["old"], write["new"]) == (
        "cpu.cfs_quota_us",
        "100000",
        "50000",
    )
    assert machine.kernel.writes_of() == []


def test_an_offline_plan_for_a_node_whose_runtime_lists_no_pod_is_complete(
    tmp_path: Path,
    machine: Kubelet,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "cri.sock").touch()
    monkeypatch.setattr("koordlet.sources.cri.CriClient.fetch", lambda _: ((), ()))
    assert plan_offline(tmp_path) == 0
    assert "Nothing would be written" in capsys.readouterr().out


def test_an_offline_plan_keeps_the_claims_that_the_last_daemon_left(
    tmp_path: Path, machine: Kubelet, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the next daemon does until its strategies have measured."""
    (tmp_path / "objects" / "pod.yaml").write_text(yaml.safe_dump(ls_manifest(POD_UID)))
    (tmp_path / "run").mkdir()
    claim = Claim(Resource.CPU_CFS_QUOTA, 70_000, policy="s", reason="busy", source="a gate")
    standing = Standing({"kubeqos/BestEffort": (claim,)})
    leases = {"BECPUSuppress": Lease(standing, 0.0), "gone": Lease(standing, 0.0)}
    path, boot = str(tmp_path / "run" / "leases"), boot_id(machine.kernel)
    for kept_in, wanted in ((boot, ["70000", "50000"]), ("another boot", ["50000"])):
        save(leases, path, boot=kept_in)
        assert plan_offline(tmp_path, "-o", "json") == 0
        writes = json.loads(capsys.readouterr().out)["writes"]
        assert sorted(each["new"].split()[0] for each in writes) == sorted(wanted)
    Path(path).write_text("{")
    assert plan_offline(tmp_path, "-o", "json") == 1
    answer = json.loads(capsys.readouterr().out)
    assert [each["object"] for each in answer["problems"] if each["file"] == path] == [
        "strategies' claims"
    ]
    assert len(answer["writes"]) == 1


def test_a_plan_lists_bad_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = {**SLO, "spec": {"cpuBurstStrategy": {"cpuBurstPercent": "lots"}}}
    (tmp_path / "slo.yaml").write_text(yaml.safe_dump(bad))
    (tmp_path / "node.yaml").write_text(yaml.safe_dump(node_object("1.25")))

    async def test(n: Node, ask: Ask) -> None:
        assert await ask("plan", "--objects", str(tmp_path)) == 1
        shown = capsys.readouterr().out
        assert "lots" in shown
        assert "Nothing would be written" in shown

    with_daemon(test)


def test_doctor_uses_the_running_daemons_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    """Its sockets and directories are in no file at the default place."""

    async def test(n: Node, ask: Ask) -> None:
        await ask("doctor", "-o", "json")
        findings = json.loads(capsys.readouterr().out)
        assert config_in_force(as_tree(n.daemon.parts.config)) == n.daemon.parts.config
        (socket,) = (each for each in findings if each["check"] == "NRI socket")
        assert n.daemon.parts.config.nri.socket in socket["found"]

    with_daemon(test)


def test_doctor_examines_machine_and_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(n: Node, ask: Ask) -> None:
        status = await ask("doctor", "-o", "json")
        findings: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        checks = {finding["check"]: finding for finding in findings}
        assert checks["daemon"]["state"] == "ok"
        assert "containerd" in checks["NRI"]["found"]
        assert status == int(any(finding["state"] == "fail" for finding in findings))
        assert checks["NRI socket"]["state"] == "ok"

    with_daemon(test)


def test_doctor_names_a_right_that_kubelet_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    refused = b"Forbidden (user=koordlet, verb=get, resource=nodes, subresource(s)=[pods proxy])"

    async def run() -> None:
        with kubelet_answering(403, refused) as (port, _, _):
            kubelet = {"enabled": True, "readOnly": True, "readOnlyPort": port}
            async with node(kubelet=kubelet) as n, n.running() as daemon:
                sources = daemon.parts.feeds
                await until(
                    "the refusal", lambda: [one for one in sources.statuses if one.failures]
                )
                asked = ["--run-dir", str(n.folder / "run"), "doctor", "-o", "json"]
                await asyncio.to_thread(main, asked)

    asyncio.run(asyncio.wait_for(run(), 30))
    findings = json.loads(capsys.readouterr().out)
    (found,) = [each for each in findings if each["check"] == "source kubelet"]
    assert found["state"] == "warn"
    assert "neither nodes/pods nor nodes/proxy" in found["found"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["status"], "start koordlet"),
        (["explain", "pod", "x"], "no daemon"),
        (["plan", "--objects", "/does/not/exist"], "cannot read the objects"),
        (["plan", "--objects", "."], "no manifests"),
        (["restore", "--config", "/does/not/exist"], "/does/not/exist: no such file"),
    ],
)
def test_without_a_daemon_a_command_says_what_to_do(
    tmp_path: Path,
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--run-dir", str(tmp_path), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_plan_without_a_daemon_points_to_offline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slo.yaml").write_text(yaml.safe_dump(SLO))
    assert main(["--run-dir", str(tmp_path), "plan", "--objects", str(tmp_path)]) == 2
    assert "--offline" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: os.mkfifo(path), "is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
        (lambda path: path.write_bytes(b" " * (25 << 20)), "are limited to 24 MiB"),
        (lambda path: path.write_bytes(b"\xff"), "not UTF-8"),
    ],
)
def test_a_plan_waits_for_nothing_that_is_no_manifest(
    tmp_path: Path,
    make: Callable[[Path], object],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(tmp_path / "a.yaml")
    assert main(["--run-dir", str(tmp_path), "plan", "--objects", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "a.yaml" in told


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "does not understand the daemon"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "does not understand the daemon"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 3\r\n\r\na\nb", "a\\nb"),
        (b"hello\r\n", "is koordlet running?"),
        (b"", "is koordlet running?"),
    ],
)
def test_an_answer_that_is_not_a_daemons_is_one_line(
    tmp_path: Path, answer: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A daemon of another version, in the middle of an upgrade, or no koordlet at all."""
    with answering(tmp_path, answer):
        assert main(["--run-dir", str(tmp_path), "status"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_doctor_reports_objects_that_other_users_may_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = tmp_path / "objects.d"
    objects.mkdir(mode=0o755)
    (objects / "slo.yaml").write_text("")
    tree = {"nodeName": "n1", "kubepodsRoot": "koordctl-test-none", "objectsDir": str(objects)}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    asked = ["--run-dir", str(tmp_path), "doctor", "-o", "json", "--config", f"{tmp_path}/c.yaml"]
    for mode, states in ((0o644, ["ok"]), (0o666, ["ok", "warn"])):
        (objects / "slo.yaml").chmod(mode)
        main(asked)
        found = [f for f in json.loads(capsys.readouterr().out) if f["check"] == "objects"]
        assert [each["state"] for each in found] == states
    assert f"users other than root may write {objects}/slo.yaml" in found[-1]["found"]


def test_originals_in_a_journal_of_another_version_are_named_until_it_is_removed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def run() -> None:
        async with node() as n:
            journal = n.folder / "run" / "journal"
            journal.write_bytes(b"another version's\n")
            n.daemon = n.new_daemon()
            kept = n.folder / "run" / "journal.unread-1"

            async def shown(*arguments: str) -> str:
                run_dir = str(n.folder / "run")
                await asyncio.to_thread(main, ["--run-dir", run_dir, *arguments])
                return capsys.readouterr().out

            async with n.running() as daemon:
                for _ in range(2):
                    daemon.parts.health.report_journal()
                (message,) = events(n, "run-dir")
                assert f"the file is kept as {kept}; originals that only it held" in message
                assert daemon.parts.health.not_ready() == []
                assert f"the file is kept as {kept}" in " ".join((await shown("status")).split())
                reconciler = json.loads(await shown("status", "-o", "json"))["reconciler"]
                assert reconciler["journalLost"].endswith(f"the file is kept as {kept}")
                for state in (["warn"], []):
                    findings = json.loads(await shown("doctor", "-o", "json"))
                    found = [each for each in findings if each["check"] == "originals"]
                    assert [each["state"] for each in found] == state
                    assert all(str(kept) in each["found"] for each in found)
                    kept.unlink(missing_ok=True)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_an_offline_plan_names_what_it_cannot_read_of_the_journal_and_leaves_it(
    tmp_path: Path, machine: Kubelet, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "objects" / "pod.yaml"
    manifest.write_text(yaml.safe_dump(ls_manifest(POD_UID)))
    (tmp_path / "run").mkdir()
    journal = tmp_path / "run" / "journal"
    journal.write_bytes(b"another version's\n")
    plan_offline(tmp_path, "-o", "json")
    problems = json.loads(capsys.readouterr().out)["problems"]
    (problem,) = [one for one in problems if one["file"] == str(journal)]
    assert problem["message"] == "its first line is not that of a journal of this version"
    assert journal.read_bytes() == b"another version's\n"
    assert list(journal.parent.iterdir()) == [journal]


def test_a_daemon_that_hangs_is_waited_for_once_and_to_be_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koordctl.client._TIMEOUT_S", 0.2)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "admin.sock"))
        listener.listen()
        findings = examine(config_path=None, run_dir=None, client=Client(str(tmp_path)))
        listener.setblocking(False)
        listener.accept()[0].close()
        with pytest.raises(BlockingIOError):
            listener.accept()
    (daemon,) = [each for each in findings if each["check"] == "daemon"]
    assert (daemon["state"], daemon["fix"]) == ("fail", "systemctl restart koordlet")


def test_doctor_goes_on_where_the_daemon_is_of_another_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text("{nodeName: n1, kubepodsRoot: koordctl-test-none}")
    config = ["--config", str(tmp_path / "c.yaml")]
    with answering(tmp_path, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"):
        main(["--run-dir", str(tmp_path), "doctor", "-o", "json", *config])
    findings = {each["check"]: each for each in json.loads(capsys.readouterr().out)}
    assert "cannot understand the daemon's answer" in findings["daemon"]["found"]
    assert "objects" in findings


@contextmanager
def answering(run_dir: Path, answer: bytes) -> Iterator[None]:
    """Somebody at the admin socket who answers one question with these bytes."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(run_dir / "admin.sock"))
        listener.listen()
        listener.settimeout(10)

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join(10)


def test_every_mistake_of_the_configuration_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text("{runDir: here, foo: 1, objectsDir: there}")
    assert main(["restore", "--config", str(tmp_path / "c.yaml")]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and "foo = '1': unknown field" in told[0]


@pytest.mark.parametrize("named", [True, False])
def test_without_a_daemon_the_run_directory_is_the_named_one_else_that_of_the_configuration(
    tmp_path: Path,
    named: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("KOORDLET_RUN_DIR", raising=False)
    (tmp_path / "c.yaml").write_text(f"{{runDir: {tmp_path}/file}}")
    (tmp_path / "slo.yaml").write_text(yaml.safe_dump(SLO))
    config = ["--config", str(tmp_path / "c.yaml")]
    config += ["--run-dir", str(tmp_path / "named")] if named else []
    meant = "named" if named else "file"
    assert main(["restore", *config]) == 0
    assert f"no daemon has used {tmp_path}/{meant} since" in capsys.readouterr().out
    planned: list[str] = []

    def plan_offline(config: Config, *_: object, **__: object) -> dict[str, object]:
        planned.append(config.run_dir)
        return {"problems": [], "policies": [], "writes": [], "pods": 1}

    monkeypatch.setattr("koordctl.offline.layout_of", lambda *_: None)
    monkeypatch.setattr("koordctl.offline.plan_offline", plan_offline)
    assert main(["plan", "--offline", "--objects", str(tmp_path / "slo.yaml"), *config]) == 0
    assert planned == [f"{tmp_path}/{meant}"]


@pytest.mark.parametrize("place", ["before", "after"])
def test_the_run_directory_and_the_form_are_named_before_or_after_the_command(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--run-dir", str(tmp_path / "that"), "-o", "json"]
    assert main([*options, "status"] if place == "before" else ["status", *options]) == 2
    assert f"{tmp_path}/that/admin.sock does not exist" in capsys.readouterr().err


def test_a_wrong_command_shows_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", "cow", "x"])
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_status_reports_a_missing_nodeslo(capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        async with node() as n, n.running():
            await asyncio.to_thread(main, ["--run-dir", str(n.folder / "run"), "status"])
            shown = " ".join(capsys.readouterr().out.split())
            assert f"no NodeSLO of this node in {n.folder}/objects.d: its defaults apply" in shown
            assert "NodeMetric: " in shown
            assert "NodeResourceTopology: " in shown
            assert " trainings" in shown

    asyncio.run(asyncio.wait_for(run(), 30))


def test_status_shows_what_is_shaped_and_what_is_not() -> None:
    classes = [
        {"name": "system", "rateBits": 9 * 10**9, "ceilBits": 10**10, "members": 0},
        {"name": "be", "rateBits": 8_000, "ceilBits": 2_500_000, "members": 3},
        {"name": "pod", "rateBits": 8_000, "ceilBits": 8_000, "members": 1},
    ]
    shown = network_rows(
        {
            "why": "gate TCNetworkQoS",
            "device": "eth0",
            "bitsPerSecond": 10**10,
            "classes": classes,
            "problems": ["the kernel refuses to add class 108: no"],
        }
    )
    assert shown == [
        ("network", "eth0, 10 Gbit/s; 1 pods limited"),
        ("", "system: 9 Gbit/s guaranteed, up to 10 Gbit/s, 0 members"),
        ("", "be: 8 kbit/s guaranteed, up to 2.5 Mbit/s, 3 members"),
        ("", "the kernel refuses to add class 108: no"),
    ]


# --- tables ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "bold"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
    ],
)
def test_headings_are_bold_if_the_terminal_supports_it(
    environment: dict[str, str], bold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert tables.heading("x") == "x"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert (tables.heading("x") != "x") is bold


def test_tables_align_and_wrap_their_last_column() -> None:
    shown = tables.table(
        ("A", "B", "WHY"), [("x", 1, "word " * 30), ("longer", None, "y")], width=60
    )
    lines = shown.splitlines()
    assert lines[0] == "A       B  WHY"
    assert lines[-1] == "longer  -  y"
    assert all(len(line) <= 60 for line in lines)


def test_a_last_column_without_room_follows_below_its_row() -> None:
    path = "/a/very/long/path/" * 4
    shown = tables.table(("FILE", "OBJECT", "PROBLEM"), [(path, "", "word " * 20)], width=80)
    first, header_of_last, row, *rest = shown.splitlines()
    assert (first, header_of_last, row) == ("FILE  OBJECT", "    PROBLEM", path)
    assert len(rest) == 2
    assert all(line.startswith("    word") and len(line) <= 80 for line in rest)


def test_a_hostile_cell_stays_in_its_cell() -> None:
    shown = tables.table(("A", "B"), [("x\n\x1b[2J", "y\r\nz")])
    assert len(shown.splitlines()) == 2
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.5, "0.5s"), (61, "1m1s"), (3600, "1h"), (90061, "1d1h")]
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert tables.duration(seconds) == text
