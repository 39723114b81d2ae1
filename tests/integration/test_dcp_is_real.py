"""DCP cannot be faked: every rank holds its stripe and nothing else, and its stripe matters.

The model is tiny-mla (MLA) or a seeded Llama with 9 query and 3 KV heads (GQA); transformers
tells what must come out, also when a stripe is wiped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from kvbraid.engine.communicator import RankGroups
from kvbraid.engine.model_runner import ModelRunner, WindowedDecode
from kvbraid.engine.rank_state import RankState
from kvbraid.engine.ranks import RankContext
from kvbraid.engine.step_plan import Admit, Extend
from kvbraid.kv.page_pool import StripedPagePool
from kvbraid.kv.slots import LogicalSlots, owners_of, slots_of
from kvbraid.model.loader import load_config
from kvbraid.request import SamplingParams
from kvbraid.settings import (
    KvSettings,
    ModelSettings,
    ParallelSettings,
    SchedulerSettings,
    SpeculativeSettings,
)
from kvbraid.worker.rank_assembly import build_rank, kv_layout
from tools.no_transfers import NoReceiver, NoSender
from tools.thread_ranks import ThreadGroup, run_threads, thread_groups

ASSETS = Path(__file__).parents[1] / "assets"
TOPOLOGIES = [(2, 2), (3, 3), (4, 2), (4, 4)]
GREEDY = SamplingParams(temperature=0.0, seed=0)
PAGE = 4


@dataclass(frozen=True)
class Settings:
    model: ModelSettings
    parallel: ParallelSettings
    kv: KvSettings
    scheduler: SchedulerSettings
    speculative: SpeculativeSettings


@dataclass
class Ranks:
    """A worker whose ranks are threads, one sequence in slot 0 of each."""

    groups: list[tuple[ThreadGroup, ThreadGroup]]
    runners: list[ModelRunner]
    states: list[RankState]
    pages: tuple[int, ...]

    def forward(self, decode_guesses: tuple[int, ...] | None, extend: Extend | None) -> Tensor:
        """Logits [rows, vocab] of a decode window (when guesses are given) or of a chunk."""

        def one(rank: int) -> Tensor:
            runner, state = self.runners[rank], self.states[rank]
            if decode_guesses is None:
                assert extend is not None
                return runner.forward(WindowedDecode((), ()), [extend], with_taps=False)
            return runner.forward(WindowedDecode([state[0]], [decode_guesses]), [], with_taps=False)

        return torch.cat(run_threads(self.groups, one), dim=-1)

    def slots(self, positions: range) -> LogicalSlots:
        pool = self.runners[0].pool
        return slots_of(self.pages, np.array(positions), pool.stripe.logical_page_size)

    def owned(self, rank: int, positions: range) -> LogicalSlots:
        slots = self.slots(positions)
        stripe = self.runners[rank].pool.stripe
        return LogicalSlots(slots.array[owners_of(stripe, slots.array) == stripe.dcp_rank])

    def pool(self, rank: int) -> StripedPagePool:
        return self.runners[rank].pool


@pytest.fixture(scope="module")
def llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=72,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(params=["gqa", "mla"])
def model_path(request: pytest.FixtureRequest, llama_path: Path) -> Path:
    return llama_path if request.param == "gqa" else ASSETS / "tiny-mla"


def make_ranks(path: Path, tp_size: int, dcp_size: int, prompt: list[int], length: int) -> Ranks:
    """Ranks with `prompt` admitted in slot 0 and pages for `length` tokens, pools full of NaN."""
    settings = Settings(
        ModelSettings(model=str(path)),
        ParallelSettings(tp_size=tp_size, dcp_size=dcp_size),
        KvSettings(page_size=PAGE, kv_cache_tokens=256, poison_kv=True),
        SchedulerSettings(max_num_seqs=2),
        SpeculativeSettings(),
    )
    config = load_config(path)
    layout = kv_layout(config, settings.parallel, settings.kv, torch.float32, "digest")
    groups = thread_groups(tp_size, dcp_size)
    num_pages = -(-length // layout.stripe(0).logical_page_size)
    pages = tuple(range(3, 3 + num_pages))[::-1]  # not in order: pages may lie anywhere

    def build(rank: int) -> tuple[ModelRunner, RankState]:
        built = build_rank(
            settings=settings,
            context=RankContext(rank, tp_size, rank, tp_size, "test"),
            groups=RankGroups(*groups[rank], control=groups[rank][0]),
            config=config,
            layout=layout,
            max_model_len=128,
            receiver=NoReceiver(),
            sender=NoSender(),
        )
        state = built.state
        state.admit(Admit(0, GREEDY, 0, len(prompt), 0, tuple(prompt), pages))
        return built.runner, state

    runners, states = zip(*run_threads(groups, build), strict=True)
    return Ranks(groups, list(runners), list(states), pages)


def reference_model(path: Path) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def prompt_of(path: Path, length: int) -> list[int]:
    vocab = load_config(path).vocab_size
    return torch.randint(5, vocab, (length,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize(("tp_size", "dcp_size"), TOPOLOGIES)
def test_each_rank_holds_exactly_its_stripe_and_pools_shrink_with_c(
    model_path: Path, tp_size: int, dcp_size: int
) -> None:
    length = 2 * PAGE * dcp_size + 3
    ranks = make_ranks(model_path, tp_size, dcp_size, prompt_of(model_path, length), length)
    ranks.forward(None, Extend(0, 0, length, True))
    for rank in range(tp_size):
        pool = ranks.pool(rank)
        per_token = pool.spec.num_layers * pool.spec.num_heads
        assert pool.count_finite_rows() == pool.stripe.local_length(length) * per_token
        owned = ranks.owned(rank, range(length))
        assert pool.count_finite_rows(owned) == pool.count_finite_rows()
    whole = make_ranks(model_path, tp_size, 1, prompt_of(model_path, 5), 5).pool(0)
    mine = ranks.pool(0)
    rows = (whole.num_pages - 1) * PAGE, (mine.num_pages - 1) * PAGE
    assert rows[1] == -(-rows[0] // (PAGE * dcp_size)) * PAGE


@pytest.mark.parametrize(("tp_size", "dcp_size"), TOPOLOGIES)
def test_wiping_one_ranks_stripe_changes_the_output_as_the_reference_predicts(
    model_path: Path, tp_size: int, dcp_size: int
) -> None:
    length, wiped = 23, dcp_size - 1
    tokens = prompt_of(model_path, length + 1)
    ranks = make_ranks(model_path, tp_size, dcp_size, tokens, length + 1)
    for state in ranks.states:
        del state[0].token_ids[length:]
    ranks.forward(None, Extend(0, 0, length, True))
    for rank in range(tp_size):
        pool = ranks.pool(rank)
        if pool.stripe.dcp_rank == wiped:
            owned = ranks.owned(rank, range(length))
            layers, heads = range(pool.spec.num_layers), range(pool.spec.num_heads)
            pool.scatter(owned, layers, heads, torch.zeros_like(pool.gather(owned, layers, heads)))
        ranks.states[rank][0].token_ids.append(tokens[length])
    ours = ranks.forward((), None)[0]
    lost = [p for p in range(length) if p % dcp_size == wiped]
    expected = _logits_with_wiped_keys(model_path, tokens, lost)
    intact = _logits_with_wiped_keys(model_path, tokens, [])
    assert (ours - expected).abs().max() < 2e-4
    assert (intact - expected).abs().max() > 1e-2, "the wiped stripe must matter"


def _logits_with_wiped_keys(path: Path, tokens: list[int], lost: list[int]) -> Tensor:
    """transformers' logits after `tokens`, with cached rows of `lost` set to zero beforehand.

    In MLA the cache row is the latent; what transformers caches is expanded out of it, so a zero
    latent means zero keys and values there too.
    """
    model = reference_model(path)
    with torch.inference_mode():
        cache = transformers.DynamicCache(config=model.config)
        model(torch.tensor([tokens[:-1]]), cache=cache)
        for layer in cache.layers:
            layer.keys[:, :, lost] = 0
            layer.values[:, :, lost] = 0
        return model(torch.tensor([tokens[-1:]]), cache=cache).logits[0, -1]


@pytest.mark.parametrize(("tp_size", "dcp_size"), [*TOPOLOGIES, (1, 1)])
@pytest.mark.parametrize("window", [2, 5])
def test_a_verify_window_gives_the_logits_of_every_row(
    model_path: Path, tp_size: int, dcp_size: int, window: int
) -> None:
    length = PAGE * dcp_size + 1
    tokens = prompt_of(model_path, length + window)
    ranks = make_ranks(model_path, tp_size, dcp_size, tokens[: length + 1], length + window)
    ranks.forward(None, Extend(0, 0, length, True))
    ours = ranks.forward(tuple(tokens[length + 1 : length + window]), None)
    with torch.inference_mode():
        expected = reference_model(model_path)(torch.tensor([tokens])).logits[0, length:]
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() < 2e-4


def test_chunked_prefill_over_stripes_equals_one_pass(model_path: Path) -> None:
    tokens = prompt_of(model_path, 29)
    with torch.inference_mode():
        expected = reference_model(model_path)(torch.tensor([tokens])).logits[0, -1]
    for tp_size, dcp_size in TOPOLOGIES:
        ranks = make_ranks(model_path, tp_size, dcp_size, tokens, 29)
        for start in range(0, 29, 7):
            end = min(29, start + 7)
            logits = ranks.forward(None, Extend(0, start, end - start, end == 29))
        assert (logits[-1] - expected).abs().max() < 2e-4


def test_the_reference_rows_in_the_tree_are_those_of_the_model() -> None:
    lines = (ASSETS / "reference" / "tiny-mla-greedy.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    model = reference_model(ASSETS / "tiny-mla")
    with torch.inference_mode():
        logits = model(torch.tensor([row["prompt_ids"]])).logits[0, -1]
    assert int(logits.argmax()) == row["output_ids"][0]
