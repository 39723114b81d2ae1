"""The laws of attention.interface.Group, on every communicator, among real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attention.single_group import SingleGroup
from kvbraid.engine.communicator import make_groups
from kvbraid.engine.rank_lost import RankLostError
from kvbraid.engine.ranks import RankContext
from kvbraid.engine.shared_memory import SharedMemoryGroup
from kvbraid.errors import ConfigError, UnavailableError

PROGRAM = Path(__file__).parent / "rank_programs" / "group_laws.py"
LAWS = [
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "back_to_back",
    "many_shapes",
    "inference_mode_on_and_off",
    "barrier",
    "wrong_arguments",
    "contiguous_ranks",
    "step_plans",
]
Outcomes = dict[tuple[int, str, str], dict[int, str | None]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Error text (None: the law held) by (size, kind, law) and rank, from one set of processes."""
    finished = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path_factory.mktemp("laws"))],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    found: Outcomes = {}
    for line in finished.stdout.splitlines():
        entry = json.loads(line)
        key = entry["size"], entry["kind"], entry["law"]
        found.setdefault(key, {})[entry["rank"]] = entry["error"]
    return found


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("kind", ["shared_memory", "gloo"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_law_holds_on_every_rank(outcomes: Outcomes, size: int, kind: str, law: str) -> None:
    assert outcomes[size, kind, law] == dict.fromkeys(range(size))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_idle_callback_can_end_the_wait_for_a_plan(outcomes: Outcomes, size: int) -> None:
    assert outcomes[size, "shared_memory", "idle"] == dict.fromkeys(range(size))


def test_one_rank_needs_no_communication() -> None:
    group = SingleGroup()
    tensor = torch.arange(6.0).view(1, 2, 3)
    results = [
        group.all_gather(tensor)[0],
        group.reduce_scatter(tensor)[None],
        group.all_to_all(tensor, [1], [1]),
    ]
    for result in results:
        assert torch.equal(result, tensor)
        assert result.data_ptr() != tensor.data_ptr()
    assert group.all_reduce(tensor) is tensor
    assert group.broadcast(tensor, 0) is tensor
    with pytest.raises(ValueError, match="size 1"):
        group.reduce_scatter(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"\[1\]"):
        group.all_to_all(tensor, [2], [1])


def context(rank: int, size: int, local_size: int | None = None) -> RankContext:
    return RankContext(rank, size, rank, local_size or size, f"{os.getpid()}-0a0b0c0d-t")


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: make_groups("mpi", context(0, 1), tp_size=1, dcp_size=1), "'mpi'.*shared_memory"),
        (lambda: make_groups("gloo", context(0, 1), tp_size=2, dcp_size=1), "tp_size 2"),
        (lambda: make_groups("gloo", context(0, 4), tp_size=4, dcp_size=3), "dcp_size 3"),
        (
            lambda: make_groups("shared_memory", context(0, 4, 2), tp_size=4, dcp_size=2),
            "4 ranks on one host, here are 2",
        ),
    ],
)
def test_impossible_groups_are_refused(make: Callable[[], object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make()


def test_one_rank_gets_single_groups_whatever_the_kind() -> None:
    groups = make_groups("nccl", context(0, 1), tp_size=1, dcp_size=1)
    assert isinstance(groups.tp, SingleGroup)
    assert isinstance(groups.dcp, SingleGroup)


def test_a_peer_that_does_not_come_is_a_lost_rank(
    as_threads: Callable[[int, Callable[..., object]], list[object]],
) -> None:
    name = f"{os.getpid()}-0a0b0c0d-lost"

    def one_rank(threads: SingleGroup) -> str:
        group = SharedMemoryGroup(name, rank=threads.rank, size=3, timeout_s=0.2)
        group.all_reduce(torch.ones(4))
        message = ""
        if threads.rank != 1:
            with pytest.raises(RankLostError, match="rank 1 of 3") as caught:
                group.all_reduce(torch.ones(4))
            message = str(caught.value)
            assert isinstance(caught.value, UnavailableError)
        threads.barrier()
        return message

    assert as_threads(3, one_rank)[1] == ""
    assert not list(Path("/dev/shm").glob(f"kvbraid-{name}*"))
