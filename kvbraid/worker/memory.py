"""How much memory a rank may plan with."""

from __future__ import annotations

from pathlib import Path

import torch

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")
_MEMINFO = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int:
    """Free memory of `device`: the GPU's own, or the host's within this container's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return min(_host_available(), _container_available())


def _host_available() -> int:
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_MEMINFO} has no MemAvailable")


def _container_available() -> int:
    try:
        limit, used = _CGROUP_LIMIT.read_text().strip(), int(_CGROUP_USED.read_text())
    except FileNotFoundError:
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - used)
