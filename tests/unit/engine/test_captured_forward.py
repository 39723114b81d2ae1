"""Decode steps through static buffers against the same steps run eagerly, on CPU.

A graph is its own launches run again (rerun_graphs), so whatever a step does not write anew shows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from attention.backends.torch_backend import TorchBackend
from kvbraid.engine.captured_forward import CapturedForward, DecodeLimits
from kvbraid.engine.model_runner import WindowedDecode
from kvbraid.engine.step_forward import EagerForward
from tests.unit.engine.forward_script import (
    CAPTURED,
    LIMITS,
    MAX_LEN,
    STEPS,
    UNTAPPED,
    Rank,
    admit,
    build,
    check_equal,
    play,
)
from tests.unit.engine.rerun_graphs import ReplannedTorchBackend, RerunGraphs
from tools.thread_ranks import run_threads, thread_groups

TINY_MLA = Path(__file__).parents[2] / "assets" / "tiny-mla"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def gqa_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
    )
    path = tmp_path_factory.mktemp("gqa")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize(("tp_size", "dcp_size"), [(1, 1), (2, 2), (2, 1)])
@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_replayed_steps_equal_eager_ones(
    kind: str, tp_size: int, dcp_size: int, gqa_folder: Path
) -> None:
    folder = str(TINY_MLA if kind == "mla" else gqa_folder)
    graphs = [RerunGraphs() for _ in range(tp_size)]

    def ranks(*, captures: bool) -> list[Rank]:
        groups = thread_groups(tp_size, dcp_size)

        def body(index: int) -> Rank:
            if captures:
                rank = captured_rank(folder, LIMITS, graphs[index], groups[index])
            else:
                rank = build(folder, groups[index], TorchBackend(), EagerForward, CPU)
            play(rank)
            return rank

        return run_threads(groups, body)

    captured = ranks(captures=True)
    for ours, expected in zip(captured, ranks(captures=False), strict=True):
        # Logits are up to 10; products of other sizes round otherwise.
        check_equal(ours, expected, tolerance=1e-4)
    # Steps of chunks are not captured; a size is captured once, all ranks in the same order.
    sizes = [
        (LIMITS.batch_size(len(drafts)), 1 + max(drafts.values()), number not in UNTAPPED)
        for number, drafts in enumerate(STEPS)
    ]
    for rank, own in zip(captured, graphs, strict=True):
        assert isinstance(rank.forward, CapturedForward)
        assert rank.forward.captured == CAPTURED
        assert own.num_captures == len(CAPTURED)
        assert [CAPTURED[number] for number in own.replays] == sizes
        rank.runner.close()
        assert rank.forward.captured == ()


def captured_rank(folder, limits, graphs, groups) -> Rank:
    return build(
        folder,
        groups,
        ReplannedTorchBackend(),
        lambda rank: CapturedForward(rank, limits, graphs),
        CPU,
    )


def single_rank(
    folder: Path, limits: DecodeLimits = LIMITS, graphs: RerunGraphs | None = None
) -> Rank:
    return captured_rank(str(folder), limits, graphs or RerunGraphs(), thread_groups(1, 1)[0])


def test_a_capture_writes_to_the_sink_only(gqa_folder: Path) -> None:
    graphs, seen = RerunGraphs(), []
    rank = single_rank(gqa_folder, graphs=graphs)

    def has_rows() -> bool:
        return not all(bool(part.isnan().all()) for part in rank.stored())

    graphs.on_capture = lambda: seen.append(has_rows())
    admit(rank, 0, (7, 8, 9), range(1, 3))
    rank.runner.forward(WindowedDecode([rank.state[0]], [()]), [], with_taps=True)
    assert seen == [False]
    assert has_rows()


@pytest.mark.parametrize(
    ("limits", "num_seqs", "num_drafts", "message"),
    [
        (replace(LIMITS, max_num_seqs=1), 2, 0, r"2 sequences are outside \[1, 1\]"),
        (replace(LIMITS, max_window=2), 1, 2, "window 3 is above 2"),
        (replace(LIMITS, max_model_len=2), 1, 0, r"length 4 is outside \[0, 3\]"),
    ],
)
def test_a_step_outside_the_limits_is_refused(
    limits: DecodeLimits, num_seqs: int, num_drafts: int, message: str, gqa_folder: Path
) -> None:
    rank = single_rank(gqa_folder, limits)
    for slot in range(num_seqs):
        admit(rank, slot, (7, 8, 9, 10), range(1 + 2 * slot, 3 + 2 * slot))
    sequences = [rank.state[slot] for slot in range(num_seqs)]
    decode = WindowedDecode(sequences, [(1,) * num_drafts] * num_seqs)
    with pytest.raises(ValueError, match=message):
        rank.runner.forward(decode, [], with_taps=True)


def test_sizes_are_powers_of_two_up_to_the_most() -> None:
    limits = replace(LIMITS, max_num_seqs=20)
    sizes = [limits.batch_size(n) for n in range(1, 21)]
    assert sizes == [1, 2, 4, 4, *[8] * 4, *[16] * 8, *[20] * 4]
    for num_seqs in (0, 21):
        with pytest.raises(ValueError, match=r"outside \[1, 20\]"):
            limits.batch_size(num_seqs)
