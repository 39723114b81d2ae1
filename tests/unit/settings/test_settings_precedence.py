from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Literal

import pytest

from kvbraid.errors import ConfigError
from kvbraid.settings import ByteSize, KvSettings, ServerSettings, load_settings, setting


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A worker for tests."""

    server: ServerSettings = field(default_factory=lambda: ServerSettings(port=50053))
    kv: KvSettings = field(default_factory=KvSettings)
    level: int = setting(1, "How much.", unit="tokens", minimum=0, maximum=90)
    share: float = setting(0.5, "Which part.")
    limit: int | None = setting(None, "At most this many.")
    size: ByteSize = setting(ByteSize(1024), "How large.", unit="bytes")
    mode: Literal["fast", "exact"] = setting("fast", "How.")
    peers: list[str] = setting([], "Who else.")
    weights: list[int] = setting([1], "How heavy.")


def load(
    argv: tuple[str, ...] = (), environ: dict[str, str] | None = None, file: Path | None = None
) -> WorkerConfig:
    return load_settings(WorkerConfig, argv, environ or {}, file, role="decode")


SOURCES = ("file_top", "file_role", "env_shared", "env_role", "flag")


@pytest.mark.parametrize(
    "present", [p for n in range(len(SOURCES) + 1) for p in combinations(SOURCES, n)]
)
def test_the_weightiest_source_that_speaks_wins(present: tuple[str, ...], tmp_path: Path) -> None:
    value = {source: 10 + rank for rank, source in enumerate(SOURCES)}
    file = tmp_path / "kvbraid.toml"
    lines = [f"level = {value['file_top']}"] if "file_top" in present else []
    lines += ["[decode]", f"level = {value['file_role']}"] if "file_role" in present else []
    file.write_text("\n".join(lines))
    names = {"env_shared": "KVBRAID_LEVEL", "env_role": "KVBRAID_DECODE_LEVEL"}
    environ = {name: str(value[key]) for key, name in names.items() if key in present}
    argv = (f"--level={value['flag']}",) if "flag" in present else ()
    expected = max((value[source] for source in present), default=1)
    assert load(argv, environ, file).level == expected


def test_defaults_of_a_section_can_be_the_services_own() -> None:
    config = load()
    assert config.server.port == 50053
    assert config.server.host == ServerSettings().host
    assert config.kv == KvSettings()


@pytest.mark.parametrize(
    ("argv", "name", "expected"),
    [
        (("--size", "64MiB"), "size", 64 << 20),
        (("--size", "2MB"), "size", 2_000_000),
        (("--size", "77"), "size", 77),
        (("--share", "1e-3"), "share", 0.001),
        (("--limit", "4"), "limit", 4),
        (("--limit", ""), "limit", None),
        (("--mode", "exact"), "mode", "exact"),
        (("--peers", "a:1,b:2", "--peers", "c:3"), "peers", ["a:1", "b:2", "c:3"]),
        (("--weights", "3, 4"), "weights", [3, 4]),
        (("--level", "2", "--level", "3"), "level", 3),
    ],
)
def test_text_becomes_the_declared_type(argv: tuple[str, ...], name: str, expected: object) -> None:
    value = getattr(load(argv), name)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("--prefix-cache",), True),
        (("--no-prefix-cache",), False),
        (("--prefix-cache=off",), False),
        (("--prefix-cache", "--no-prefix-cache"), False),
        (("--no-prefix-cache", "--prefix-cache=yes"), True),
    ],
)
def test_boolean_flags_have_a_short_and_a_long_form(argv: tuple[str, ...], expected: bool) -> None:
    assert load(argv).kv.prefix_cache is expected


def test_toml_values_keep_their_types(tmp_path: Path) -> None:
    file = tmp_path / "kvbraid.toml"
    file.write_text(
        'size = "1KiB"\nshare = 2\nprefix_cache = false\npeers = ["a:1"]\nmode = "exact"\n'
        "[prefill]\nlevel = 80\n[decode]\nlevel = 7\nport = 1\n"
    )
    config = load(file=file)
    assert (config.size, config.share, config.kv.prefix_cache) == (1024, 2.0, False)
    assert (config.peers, config.mode, config.level, config.server.port) == (["a:1"], "exact", 7, 1)


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_the_file_can_be_named_by_flag_or_environment(how: str, tmp_path: Path) -> None:
    file = tmp_path / "kvbraid.toml"
    file.write_text("level = 9")
    argv = ("--config", str(file)) if how == "flag" else ()
    environ = {} if how == "flag" else {"KVBRAID_CONFIG": str(file)}
    assert load(argv, environ).level == 9


def test_settings_of_other_roles_in_a_shared_environment_or_file_are_skipped(
    tmp_path: Path,
) -> None:
    file = tmp_path / "kvbraid.toml"
    file.write_text("tp_size = 4\n[prefill]\nanything = 1\n")
    environ = {"KVBRAID_TP_SIZE": "8", "KVBRAID_PREFILL_ANYTHING": "x", "KVBRAID_MODELS": "/m"}
    assert load((), environ, file) == load()


REFUSED_FLAGS = [
    (("--colour", "red"), "--colour"),
    (("--lev", "2"), "--lev"),
    (("--level", "many"), r"level is 'many'.*whole number"),
    (("--level", "1.5"), r"level is '1\.5'"),
    (("--level", "91"), r"level is '91', accepted: 0 to 90"),
    (("--level", "-1"), r"level is '-1', accepted: 0 to 90"),
    (("--share", "nan"), r"share is 'nan'"),
    (("--mode", "slow"), r"mode is 'slow', accepted: one of fast, exact"),
    (("--prefix-cache", "maybe"), r"prefix_cache is 'maybe', accepted: true or false"),
    (("--size", "3 apples"), r"size is '3 apples'"),
    (("--size", "1.5GiB"), r"size is '1\.5GiB'"),
    (("--weights", "1,x"), r"weights is 'x'"),
    (("--page-size", "6", "--interleave", "4"), r"interleave is 4.*page_size 6"),
    (("stray",), "stray"),
]


@pytest.mark.parametrize(("argv", "message"), REFUSED_FLAGS)
def test_wrong_flag_is_refused_by_name_with_what_is_accepted(
    argv: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(argv)


@pytest.mark.parametrize(
    "environ",
    [
        {"KVBRAID_COLOUR": "red"},
        {"KVBRAID_DECODE_COLOUR": "red"},
        {"KVBRAID_DECODE_TP_SIZE": "2"},
        {"KVBRAID_LEVEL": "many"},
    ],
)
def test_wrong_environment_variable_is_refused_by_name(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(environ))):
        load((), environ)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour = 1", "colour"),
        ("[decode]\ntp_size = 2", r"\[decode\] tp_size"),
        ('level = "2"', "level is '2'"),
        ("level = true", "level is True"),
        ("prefix_cache = 1", "prefix_cache is 1"),
        ('peers = "a"', "peers is 'a', accepted: a list"),
        ("weights = [1.5]", r"weights is 1\.5"),
        ("level = [", "kvbraid.toml"),
        ("[colour]\nx = 1", "colour"),
    ],
)
def test_wrong_file_is_refused_with_file_and_key(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "kvbraid.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(file=file)
    assert str(file) in str(caught.value)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load(("--config", str(tmp_path / "absent.toml")))


def test_help_shows_every_setting_with_sentence_unit_default_and_range(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        load(("--help",))
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "A worker for tests." in text
    assert "--level TOKENS How much. [default: 1 tokens; 0 to 90]" in text
    assert "--port VALUE" in text
    assert "default: 50053" in text
    assert "one of fast, exact" in text


def test_a_name_declared_twice_is_a_programming_error() -> None:
    @dataclass(frozen=True)
    class Twice:
        kv: KvSettings = field(default_factory=KvSettings)
        page_size: int = setting(1, "Again.")

    with pytest.raises(TypeError, match="page_size"):
        load_settings(Twice, (), {}, role="decode")


def test_a_field_without_description_is_a_programming_error() -> None:
    @dataclass(frozen=True)
    class Bare:
        level: int = 1

    with pytest.raises(TypeError, match=r"Bare\.level"):
        load_settings(Bare, (), {}, role="decode")


@pytest.mark.parametrize(
    ("host", "advertised", "expected"),
    [("127.0.0.1", "", "127.0.0.1"), ("0.0.0.0", "pod-1", "pod-1"), ("10.0.0.1", "x", "x")],
)
def test_peers_are_told_a_host_they_can_reach(host: str, advertised: str, expected: str) -> None:
    assert ServerSettings(host=host, advertise_host=advertised).reachable_host == expected


def test_a_wildcard_address_alone_cannot_be_advertised() -> None:
    with pytest.raises(ConfigError, match="advertise_host"):
        _ = ServerSettings(host="0.0.0.0").reachable_host
