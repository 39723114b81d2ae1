"""Settings as `kvbraid up` and operators write them."""

from __future__ import annotations

import pytest

from coordinator.__main__ import main
from coordinator.config import CoordinatorConfig
from kvbraid.errors import ConfigError
from kvbraid.settings import load_settings


def load(*flags: str, **environ: str) -> CoordinatorConfig:
    return load_settings(CoordinatorConfig, flags, environ, role="coordinator")


def test_flags_of_kvbraid_up() -> None:
    config = load(
        "--model=m", "--prefill-workers=a:1,b:2", "--decode-workers=c:3", "--port=5",
        "--http-port=6", "--host=127.0.0.1", "--log-level=info", "--drain-seconds=3",
        "--ready-file=/r",
    )  # fmt: skip
    assert config.routing.prefill_workers == ["a:1", "b:2"]
    assert config.routing.decode_workers == ["c:3"]
    assert (config.server.port, config.api.http_port, config.api.model) == (5, 6, "m")


def test_no_prefill_workers_is_a_configuration() -> None:
    assert load("--prefill-workers=", "--decode-workers=c:3").routing.prefill_workers == []


def test_environment() -> None:
    config = load(KVBRAID_COORDINATOR_LOCAL_PREFILL_MAX_TOKENS="9", KVBRAID_MODEL="x")
    assert (config.routing.local_prefill_max_tokens, config.api.model) == (9, "x")


def test_values_out_of_range_name_the_range() -> None:
    with pytest.raises(ConfigError, match=r"max_attempts is '0', accepted: >= 1"):
        load("--max-attempts=0")


def test_connections_live_for_ever_unless_told_otherwise() -> None:
    assert load().connection_options() == []


def test_the_grace_of_a_connection_is_longer_than_any_request() -> None:
    flags = ["--max-connection-age-seconds=300", "--request-timeout-seconds=90"]
    age = ("grpc.max_connection_age_ms", 300_000)
    assert load(*flags).connection_options() == [age, ("grpc.max_connection_age_grace_ms", 120_000)]
    flags.append("--max-connection-age-grace-seconds=90")
    assert load(*flags).connection_options() == [age, ("grpc.max_connection_age_grace_ms", 90_000)]
    with pytest.raises(ConfigError, match=r"is 89.0, accepted: 0 or at least .* 90.0"):
        load(*flags[:2], "--max-connection-age-grace-seconds=89")


def test_the_longest_grace_fits_what_grpc_takes() -> None:
    config = load("--max-connection-age-seconds=1", "--request-timeout-seconds=3000000")
    assert dict(config.connection_options())["grpc.max_connection_age_grace_ms"] == 2**31 - 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "model is ''"),
        (["--model=x"], "decode_workers is empty"),
        (["--model=/missing", "--decode-workers=a:1"], "/missing: no such file"),
        (["--gravity=9"], "gravity"),
    ],
)
def test_a_bad_start_is_one_line_and_exit_code_2(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
