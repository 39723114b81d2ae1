"""EAGLE3 and DSpark on a GPU, through the attention kernels, against the float64 reference; and
their steps in CUDA graphs against the same steps run eagerly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvbraid.engine.cuda_graph import CudaGraphCapture
from kvbraid.kv.slots import LogicalSlots
from kvbraid.model.config import MLAConfig
from kvbraid.speculative.draft_graphs import DraftGraphs
from kvbraid.speculative.drafter_config import AnyDrafterConfig
from kvbraid.speculative.fused_rows import FusedRows
from kvbraid.speculative.proposal import DraftSampling, DraftTask, Proposal
from kvbraid.speculative.proposer import Proposer
from tests.unit.speculative.drafters.captured_proposers import poison
from tests.unit.speculative.drafters.draft_script import (
    MAX_LEN,
    MAX_SEQUENCES,
    NUM_KV_TOKENS,
    PAGE_SIZE,
    Script,
    check_same,
)
from tests.unit.speculative.drafters.random_drafters import (
    DSPARK_FORMS,
    EAGLE3_FORMS,
    dspark_config,
    eagle3_config,
    random_drafter,
)
from tests.unit.speculative.drafters.streams import check, expected, random_stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"),
]

MLA = MLAConfig(
    q_lora_rank=16,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    rope_interleave=True,
)
# Head sizes as real drafters have them: kernels are made for powers of two.
FORMS: dict[str, AnyDrafterConfig] = {
    "eagle3": eagle3_config(head_dim=64, num_q_heads=9, num_kv_heads=3),
    "eagle3-map": eagle3_config(head_dim=32, draft_vocab_size=37),
    "eagle3-mla": eagle3_config(mla=MLA),
    "dspark": dspark_config(head_dim=64, num_q_heads=9, num_kv_heads=3),
    "dspark-rnn": dspark_config(head_dim=32, markov_head="rnn", predicts_from_anchor=False),
    "dspark-mla": dspark_config(mla=MLA, qk_norm=False),
    "eagle3-small": EAGLE3_FORMS["gqa"],
    "dspark-one-slot": DSPARK_FORMS["one_slot"],
}
PROMPTS = (33, 1, 70)
ENDS = [(prompt, prompt + 1, prompt + 6, prompt + 8) for prompt in PROMPTS]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
def test_float32_drafts_equal_the_reference(config: AnyDrafterConfig, page_size: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    drafter = random_drafter(config)
    proposer = Proposer(
        drafter.load(device="cuda"), num_kv_tokens=1024, max_sequences=4, page_size=page_size
    )
    proposer.kv.pool.fill_nan()
    streams = [random_stream(str(i), 90, config.hidden_size, i) for i in range(len(PROMPTS))]
    for step in range(4):
        # Rows may come from a wire (host) or from the target beside the drafter (device).
        for stream in streams:
            stream.rows = stream.rows.cuda() if step % 2 else stream.rows.cpu()
        tasks = [s.task(ENDS[i][step], 5) for i, s in enumerate(streams)]
        answers = proposer.step(tasks)
        for stream, answer in zip(streams, answers, strict=True):
            stream.rows = stream.rows.cpu()
            check(answer, expected(drafter, stream, 5))


@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
def test_rows_of_host_and_device_in_one_step(config: AnyDrafterConfig) -> None:
    drafter = random_drafter(config)
    proposer = Proposer(drafter.load(device="cuda"), num_kv_tokens=1024, max_sequences=4)
    a, b = (random_stream(name, 40, config.hidden_size, 7) for name in "ab")
    proposer.step([a.task(20, 0)])
    # EAGLE3 extends a's kept row, which is on the device; b's rows are on the host.
    answers = proposer.step([a.task(20, 4), b.task(9, 4)])
    check(answers[0], expected(drafter, a, 4))
    check(answers[1], expected(drafter, b, 4))


@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
def test_bf16_proposals_are_whole_and_real(config: AnyDrafterConfig) -> None:
    proposer = Proposer(
        random_drafter(config).load(torch.bfloat16, "cuda"), num_kv_tokens=4096, max_sequences=64
    )
    proposer.kv.pool.fill_nan()
    tasks: list[DraftTask] = []
    for i in range(64):
        stream = random_stream(str(i), 60, config.hidden_size, i)
        tasks.append(stream.task(1 + i % 50, config.max_draft_tokens))
    for answer in proposer.step(tasks):
        assert isinstance(answer, Proposal)
        assert len(answer.token_ids) == config.max_draft_tokens
        assert all(0 <= token_id < config.vocab_size for token_id in answer.token_ids)
        assert all(0 <= level <= 1 for level in answer.confidences)


def captured_proposer(
    config: AnyDrafterConfig, dtype: torch.dtype, max_len: int, **sizes: int
) -> Proposer:
    proposer = Proposer(
        random_drafter(config).load(dtype, "cuda"),
        graphs=DraftGraphs(CudaGraphCapture(), max_len),
        **sizes,
    )
    proposer.kv.pool.fill_nan()
    return proposer


@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
def test_replayed_steps_equal_eager_ones(config: AnyDrafterConfig) -> None:
    """float32; rows of every second sequence are on the device."""
    torch.backends.cuda.matmul.allow_tf32 = False
    sizes = {
        "num_kv_tokens": NUM_KV_TOKENS, "max_sequences": MAX_SEQUENCES, "page_size": PAGE_SIZE
    }  # fmt: skip
    eager = Proposer(random_drafter(config).load(device="cuda"), **sizes)
    eager.kv.pool.fill_nan()
    captured = captured_proposer(config, torch.float32, MAX_LEN, **sizes)
    ours = Script(captured, 1, "cuda").play(poison(captured))
    check_same(ours, Script(eager, 1, "cuda").play(), tolerance=1e-4)


@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
def test_replayed_bf16_proposals_are_whole_and_real(config: AnyDrafterConfig) -> None:
    """64 sequences, each drafting alone and all together, greedy and drawn."""
    proposer = captured_proposer(config, torch.bfloat16, 64, num_kv_tokens=8192, max_sequences=64)
    streams = [random_stream(str(i), 64, config.hidden_size, i) for i in range(64)]
    for number, size in enumerate((64, 1, 33, 64)):
        tasks = [
            stream.task(
                stream.committed + 1 + (i + number) % 7,
                config.max_draft_tokens,
                sampling=DraftSampling(float(i % 3 == number % 3), i),
            )
            for i, stream in enumerate(streams[:size])
        ]
        for answer in proposer.step(tasks):
            assert isinstance(answer, Proposal)
            assert len(answer.token_ids) == config.max_draft_tokens
            assert all(0 <= token_id < config.vocab_size for token_id in answer.token_ids)
            assert all(0 <= level <= 1 for level in answer.confidences)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_rows_arrive_whatever_is_launched_behind_them(dtype: torch.dtype) -> None:
    """They lie in memory of a captured graph: the next step writes it while some are on the way."""
    rows = FusedRows(8, num_slots=64, logical_page_size=4, dtype=dtype)
    fused = torch.empty(3, 8, dtype=dtype, device="cuda")
    expected = {}
    for step in range(40):
        # Slot 1 is in the sink page: padding.
        slots = np.array([4 + step % 50, 1, 5 + step % 50])
        torch.cuda._sleep(200_000)
        fused.fill_(step)
        rows.take(LogicalSlots(slots), fused)
        fused.fill_(torch.nan)
        expected |= {int(slot): float(step) for slot in slots if slot >= 4}
    held = np.array(sorted(expected))
    assert rows.num_missing(LogicalSlots(held)) == 0
    newest = rows.read_in_place(LogicalSlots(held[-3:]))
    assert newest.is_cuda
    assert newest[:, 0].tolist() == [expected[slot] for slot in held[-3:]]
    found = rows.read(LogicalSlots(held))
    assert found.dtype == dtype
    assert found[:, 0].tolist() == [expected[slot] for slot in held]
    assert (found == found[:, :1]).all()
