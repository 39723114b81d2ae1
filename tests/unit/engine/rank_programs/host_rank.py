"""A rank that is alone on its host: hosts of a worker, played by processes of this machine.

argv: RANK WORLD_SIZE PORT TIMEOUT_S MODE. MODE "wait": every rank but the last enters an
all_reduce, which therefore never ends. MODE "leave": every rank leaves in peace once stdin closes.
Prints "ready" when it is about to wait.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

import torch

from kvbraid.engine.communicator import make_groups
from kvbraid.engine.heartbeat import Heartbeat
from kvbraid.engine.host_heartbeat import connect_hosts
from kvbraid.engine.rank_lost import RankLostError
from kvbraid.engine.ranks import RankContext


def main() -> None:
    logging.basicConfig()
    rank, size, port = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    timeout_s, mode = float(sys.argv[4]), sys.argv[5]
    context = RankContext(rank, size, 0, 1, f"{os.getpid()}-0a0b0c0d", "127.0.0.1", port)
    groups = make_groups("gloo", context, tp_size=size, dcp_size=1, timeout_s=60)
    heartbeat = Heartbeat(context, timeout_s=timeout_s)
    heartbeat.start()
    hosts = connect_hosts(context, groups.control, heartbeat.end_worker, timeout_s=timeout_s)
    hosts.start()
    groups.control.barrier()
    os.write(1, b"ready\n")
    if mode == "leave" or rank == size - 1:
        sys.stdin.read()
    else:
        try:
            groups.tp.all_reduce(torch.ones(4))
        except RankLostError as error:
            # gloo sees a closed connection too; here the heartbeat has to end the process.
            logging.info("the collective failed: %s", error)
            threading.Event().wait()
    hosts.stop()
    heartbeat.stop()


if __name__ == "__main__":
    main()
