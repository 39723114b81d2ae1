"""Laws of emitted tokens with the project's real noise: fixed keys, thresholds of 1e-9.

The target and the drafter are Markov chains, so the law of consecutive tokens is known.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvbraid.sampling_key import sampling_key
from kvbraid.sampling_noise import hash_words, negative_gumbel, row_words, token_words
from kvbraid.speculative.acceptance import accepted_length
from kvbraid.speculative.ratio_test import KeyedChance, draft_key, uniform, verify_by_ratio

CPU = torch.device("cpu")
VOCAB = 8
NUM_KEYS = 100_000
ANCHOR_POSITION = 11
GENERATOR = torch.Generator().manual_seed(20)
TARGET = 1.2 * torch.randn(VOCAB, VOCAB, generator=GENERATOR)
DRAFT = TARGET + 0.7 * torch.randn(VOCAB, VOCAB, generator=GENERATOR)
P = TARGET.softmax(1).double()
# Chi-square quantiles at 1e-9 by degrees of freedom (spec.md 3.7).
LIMITS = {2: 41.4, 7: 55.9, 15: 73.6, 63: 155.1}


def chi_square(cells: Tensor, law: Tensor) -> float:
    """cells: int64 [n]; law: [k], all cells expected 5 times or more."""
    expected = law.double() * len(cells)
    assert expected.min() >= 5
    counts = torch.bincount(cells, minlength=len(law)).double()
    return float(((counts - expected) ** 2 / expected).sum())


def total_variation(cells: Tensor, law: Tensor) -> float:
    counts = torch.bincount(cells, minlength=len(law)).double()
    return float(0.5 * (counts / len(cells) - law).abs().sum())


def variation_limit(num_cells: int, num_draws: int) -> float:
    """What the empirical TV of a right sampler exceeds with probability 1e-9 at most."""
    bias = 0.5 * math.sqrt((num_cells - 1) / num_draws)
    return bias + math.sqrt(math.log(1e9) / (2 * num_draws))


def noise(keys: Tensor, position: int) -> Tensor:
    """Gumbel noise of the token at a position: float32 [n, VOCAB]."""
    words = row_words(keys, torch.full_like(keys, position))
    return -negative_gumbel(
        hash_words(token_words(0, VOCAB, CPU), words.a[:, None], words.b[:, None])
    )


def signed_keys(count: int) -> Tensor:
    keys = [sampling_key(seed, 0) for seed in range(count)]
    return torch.tensor([key - (1 << 64) if key >> 63 else key for key in keys])


@pytest.fixture(scope="module")
def keys() -> Tensor:
    return signed_keys(NUM_KEYS)


@pytest.fixture(scope="module")
def gumbel(keys: Tensor) -> list[Tensor]:
    """Noise of the five tokens after the anchor."""
    return [noise(keys, ANCHOR_POSITION + 1 + n) for n in range(5)]


def plain(anchor: Tensor, gumbel: list[Tensor]) -> Tensor:
    """Tokens of plain decoding: [n, 5]."""
    tokens = [anchor]
    for g in gumbel:
        tokens.append((TARGET[tokens[-1]] + g).argmax(1))
    return torch.stack(tokens[1:], dim=1)


def pairs(tokens: Tensor) -> Tensor:
    return tokens[:, 0] * VOCAB + tokens[:, 1]


PAIR_LAW = (P[0][:, None] * P).flatten()
ANCHOR = torch.zeros(NUM_KEYS, dtype=torch.int64)


def coupled_round(anchor: Tensor, gumbel: list[Tensor], num_drafts: int) -> tuple[Tensor, Tensor]:
    """One window of exact match with drafts that share the noise: samples [n, k + 1], accepted."""
    drafts, samples, last = [], [], anchor
    for n in range(num_drafts + 1):
        samples.append((TARGET[last] + gumbel[n]).argmax(1))
        if n < num_drafts:
            last = (DRAFT[last] + gumbel[n]).argmax(1)
            drafts.append(last)
    columns = torch.stack(samples, dim=1)
    rows = torch.stack(drafts, dim=1)
    accepted = [accepted_length(x, y) for x, y in zip(rows.tolist(), columns.tolist(), strict=True)]
    return columns, torch.tensor(accepted)


def exact_match(gumbel: list[Tensor], num_drafts: int) -> tuple[Tensor, float]:
    """First two tokens of windows one after another, and the share of first drafts accepted."""
    samples, accepted = coupled_round(ANCHOR, gumbel, num_drafts)
    again, _ = coupled_round(samples[:, 0], gumbel[1:], num_drafts)
    second = torch.where(accepted > 0, samples[:, 1], again[:, 0])
    return torch.stack((samples[:, 0], second), dim=1), (accepted > 0).double().mean().item()


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_exact_match_follows_the_joint_law_of_consecutive_tokens(
    gumbel: list[Tensor], num_drafts: int
) -> None:
    tokens, acceptance = exact_match(gumbel, num_drafts)
    assert 0.6 < acceptance < 0.95, "inconclusive: nothing or everything was accepted"
    assert chi_square(tokens[:, 0], P[0]) < LIMITS[7]
    assert chi_square(pairs(tokens), PAIR_LAW) < LIMITS[63]
    assert total_variation(pairs(tokens), PAIR_LAW) < variation_limit(VOCAB**2, NUM_KEYS)
    # The check can fail: a law that is off by a few percent does not fit.
    wrong = ((TARGET[0] * 1.05).softmax(0).double()[:, None] * P).flatten()
    assert chi_square(pairs(tokens), wrong) > LIMITS[63]


def test_bug_22_a_seeds_tokens_do_not_depend_on_the_draft_length(gumbel: list[Tensor]) -> None:
    expected = plain(ANCHOR, gumbel)[:, :2]
    for num_drafts in (1, 2, 3):
        assert torch.equal(exact_match(gumbel, num_drafts)[0], expected)


def test_bug_22_control_noise_drawn_in_order_depends_on_the_draft_length() -> None:
    """A sequential generator consumed once a row gives other tokens for another length."""

    def tokens(num_drafts: int) -> list[int]:
        generator = torch.Generator().manual_seed(3)
        emitted = [0]
        while len(emitted) < 20:
            drafts = [7] * num_drafts
            u = torch.rand(num_drafts + 1, VOCAB, generator=generator)
            last = torch.tensor([emitted[-1], *drafts])
            samples = (TARGET[last] - (-u.log()).log()).argmax(1).tolist()
            emitted += samples[: accepted_length(drafts, samples) + 1]
        return emitted[:20]

    assert tokens(1) != tokens(3)


@pytest.mark.parametrize("adversary", ["random", "all eos", "-1", "out of range", "always wrong"])
def test_any_drafter_leaves_every_token_as_it_is(adversary: str) -> None:
    keys = signed_keys(200)
    steps = [noise(keys, position) for position in range(16)]
    random = torch.Generator().manual_seed(9)
    for row in range(len(keys)):
        expected = [0]
        for g in steps:
            expected.append(int((TARGET[expected[-1]] + g[row]).argmax()))
        emitted = [0]
        while len(emitted) < len(expected):
            at = len(emitted) - 1
            room = len(expected) - len(emitted)
            count = min(int(torch.randint(0, 4, (), generator=random)), room - 1)
            drafts = {
                "random": torch.randint(0, VOCAB, (count,), generator=random).tolist(),
                "all eos": [VOCAB - 1] * count,
                "-1": [-1] * count,
                "out of range": [VOCAB + 5] * count,
                "always wrong": [(expected[at + 1 + n] + 1) % VOCAB for n in range(count)],
            }[adversary]
            history = [emitted[-1], *(min(max(x, 0), VOCAB - 1) for x in drafts)]
            samples = [
                int((TARGET[token] + steps[at + n][row]).argmax())
                for n, token in enumerate(history)
            ]
            emitted += samples[: accepted_length(drafts, samples) + 1]
        assert emitted == expected


def test_bug_2_draft_and_residual_from_one_gumbel_stream_are_caught(gumbel: list[Tensor]) -> None:
    q = DRAFT.softmax(1).double()
    draft = (DRAFT[0] + gumbel[0]).argmax(1)
    redraw = ((P[0] - q[0]).clamp(min=0).log() + gumbel[0]).argmax(1)
    accept = torch.rand(NUM_KEYS, generator=torch.Generator().manual_seed(2)).double()
    tokens = torch.where(accept < (P[0] / q[0])[draft], draft, redraw)
    assert chi_square(tokens, P[0]) > LIMITS[7]
    # With noise of its own the redraw is right: the shared stream is what is wrong.
    own = ((P[0] - q[0]).clamp(min=0).log() + gumbel[3]).argmax(1)
    tokens = torch.where(accept < (P[0] / q[0])[draft], draft, own)
    assert chi_square(tokens, P[0]) < LIMITS[7]


def test_bug_37_accept_if_equal_then_a_fresh_draw_is_caught(gumbel: list[Tensor]) -> None:
    draft = (DRAFT[0] + gumbel[0]).argmax(1)
    target = (TARGET[0] + gumbel[0]).argmax(1)
    fresh = (TARGET[0] + gumbel[3]).argmax(1)
    assert chi_square(torch.where(draft == target, draft, fresh), P[0]) > LIMITS[7]
    assert chi_square(torch.where(draft == target, draft, target), P[0]) < LIMITS[7]


def test_reusing_a_positions_noise_for_the_bonus_token_shows_in_pairs(
    gumbel: list[Tensor],
) -> None:
    """Marginals alone would not have noticed much; the joint law does."""
    first = (TARGET[0] + gumbel[0]).argmax(1)
    second = (TARGET[first] + gumbel[0]).argmax(1)
    assert chi_square(first, P[0]) < LIMITS[7]
    assert chi_square(pairs(torch.stack((first, second), dim=1)), PAIR_LAW) > LIMITS[63]


# -- the ratio test with its keyed noise -------------------------------------------------------

SMALL = 4
NUM_RATIO_KEYS = 12_000
SMALL_P = (TARGET[:SMALL, :SMALL] / 1.5).softmax(1).double()
SMALL_Q = (DRAFT[:SMALL, :SMALL] / 1.5).softmax(1).double()
SMALL_PAIRS = (SMALL_P[0][:, None] * SMALL_P).flatten()


def ratio_tokens(num_keys: int, *, shares_streams: bool) -> Tensor:
    """First two tokens of windows of one sampled draft, for many keys: [n, 2]."""
    cumulative = SMALL_Q.cumsum(1).tolist()
    rows = []
    for seed in range(num_keys):
        key = sampling_key(seed, 0)
        emitted = [0]
        while len(emitted) < 3:
            position = len(emitted)
            own = KeyedChance(draft_key(key, position - 1))
            number = uniform(key, position, 0xA5C3_0001)  # the stream of the accept test
            draft = (
                sum(number > bound for bound in cumulative[emitted[-1]][:-1])
                if shares_streams
                else own.draws(position, SMALL_Q[emitted[-1]])
            )
            emitted += verify_by_ratio(
                [draft],
                SMALL_P[[emitted[-1], draft]],
                SMALL_Q[[emitted[-1]]],
                first_position=position,
                chance=KeyedChance(key),
            )
        rows.append(emitted[1:3])
    return torch.tensor(rows)


def test_ratio_test_with_keyed_noise_follows_the_joint_law() -> None:
    tokens = ratio_tokens(NUM_RATIO_KEYS, shares_streams=False)
    cells = tokens[:, 0] * SMALL + tokens[:, 1]
    assert chi_square(cells, SMALL_PAIRS) < LIMITS[15]
    assert total_variation(cells, SMALL_PAIRS) < variation_limit(SMALL**2, NUM_RATIO_KEYS)


def test_control_a_draft_from_the_accept_stream_is_caught() -> None:
    tokens = ratio_tokens(NUM_RATIO_KEYS // 2, shares_streams=True)
    cells = tokens[:, 0] * SMALL + tokens[:, 1]
    assert chi_square(cells, SMALL_PAIRS) > LIMITS[15]


# -- the noise ---------------------------------------------------------------------------------


def test_noise_is_finite_at_the_edges_and_over_a_stride_of_all_hashes() -> None:
    edges = [0, 1, 2, 3, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 32) - 2, (1 << 32) - 1]
    # A stride prime to 2**32 meets every residue of the low bits.
    words = torch.cat((torch.tensor(edges), torch.arange(0, 1 << 32, 4093)))
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    values = -negative_gumbel(signed.clone())
    assert values.isfinite().all()
    assert values.min() > -2.82
    assert values.max() < 22.2
    # The noise falls with the hash, to rounding: no value wraps.
    assert values[len(edges) :].diff().max() < 1e-5
