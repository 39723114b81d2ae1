"""Proposers whose steps are "captured" on CPU: graphs are their launches run again."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attention.dispatch import AttentionChoice, AttentionNeeds
from attention.exchanges.a2a import A2AExchange
from kvbraid.speculative.draft_graphs import DraftGraphs
from kvbraid.speculative.drafter import Drafter
from kvbraid.speculative.proposer import Proposer
from tests.unit.engine.rerun_graphs import ReplannedTorchBackend, RerunGraphs


def replanned(needs: AttentionNeeds) -> AttentionChoice:
    """What `attention.dispatch.choose` finds on a GPU."""
    assert needs.cuda_graphs
    return AttentionChoice(ReplannedTorchBackend(), A2AExchange(), ())


def captured_proposer(
    drafter: Drafter, graphs: RerunGraphs, *, max_len: int, **sizes: int
) -> Proposer:
    return Proposer(drafter, graphs=DraftGraphs(graphs, max_len, replanned), **sizes)


def poison(proposer: Proposer) -> Callable[[], None]:
    """Ruins the sink page, which padding alone reads and writes."""

    def ruin() -> None:
        pool = proposer.kv.pool
        for layer in range(pool.spec.num_layers):
            for part in pool.layer(layer):
                if part is not None:
                    part[0].fill_(torch.nan)

    return ruin
