"""Exact-match verification: total over what a drafter may say, and counted exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbraid.speculative.acceptance import (
    AcceptanceCounts,
    WindowOutcome,
    accepted_length,
    usable_drafts,
    verify_by_match,
)

ANY_INT = st.integers(-(1 << 65), 1 << 65) | st.integers(-2, 4)


@pytest.mark.parametrize(
    ("drafts", "samples", "accepted"),
    [
        ([], [5], 0),
        ([5], [5, 6], 1),
        ([5, 6, 7], [5, 6, 7, 8], 3),
        ([5, 9, 7], [5, 6, 7, 8], 1),
        ([9, 6, 7], [5, 6, 7, 8], 0),
        # The last sample has no draft after it; a draft without a row is not accepted.
        ([5, 6], [5, 6], 1),
        ([5], [5], 0),
        # Rows behind the drafts are padding.
        ([5], [5, 6, 7, 8], 1),
        ([-1, -1], [0, 0, 0], 0),
        ([1 << 40], [3, 4], 0),
    ],
)
def test_drafts_are_accepted_up_to_the_first_that_differs(
    drafts: list[int], samples: list[int], accepted: int
) -> None:
    assert accepted_length(drafts, samples) == accepted


def test_a_window_without_a_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        accepted_length([1, 2], [])


@given(st.lists(ANY_INT, max_size=6), st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_emitted_tokens_are_the_targets_whatever_the_drafts(
    drafts: list[int], samples: list[int]
) -> None:
    outcome = verify_by_match(drafts, samples)
    accepted = outcome.num_accepted
    assert 0 <= accepted <= outcome.num_proposed <= len(samples) - 1
    assert outcome.num_emitted <= len(samples)
    # Row j saw drafts 1..j, and these are the emitted tokens before it: the row is a real one.
    assert drafts[:accepted] == samples[:accepted]
    if accepted < outcome.num_proposed:
        assert drafts[accepted] != samples[accepted]


@given(st.lists(ANY_INT, max_size=8), st.integers(1, 4))
def test_bug_19_only_token_ids_reach_the_target(drafts: list[int], vocab_size: int) -> None:
    usable = usable_drafts(drafts, vocab_size)
    assert all(0 <= token_id < vocab_size for token_id in usable)
    assert list(usable) == drafts[: len(usable)]
    assert len(usable) == len(drafts) or not 0 <= drafts[len(usable)] < vocab_size


def test_counts_by_position_are_recomputed_from_the_windows() -> None:
    outcomes = [WindowOutcome(3, 3), WindowOutcome(3, 0), WindowOutcome(2, 1), WindowOutcome(1, 1)]
    counts = AcceptanceCounts(4)
    assert counts.acceptance_length == 1.0
    for outcome in outcomes:
        counts.add(outcome)
    # Position 0 counts like any other (bug 35).
    assert counts.num_proposed_by_position == [4, 3, 2, 0]
    assert counts.num_accepted_by_position == [3, 1, 1, 0]
    assert (counts.num_proposed, counts.num_accepted) == (9, 5)
    assert counts.acceptance_length == sum(o.num_emitted for o in outcomes) / len(outcomes)
