"""The command line: upstream's flags and defaults, and a sentence for what is wrong."""

from __future__ import annotations

import logging

import pytest

from runtime_proxy import options


def test_the_defaults_are_upstreams() -> None:
    chosen = options.parse([])
    assert chosen.listen == "/var/run/koord-runtimeproxy/runtimeproxy.sock"
    assert chosen.backend == "/var/run/containerd/containerd.sock"
    assert chosen.mode == "Containerd"
    assert chosen.skip_key == "runtimeproxy.koordinator.sh/skip-hookserver"
    assert chosen.skip_value == "true"
    assert chosen.hook_server_dir == "/etc/runtime/hookserver.d"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--remote-runtime-service-endpoint=/run/x.sock"],
        ["--remote-runtime-service-endpoint", "/run/x.sock"],
        ["--remote-runtime-service-endpoint=unix:///run/x.sock"],
    ],
)
def test_an_endpoint_may_be_written_in_every_usual_way(arguments: list[str]) -> None:
    assert options.parse(arguments).backend == "/run/x.sock"


def test_a_flag_of_old_releases_is_taken_with_a_hint(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        options.parse(["--remote-image-service-endpoint=/run/containerd/containerd.sock"])
    assert "flag has no effect any more" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--backend-runtime-mode=docker"], "invalid choice: 'docker'"),
        (["--koord-runtimeproxy-endpoint=relative"], "'relative' is not the absolute path"),
        (["--koord-runtimeproxy-endpoint=/" + "x" * 120], "longer than the 107 octets"),
        (["--hook-timeout=2"], "'2' is not a duration"),
        (["--drain-timeout=-1s"], "less than nothing"),
        (["--hook-timeout=0s"], "leaves no time"),
        (["--max-message-bytes=10"], "is not between"),
        (["--http-address=9318"], "expected host:port"),
        (["--koord-runtimeproxy"], "unrecognized arguments"),
        (["--nonsense"], "unrecognized arguments"),
    ],
)
def test_a_wrong_flag_ends_with_status_2_and_says_why(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("2s", 2.0), ("1.5m", 90.0), ("1m30s", 90.0), ("0s", 0.0)]
)
def test_durations_are_read_with_their_unit(text: str, seconds: float) -> None:
    assert options.duration_s(text) == seconds
