"""The command line: upstream's flags and defaults, and a sentence for what is wrong."""

from __future__ import annotations

import logging

import pytest

from runtime_proxy import options


def test_the_defaults_are_upstreams() -> None:
    chosen = options.parse([])
    assert chosen == options.Options(
        listen="/var/run/koord-runtimeproxy/runtimeproxy.sock",
        backend="/var/run/containerd/containerd.sock",
        mode="Containerd",
        skip_key="runtimeproxy.koordinator.sh/skip-hookserver",
        skip_value="true",
        hook_server_dir="/etc/runtime/hookserver.d",
        hook_timeout_s=2.0,
        max_message_bytes=16 * 1024 * 1024,
        state_dir="/var/lib/koord-runtime-proxy",
        drain_timeout_s=20.0,
        http_address=("127.0.0.1", 9318),
        log_level="info",
        log_format="text",
    )


def test_every_flag_reaches_its_option() -> None:
    chosen = options.parse(
        [
            "--koord-runtimeproxy-endpoint=unix:///run/a.sock",
            "--remote-runtime-service-endpoint=/run/b.sock",
            "--backend-runtime-mode=Docker",
            "--runtime-hook-server-key=key",
            "--runtime-hook-server-val=value",
            "--hook-server-dir=/dir",
            "--hook-timeout=1ms",
            "--max-message-bytes=65536",
            "--state-dir=",
            "--drain-timeout=0s",
            "--http-address=",
            "--log-level=debug",
            "--log-format=json",
        ]
    )
    assert chosen == options.Options(
        listen="/run/a.sock",
        backend="/run/b.sock",
        mode="Docker",
        skip_key="key",
        skip_value="value",
        hook_server_dir="/dir",
        hook_timeout_s=0.001,
        max_message_bytes=65_536,
        state_dir="",
        drain_timeout_s=0.0,
        http_address=None,
        log_level="debug",
        log_format="json",
    )
    assert options.parse(["--max-message-bytes=2147483647"]).max_message_bytes == 2**31 - 1
    assert options.parse(["--http-address=:0"]).http_address == ("127.0.0.1", 0)


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
@pytest.mark.parametrize("form", ["text", "json"])
def test_every_level_and_format_of_the_log_may_be_chosen(level: str, form: str) -> None:
    chosen = options.parse([f"--log-level={level}", f"--log-format={form}"])
    assert (chosen.log_level, chosen.log_format) == (level, form)


@pytest.mark.parametrize("mode", ["Containerd", "Docker"])
def test_every_mode_may_be_chosen(mode: str) -> None:
    assert options.parse([f"--backend-runtime-mode={mode}"]).mode == mode


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
        (["--koord-runtimeproxy-endpoint=/" + "x" * 120], "longer than the 107 bytes"),
        (["--hook-timeout=2"], "'2' is not a duration"),
        (["--drain-timeout=-1s"], "must not be negative"),
        (["--hook-timeout=0s"], "must be greater than 0"),
        *(
            ([f"--max-message-bytes={size}"], "is not between 65536 and 2147483647 bytes")
            for size in ("10", "65535", "2147483648", "-70000", "\u00b27\u00b27\u00b27", "64Ki", "")
        ),
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
