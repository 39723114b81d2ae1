"""The ratio test as the engine runs it: logits, processors, shards and keyed noise included.

Exact laws by enumeration at V = 3, laws of many keys by chi-square; what is known to bend the law
(spec.md 3.4) must be caught.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.layout import shard_range
from attention.single_group import SingleGroup
from kvbraid.engine import ratio_verification
from kvbraid.engine.draft_drawing import LawfulDrawing
from kvbraid.engine.rank_state import RankSequence
from kvbraid.engine.ratio_verification import RatioTest
from kvbraid.engine.sampler import SampleResult, sample, target_scores
from kvbraid.engine.sampling_state import SequenceSampling, build_rows
from kvbraid.engine.verification import Emitted, ExactMatch, Window
from kvbraid.request import SamplingParams
from kvbraid.sampling_key import sampling_key
from kvbraid.speculative.draft_sampler import DraftSampler
from kvbraid.speculative.proposal import DraftSampling, DraftTask, Proposal
from kvbraid.speculative.ratio_test import Chance, verify_by_ratio
from kvbraid.speculative.vocabulary_weights import VocabularyWeights
from tests.unit.engine.test_sampler_filters import reference_logits, reference_support
from tests.unit.speculative.exact_law import (
    HORIZON,
    VOCAB,
    BranchingChance,
    Law,
    Tokens,
    TokenTable,
    largest_difference,
    law_of_first_tokens,
)

CPU = torch.device("cpu")
EXACT = 1e-12
ROUNDED = 1e-6  # logits are edited in float32
BENT = 1e-3
PROMPT = (0,)
WANTS_LAW = DraftSampling(1.0, 0, wants_law=True)


class Sampler:
    """A model runner's half: rows of logits to samples, of one rank."""

    def __init__(self, vocab_shard: range, group: Any) -> None:
        self.vocab_shard = vocab_shard
        self.group = group

    def sample(self, logits: Tensor, sequences: Any, assumed: Any) -> SampleResult:
        rows = build_rows(
            [s.sampling for s in sequences],
            positions=[len(s.token_ids) + len(a) for s, a in zip(sequences, assumed, strict=True)],
            assumed=assumed,
            vocab_shard=self.vocab_shard,
            device=CPU,
        )
        return sample(logits, self.vocab_shard.start, self.group, rows)


def running(
    params: SamplingParams, output: Iterable[int] = (), *, slot: int = 0, key: int = 7
) -> RankSequence:
    """A sequence behind its one-token prompt."""
    token_ids = [*PROMPT, *output]
    sampling = SequenceSampling(params, key=key, token_ids=token_ids, num_prompt_tokens=len(PROMPT))
    return RankSequence(slot, sampling, token_ids, 0)


def ratio_test(vocab_size: int, chance: Chance | None = None) -> RatioTest:
    options = {} if chance is None else {"chance_of": lambda sequence: chance}
    return RatioTest(
        vocab_shard=range(vocab_size), vocab_size=vocab_size, group=SingleGroup(), **options
    )


def give_laws(verification: RatioTest, slot: int, laws: Tensor | None) -> bool:
    drawing = verification.drawing
    assert isinstance(drawing, LawfulDrawing)
    return drawing.is_usable(slot, Proposal(laws=laws), WANTS_LAW)


# -- exact laws --------------------------------------------------------------------------------


