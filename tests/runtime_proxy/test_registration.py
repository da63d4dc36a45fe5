"""Registration files: what counts as one, and what a folder full of surprises leaves in force."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_proxy.registration import (
    RegistrationError,
    Registrations,
    parse_registration,
)
from runtime_proxy.stages import Stage

GOOD = {
    "remote-endpoint": "/var/run/koordlet/koordlet.sock",
    "failure-policy": "Ignore",
    "runtime-hooks": ["PreRunPodSandbox", "PreCreateContainer", "PreUpdateContainerResources"],
}


def test_what_koordlet_writes_is_understood() -> None:
    found = parse_registration("koordlet.json", json.dumps(GOOD, indent="\t").encode())
    assert found.endpoint == "/var/run/koordlet/koordlet.sock"
    assert not found.fail
    assert found.stages == {
        Stage.PRE_RUN_POD_SANDBOX,
        Stage.PRE_CREATE_CONTAINER,
        Stage.PRE_UPDATE_CONTAINER_RESOURCES,
    }


@pytest.mark.parametrize(
    ("change", "fail", "count"),
    [
        ({"failure-policy": "Fail"}, True, 3),
        ({"failure-policy": ""}, False, 3),
        ({"failure-policy": None}, False, 3),
        ({"runtime-hooks": ["PreStartContainer", "NoneRuntimeHookType", "Sing"]}, False, 1),
        ({"runtime-hooks": None}, False, 0),
        ({"extra": [1]}, False, 3),
        ({"remote-endpoint": "unix:///run/x.sock"}, False, 3),
    ],
)
def test_policy_and_hooks_are_read_as_upstream_reads_them(
    change: dict[str, object], fail: bool, count: int
) -> None:
    found = parse_registration("x.json", json.dumps({**GOOD, **change}).encode())
    assert found.fail is fail
    assert len(found.stages) == count


def test_keys_match_in_any_case() -> None:
    content = json.dumps({"Remote-Endpoint": "/run/x.sock", "FAILURE-POLICY": "Fail"}).encode()
    assert parse_registration("x.json", content).fail


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "x.json: not JSON"),
        (b"{", "x.json: not JSON"),
        (b"[" * 100_000, "x.json: not JSON"),
        (b"[]", "x.json: not a JSON object"),
        (b"{}", "remote-endpoint: ''"),
        (b'{"remote-endpoint": "relative.sock"}', "remote-endpoint: 'relative.sock'"),
        (b'{"remote-endpoint": 5}', "remote-endpoint: 5"),
        (b'{"remote-endpoint": "/' + b"x" * 200 + b'"}', "path of a unix socket has at most 107"),
        (b'{"remote-endpoint": "/x", "runtime-hooks": "PreRunPodSandbox"}', "not a list"),
        *(
            (
                b'{"remote-endpoint": "/x", "failure-policy": %b}' % policy,
                "x.json: failure-policy: .* is neither Fail nor Ignore",
            )
            for policy in (b'"fail"', b'"Sometimes"', b"5", b"false", b'["Fail"]', b'" Fail"')
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_named(content: bytes, complaint: str) -> None:
    with pytest.raises(RegistrationError, match=complaint):
        parse_registration("x.json", content)


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=200))
def test_any_content_is_a_registration_or_a_named_error(content: bytes) -> None:
    try:
        parse_registration("x.json", content)
    except RegistrationError as error:
        assert str(error).startswith("x.json: ")


def write(folder: Path, name: str, **change: object) -> Path:
    path = folder / name
    path.write_text(json.dumps({**GOOD, **change}))
    return path


def test_servers_are_asked_in_the_order_of_their_file_names(tmp_path: Path) -> None:
    for name in ("20-b.json", "10-a.json", "30-c.json.bak", "40-d.json~", "50xjson"):
        write(tmp_path, name)
    registrations = Registrations(str(tmp_path))
    assert registrations.scan()
    assert [r.name for r in registrations.current] == ["10-a.json", "20-b.json", "50xjson"]
    assert not registrations.scan()


def test_a_broken_rewrite_keeps_the_last_good_one_until_the_file_goes(tmp_path: Path) -> None:
    path = write(tmp_path, "k.json")
    registrations = Registrations(str(tmp_path))
    registrations.scan()
    good = registrations.current
    path.write_text('{"remote-endpoint":')
    assert not registrations.scan()
    assert registrations.current == good
    assert "k.json: not JSON" in registrations.complaints["k.json"]
    path.unlink()
    assert registrations.scan()
    assert registrations.current == ()
    assert registrations.complaints == {}


def test_a_rewrite_within_a_clock_tick_is_seen(tmp_path: Path) -> None:
    path = write(tmp_path, "k.json")
    registrations = Registrations(str(tmp_path))
    registrations.scan()
    before = path.stat()
    write(tmp_path, "k.json", **{"failure-policy": "Fail", "remote-endpoint": "/run/k2.sock"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert registrations.scan()
    assert registrations.current[0].fail


@pytest.mark.parametrize("mode", [0o666, 0o664])
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    write(tmp_path, "k.json").chmod(mode)
    registrations = Registrations(str(tmp_path))
    assert not registrations.scan()
    assert "chmod go-w" in registrations.complaints["k.json"]


@pytest.mark.root
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(write(tmp_path, "k.json"), 12345, 0)
    registrations = Registrations(str(tmp_path))
    assert not registrations.scan()
    assert "must belong to root" in registrations.complaints["k.json"]


def test_links_folders_pipes_and_giants_do_no_harm(tmp_path: Path) -> None:
    write(tmp_path, "good.json")
    (tmp_path / "loop.json").symlink_to("loop.json")
    (tmp_path / "device.json").symlink_to("/dev/zero")
    (tmp_path / "dangling.json").symlink_to("nothing")
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "giant.json").write_bytes(b" " * (1 << 20))
    registrations = Registrations(str(tmp_path))
    registrations.scan()
    assert [r.name for r in registrations.current] == ["good.json"]
    assert set(registrations.complaints) == {
        "loop.json",
        "device.json",
        "folder.json",
        "pipe.json",
        "giant.json",
    }


@pytest.mark.parametrize(("more", "good"), [(0, True), (1, False)])
def test_a_file_counts_up_to_64_kib(tmp_path: Path, more: int, good: bool) -> None:
    path = write(tmp_path, "a.json")
    path.write_text(path.read_text().ljust(64 * 1024 + more))
    registrations = Registrations(str(tmp_path))
    assert registrations.scan() is good
    expected = {} if good else {"a.json": "a.json: larger than 65536 bytes"}
    assert registrations.complaints == expected


def test_a_missing_folder_is_an_empty_one(tmp_path: Path) -> None:
    registrations = Registrations(str(tmp_path / "none"))
    assert not registrations.scan()
    assert registrations.current == ()


def test_a_mounted_config_map_is_read_through_its_links(tmp_path: Path) -> None:
    """kubelet makes `..data` a link to a folder, and replaces that link to change all files."""
    for version in ("one", "two"):
        (tmp_path / f"..{version}").mkdir()
        write(tmp_path / f"..{version}", "k.json", **{"remote-endpoint": f"/run/{version}.sock"})
    (tmp_path / "..data").symlink_to("..one")
    (tmp_path / "k.json").symlink_to("..data/k.json")
    registrations = Registrations(str(tmp_path))
    assert registrations.scan()
    assert [(r.name, r.endpoint) for r in registrations.current] == [("k.json", "/run/one.sock")]
    (tmp_path / "..new").symlink_to("..two")
    (tmp_path / "..new").rename(tmp_path / "..data")
    assert registrations.scan()
    assert registrations.current[0].endpoint == "/run/two.sock"
    (tmp_path / "k.json").unlink()
    assert registrations.scan()
    assert registrations.current == ()


def test_a_complaint_ends_with_the_file_behind_the_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("{")
    (tmp_path / "k.json").symlink_to("target")
    registrations = Registrations(str(tmp_path))
    registrations.scan()
    assert set(registrations.complaints) == {"k.json"}
    (tmp_path / "target").unlink()
    registrations.scan()
    assert registrations.complaints == {}


@pytest.mark.root
@pytest.mark.parametrize(("of_link", "of_file"), [(12345, 0), (0, 12345)])
def test_neither_a_link_nor_its_file_may_be_another_users(
    tmp_path: Path, of_link: int, of_file: int
) -> None:
    target = write(tmp_path, "target")
    os.chown(target, of_file, 0)
    (tmp_path / "k.json").symlink_to(target)
    os.lchown(tmp_path / "k.json", of_link, 0)
    registrations = Registrations(str(tmp_path))
    assert not registrations.scan()
    assert "root" in registrations.complaints["k.json"]


def test_an_unknown_policy_leaves_the_last_registration_in_force(tmp_path: Path) -> None:
    write(tmp_path, "k.json", **{"failure-policy": "Fail"})
    registrations = Registrations(str(tmp_path))
    registrations.scan()
    write(tmp_path, "k.json", **{"failure-policy": "Closed"})
    assert not registrations.scan()
    assert registrations.current[0].fail
    assert registrations.complaints == {
        "k.json": "k.json: failure-policy: 'Closed' is neither Fail nor Ignore"
    }


def test_a_file_that_comes_back_with_the_same_content_counts_again(tmp_path: Path) -> None:
    path = write(tmp_path, "k.json")
    registrations = Registrations(str(tmp_path))
    registrations.scan()
    content = path.read_bytes()
    path.unlink()
    assert registrations.scan()
    path.write_bytes(content)
    assert registrations.scan()
    assert [r.name for r in registrations.current] == ["k.json"]


def test_a_link_whose_file_comes_back_with_the_same_content_counts_again(tmp_path: Path) -> None:
    folder, file = tmp_path / "hooks", tmp_path / "file"
    folder.mkdir()
    write(tmp_path, "file")
    content = file.read_bytes()
    (folder / "k.json").symlink_to(file)
    registrations = Registrations(str(folder))
    assert registrations.scan()
    file.unlink()
    assert registrations.scan()
    assert [*registrations.current] == []
    file.write_bytes(content)
    assert registrations.scan()
    assert [r.name for r in registrations.current] == ["k.json"]


def test_a_folder_that_cannot_be_read_leaves_the_registrations_in_force(tmp_path: Path) -> None:
    folder, aside = tmp_path / "hooks", tmp_path / "aside"
    folder.mkdir()
    (folder / "a.json").write_text('{"remote-endpoint": "/run/a.sock"}')
    found = Registrations(str(folder))
    assert found.scan()
    folder.rename(aside)
    folder.write_text("")
    assert not found.scan()
    assert [one.name for one in found.current] == ["a.json"]
    assert found.complaints == {"": f"{folder}: Not a directory"}
    folder.unlink()
    aside.rename(folder)
    assert not found.scan()
    assert found.complaints == {}
