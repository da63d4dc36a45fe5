"""Leases on disk: what the next daemon resumes, and for how long."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from apis.cpuset import CpuSet
from apis.qos import KubeQoS
from hooks.claim import Claim, Op, Rank
from hooks.standing import Standing
from hooks.subject import Level
from koordlet.qos.board import Lease
from koordlet.qos.lease_file import LeaseFile, LeaseFileError, load, save
from linux.resources import UNLIMITED, Resource, Value

BOOT = "b1"
TTL = {"one": 10.0}


def claim(resource: Resource, value: Value, *, reason: str = "node 62 % x 16") -> Claim:
    return Claim(
        resource=resource,
        value=value,
        policy="one",
        reason=reason,
        source="NodeSLO",
        rank=Rank.EMERGENCY,
    )


QUOTA = claim(Resource.CPU_CFS_QUOTA, 50_000)
RAISED = Claim(
    resource=Resource.CPU_CFS_QUOTA,
    value=0,
    policy="one",
    reason="throttled",
    source="annotation",
    op=Op.MULTIPLY,
    factor=1.44,
    degraded="in part",
)


def lease(*claims: Claim, until: float = 100.0, resumed: bool = False) -> Mapping[str, Lease]:
    return {"one": Lease(Standing({"pod/u1": claims}), until, resumed)}


def test_every_kind_of_claim_returns_as_it_was(tmp_path: Path) -> None:
    path = str(tmp_path / "leases")
    within = Claim(
        resource=Resource.CPUSET_CPUS,
        value=CpuSet.parse("0-2,8"),
        policy="one",
        reason="suppressed to 4 CPUs",
        source="NodeSLO",
        op=Op.WITHIN,
    )
    standing = Standing(
        {
            "kubeqos/besteffort": (QUOTA,),
            "container/c1": (RAISED, within),
            "node/": (
                Claim(
                    resource=Resource.RESCTRL_SCHEMATA,
                    key="BE",
                    value="MB:0=20",
                    policy="one",
                    reason="r",
                    source="s",
                ),
            ),
        },
        {(Level.CONTAINER, KubeQoS.BESTEFFORT): (claim(Resource.CPU_CFS_QUOTA, UNLIMITED),)},
    )
    save({"one": Lease(standing, 100.0)}, path, boot=BOOT)
    loaded = load(path, boot=BOOT, ttl_s=TTL, now=500.0)
    assert loaded == {"one": Lease(standing, 510.0, resumed=True)}


def test_a_second_start_before_the_first_step_does_not_prolong_the_claims(tmp_path: Path) -> None:
    path = str(tmp_path / "leases")
    save(lease(QUOTA), path, boot=BOOT)
    first = LeaseFile(path, boot=BOOT)
    resumed = first.resumed(TTL, 500.0)
    first.keep(resumed)
    second = LeaseFile(path, boot=BOOT).resumed(TTL, 507.0)
    assert second["one"].until == 510.0
    assert LeaseFile(path, boot=BOOT).resumed(TTL, 510.0) == {}


def test_what_is_of_another_boot_or_of_a_strategy_that_is_off_is_left_out(tmp_path: Path) -> None:
    path = str(tmp_path / "leases")
    save(lease(QUOTA), path, boot=BOOT)
    assert load(path, boot="b2", ttl_s=TTL, now=500.0) == {}
    assert load(path, boot="", ttl_s=TTL, now=500.0) == {}
    assert load(path, boot=BOOT, ttl_s={"two": 10.0}, now=500.0) == {}
    assert load(str(tmp_path / "missing"), boot=BOOT, ttl_s=TTL, now=500.0) == {}


def test_a_claim_that_cannot_be_carried_out_is_left_out(tmp_path: Path) -> None:
    path = str(tmp_path / "leases")
    save(lease(QUOTA, claim(Resource.CPUSET_CPUS, 7)), path, boot=BOOT)
    found = load(path, boot=BOOT, ttl_s=TTL, now=500.0)
    assert found["one"].standing.by_subject == {"pod/u1": (QUOTA,)}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not readable"),
        (b'{"format": "koordlet leases 9", "boot": "b1", "leases": {}}', "version"),
        (b'{"format": "koordlet leases 1", "boot": "b1", "leases": {"one": 7}}', "not readable"),
    ],
)
def test_a_damaged_file_is_reported_and_holds_nothing(
    tmp_path: Path, content: bytes, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "leases"
    path.write_bytes(content)
    with pytest.raises(LeaseFileError, match=problem):
        load(str(path), boot=BOOT, ttl_s=TTL, now=500.0)
    assert LeaseFile(str(path), boot=BOOT).resumed(TTL, 500.0) == {}
    assert str(path) in caplog.text


def test_a_bad_cpu_set_is_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "leases"
    save(lease(claim(Resource.CPUSET_CPUS, CpuSet.parse("0-3"))), str(path), boot=BOOT)
    path.write_text(path.read_text().replace("0-3", "0-x"))
    with pytest.raises(LeaseFileError, match="not readable"):
        load(str(path), boot=BOOT, ttl_s=TTL, now=500.0)


def test_the_file_is_written_when_values_change_and_not_for_reasons(tmp_path: Path) -> None:
    path = tmp_path / "leases"
    file = LeaseFile(str(path), boot=BOOT)
    file.keep(lease(QUOTA))
    inode = path.stat().st_ino
    file.keep(lease(claim(Resource.CPU_CFS_QUOTA, 50_000, reason="node 63 % x 16"), until=101.0))
    assert path.stat().st_ino == inode
    file.keep(lease(claim(Resource.CPU_CFS_QUOTA, 60_000)))
    assert path.stat().st_ino != inode
    file.keep({})
    assert json.loads(path.read_text())["leases"] == {}
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written_is_reported_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    file = LeaseFile(str(folder / "leases"), boot=BOOT)
    with caplog.at_level(logging.WARNING):
        file.keep(lease(QUOTA))
        file.keep(lease(QUOTA))
    assert caplog.text.count("cannot keep the strategies' claims") == 1
    folder.mkdir()
    file.keep(lease(QUOTA))
    assert load(str(folder / "leases"), boot=BOOT, ttl_s=TTL, now=500.0)
