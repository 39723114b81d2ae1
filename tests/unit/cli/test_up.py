from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

SCRIPT = Path(__file__).with_name("scripted_service.py")
DRIVER = """
import json, sys
from kvbraid.cluster import ClusterSpec, LocalCluster, WorkerSpec
from kvbraid.commands.up import serve_cluster
from kvbraid.errors import KVBraidError

script, log_directory, drain, decode, draft, drafter = sys.argv[1:]
spec = ClusterSpec(
    model="unused",
    decode=tuple(WorkerSpec.parse("decode", text) for text in json.loads(decode)),
    draft=tuple(WorkerSpec.parse("draft", text) for text in json.loads(draft)),
    drafter=drafter,
    drain_seconds=float(drain),
    commands={
        role: (sys.executable, script, role)
        for role in ("prefill", "decode", "draft", "coordinator")
    },
)
cluster = LocalCluster(spec, log_directory)
try:
    sys.exit(serve_cluster(cluster, start_seconds=60, as_json=True))
except KVBraidError as error:
    sys.exit(str(error))
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def run(
        *decode: str, drain_seconds: float = 5.0, draft: tuple[str, ...] = (), drafter: str = ""
    ) -> subprocess.Popen[str]:
        arguments = [str(SCRIPT), str(tmp_path / "logs"), str(drain_seconds)]
        arguments += [json.dumps(decode), json.dumps(draft), drafter]
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line: dict[str, Any] = json.loads(process.stdout.readline())
    return line


def processes(line: dict[str, Any]) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in line["pids"].values()]


def assert_all_gone(children: list[psutil.Process], within_s: float = 20.0) -> None:
    _, alive = psutil.wait_procs(children, timeout=within_s)
    assert not alive


def test_one_ready_line_names_every_address_and_one_ctrl_c_stops_all(start: Start) -> None:
    process = start("tp=1,dcp=1", "tp=2,dcp=2")
    line = ready(process)
    names = {"prefill-0", "decode-0", "decode-1", "coordinator"}
    assert set(line["pids"]) == set(line["metrics"]) == names
    assert set(line["workers"]) == names - {"coordinator"}
    told = [line["workers"][name] for name in ("prefill-0", "decode-0", "decode-1")]
    assert line["http"] == ";".join(told)  # the coordinator was given exactly these
    for address in line["metrics"].values():
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
            assert b"kvbraid_process_info" in response.read()
    children = processes(line)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert_all_gone(children)


def told_about_drafts(tmp_path: Path, names: list[str]) -> dict[str, str]:
    """drafter;draft_worker;tap_fusion of each worker: what its ready file says it was given."""
    reports = {n: json.loads((tmp_path / "logs" / f"{n}.ready").read_text()) for n in names}
    return {name: report["http"] for name, report in reports.items()}


def test_draft_services_start_first_and_workers_are_told_in_turn(
    start: Start, tmp_path: Path
) -> None:
    process = start("tp=1", "tp=1", "tp=1", draft=("drafter=/d/one", "drafter=/d/two,device=cpu"))
    workers = ready(process)["workers"]
    assert list(workers)[:2] == ["draft-0", "draft-1"]
    first = f";{workers['draft-0']};/d/one"
    second = f";{workers['draft-1']};/d/two"
    names = ["prefill-0", "decode-0", "decode-1", "decode-2"]
    assert told_about_drafts(tmp_path, names) == dict(
        zip(names, [first, first, second, first], strict=True)
    )


def test_an_embedded_drafter_is_given_to_every_worker(start: Start, tmp_path: Path) -> None:
    ready(start("tp=1", drafter="/d/one"))
    names = ["prefill-0", "decode-0"]
    assert told_about_drafts(tmp_path, names) == dict.fromkeys(names, "/d/one;;")


def test_only_prefill_workers_spin_briefly(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    line = ready(start("tp=1"))
    brief = [
        name
        for name, pid in line["pids"].items()
        if "GOMP_SPINCOUNT" in psutil.Process(pid).environ()
    ]
    assert brief == ["prefill-0"]


def test_a_dead_child_is_reported_and_stops_the_rest(start: Start) -> None:
    process = start("tp=1")
    line = ready(process)
    children = processes(line)
    os.kill(line["pids"]["decode-0"], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "decode-0" in err
    assert "SIGKILL" in err
    assert_all_gone(children)


def test_a_child_that_refuses_to_start_is_reported_with_its_reason(start: Start) -> None:
    process = start("tp=1", "behaviour=refuse")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert "decode-1" in err
    assert "exited with code 2" in err
    assert "tensor lm_head.weight is missing" in err


def test_an_unknown_worker_setting_is_refused_by_the_service(start: Start) -> None:
    _, err = start("colour=red").communicate(timeout=60)
    assert "--colour=red" in err


def test_certificates_that_cannot_work_are_refused_with_every_reason(start: Start) -> None:
    files = {"tls_certificate": "/nowhere/a.crt", "tls_private_key": "/nowhere/a.key"}
    process = start(",".join(f"{name}={path}" for name, path in files.items()))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "exited with code 2" in err
    for name, path in files.items():
        assert f"{name} is {path}: No such file or directory" in err


def test_children_do_not_survive_a_killed_up(start: Start) -> None:
    process = start("tp=1")
    children = processes(ready(process))
    process.kill()
    assert_all_gone(children)


def test_a_child_that_will_not_end_is_killed_after_the_drain_budget(start: Start) -> None:
    process = start("behaviour=ignore_sigterm", drain_seconds=0.2)
    children = processes(ready(process))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert_all_gone(children)


def test_a_second_ctrl_c_does_not_wait_for_the_drain_budget(start: Start) -> None:
    process = start("behaviour=ignore_sigterm", drain_seconds=300)
    children = processes(ready(process))
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "once more" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert_all_gone(children)
