"""A rank that lives on but goes wrong: an error in its step, or a token that others do not have.

The whole worker ends; its requests go on elsewhere, or their clients get a proper status in time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import grpc
import psutil
import pytest

from kvbraid.cluster.child import Child
from kvbraid.cluster.local_cluster import SERVICE_COMMANDS
from kvbraid.engine.ranks import start_run
from kvbraid.rpc.lifecycle import EXIT_FAILED
from kvbraid.testing.loopback import has_ipv6

SHORT = 6  # 6 prompt tokens, 128 greedy tokens
TINY_MLA = Path(__file__).parents[2] / "assets" / "tiny-mla"
COMMANDS = {**SERVICE_COMMANDS, "decode": (sys.executable, "-m", "failing_decode_worker")}
DECODE = SERVICE_COMMANDS["decode"]
IPV6 = "::1" if has_ipv6() else "127.0.0.1"
TWO_RANKS = (
    f"--model={TINY_MLA}", "--tp-size=2", "--dcp-size=2", "--kv-cache-tokens=4096",
    "--page-size=4", "--threads-per-rank=1", "--heartbeat-seconds=0.4",
)  # fmt: skip


@pytest.fixture(autouse=True)
def failing_worker_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))


def pid_of(cluster, name: str, rank: int) -> int:
    """Process id of a rank of a worker of two."""
    first = cluster.children[name].pid
    (child,) = psutil.Process(first).children()
    return (first, child.pid)[rank]


async def has_ended_with(cluster, support, name: str, code: int) -> None:
    child = cluster.children[name]

    async def has_ended() -> bool:
        return not child.is_running

    await support.wait_for(has_ended, 8, f"{name} ends")
    assert child.exit_code == code


@pytest.mark.parametrize("rank", [0, 1])
async def test_an_error_in_any_rank_is_unavailable_to_the_client_within_5_s(
    cluster_of: Callable, support, references, tmp_path: Path, rank: int
) -> None:
    reference = references[SHORT]
    options = ("--recovery-seconds=1",)
    with cluster_of(tmp_path, coordinator=options, commands=COMMANDS) as cluster:
        async with support.client(cluster.coordinator.grpc) as client:
            stream = client.tokens(client.start(reference.prompt_ids, 128))
            tokens = [await anext(stream)]

            async def read_on() -> None:
                async for token in stream:
                    tokens.append(token)

            os.kill(pid_of(cluster, "decode-0", rank), signal.SIGUSR1)
            struck_at = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_on()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert time.monotonic() - struck_at < 5
            assert tokens == reference.output_ids[: len(tokens)]
            await has_ended_with(cluster, support, "decode-0", EXIT_FAILED)
            log = cluster.children["decode-0"].log_path.read_text()
            assert "ArithmeticError: this rank was told to fail" in log
            await support.leak_free([cluster.workers["prefill-0"].grpc])


@pytest.mark.parametrize(
    ("number", "options", "complaint"),
    [
        (signal.SIGUSR1, "", "this rank was told to fail"),
        (
            signal.SIGUSR2,
            ",debug_guard=true",
            "the token window of rank 1 differs from rank 0's",
        ),
    ],
    ids=["an error", "another token under the debug guard"],
)
async def test_a_rank_that_goes_wrong_costs_no_token(
    cluster_of: Callable,
    support,
    references,
    tmp_path: Path,
    number: signal.Signals,
    options: str,
    complaint: str,
) -> None:
    reference = references[SHORT]
    decode = (f"tp=2,dcp=2{options}",) * 2
    with cluster_of(tmp_path, decode=decode, commands=COMMANDS) as cluster:
        async with support.client(cluster.coordinator.grpc) as client:
            tokens, lost = [], ""
            call = client.start(reference.prompt_ids, len(reference.output_ids))
            async for token in client.tokens(call):
                tokens.append(token)
                if len(tokens) == 10:
                    lost = await support.busy_worker(cluster, "decode")
                    os.kill(pid_of(cluster, lost, 1), number)
            assert tokens == reference.output_ids
            await has_ended_with(cluster, support, lost, EXIT_FAILED)
            assert complaint in cluster.children[lost].log_path.read_text()
            survivors = [r.grpc for n, r in cluster.workers.items() if n != lost]
            await support.leak_free(survivors)


async def test_a_port_of_the_second_rank_that_is_taken_ends_the_worker(
    support, tmp_path: Path
) -> None:
    """The first one waits for the second one's endpoints, and must not do so for ever."""
    with ExitStack() as stack:
        taken, free = two_ports_in_a_row(stack)
        free.close()
        port = taken.getsockname()[1]
        worker = Child("decode-0", [*DECODE, *TWO_RANKS, f"--metrics-port={port - 1}"], tmp_path)
        stack.callback(worker.kill)

        async def has_ended() -> bool:
            return not worker.is_running

        await support.wait_for(has_ended, 60, "the worker ends")
        assert worker.exit_code == EXIT_FAILED
        assert f"cannot serve metrics on 127.0.0.1:{port}" in worker.log_path.read_text()


def two_ports_in_a_row(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    """Listeners on a port and on the one before."""
    while True:
        last = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        with contextlib.suppress(OSError):
            return last, socket.create_server(("127.0.0.1", last.getsockname()[1] - 1))


@pytest.mark.parametrize(("lost", "address"), [(0, "127.0.0.1"), (1, IPV6)])
async def test_a_worker_over_two_hosts_ends_with_either_of_them(
    support, tmp_path: Path, lost: int, address: str
) -> None:
    """Two processes that are told to be alone on their hosts, as torchrun and LWS start them."""
    children: list[Child] = []
    with pytest.MonkeyPatch.context() as patch:
        shared = {"WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": address}
        for name, value in {**shared, "MASTER_PORT": start_run(2).master_port}.items():
            patch.setenv(name, str(value))
        for rank in (0, 1):
            patch.setenv("RANK", str(rank))
            children.append(Child(f"rank-{rank}", [*DECODE, *TWO_RANKS], tmp_path))
    try:

        async def serves() -> bool:
            return children[0].ready() is not None

        await support.wait_for(serves, 100, "the worker serves")
        os.kill(children[lost].pid, signal.SIGSTOP)  # its connections stay open

        async def has_ended() -> bool:
            return not children[1 - lost].is_running

        await support.wait_for(has_ended, 8, "the other host ends")
        assert children[1 - lost].exit_code == EXIT_FAILED
        words = f"the host of rank {lost} has not given a sign of life"
        assert words in children[1 - lost].log_path.read_text()
    finally:
        for child in children:
            child.kill()
