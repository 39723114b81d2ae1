"""A rank that runs the same script of steps whatever its StepForward: prompts in chunks, then
windows of changing sequences and widths. Every output is NaN before each step, and the pool is NaN
wherever nothing was stored.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention.backends.base import AttentionBackend
from attention.dcp import DcpAttention
from attention.exchanges.a2a import A2AExchange
from attention.interface import Group
from attention.layout import HeadLayout, StripeLayout
from kvbraid.engine.captured_forward import DecodeLimits
from kvbraid.engine.model_runner import ModelRunner, WindowedDecode
from kvbraid.engine.rank_state import RankState
from kvbraid.engine.step_forward import ForwardOutput, RankModel, StepBatch, StepForward
from kvbraid.engine.step_plan import Admit, Extend
from kvbraid.kv.page_pool import KvSpec, StripedPagePool
from kvbraid.kv.slots import LogicalSlots
from kvbraid.model.causal_lm import CausalLM
from kvbraid.model.loader import load_config, load_model
from kvbraid.model.parallel import ParallelContext
from kvbraid.request import SamplingParams

PAGE_SIZE, NUM_SEQS, MAX_LEN, MAX_WINDOW = 4, 6, 120, 5
LIMITS = DecodeLimits(NUM_SEQS, MAX_WINDOW, MAX_LEN, torch.float32)
# Long and short sequences, so that steps of one size differ as much as they can.
PROMPTS = (90, 1, 33, 8, 57, 2)

# Of each step: the sequences that decode, and how many drafts each has.
STEPS: list[dict[int, int]] = [
    {0: 0},
    {1: 0},
    {0: 0, 1: 0, 2: 0},
    {3: 2},
    {5: 0, 4: 0, 3: 0, 2: 0, 1: 0, 0: 0},
    {1: 0, 5: 3, 0: 1},
    {1: 0, 3: 0, 5: 0},
    {0: 3, 4: 3, 2: 0},
    {1: 2},
    {0: 4, 1: 0, 2: 4, 3: 1, 4: 0, 5: 2},
    {0: 0},
]
# Steps that keep no taps.
UNTAPPED = (1, 6)
# (batch size, width, with taps) of their graphs, in the order of first use.
CAPTURED = (
    (1, 1, True),
    (1, 1, False),
    (4, 1, True),
    (1, 3, True),
    (6, 1, True),
    (4, 4, True),
    (4, 1, False),
    (6, 5, True),
)


class SideBySide:
    """A Fusion whose row is the taps themselves, one after the other."""

    tap_layers = (2, 0)

    def __init__(self, hidden_size: int) -> None:
        self.fused_width = len(self.tap_layers) * hidden_size

    def fuse(self, taps: Tensor) -> Tensor:
        return taps.flatten(1).clone()


@dataclass
class Rows:
    """A RowSink that keeps what it is given."""

    taken: list[Tensor] = field(default_factory=list)

    def take(self, slots: LogicalSlots, rows: Tensor) -> None:
        self.taken.append(rows.cpu()[torch.from_numpy(slots.array >= PAGE_SIZE)])

    def renew(self, pages: Sequence[int]) -> None:
        pass


class Poisoned:
    """A StepForward that ruins the outputs of the step before it runs the next."""

    def __init__(self, forward: StepForward) -> None:
        self._forward = forward
        self._last: list[Tensor] = []

    def run(self, batch: StepBatch) -> ForwardOutput:
        for tensor in self._last:
            tensor.fill_(float("nan"))
        out = self._forward.run(batch)
        self._last = [tensor for tensor in out if tensor is not None]
        return out

    def close(self) -> None:
        self._forward.close()


@dataclass
class Rank:
    """One rank and what its steps gave."""

    runner: ModelRunner
    pool: StripedPagePool
    state: RankState
    rows: Rows
    forward: StepForward
    logits: list[Tensor] = field(default_factory=list)

    def stored(self) -> list[Tensor]:
        """Rows of every layer outside the sink page."""
        layers = range(self.pool.spec.num_layers)
        return [part[1:].cpu() for i in layers for part in self.pool.layer(i) if part is not None]


def build(
    folder: str,
    groups: tuple[Group, Group],
    backend: AttentionBackend,
    make_forward: Callable[[RankModel], StepForward],
    device: torch.device,
) -> Rank:
    """groups: tensor-parallel and DCP."""
    config, (tp, dcp) = load_config(folder), groups
    num_kv_heads = 1 if config.mla else config.num_kv_heads
    heads = HeadLayout(config.num_q_heads, num_kv_heads, tp.size, tp.rank, dcp.size)
    model = load_model(
        folder, parallel=ParallelContext(heads, tp), dtype=torch.float32, device=device
    )
    stripe = StripeLayout(dcp.size, dcp.rank, PAGE_SIZE)
    attention = DcpAttention(
        geometry=model.geometry,
        stripe=stripe,
        heads=heads,
        group=dcp,
        backend=backend,
        exchange=A2AExchange(),
        q_mode="gather",
    )
    num_pages = -(-MAX_LEN // stripe.logical_page_size)
    pool = StripedPagePool(kv_spec(model, heads), 1 + NUM_SEQS * num_pages, stripe, device)
    pool.fill_nan()
    state, rows = RankState(NUM_SEQS, num_pages), Rows()
    fusion = SideBySide(config.hidden_size)
    forward = make_forward(RankModel(model, attention, pool, device, fusion))
    runner = ModelRunner(
        model=model,
        forward=Poisoned(forward),
        pool=pool,
        state=state,
        tp_group=tp,
        device=device,
        row_sink=rows,
    )
    return Rank(runner, pool, state, rows, forward)


def kv_spec(model: CausalLM, heads: HeadLayout) -> KvSpec:
    config = model.config
    if config.mla:
        return KvSpec("mla", config.num_layers, 1, config.mla.latent_width, 0, torch.float32)
    own, width = len(heads.group_kv_heads), config.head_dim
    return KvSpec("gqa", config.num_layers, own, width, width, torch.float32)


def play(rank: Rank) -> None:
    """Prompts in two steps of chunks, the second beside windows; then STEPS."""
    generator = random.Random(5)
    pages = list(range(1, rank.pool.num_pages))
    generator.shuffle(pages)
    for slot, length in enumerate(PROMPTS):
        own = [pages.pop() for _ in range(rank.state.page_table.shape[1])]
        admit(rank, slot, tuple(generator.randrange(64) for _ in range(length)), own)
    chunks = [Extend(slot, 0, length, True) for slot, length in enumerate(PROMPTS)]
    step(rank, {}, chunks[:3], generator)
    step(rank, {0: 1, 2: 0}, chunks[3:], generator)
    for number, drafts in enumerate(STEPS):
        step(rank, drafts, [], generator, with_taps=number not in UNTAPPED)


def admit(rank: Rank, slot: int, tokens: tuple[int, ...], pages: Sequence[int]) -> None:
    sampling = SamplingParams(temperature=0.0, seed=0)
    rank.state.admit(Admit(slot, sampling, 0, len(tokens), 0, tokens, tuple(pages)))


def step(
    rank: Rank,
    drafts: dict[int, int],
    extends: list[Extend],
    generator: random.Random,
    *,
    with_taps: bool = True,
) -> None:
    sequences = [rank.state[slot] for slot in drafts]
    given = [tuple(generator.randrange(64) for _ in range(n)) for n in drafts.values()]
    decode = WindowedDecode(sequences, given)
    rank.logits.append(rank.runner.forward(decode, extends, with_taps=with_taps).cpu())
    for sequence, tokens in zip(sequences, given, strict=True):
        # Half of the drafts come true, and one token follows them.
        for token in (*tokens[: (len(tokens) + 1) // 2], generator.randrange(64)):
            sequence.append(token)
    for extend in extends:
        rank.state[extend.slot].append(generator.randrange(64))


def check_equal(ours: Rank, expected: Rank, tolerance: float) -> None:
    """Logits, taps and stored rows of the whole script; no NaN in what was computed."""
    assert len(ours.logits) == len(ours.rows.taken) + len(UNTAPPED) == len(STEPS) + 2
    computed = [(ours.logits, expected.logits), (ours.rows.taken, expected.rows.taken)]
    for some, _ in computed:
        assert not any(bool(tensor.isnan().any()) for tensor in some)
    for some, others in [*computed, (ours.stored(), expected.stored())]:
        for a, b in zip(some, others, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance, equal_nan=True)
