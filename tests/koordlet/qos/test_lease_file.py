"""Leases on disk: what the next daemon resumes, and for how long."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from apis.cpuset import CpuSet
from apis.qos import KubeQoS
from hooks.claim import Claim, Op, Rank
from hooks.standing import Standing
from hooks.subject import Level
from koordlet.qos.board import Lease
from koordlet.qos.lease_file import Carried, LeaseFile, LeaseFileError, load, save
from linux.resources import UNLIMITED, Resource, Value

BOOT = "b1"
TTL = {"one": 10.0}


class Remembered(msgspec.Struct, frozen=True, tag_field="version", tag=1):
    tokens: int


class Later(msgspec.Struct, frozen=True, tag_field="version", tag=2):
    tokens: int


TYPES: Mapping[str, type[msgspec.Struct]] = {"one": Remembered}


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
    loaded, problems = load(path, boot=BOOT, ttl_s=TTL, now=500.0)
    assert loaded.leases == {"one": Lease(standing, 510.0, resumed=True)}
    assert (loaded.states, problems) == ({}, ())


def test_a_second_start_before_the_first_step_does_not_prolong_the_claims(tmp_path: Path) -> None:
    path = str(tmp_path / "leases")
    save(lease(QUOTA), path, boot=BOOT)
    first = LeaseFile(path, boot=BOOT)
    resumed = first.resumed(TTL, 500.0)
    first.keep(resumed.leases, {}, 500.0)
    second = LeaseFile(path, boot=BOOT).resumed(TTL, 507.0)
    assert second.leases["one"].until == 510.0
    assert LeaseFile(path, boot=BOOT).resumed(TTL, 510.0) == Carried()


def test_what_is_of_another_boot_or_of_a_strategy_that_is_off_is_left_out(tmp_path: Path) -> None:
    path = str(tmp_path / "leases")
    save(lease(QUOTA), path, boot=BOOT, states={"one": Remembered(7)})
    missing = str(tmp_path / "missing")
    for file, boot, ttl_s in (
        (path, "b2", TTL),
        (path, "", TTL),
        (path, BOOT, {"two": 10.0}),
        (missing, BOOT, TTL),
    ):
        found = load(file, boot=boot, ttl_s=ttl_s, now=500.0, types=TYPES)
        assert found == (Carried(), ())


def test_a_claim_that_cannot_be_carried_out_is_left_out(tmp_path: Path) -> None:
    path = str(tmp_path / "leases")
    save(lease(QUOTA, claim(Resource.CPUSET_CPUS, 7)), path, boot=BOOT)
    found, _ = load(path, boot=BOOT, ttl_s=TTL, now=500.0)
    assert found.leases["one"].standing.by_subject == {"pod/u1": (QUOTA,)}


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
    assert LeaseFile(str(path), boot=BOOT).resumed(TTL, 500.0) == Carried()
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
    file.keep(lease(QUOTA), {}, 500.0)
    inode = path.stat().st_ino
    other = claim(Resource.CPU_CFS_QUOTA, 50_000, reason="node 63 % x 16")
    file.keep(lease(other, until=101.0), {}, 600.0)
    assert path.stat().st_ino == inode
    file.keep(lease(claim(Resource.CPU_CFS_QUOTA, 60_000)), {}, 601.0)
    assert path.stat().st_ino != inode
    file.keep({}, {}, 602.0)
    assert json.loads(path.read_text())["leases"] == {}
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written_is_reported_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    file = LeaseFile(str(folder / "leases"), boot=BOOT)
    with caplog.at_level(logging.WARNING):
        file.keep(lease(QUOTA), {}, 500.0)
        file.keep(lease(QUOTA), {}, 501.0)
    assert caplog.text.count("cannot keep the strategies' claims") == 1
    folder.mkdir()
    file.keep(lease(QUOTA), {}, 502.0)
    found, _ = load(str(folder / "leases"), boot=BOOT, ttl_s=TTL, now=503.0)
    assert found.leases


def test_what_is_kept_agrees_with_what_is_in_force_by_subject_class_and_origin(
    tmp_path: Path,
) -> None:
    """Each of these differs from the one before it in what the next daemon would resume."""
    path = tmp_path / "leases"
    file = LeaseFile(str(path), boot=BOOT)
    of_class = (Level.CONTAINER, KubeQoS.BESTEFFORT)
    standings = [
        Standing({"pod/u1": (QUOTA,)}),
        Standing({"pod/u2": (QUOTA,)}),
        Standing({"pod/u2": (QUOTA,)}, {of_class: (QUOTA,)}),
        Standing({"pod/u2": (QUOTA,)}, {(Level.POD, KubeQoS.BESTEFFORT): (QUOTA,)}),
        Standing({"pod/u2": (QUOTA,)}, {(Level.POD, KubeQoS.BESTEFFORT): (RAISED,)}),
        Standing({"pod/u2": (RAISED,)}, {(Level.POD, KubeQoS.BESTEFFORT): (RAISED,)}),
    ]
    leases = [{"one": Lease(standing, 100.0)} for standing in standings]
    leases.append({"one": Lease(standings[-1], 100.0, resumed=True)})
    leases.append({"two": Lease(standings[-1], 100.0, resumed=True)})
    leases.append({**leases[-1], "one": Lease(standings[0], 100.0)})
    leases.append({**leases[-1], "one": Lease(standings[1], 100.0)})
    for wanted in leases:
        for _ in range(2):
            file.keep(wanted, {}, 1.0)
            loaded, _ = load(str(path), boot=BOOT, ttl_s={"one": 9.0, "two": 9.0}, now=1.0)
            assert {name: one.standing for name, one in loaded.leases.items()} == {
                name: one.standing for name, one in wanted.items()
            }
            saved = json.loads(path.read_text())["leases"]
            assert {name: one["resumed"] for name, one in saved.items()} == {
                name: one.resumed for name, one in wanted.items()
            }


def test_where_the_boot_is_not_known_nothing_is_kept(tmp_path: Path) -> None:
    LeaseFile(str(tmp_path / "leases"), boot="").keep(lease(QUOTA), {}, 1.0)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_too_large_to_be_ours_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "leases"
    save(lease(QUOTA), str(path), boot=BOOT)
    content = path.read_bytes()
    path.write_bytes(content.ljust(64 << 20))
    found, _ = load(str(path), boot=BOOT, ttl_s=TTL, now=500.0)
    assert found.leases
    with path.open("ab") as file:
        file.write(b" ")
    with pytest.raises(LeaseFileError, match="has more than 67108864 bytes"):
        load(str(path), boot=BOOT, ttl_s=TTL, now=500.0)


def test_the_message_about_a_damaged_file_is_short(tmp_path: Path) -> None:
    path = tmp_path / "leases"
    save({"o" * 5000: Lease(Standing(), 1.0)}, str(path), boot=BOOT)
    path.write_text(path.read_text().replace('"resumed":false', '"resumed":7'))
    with pytest.raises(LeaseFileError) as caught:
        load(str(path), boot=BOOT, ttl_s=TTL, now=500.0)
    assert len(str(caught.value)) < len(str(path)) + 400
    path.write_text('{"format": "' + "f" * 5000 + '", "boot": "b1", "leases": {}}')
    with pytest.raises(LeaseFileError) as caught:
        load(str(path), boot=BOOT, ttl_s=TTL, now=500.0)
    assert len(str(caught.value)) < len(str(path)) + 400


def test_a_lease_that_was_resumed_and_has_ended_is_left_out(tmp_path: Path) -> None:
    path = str(tmp_path / "leases")
    save(lease(QUOTA, until=510.0, resumed=True), path, boot=BOOT)
    found, _ = load(path, boot=BOOT, ttl_s=TTL, now=509.9)
    assert found.leases["one"].until == 510.0
    assert load(path, boot=BOOT, ttl_s=TTL, now=510.0) == (Carried(), ())


# -- states -----------------------------------------------------------------------------------


def test_a_state_returns_without_any_claim(tmp_path: Path) -> None:
    path = str(tmp_path / "leases")
    first = LeaseFile(path, boot=BOOT)
    first.keep({}, {"one": Remembered(7), "off": Remembered(8)}, 500.0)
    found = LeaseFile(path, boot=BOOT).resumed(TTL, 9000.0, types=TYPES)
    assert found == Carried({}, {"one": Remembered(7)})


def test_a_state_alone_is_written_every_five_seconds_and_at_the_end(tmp_path: Path) -> None:
    path = str(tmp_path / "leases")
    file = LeaseFile(path, boot=BOOT)

    def kept() -> int:
        state = LeaseFile(path, boot=BOOT).resumed(TTL, 600.0, types=TYPES).states["one"]
        assert isinstance(state, Remembered)
        return state.tokens

    written = []
    for second in range(13):
        file.keep(lease(QUOTA), {"one": Remembered(second)}, 500.0 + second)
        written.append(kept())
    assert written == [0, 0, 0, 0, 0, 5, 5, 5, 5, 5, 10, 10, 10]
    file.keep(lease(QUOTA), {"one": Remembered(12)}, 512.0, at_once=True)
    assert kept() == 12
    # A claim is written at once, and the state with it.
    file.keep(lease(claim(Resource.CPU_CFS_QUOTA, 60_000)), {"one": Remembered(13)}, 513.0)
    assert kept() == 13


def test_a_state_that_does_not_change_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "leases"
    file = LeaseFile(str(path), boot=BOOT)
    file.keep(lease(QUOTA), {"one": Remembered(7)}, 500.0)
    inode = path.stat().st_ino
    file.keep(lease(QUOTA), {"one": Remembered(7)}, 600.0)
    assert path.stat().st_ino == inode


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"version":2,"tokens":7}', "Invalid value 2 - at `$.version`"),
        ('{"version":1,"tokens":"many"}', "Expected `int`, got `str` - at `$.tokens`"),
        ('{"version":1}', "missing required field `tokens`"),
        ("[]", "Expected `object`, got `array`"),
    ],
)
def test_a_state_that_cannot_be_used_costs_this_strategy_its_state_alone(
    tmp_path: Path, content: str, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "leases"
    states = {"one": Remembered(7), "two": Remembered(8)}
    save(lease(QUOTA), str(path), boot=BOOT, states=states)
    text = path.read_text()
    assert text.count('{"version":1,"tokens":7}') == 1
    path.write_text(text.replace('{"version":1,"tokens":7}', content))
    types: Mapping[str, type[msgspec.Struct]] = {"one": Remembered, "two": Remembered}
    found = LeaseFile(str(path), boot=BOOT).resumed({"one": 10.0, "two": 10.0}, 500.0, types=types)
    assert found.states == {"two": Remembered(8)}
    assert found.leases.keys() == {"one"}
    assert "the state of one is not readable: " in caplog.text and problem in caplog.text


def test_a_file_of_before_there_were_states_is_read(tmp_path: Path) -> None:
    path = tmp_path / "leases"
    save(lease(QUOTA), str(path), boot=BOOT)
    path.write_text(path.read_text().replace(',"states":{}', ""))
    assert "states" not in path.read_text()
    found = LeaseFile(str(path), boot=BOOT).resumed(TTL, 500.0, types=TYPES)
    assert found.leases.keys() == {"one"} and not found.states


def test_a_state_of_a_later_version_is_not_taken(tmp_path: Path) -> None:
    path = str(tmp_path / "leases")
    save({}, path, boot=BOOT, states={"one": Later(7)})
    found, problems = load(path, boot=BOOT, ttl_s=TTL, now=500.0, types=TYPES)
    assert found == Carried() and len(problems) == 1
