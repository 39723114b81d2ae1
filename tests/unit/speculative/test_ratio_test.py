"""The ratio test emits the target's law, by exact enumeration; what bends it is caught."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbraid.speculative.acceptance import accepted_length
from kvbraid.speculative.ratio_test import (
    KeyedChance,
    acceptance_probability,
    draft_key,
    residual,
    uniform,
    verify_by_ratio,
)
from kvbraid.speculative.verify_budget import best_width, causal_width
from tests.unit.speculative.exact_law import (
    BranchingChance,
    Tokens,
    TokenTable,
    exact_law,
    largest_difference,
    law_of_first_tokens,
    target_law,
)

EXACT = 1e-12
BENT = 1e-3
SEEDS = [1, 2, 3]
MAX_DRAFTS = 3

Cut = Callable[[TokenTable, TokenTable, Tokens, Tokens], int]
Window = Callable[[Tokens, BranchingChance], list[int]]


def draw_drafts(
    prefix: Tokens, row: Callable[[Tokens], Tensor], chance: BranchingChance, count: int
) -> Tokens:
    drafts: Tokens = ()
    for _ in range(count):
        drafts = (*drafts, chance.draws(0, row(prefix + drafts)))
    return drafts


def keep_all(target: TokenTable, draft: TokenTable, prefix: Tokens, drafts: Tokens) -> int:
    return len(drafts)


def sampled_window(target: TokenTable, draft: TokenTable, cut: Cut, count: int) -> Window:
    def window(prefix: Tokens, chance: BranchingChance) -> list[int]:
        drafts = draw_drafts(prefix, draft.row, chance, count)
        drafts = drafts[: cut(target, draft, prefix, drafts)]
        return verify_by_ratio(
            drafts,
            target.rows(prefix, drafts),
            draft.rows(prefix, drafts)[:-1],
            first_position=len(prefix),
            chance=chance,
        )

    return window


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_ratio_test_keeps_the_law_for_any_fixed_length(seed: int, count: int) -> None:
    target, draft = TokenTable(seed), TokenTable(seed + 100)
    law = law_of_first_tokens(sampled_window(target, draft, keep_all, count))
    assert largest_difference(law, target_law(target)) < EXACT


# -- variable length ---------------------------------------------------------------------------

# The first draft alone does not pay: it is verified in the hope for the next ones.
SECONDS = np.array([1.0, 1.9, 2.0, 2.1])
SEEN_WIDTHS: set[int] = set()


def confidences(
    target: TokenTable, draft: TokenTable, prefix: Tokens, drafts: Tokens
) -> list[float]:
    """What a perfect head says: 1 - TV(p, q) of each slot, a function of the drafts before it."""
    return [
        1.0
        - 0.5
        * float((target.row(prefix + drafts[:n]) - draft.row(prefix + drafts[:n])).abs().sum())
        for n in range(len(drafts))
    ]


def cut_causally(target: TokenTable, draft: TokenTable, prefix: Tokens, drafts: Tokens) -> int:
    acceptance = np.array([confidences(target, draft, prefix, drafts)])
    width = causal_width(acceptance, np.full(acceptance.shape, 0.6), SECONDS)
    SEEN_WIDTHS.add(width)
    return width - 1


def cut_at_the_best_width(
    target: TokenTable, draft: TokenTable, prefix: Tokens, drafts: Tokens
) -> int:
    acceptance = np.array([confidences(target, draft, prefix, drafts)])
    return best_width(acceptance, acceptance, SECONDS) - 1


def cut_unlikely_drafts(
    target: TokenTable, draft: TokenTable, prefix: Tokens, drafts: Tokens
) -> int:
    for n, token in enumerate(drafts):
        if target.row(prefix + drafts[:n])[token] < draft.row(prefix + drafts[:n])[token]:
            return n
    return len(drafts)


@pytest.mark.parametrize("seed", SEEDS)
def test_causal_widths_keep_the_law(seed: int) -> None:
    SEEN_WIDTHS.clear()
    target, draft = TokenTable(seed), TokenTable(seed + 100)
    law = law_of_first_tokens(sampled_window(target, draft, cut_causally, MAX_DRAFTS))
    assert len(SEEN_WIDTHS) >= 2, "the length did not vary: the test would say nothing"
    assert largest_difference(law, target_law(target)) < EXACT


def test_control_a_cut_that_has_seen_what_it_cuts_off_is_caught() -> None:
    """Appendix A of the paper: retrospective cuts."""
    target, draft = TokenTable(1), TokenTable(101)
    law = law_of_first_tokens(sampled_window(target, draft, cut_unlikely_drafts, MAX_DRAFTS))
    assert largest_difference(law, target_law(target)) > BENT


def test_control_the_best_of_all_widths_is_not_for_the_ratio_test() -> None:
    differences = []
    for seed in range(1, 9):
        target, draft = TokenTable(seed), TokenTable(seed + 100)
        law = law_of_first_tokens(sampled_window(target, draft, cut_at_the_best_width, MAX_DRAFTS))
        differences.append(largest_difference(law, target_law(target)))
    assert max(differences) > BENT


# -- exact match -------------------------------------------------------------------------------


def matched_window(target: TokenTable, draft: TokenTable, cut: Cut) -> Window:
    def window(prefix: Tokens, chance: BranchingChance) -> list[int]:
        drafts = draw_drafts(prefix, draft.row, chance, 2)
        drafts = drafts[: cut(target, draft, prefix, drafts)]
        samples = [
            chance.draws(len(prefix) + n, row) for n, row in enumerate(target.rows(prefix, drafts))
        ]
        return samples[: accepted_length(drafts, samples) + 1]

    return window


@pytest.mark.parametrize("cut", [keep_all, cut_unlikely_drafts, cut_at_the_best_width])
def test_exact_match_keeps_the_law_for_any_cut(cut: Cut) -> None:
    target, draft = TokenTable(4), TokenTable(104)
    if cut is cut_at_the_best_width:
        cut = lambda t, d, p, x: min(  # noqa: E731
            cut_at_the_best_width(t, d, p, (*x, 0)), len(x)
        )
    law = law_of_first_tokens(matched_window(target, draft, cut))
    assert largest_difference(law, target_law(target)) < EXACT


def greedy_drafts(prefix: Tokens, draft: TokenTable, count: int) -> Tokens:
    drafts: Tokens = ()
    for _ in range(count):
        drafts = (*drafts, int(draft.row(prefix + drafts).argmax()))
    return drafts


@pytest.mark.parametrize("seed", SEEDS)
def test_bug_27_a_greedy_drafter_is_a_point_mass_and_equals_exact_match(seed: int) -> None:
    """Not only the emitted law: the accepted counts have the same joint law too."""
    target, draft = TokenTable(seed), TokenTable(seed + 100)
    drafts = greedy_drafts((), draft, MAX_DRAFTS)
    rows = target.rows((), drafts)

    def by_ratio(chance: BranchingChance) -> list[int]:
        return verify_by_ratio(drafts, rows, None, first_position=0, chance=chance)

    def by_one_hot_rows(chance: BranchingChance) -> list[int]:
        one_hot = torch.eye(3, dtype=torch.float64)[list(drafts)]
        return verify_by_ratio(drafts, rows, one_hot, first_position=0, chance=chance)

    def by_match(chance: BranchingChance) -> list[int]:
        samples = [chance.draws(n, row) for n, row in enumerate(rows)]
        return samples[: accepted_length(drafts, samples) + 1]

    expected = exact_law(by_match)
    assert largest_difference(exact_law(by_ratio), expected) < EXACT
    assert largest_difference(exact_law(by_one_hot_rows), expected) < EXACT


def test_greedy_target_accepts_what_is_its_argmax() -> None:
    target = torch.eye(3)[[2, 0, 1]]
    chance = KeyedChance(5)
    for drafts, emitted in [([2, 0], [2, 0, 1]), ([2, 1], [2, 0]), ([0, 0], [2])]:
        assert verify_by_ratio(drafts, target, None, first_position=9, chance=chance) == emitted


# -- controls of what is known to be wrong -----------------------------------------------------


def check_caught(window: Window, target: TokenTable) -> None:
    law = law_of_first_tokens(window)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert largest_difference(law, target_law(target)) > BENT


def window_with_wrong_q(
    target: TokenTable, draft: TokenTable, drawn: Callable[[Tokens], Tensor]
) -> Window:
    """Drafts drawn from `drawn`, verified against the whole q."""

    def window(prefix: Tokens, chance: BranchingChance) -> list[int]:
        drafts = draw_drafts(prefix, drawn, chance, 2)
        return verify_by_ratio(
            drafts,
            target.rows(prefix, drafts),
            draft.rows(prefix, drafts)[:-1],
            first_position=len(prefix),
            chance=chance,
        )

    return window


def test_bug_38_greedy_draft_with_softmax_q_is_caught() -> None:
    target, draft = TokenTable(5), TokenTable(105)
    greedy = torch.eye(3, dtype=torch.float64)
    check_caught(
        window_with_wrong_q(target, draft, lambda prefix: greedy[draft.row(prefix).argmax()]),
        target,
    )


def test_control_draft_at_another_temperature_is_caught() -> None:
    target, draft = TokenTable(5), TokenTable(105)
    check_caught(
        window_with_wrong_q(
            target, draft, lambda prefix: (draft.row(prefix).log() / 0.9).softmax(0)
        ),
        target,
    )


def test_control_truncated_draft_with_full_q_is_caught() -> None:
    target, draft = TokenTable(5), TokenTable(105)

    def top_two(prefix: Tokens) -> Tensor:
        row = draft.row(prefix).clone()
        row[row.argmin()] = 0
        return row / row.sum()

    check_caught(window_with_wrong_q(target, draft, top_two), target)


def test_bug_37_accept_if_equal_then_a_fresh_redraw_is_caught() -> None:
    target, draft = TokenTable(5), TokenTable(105)

    def window(prefix: Tokens, chance: BranchingChance) -> list[int]:
        (token,) = draw_drafts(prefix, draft.row, chance, 1)
        if chance.draws(0, target.row(prefix)) == token:
            return [token]
        return [chance.draws(0, target.row(prefix))]

    check_caught(window, target)


def test_bug_27_point_mass_acceptance_with_a_softmax_residual_is_caught() -> None:
    target, draft = TokenTable(5), TokenTable(105)

    def window(prefix: Tokens, chance: BranchingChance) -> list[int]:
        (token,) = draw_drafts(prefix, draft.row, chance, 1)
        p = target.row(prefix)
        if chance.accepts(0, float(p[token])):
            return [token]
        return [chance.draws(0, residual(p, draft.row(prefix)))]

    check_caught(window, target)


# -- edges -------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [-1, 3, 1 << 40])
@pytest.mark.parametrize("has_rows", [True, False])
def test_a_draft_that_is_no_token_ends_the_window_with_a_draw_from_p(
    token: int, has_rows: bool
) -> None:
    target = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]], dtype=torch.float64)
    rows = torch.full((1, 3), 1 / 3, dtype=torch.float64) if has_rows else None
    law = exact_law(
        lambda chance: verify_by_ratio([token], target, rows, first_position=0, chance=chance)
    )
    assert law == pytest.approx({(0,): 0.2, (1,): 0.5, (2,): 0.3})


def test_a_draft_that_q_cannot_draw_is_none() -> None:
    target = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]], dtype=torch.float64)
    draft = torch.tensor([[0.0, 0.5, 0.5]], dtype=torch.float64)
    law = exact_law(
        lambda chance: verify_by_ratio([0], target, draft, first_position=0, chance=chance)
    )
    assert law == pytest.approx({(0,): 0.2, (1,): 0.5, (2,): 0.3})


def test_residual_without_mass_is_p() -> None:
    p = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    assert torch.equal(residual(p, p), p)
    q = p + torch.tensor([-1e-9, 5e-10, 5e-10], dtype=torch.float64)
    assert torch.equal(residual(p, q), p)
    q = p + torch.tensor([-1e-7, 5e-8, 5e-8], dtype=torch.float64)
    assert residual(p, q).tolist() == pytest.approx([1e-7, 0.0, 0.0])
    assert acceptance_probability(p, q, 0) == 1.0


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([float("nan"), 0.5, 0.5], "add up to 1"),
        ([0.5, 0.7, -0.2], "add up to 1"),
        ([0.5, 0.2, 0.2], "add up to 1"),
        ([0.5, 0.5], "must be"),
    ],
)
def test_rows_that_are_no_law_are_refused(row: list[float], reason: str) -> None:
    good = torch.full((1, 3), 1 / 3)
    bad = torch.tensor([row])
    chance = KeyedChance(1)
    with pytest.raises(ValueError, match=f"draft rows .*{reason}"):
        verify_by_ratio([0], good.expand(2, 3), bad, first_position=0, chance=chance)
    if len(row) == 3:
        with pytest.raises(ValueError, match="target rows"):
            verify_by_ratio([], bad, None, first_position=0, chance=chance)
    with pytest.raises(ValueError, match="float16"):
        verify_by_ratio([], good.half(), None, first_position=0, chance=chance)


@pytest.mark.parametrize("number", [0.0, 2.0**-54, 0.5, 1.0 - 2.0**-53, 1.0])
def test_tokens_of_probability_zero_are_never_drawn(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbraid.speculative.ratio_test.uniform", lambda *_: number)
    weights = torch.tensor([0.0, 0.3, 0.0, 1e-12, 0.0], dtype=torch.float64)
    assert KeyedChance(0).draws(0, weights) in (1, 3)


def test_uniform_numbers_are_inside_the_open_interval_and_disjoint() -> None:
    keys = [0, 1, -1, (1 << 64) - 1, 1 << 63]
    numbers = [
        uniform(key, position, purpose)
        for key in keys
        for position in (0, 1, 4095)
        for purpose in (1, 2)
    ]
    assert all(0.0 < number < 1.0 for number in numbers)
    # The signed and the unsigned form of a key are one key.
    assert uniform(-1, 7, 1) == uniform((1 << 64) - 1, 7, 1)
    assert len(set(numbers)) == len(numbers) - 6
    assert len({draft_key(key, start) for key in (0, 1) for start in range(100)}) == 200
