"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from kvbraid.errors import ConfigError, StartupError

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when `parent_pid`, its parent, ends. 0 does nothing.

    A grandchild (a rank that inherited the flag from rank 0) is left to its own parent. Raises
    StartupError when the parent is gone already and ConfigError where it cannot be done.
    """
    if parent_pid == 0:
        return
    if not sys.platform.startswith("linux"):
        raise ConfigError(f"parent_pid is {parent_pid}, accepted on {sys.platform}: 0")
    libc = ctypes.CDLL(None, use_errno=True)
    if os.getppid() == parent_pid and libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise ConfigError(f"parent_pid: {os.strerror(ctypes.get_errno())}")
    # Checked last: a parent that ended before the call above will never send the signal.
    if not _is_alive(parent_pid):
        raise StartupError(f"the parent process {parent_pid} is gone")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's, so alive
        pass
    return True
