from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from kvbraid.errors import StartupError
from kvbraid.rpc.parent import die_with_parent

CHILD = """
import os, sys, time
from kvbraid.rpc.parent import die_with_parent
die_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
parent = sys.argv[2] if len(sys.argv) > 2 else str(os.getpid())
subprocess.Popen([sys.executable, "-c", sys.argv[1], parent])
time.sleep(60)
"""


def start(*more: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    command = [sys.executable, "-c", PARENT, CHILD, *more]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, psutil.Process(int(parent.stdout.readline()))


def test_child_is_killed_with_its_parent() -> None:
    parent, child = start()
    parent.kill()
    parent.communicate()
    assert not psutil.wait_procs([child], timeout=5)[1]


def test_grandchild_that_inherited_the_flag_is_left_to_its_own_parent() -> None:
    parent, child = start(str(os.getpid()))
    parent.kill()
    parent.wait()
    assert child.is_running()
    child.kill()
    parent.communicate()


def test_a_parent_that_is_gone_already_is_noticed() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(StartupError, match=str(gone.pid)):
        die_with_parent(gone.pid)


def test_zero_means_no_parent() -> None:
    die_with_parent(0)
