"""A process finds its rank in the environment, starts the others and cleans up after them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvbraid.engine.rank_lost import RankLostError
from kvbraid.engine.ranks import RankContext, from_environment, spawn_ranks, start_run
from kvbraid.errors import ConfigError


def test_without_rank_nothing_is_decided() -> None:
    assert from_environment({"WORLD_SIZE": "4"}) is None


def test_torchrun_variables_are_understood() -> None:
    context = from_environment(
        {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "worker-0.workers",
            "MASTER_PORT": "29500",
        }
    )
    assert context == RankContext(5, 8, 1, 4, "worker-0.workers-29500", "worker-0.workers", 29500)
    assert not context.is_one_host
    assert context.local_ranks == range(4, 8)


def test_an_ipv6_master_gives_a_usable_run_id() -> None:
    context = from_environment({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "fd00::1"})
    assert context is not None
    assert context.run_id == "fd00__1-0"


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"RANK": "0"}, "WORLD_SIZE must be set"),
        ({"RANK": "two", "WORLD_SIZE": "4"}, "RANK='two'"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK='-1'"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, r"RANK 4 is outside \[0, WORLD_SIZE 4\)"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE 0"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}, "at most WORLD_SIZE 2"),
        ({"RANK": "0", "WORLD_SIZE": "1", "RANK_RUN_ID": "a/b"}, "run id 'a/b'"),
    ],
)
def test_a_malformed_environment_is_refused(variables: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        from_environment(variables)


def test_a_rank_whose_parent_is_gone_does_not_start() -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "RANK_PARENT_PID": "1"}
    code = (
        "from kvbraid.engine.ranks import from_environment\n"
        "from kvbraid.engine.rank_lost import RankLostError\n"
        "import sys\n"
        "try:\n"
        f"    from_environment({variables!r})\n"
        "except RankLostError as error:\n"
        "    sys.exit(7 if 'pid 1' in str(error) else 8)\n"
    )
    context = RankContext(0, 2, 0, 2, "test-orphan")
    assert spawn_ranks([sys.executable, "-c", code], context).stop(20) == (7,)


REPORT = """
import sys
from kvbraid.engine.ranks import from_environment
context = from_environment()
path = sys.argv[1] + f"/{context.rank}"
open(path, "w").write(repr(context))
sys.exit(context.rank)
"""


def test_spawned_ranks_find_themselves(tmp_path: Path) -> None:
    context = start_run(3)
    assert (context.rank, context.world_size, context.local_world_size) == (0, 3, 3)
    ranks = spawn_ranks([sys.executable, "-c", REPORT, str(tmp_path)], context)
    leftover = Path(f"/dev/shm/kvbraid-{context.run_id}-tp")
    leftover.touch()
    assert ranks.stop(grace_s=20) == (1, 2)
    assert not leftover.exists()
    for rank in (1, 2):
        expected = RankContext(
            rank, 3, rank, 3, context.run_id, context.master_addr, context.master_port
        )
        assert (tmp_path / str(rank)).read_text() == repr(expected)


def test_a_rank_that_does_not_end_is_killed() -> None:
    ranks = spawn_ranks(
        [sys.executable, "-c", "input_never = open('/dev/stdin'); import signal; signal.pause()"],
        RankContext(0, 2, 0, 2, "test-stuck"),
    )
    ranks.check_alive()
    assert ranks.stop(grace_s=0.1) == (-9,)


def test_a_rank_that_ended_while_starting_is_named() -> None:
    ranks = spawn_ranks([sys.executable, "-c", "raise SystemExit(3)"], start_run(2))
    assert os.waitid(os.P_PID, ranks.processes[0].pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(RankLostError, match="rank 1 ended with exit code 3"):
        ranks.check_alive()
    ranks.stop(1)


def test_runs_on_one_host_do_not_share_names() -> None:
    assert start_run(2).run_id != start_run(2).run_id
