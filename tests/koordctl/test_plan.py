"""koordctl plan: beside a daemon, and offline for a simulated machine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from apis.keys import ANNOTATION_BLKIO_QOS
from hooks.claim import Claim
from hooks.standing import Standing
from koordctl.main import main
from koordlet.qos.board import Lease
from koordlet.qos.lease_file import save
from koordlet.sources.apiserver import KEPT_FILE
from linux.procfs import boot_id
from linux.resources import Resource
from tests.koordctl.asked import ONE_CPU, POD_UID, Ask, with_daemon
from tests.koordlet.daemon.bed import SLO, Node, ls_manifest, node, node_object
from tests.simulated import UBUNTU_24_04, Kubelet, SimulatedKernel
from tests.simulated.devices import mount_line, put_disk, put_mountinfo


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


def test_an_offline_plan_finds_the_disk_of_a_pods_volume(
    tmp_path: Path, machine: Kubelet, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    gates = {"featureGates": {"BlkIOReconcile": True}}
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), **gates}))
    block = {"name": "data", "type": "podvolume", "ioCfg": {"readBPS": 7}}
    manifest = ls_manifest(POD_UID)
    manifest["metadata"]["annotations"] = {ANNOTATION_BLKIO_QOS: json.dumps({"blocks": [block]})}
    (tmp_path / "objects" / "pod.yaml").write_text(yaml.safe_dump(manifest))
    put_disk(machine.kernel, "vda", "253:0")
    point = f"/var/lib/kubelet/pods/{POD_UID}/volumes/kubernetes.io~csi/data/mount"
    put_mountinfo(machine.kernel, lambda: mount_line(point, "253:0"))
    assert plan_offline(tmp_path, "-o", "json") == 0
    (write,) = json.loads(capsys.readouterr().out)["writes"]
    assert (write["path"].rpartition("/")[2], write["new"]) == ("io.max", "7")


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
    suppressing = {**SLO, "spec": {"resourceUsedThresholdWithBE": {"enable": True}}}
    (tmp_path / "objects" / "slo.yaml").write_text(yaml.safe_dump(suppressing))
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


def test_an_offline_plan_drops_the_claims_of_a_strategy_that_its_objects_disable(
    tmp_path: Path, machine: Kubelet, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "objects" / "slo.yaml").write_text(yaml.safe_dump({**SLO, "spec": {}}))
    (tmp_path / "objects" / "pod.yaml").write_text(yaml.safe_dump(ls_manifest(POD_UID)))
    (tmp_path / "run").mkdir()

    def claim(quota_us: int) -> Claim:
        return Claim(Resource.CPU_CFS_QUOTA, quota_us, policy="s", reason="busy", source="a gate")

    leases = {
        "BECPUSuppress": Lease(Standing({"kubeqos/BestEffort": (claim(70_000),)}), 0.0),
        "CPUBurst": Lease(Standing({"kubeqos/Burstable": (claim(90_000),)}), 0.0),
    }
    save(leases, str(tmp_path / "run" / "leases"), boot=boot_id(machine.kernel))
    assert plan_offline(tmp_path, "-o", "json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert sorted(each["new"].split()[0] for each in answer["writes"]) == ["50000", "90000"]
    assert {
        "policy": "BECPUSuppress",
        "before": "on",
        "after": "off",
        "why": "NodeSLO spec.resourceUsedThresholdWithBE.enable is false",
    } in answer["policies"]


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
