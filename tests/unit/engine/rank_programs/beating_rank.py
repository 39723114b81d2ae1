"""A rank that does nothing but beat. Rank 0 spawns the others, as a service does.

argv: SIZE TIMEOUT_S MODE. MODE "default" ends the worker when a rank is lost, "report" prints
"lost <rank> <reason>" instead, "leave" does so too but the last rank stops at once, "silent" does
not beat at all. Prints "ready <rank> <pid>" once it beats. Ends in peace when stdin closes (rank 0)
or rank 0 asks it to.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import numpy as np

from kvbraid.engine.heartbeat import Heartbeat
from kvbraid.engine.ranks import from_environment, spawn_ranks, start_run
from kvbraid.engine.step_channel import make_step_channel


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def main() -> None:
    logging.basicConfig()
    size, timeout_s, mode = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    context = from_environment()
    ranks = None
    if context is None:
        context = start_run(size)
        ranks = spawn_ranks([sys.executable, *sys.argv], context)
    rank = context.rank
    channel = make_step_channel(context)
    heartbeat = None
    if mode != "silent":
        heartbeat = Heartbeat(
            context,
            timeout_s=timeout_s,
            on_lost=(None if mode == "default" else (lambda reason: say(f"lost {rank} {reason}"))),
        )
        heartbeat.start()
    say(f"ready {rank} {os.getpid()}")
    if ranks is None:
        if mode != "leave" or rank < size - 1:
            channel.receive(lambda: None)
    else:
        sys.stdin.read()
        channel.send(np.zeros(0, dtype=np.int64))
    if heartbeat is not None:
        heartbeat.stop()
    if ranks is not None:
        codes = ranks.stop(grace_s=10)
        left = list(Path("/dev/shm").glob(f"kvbraid-{context.run_id}*"))
        say(f"stopped {codes} {left}")


if __name__ == "__main__":
    main()
