"""Hosts of a worker meet, then each starts its ranks and ends with them."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbraid.errors import ConfigError
from kvbraid.worker.host_meeting import HostsMissingError, MeetingPlan, meet_hosts
from kvbraid.worker.host_ranks import HostPlan, parse_plan

# A rank that writes what it was given, then waits for a word on a fifo, or for SIGTERM.
RANK_PROGRAM = """
import json, os, signal, sys, time
from kvbraid.engine.ranks import from_environment
context = from_environment()
folder, mode = sys.argv[1:3]
if mode.startswith("fail") and context.rank == int(mode[4:]):
    sys.exit(7)
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
facts = {"context": repr(context), "flags": sys.argv[3:], "pid": os.getpid()}
with open(f"{folder}/{context.rank}.partial", "w") as file:
    json.dump(facts, file)
os.rename(f"{folder}/{context.rank}.partial", f"{folder}/{context.rank}")
while not told and not os.path.exists(f"{folder}/stop"):
    time.sleep(0.02)
open(f"{folder}/stop", "w").close()
"""


def free_port() -> int:
    """The first of two that follow each other."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def meeting(index: int, port: int, *, hosts: int = 3, ranks: int = 2, s: float = 20) -> MeetingPlan:
    return MeetingPlan(index, hosts, ranks, "127.0.0.1", port, s)


def in_thread(plan: MeetingPlan) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def attend() -> None:
        try:
            meet_hosts(plan)
        except (HostsMissingError, ConfigError) as error:
            errors.append(error)

    thread = threading.Thread(target=attend, daemon=True)
    thread.start()
    return thread, errors


def test_nobody_goes_before_the_last_has_come() -> None:
    port = free_port()
    early = [in_thread(meeting(index, port)) for index in (2, 0)]
    early[1][0].join(0.5)
    assert all(thread.is_alive() for thread, _ in early)
    meet_hosts(meeting(1, port))
    for thread, errors in early:
        thread.join(10)
        assert not thread.is_alive()
        assert errors == []


def test_a_host_that_comes_twice_counts_once_and_strangers_do_not() -> None:
    port = free_port()
    leader, errors = in_thread(meeting(0, port))
    hello = b'{"host": 1, "num_hosts": 3, "ranks_per_host": 2}\n'
    connections = []
    for words in (b"GET / HTTP/1.1\r\n\r\n", hello, hello):
        wait_for(lambda: accepts(port))
        connections.append(socket.create_connection(("127.0.0.1", port)))
        connections[-1].sendall(words)
    leader.join(0.5)
    assert leader.is_alive()
    meet_hosts(meeting(2, port))
    leader.join(10)
    assert not leader.is_alive()
    assert errors == []
    assert connections[2].recv(3) == b"go\n"
    assert connections[1].recv(3) == b""
    for connection in connections:
        connection.close()


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_hosts_that_plan_differently_are_told() -> None:
    port = free_port()
    leader, errors = in_thread(meeting(0, port, hosts=2))
    in_thread(meeting(1, port, hosts=2, ranks=4, s=2))
    leader.join(10)
    (error,) = errors
    assert isinstance(error, ConfigError)
    assert str(error) == "host 1 plans 2 hosts of 4 ranks, host 0 plans 2 of 2"


@pytest.mark.parametrize(
    ("index", "missing"), [(0, r"hosts \[1, 2\] have not come"), (1, "host 0")]
)
def test_waiting_ends(index: int, missing: str) -> None:
    with pytest.raises(HostsMissingError, match=missing):
        meet_hosts(meeting(index, free_port(), s=0.3))


def test_one_host_meets_nobody() -> None:
    meet_hosts(meeting(0, 1, hosts=1))


def test_ranks_are_numbered_over_hosts() -> None:
    flags = ("--host-index=1", "--num-hosts=2", "--ranks-per-host=8", "--leader=decode-0.decode")
    ports = ("--port=50053", "--master-port=29400")
    plan = parse_plan([*flags, *ports, "decode_service", "--page-size", "32"])
    assert plan.argv()[1:] == ["-m", "decode_service", "--page-size", "32", "--port=50045"]
    variables = plan.variables(3)
    assert variables == {
        "RANK": "11",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "decode-0.decode",
        "MASTER_PORT": "29400",
    }
    assert plan.meeting.port == 29401
    # A worker's rank r listens on its port + r.
    assert 50045 + int(variables["RANK"]) == 50053 + 3


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"host_index": 2}, r"host index 2 is outside \[0, 2\)"),
        ({"ranks_per_host": 0}, "ranks per host is 0"),
        ({"host_index": 1, "port": 2}, "port 2 must be above the first rank, 2"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(changes: dict[str, int], complaint: str) -> None:
    plan = {"host_index": 0, "num_hosts": 2, "ranks_per_host": 2, "port": 9000} | changes
    with pytest.raises(ConfigError, match=complaint):
        HostPlan(leader="x", master_port=1, meeting_seconds=1, command=("m",), **plan)


@contextmanager
def two_hosts(folder: Path, mode: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """host_ranks twice, two ranks each, on this machine."""
    (folder / "rank_program.py").write_text(RANK_PROGRAM)
    master, port = free_port(), 40000
    hosts = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "kvbraid.worker.host_ranks", f"--host-index={index}"),
                *("--num-hosts=2", "--ranks-per-host=2", "--leader=127.0.0.1"),
                *(f"--port={port}", f"--master-port={master}", "--meeting-seconds=20"),
                *("rank_program", str(folder), mode),
            ],
            cwd=folder,
        )
        for index in (1, 0)
    ]
    try:
        yield hosts[::-1]
    finally:
        for host in hosts:
            host.kill()
            host.wait()


@pytest.mark.usefixtures("importable")
def test_sigterm_goes_to_rank_0_and_everyone_ends(tmp_path: Path) -> None:
    with two_hosts(tmp_path, "serve") as hosts:
        wait_for(lambda: all((tmp_path / str(rank)).exists() for rank in range(4)))
        facts = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
        for rank, fact in enumerate(facts):
            place = f"rank={rank}, world_size=4, local_rank={rank % 2}, local_world_size=2"
            assert place in fact["context"]
            assert fact["flags"] == [f"--port={40000 - rank // 2 * 2}"]
        # The other host's ranks ignore it in a real worker; here it is not sent to them.
        hosts[0].send_signal(signal.SIGTERM)
        assert [host.wait(20) for host in hosts] == [0, 0]


@pytest.mark.usefixtures("importable")
def test_a_rank_that_fails_ends_its_host(tmp_path: Path) -> None:
    with two_hosts(tmp_path, "fail3") as hosts:
        assert hosts[1].wait(30) == 7
        wait_for(lambda: (tmp_path / "2").exists())
        pid = json.loads((tmp_path / "2").read_text())["pid"]
        assert not Path(f"/proc/{pid}").exists()


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children run in another folder and still find this checkout."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
