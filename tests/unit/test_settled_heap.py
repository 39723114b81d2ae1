"""What is alive when a process begins to serve is not walked by later collections."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc, weakref
from kvbraid.settled_heap import settle_heap

class Node:
    pass

def loop():
    node = Node()
    node.itself = node
    return weakref.ref(node)

loaded = [Node() for _ in range(10_000)]
gc.disable()
left_behind = loop()
settle_heap()
assert left_behind() is None, "what start-up left behind is not kept for ever"
assert gc.get_freeze_count() > 10_000
assert not any(isinstance(thing, Node) for thing in gc.get_objects()), "still walked"
frozen = gc.get_freeze_count()
loop()
assert gc.collect() >= 1, "what serving leaves behind is collected"
assert gc.get_freeze_count() == frozen
"""


def test_what_was_loaded_is_not_walked_again_and_later_garbage_is_collected() -> None:
    """In a process of its own: this one's heap stays as it is."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