class Engine:
    """Windows of one sequence of 3 tokens. logits of a prefix are the table's log-probabilities."""

    def __init__(self, params: SamplingParams, seed: int) -> None:
        self.params = params
        self.target = TokenTable(seed)
        self.draft = TokenTable(seed + 100)

    def logits(self, prefix: Tokens) -> Tensor:
        return self.target.row(prefix).log().float()

    def law(self, prefix: Tokens) -> Tensor:
        """What plain decoding draws the next token from, in float64."""
        edited = reference_logits(
            self.logits(prefix).tolist(), self.params, list(PROMPT), list(prefix)
        )
        scaled = torch.tensor(edited, dtype=torch.float64) / self.params.temperature
        sure, possible = reference_support(scaled, self.params)
        assert sure == possible
        kept = torch.tensor([token in sure for token in range(VOCAB)])
        return torch.where(kept, scaled, -torch.inf).softmax(0)

    def plain_law(self) -> Law:
        return {
            tokens: float(
                torch.stack([self.law(tokens[:n])[tokens[n]] for n in range(HORIZON)]).prod()
            )
            for tokens in itertools.product(range(VOCAB), repeat=HORIZON)
        }

    def window(
        self, drawn: Callable[[Tokens], Tensor], stated: Callable[[Tokens], Tensor], count: int
    ) -> Callable[[Tokens, BranchingChance], tuple[int, ...]]:
        """Drafts are drawn from `drawn` and verified against `stated`."""

        def window(prefix: Tokens, chance: BranchingChance) -> tuple[int, ...]:
            drafts: Tokens = ()
            for _ in range(count):
                drafts = (*drafts, chance.draws(0, drawn(prefix + drafts)))
            verification = ratio_test(VOCAB, chance)
            q = torch.stack([stated(prefix + drafts[:n]) for n in range(count)])
            assert give_laws(verification, 0, q)
            rows = torch.stack([self.logits(prefix + drafts[:n]) for n in range(count + 1)])
            sequence = running(self.params, prefix)
            (emitted,) = verification.verify(NoSampler(), rows, [(sequence, drafts)])
            return emitted.token_ids

        return window

    def difference(
        self, drawn: Callable[[Tokens], Tensor], stated: Callable[[Tokens], Tensor], count: int
    ) -> float:
        law = law_of_first_tokens(self.window(drawn, stated, count))
        assert sum(law.values()) == pytest.approx(1.0, abs=1e-9)
        return largest_difference(law, self.plain_law())


class NoSampler:
    def sample(self, logits: Tensor, sequences: Any, assumed: Any) -> SampleResult:
        raise AssertionError("a sampled window with drafts is not verified by exact match")


