"""Whether this machine lets us make namespaces, and the processes that hold them."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from collections.abc import Sequence

_TOOLS = ("unshare", "nsenter", "setpriv", "ip", "mount", "chroot", "sh")
# Everything that the cluster does to the kernel, once, in namespaces that end with the shell.
_TRIAL = """
mount -t tmpfs trial /mnt
mount -t proc proc /proc
echo 1 > /proc/sys/net/ipv4/ip_forward
ip link set lo up
ip link add trial0 type veth peer name trial1
ip rule add pref 200 iif trial0 ipproto tcp dport 1-2 prohibit
setpriv --reuid=10001 --regid=10001 --clear-groups --bounding-set=-all --no-new-privs true
"$1" -c 'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM).close()'
"""


@functools.cache
def why_not() -> str:
    """Why there can be no cluster of namespaces on this machine; empty where there can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} (util-linux, iproute2)"
    trial = [*unshared(), "sh", "-ec", _TRIAL, "sh", sys.executable]
    done = subprocess.run(trial, capture_output=True, text=True, timeout=30)
    last = done.stderr.strip().rpartition("\n")[2]
    return "" if done.returncode == 0 else f"namespaces are refused: {last}"


def unshared() -> list[str]:
    """The command that runs another one in namespaces of its own, which end with it."""
    return [
        *("unshare", "--net", "--mount", "--pid", "--ipc", "--uts"),
        *("--fork", "--kill-child", "--propagation", "private"),
    ]


def children(pid: int) -> list[int]:
    """The processes that a single-threaded process has started; none once it has ended."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return [int(child) for child in file.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


class Holder:
    """A process that keeps new namespaces alive, as a pod's pause container does.

    It reads stdin to its end, so it and everything in its process namespace end with the test
    process, whatever happens to that.
    """

    def __init__(self, setup: str, *, root: str = "/") -> None:
        """setup: shell lines that run inside first. Raises RuntimeError when one of them fails."""
        # A parent that ignores SIGCHLD has no zombies: orphans of the pod come to this process.
        stay = f"trap '' CHLD; exec chroot {root} cat"
        self._process = subprocess.Popen(
            [*unshared(), "sh", "-ec", f"{setup}\necho ready\n{stay}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"setting namespaces up failed with {self._process.wait()}")
        (self.pid,) = children(self._process.pid)

    def enter(self, *namespaces: str) -> list[str]:
        """The command that runs another one in these namespaces: net, pid, mount, ..."""
        return ["nsenter", f"--target={self.pid}", *(f"--{name}" for name in namespaces)]

    def run(self, command: Sequence[str], *, stdin: str = "") -> None:
        """Run a tool of the host in this network. Raises CalledProcessError."""
        subprocess.run([*self.enter("net"), *command], input=stdin, text=True, check=True)

    def close(self) -> None:
        """End the namespaces and all that runs in them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
