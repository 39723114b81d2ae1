"""Whose weights are served, given who holds which."""

from __future__ import annotations

import pytest

from coordinator.served_weights import described, served_digest


@pytest.mark.parametrize(
    ("held", "before", "served"),
    [
        ({}, None, None),
        ({"x": ["a"]}, None, "x"),
        ({"x": ["a"], "y": ["b", "c"]}, None, "y"),
        ({"y": ["b", "c"], "x": ["a"]}, "x", "y"),
        # Neither order nor name decides between equals.
        ({"x": ["a"], "y": ["b"]}, None, None),
        ({"y": ["b"], "x": ["a"]}, None, None),
        ({"x": ["a"], "y": ["b"]}, "y", "y"),
        ({"x": ["a"], "y": ["b"]}, "z", None),
        ({"x": ["a"], "y": ["b", "c"], "z": ["d", "e"]}, "x", None),
    ],
)
def test_most_workers_decide_and_between_equals_what_was_served(
    held: dict[str, list[str]], before: str | None, served: str | None
) -> None:
    assert served_digest(held, before) == served


def test_digests_are_described_with_their_workers_in_one_order() -> None:
    held = {"y" * 64: ["h:2", "h:1"], "x": ["h:3"], "": ["h:4"]}
    expected = "without a digest on h:4; x on h:3; yyyyyyyyyyyy on h:1, h:2"
    assert described(held) == expected
    assert described(dict(reversed(held.items()))) == expected