PROCESSED = {
    "plain": (SamplingParams(temperature=1.0, seed=0), EXACT),
    "cold": (SamplingParams(temperature=0.5, seed=0), EXACT),
    "top_k": (SamplingParams(temperature=1.0, seed=0, top_k=2), EXACT),
    "top_p": (SamplingParams(temperature=1.0, seed=0, top_p=0.7), EXACT),
    "min_p": (SamplingParams(temperature=2.0, seed=0, min_p=0.3), EXACT),
    "penalties": (
        SamplingParams(
            temperature=1.0, seed=0, frequency_penalty=0.75, presence_penalty=0.25,
            repetition_penalty=1.5,
        ),
        ROUNDED,
    ),
    "bias": (SamplingParams(temperature=1.0, seed=0, logit_bias={1: 1.5, 2: -0.5}), ROUNDED),
    "no stop yet": (
        SamplingParams(temperature=1.0, seed=0, stop_token_ids=(2,), min_tokens=2), ROUNDED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", PROCESSED)
def test_the_emitted_law_is_the_processed_target_law(name: str, count: int) -> None:
    """sglang 33643, vllm 42744: penalties, bias and filters of each row given the drafts before."""
    params, tolerance = PROCESSED[name]
    engine = Engine(params, 3)
    assert engine.difference(engine.draft.row, engine.draft.row, count) < tolerance


def test_a_filtered_draft_with_its_filtered_law_is_exact() -> None:
    engine = Engine(PROCESSED["top_k"][0], 5)

    def filtered(prefix: Tokens) -> Tensor:
        row = engine.draft.row(prefix).clone()
        row[row.argmin()] = 0
        return row / row.sum()

    assert engine.difference(filtered, filtered, 2) < EXACT


@pytest.mark.parametrize("control", ["temperature", "greedy", "top_2"])
def test_controls_drafts_of_another_law_than_stated_are_caught(control: str) -> None:
    engine = Engine(PROCESSED["plain"][0], 5)
    one_hot = torch.eye(VOCAB, dtype=torch.float64)

    def drawn(prefix: Tokens) -> Tensor:
        row = engine.draft.row(prefix)
        if control == "temperature":
            return (row.log() / 0.9).softmax(0)
        if control == "greedy":
            return one_hot[row.argmax()]
        kept = torch.where(row == row.min(), 0.0, row)
        return kept / kept.sum()

    assert engine.difference(drawn, engine.draft.row, 2) > BENT
    assert engine.difference(drawn, drawn, 2) < EXACT


def test_control_an_unprocessed_target_law_is_caught() -> None:
    """The test can tell a verification that forgets penalties from one that does not."""
    with_penalties = Engine(PROCESSED["penalties"][0], 3)
    without = Engine(PROCESSED["plain"][0], 3)
    law = law_of_first_tokens(without.window(without.draft.row, without.draft.row, 2))
    assert largest_difference(law, with_penalties.plain_law()) > BENT


# -- laws of many keys -------------------------------------------------------------------------

SMALL = 4
NUM_KEYS = 8000
GENERATOR = torch.Generator().manual_seed(31)
TARGET = torch.randn(SMALL, SMALL, generator=GENERATOR)
DRAFT = TARGET + 0.8 * torch.randn(SMALL, SMALL, generator=GENERATOR)
# The prompt's token is the one after which the drafter is worst: windows then often end early, and
# numbers that are used twice show.
WORST_FIRST = [3, 1, 2, 0]
TARGET, DRAFT = (logits[WORST_FIRST][:, WORST_FIRST] for logits in (TARGET, DRAFT))
LIMIT_15 = 73.6  # chi-square, 15 degrees of freedom, 1e-9
SAMPLED = SamplingParams(temperature=1.0, seed=0)


def drawn_with_noise(
    last: Tensor, drawn_as: list[DraftSampling], position: int
) -> tuple[Tensor, Tensor]:
    """One draft of each sequence by the drafter's own sampler, and the laws [n, V]."""
    tasks = [
        DraftTask(str(i), position, torch.zeros(0, 1), (), 0, 1, sampling=s)
        for i, s in enumerate(drawn_as)
    ]
    vocabulary = VocabularyWeights(torch.zeros(SMALL, 1), lambda hidden: hidden, None)
    sampler = DraftSampler(tasks, vocabulary, CPU)
    chosen = sampler.choose(DRAFT[last].clone(), 0)
    laws = [law for row, task in enumerate(tasks) if (law := sampler.laws(task, row)) is not None]
    assert len(laws) == len(tasks)
    return chosen, torch.stack(laws)


def two_tokens(*, is_greedy_draft: bool = False) -> tuple[Tensor, float]:
    """First two tokens of windows of one draft for many keys, and the share of drafts accepted."""
    verification = ratio_test(SMALL)
    drawing = verification.drawing
    keys = [sampling_key(seed, 0) for seed in range(NUM_KEYS)]
    sequences = [running(SAMPLED, slot=slot, key=key) for slot, key in enumerate(keys)]
    windows_of = [drawing.open(SamplingParams(temperature=1.0, seed=s), 0) for s in range(NUM_KEYS)]
    num_accepted = 0
    open_sequences = sequences
    while open_sequences:
        drawing.begin()
        last = torch.tensor([s.token_ids[-1] for s in open_sequences])
        anchors = [len(s.token_ids) - 1 for s in open_sequences]
        assert len(set(anchors)) == 1
        drawn_as = [
            windows_of[s.slot](anchor) for s, anchor in zip(open_sequences, anchors, strict=True)
        ]
        drafts, laws = drawn_with_noise(last, drawn_as, anchors[0])
        if is_greedy_draft:
            drafts = DRAFT[last].argmax(1)
        for sequence, law in zip(open_sequences, laws, strict=True):
            assert give_laws(verification, sequence.slot, law)
        rows = torch.stack((TARGET[last], TARGET[drafts]), 1).flatten(0, 1)
        windows: list[Window] = [
            (s, (int(d),)) for s, d in zip(open_sequences, drafts, strict=True)
        ]
        for (sequence, _), emitted in zip(
            windows, verification.verify(NoSampler(), rows, windows), strict=True
        ):
            num_accepted += len(emitted.token_ids) - 1
            for token_id in emitted.token_ids:
                sequence.append(token_id)
        open_sequences = [s for s in open_sequences if len(s.token_ids) < 3]
    return torch.tensor([s.token_ids[1:3] for s in sequences]), num_accepted / NUM_KEYS


def chi_square(tokens: Tensor) -> float:
    law = TARGET.softmax(1).double()
    expected = (law[0][:, None] * law).flatten() * len(tokens)
    assert expected.min() > 5
    counts = torch.bincount(tokens[:, 0] * SMALL + tokens[:, 1], minlength=SMALL**2).double()
    return float(((counts - expected) ** 2 / expected).sum())


def test_tokens_of_many_keys_follow_the_joint_law_of_plain_sampling() -> None:
    tokens, _ = two_tokens()
    assert chi_square(tokens) < LIMIT_15
    plain = Sampler(range(SMALL), SingleGroup())
    sequences = [running(SAMPLED, key=sampling_key(seed, 0)) for seed in range(NUM_KEYS)]
    for _ in range(2):
        last = torch.tensor([s.token_ids[-1] for s in sequences])
        drawn = plain.sample(TARGET[last], sequences, [()] * NUM_KEYS).token_ids.tolist()
        for sequence, token_id in zip(sequences, drawn, strict=True):
            sequence.append(token_id)
    assert chi_square(torch.tensor([s.token_ids[1:3] for s in sequences])) < LIMIT_15


def test_control_decisions_of_one_position_used_again_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def at_one_position(*args: Any, first_position: int, **options: Any) -> list[int]:
        return verify_by_ratio(*args, first_position=1, **options)

    monkeypatch.setattr(ratio_verification, "verify_by_ratio", at_one_position)
    tokens, _ = two_tokens()
    assert chi_square(tokens) > LIMIT_15


def test_the_share_of_accepted_drafts_is_what_theory_says() -> None:
    """1 - TV(p, q), more than exact match with the same noise can have."""
    _, share = two_tokens()
    p, q = TARGET.softmax(1)[0], DRAFT.softmax(1)[0]
    first = 1 - 0.5 * float((p - q).abs().sum())
    # The second windows of those that were refused have other rows: bounds by all rows.
    rows = 1 - 0.5 * (TARGET.softmax(1) - DRAFT.softmax(1)).abs().sum(1)
    low = first + (1 - first) * float(rows.min())
    high = first + (1 - first) * float(rows.max())
    assert low - 0.02 < share < high + 0.02


def test_control_a_greedy_draft_with_its_softmax_is_caught_in_the_joint_law() -> None:
    tokens, _ = two_tokens(is_greedy_draft=True)
    assert chi_square(tokens) > LIMIT_15


# -- pathwise ----------------------------------------------------------------------------------


def mixed_windows(vocab: int) -> tuple[list[Window], Tensor, dict[int, Tensor]]:
    """Greedy, sampled and filtered windows with and without drafts, their rows and laws."""
    generator = torch.Generator().manual_seed(5)
    params = [
        SamplingParams(temperature=0.0, seed=0, top_logprobs=2),
        SamplingParams(temperature=1.0, seed=1, top_logprobs=3),
        SamplingParams(temperature=0.8, seed=2, top_k=20, top_p=0.9),
        SamplingParams(temperature=1.2, seed=3, min_p=0.05, frequency_penalty=1.0),
        SamplingParams(temperature=1.0, seed=4),
    ]
    windows, laws, num_rows = [], {}, 0
    for slot, sampling in enumerate(params):
        count = 0 if slot == 4 else 1 + slot
        q = torch.randn(count, vocab, generator=generator).softmax(1)
        drafts = tuple(torch.multinomial(q, 1, generator=generator)[:, 0].tolist()) if count else ()
        windows.append((running(sampling, (5, 6), slot=slot, key=slot << 60), drafts))
        laws[slot] = q
        num_rows += count + 1
    return windows, torch.randn(num_rows, vocab, generator=generator), laws


def verified(group: Any, vocab: int = 101) -> list[Emitted]:
    windows, logits, laws = mixed_windows(vocab)
    shard = shard_range(vocab, group.rank, group.size)
    verification = RatioTest(vocab_shard=shard, vocab_size=vocab, group=group)
    if group.rank == 0:
        for slot, q in laws.items():
            if not windows[slot][0].sampling.is_greedy and len(q):
                assert give_laws(verification, slot, q)
    own = logits[:, shard.start : shard.stop].contiguous()
    return verification.verify(Sampler(shard, group), own, windows)


def test_every_rank_gets_the_same_tokens_in_any_number_of_ranks(as_threads: Any) -> None:
    """Rank 0 alone knows q; 101 tokens are no multiple of the ranks."""
    alone = verified(SingleGroup())
    assert [bool(e.logprobs) for e in alone] == [True, True, False, False, False]
    assert all(len(e.logprobs) in (0, len(e.token_ids)) for e in alone)
    assert all(
        [p.chosen.token_id for p in e.logprobs] == list(e.token_ids) for e in alone if e.logprobs
    )
    for size in (2, 3, 4):
        for by_rank in as_threads(size, verified):
            assert [e.token_ids for e in by_rank] == [e.token_ids for e in alone]


def test_windows_that_are_greedy_or_have_no_drafts_are_exact_match() -> None:
    windows, logits, _ = mixed_windows(101)
    by_match = ExactMatch().verify(Sampler(range(101), SingleGroup()), logits, windows)
    by_ratio = verified(SingleGroup())
    assert [by_ratio[i].token_ids for i in (0, 4)] == [by_match[i].token_ids for i in (0, 4)]
    assert by_ratio[0].logprobs == by_match[0].logprobs


@pytest.mark.parametrize("laws", [None, torch.full((2, VOCAB), torch.nan)])
def test_drafts_without_a_law_are_of_no_use_and_change_nothing(laws: Tensor | None) -> None:
    verification = ratio_test(VOCAB)
    assert not give_laws(verification, 0, laws)
    rows = torch.zeros(3, VOCAB)
    (emitted,) = verification.verify(NoSampler(), rows, [(running(SAMPLED), (1, 2))])
    (alone,) = verification.verify(NoSampler(), rows, [(running(SAMPLED), (2, 0))])
    assert emitted == alone
    assert len(emitted.token_ids) == 1


@pytest.mark.parametrize("bad_row", [0, 1, 2])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_are_never_emitted(bad_row: int, value: float) -> None:
    verification = ratio_test(VOCAB)
    certain = torch.eye(VOCAB)[[1, 2, 0]]
    assert give_laws(verification, 0, certain[:2].double())
    rows = torch.where(certain > 0, 0.0, -torch.inf)
    rows[bad_row] = value
    (emitted,) = verification.verify(NoSampler(), rows, [(running(SAMPLED), (1, 2))])
    assert emitted.token_ids == (1, 2, 0)[:bad_row]


@pytest.mark.parametrize("num_drafts", [1, 4, 7])
def test_an_oracle_has_every_sampled_draft_accepted(num_drafts: int) -> None:
    """q = p: acceptance g + 1, whatever was drawn."""
    verification, count = ratio_test(101), 50
    logits = torch.randn(count, num_drafts + 1, 101, generator=torch.Generator().manual_seed(2))
    windows = []
    for slot in range(count):
        q = logits[slot, :-1].softmax(1)
        drafts = torch.multinomial(q, 1, generator=torch.Generator().manual_seed(slot))[:, 0]
        assert give_laws(verification, slot, q)
        windows.append((running(SAMPLED, slot=slot, key=slot), tuple(drafts.tolist())))
    emitted = verification.verify(NoSampler(), logits.flatten(0, 1), windows)
    assert [len(e.token_ids) for e in emitted] == [num_drafts + 1] * count
    assert [e.token_ids[:-1] for e in emitted] == [drafts for _, drafts in windows]


def test_greedy_rows_have_no_law() -> None:
    rows = build_rows(
        [running(SamplingParams(temperature=0.0, seed=0)).sampling],
        positions=[1], vocab_shard=range(VOCAB), device=CPU,
    )  # fmt: skip
    with pytest.raises(ValueError, match="greedy"):
        target_scores(torch.zeros(1, VOCAB), 0, SingleGroup(), rows)
