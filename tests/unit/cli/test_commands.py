from __future__ import annotations

import argparse
import importlib
import io
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attention.dispatch import BACKENDS, OPERATIONS
from kvbraid.cli import COMMANDS, SERVICES, main
from kvbraid.cluster import ClusterSpec, WorkerSpec
from kvbraid.commands import up
from kvbraid.commands.attention_table import attention_table
from kvbraid.commands.model_path import resolve_model
from kvbraid.commands.progress import ProgressBar
from kvbraid.errors import ConfigError, NotFoundError
from tests.unit.attention.vendor_doubles.machine import HOPPER, PACKAGES, pretend


def test_help_lists_every_command_and_each_has_a_module(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    for name, summary in COMMANDS.items():
        assert f"  {name} " in text
        assert summary in text
        if name not in SERVICES:
            module = importlib.import_module(f"kvbraid.commands.{name}")
            assert callable(module.run)
            assert callable(module.add_arguments)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in SERVICES])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert COMMANDS[command] in " ".join(capsys.readouterr().out.split())


def test_unknown_command_lists_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve"])
    assert caught.value.code == 2
    assert "'serve'" in (err := capsys.readouterr().err)
    assert all(name in err for name in COMMANDS)


def test_the_cli_itself_loads_neither_torch_nor_grpc() -> None:
    code = "import sys, kvbraid.cli; sys.exit(bool({'torch', 'grpc'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_doctor_reports_this_machine_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"]["grpcio"]
    assert report["transports"]["grpc_push"] is True
    cells = {(row["kind"], row["backend"], row["operation"]) for row in report["attention"]}
    kinds, operations = ("gqa", "mla"), ("decode", "verify", "extend")
    assert cells == set(itertools.product(kinds, ("auto", *BACKENDS), operations))
    assert all(list(row)[-4:] == ["c=1", "c=2", "c=4", "c=8"] for row in report["attention"])


def test_doctor_says_what_serves_and_the_first_reason_otherwise(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--json", "--dcp", "3,8"]) == 0
    rows = {
        (row["kind"], row["backend"], row["operation"]): (row["c=3"], row["c=8"])
        for row in json.loads(capsys.readouterr().out)["attention"]
    }
    assert rows["mla", "auto", "verify"] == ("torch", "torch")
    assert rows["gqa", "torch", "extend"] == ("ok", "ok")
    assert rows["mla", "aiter", "decode"] == ("device 'cpu' is not cuda",) * 2


def test_doctor_names_the_backend_that_a_worker_with_graphs_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FlashInfer is preferred for 128 heads, but its decode cannot be captured."""
    pretend(monkeypatch, HOPPER)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = attention_table([8])
    cells = {(row["kind"], row["backend"], row["operation"]): row["c=8"] for row in rows}
    assert [cells["mla", "auto", operation] for operation in OPERATIONS] == ["triton"] * 3
    assert cells["mla", "flashinfer", "decode"] == "ok"
    packages = {name: release for name, release in PACKAGES.items() if name != "triton"}
    pretend(monkeypatch, HOPPER, packages)
    taken = {row["c=8"] for row in attention_table([8]) if row["backend"] == "auto"}
    assert taken == {"flashinfer"}


@pytest.mark.parametrize("sizes", ["0", "2,", "two"])
def test_doctor_refuses_malformed_stripe_widths(
    sizes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--dcp", sizes])
    assert caught.value.code == 2
    assert "must be sizes >= 1" in capsys.readouterr().err


def test_doctor_prints_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "shared_memory:" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["kind", "backend", "operation", "device", "c=1", "c=2", "c=4", "c=8"] in lines
    assert any(line[:3] == ["mla", "torch", "verify"] and line[-1] == "ok" for line in lines)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("tp=2,dcp=2", ["--tp-size=2", "--dcp-size=2"]),
        ("tp=1, page_size=4", ["--tp-size=1", "--page-size=4"]),
    ],
)
def test_worker_spec_becomes_flags(text: str, flags: list[str]) -> None:
    assert WorkerSpec.parse("decode", text).flags() == flags


@pytest.mark.parametrize("text", ["", "tp", "tp=", "=2", "tp=2,,dcp=2"])
def test_malformed_worker_spec_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="tp=2,dcp=2"):
        WorkerSpec.parse("decode", text)


def test_a_draft_service_needs_a_drafter_and_excludes_an_embedded_one() -> None:
    service = WorkerSpec.parse("draft", "drafter=/m,device=cpu")
    assert service.option("drafter") == "/m"
    assert service.flags() == ["--drafter=/m", "--device=cpu"]
    with pytest.raises(ConfigError, match="--draft has no drafter"):
        ClusterSpec(model="/m", draft=(WorkerSpec.parse("draft", "device=cpu"),))
    with pytest.raises(ConfigError, match="not both"):
        ClusterSpec(model="/m", draft=(service,), drafter="/m")


def test_up_gives_everyone_its_certificates(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    given = ["--tls-certificate=a.crt", "--tls-private-key=a.key", "--tls-server-ca=ca.crt"]
    spec = up.cluster_spec(parser.parse_args([f"--model={tmp_path}", *given]))
    assert [flag for flag in spec.everyone if flag.startswith("--tls-")] == given
    plain = up.cluster_spec(parser.parse_args([f"--model={tmp_path}"]))
    assert not any(flag.startswith("--tls-") for flag in plain.everyone)


def test_up_takes_drafters_and_draft_services(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    model = f"--model={tmp_path}"
    plain = up.cluster_spec(parser.parse_args([model]))
    assert (plain.draft, plain.drafter) == ((), "")
    assert up.cluster_spec(parser.parse_args([model, "--drafter=/m"])).drafter == "/m"
    twice = parser.parse_args([model, "--draft=drafter=/m", "--draft", "drafter=/n,port=7"])
    assert [service.flags() for service in up.cluster_spec(twice).draft] == [
        ["--drafter=/m"], ["--drafter=/n", "--port=7"]
    ]  # fmt: skip


def test_model_is_a_path_or_a_pulled_name_or_an_error_that_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVBRAID_MODELS", str(tmp_path / "models"))
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "model.gguf").write_bytes(bytes(2_500_000))
    (tmp_path / "models" / "some" / "repo").mkdir(parents=True)
    (tmp_path / "models" / "some" / "repo" / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model("tiny") == tmp_path / "models" / "tiny"
    with pytest.raises(NotFoundError, match="kvbraid model pull giant"):
        resolve_model("giant")
    assert main(["model", "list"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("some/repo ")
    assert second.startswith("tiny ")
    assert "2.5 MB" in second
    assert main(["model", "path", "tiny"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "models" / "tiny")


def test_our_errors_are_one_line_and_exit_code_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nothing_of_that_name"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("kvbraid bench: no benchmark 'nothing_of_that_name'")
    assert err.count("\n") == 1


def test_progress_without_a_terminal_is_a_line_each_tenth() -> None:
    stream = io.StringIO()
    with ProgressBar("pulling", stream) as bar:
        for done in range(1001):
            bar.update(done, 1000)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11
    assert "100%" in lines[-1]
    assert "\r" not in stream.getvalue()


def test_progress_of_unknown_size_prints_nothing() -> None:
    stream = io.StringIO()
    ProgressBar("pulling", stream).update(10, 0)
    assert stream.getvalue() == ""
