"""Every row of the bug log in spec.md section 6 is a test here, or cannot happen here for a reason.

Row numbers have gaps in the source. The tests that are named must exist.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
DIALECTS = "unit/speculative/dialects/test_drafter_bug_log.py"
PROPOSER = "unit/speculative/test_proposer_bug_log.py"
LAW = "unit/speculative/test_verification_law.py"
RATIO = "unit/speculative/test_ratio_test.py"
ENGINE_RATIO = "unit/engine/test_ratio_verification.py"
LOOP = "unit/engine/test_speculation.py"
DRAFTER_ROWS = "unit/engine/test_drafter_rows.py"
POLICY = "unit/speculative/test_draft_policy.py"
CHECK = "unit/worker/test_drafter_check.py"
WORLD = "integration/test_engine_speculation.py"
TRACES = "integration/test_engine_speculation_traces.py"
SERVICES = "integration/services/test_drafted_services.py"

ROWS = {
    1: [f"{PROPOSER}::test_row_1_accepted_drafts_are_extended_again_with_the_targets_rows"],
    2: [f"{LAW}::test_bug_2_draft_and_residual_from_one_gumbel_stream_are_caught"],
    3: [
        "unit/speculative/test_draft_sampling.py"
        "::test_row_3_drafts_of_a_bf16_drafter_follow_the_law_of_their_logits"
    ],
    4: [
        f"{DIALECTS}::test_row_4_slot_convention_of_speculators",
        f"{CHECK}::test_row_4_drafts_one_slot_late_are_told",
    ],
    5: [f"{PROPOSER}::test_row_5_the_block_begins_at_the_anchors_own_position"],
    6: [
        f"{DRAFTER_ROWS}::test_prefix_hits_have_their_rows",
        f"{WORLD}::test_accepted_counts_are_the_reference_loops",
        f"{DRAFTER_ROWS}::test_a_drafter_gets_rows_that_another_worker_pushed_when_it_drafts_and_when_it_loses_them",
    ],
    7: [
        f"{DIALECTS}::test_row_7_the_drafts_2048_positions_are_nominal",
        f"{PROPOSER}::test_row_7_positions_past_2048",
    ],
    8: [
        f"{DIALECTS}::test_row_8_ids_of_taps_count_from_the_dialects_own_zero",
        f"{DIALECTS}::test_row_8_a_norm_before_fc_is_not_ignored",
        f"{CHECK}::test_row_8_taps_in_another_order_are_told",
    ],
    9: [
        f"{DIALECTS}::test_row_9_an_eagle3_without_lm_head_is_refused",
        f"{CHECK}::test_row_9_a_tensor_that_was_left_random_is_told",
    ],
    10: [
        f"{DIALECTS}::test_row_10_the_drafts_own_embedding_is_kept",
        f"{PROPOSER}::test_row_10_the_drafts_own_embedding_and_head_are_used",
    ],
    11: [f"{DIALECTS}::test_row_11_maps_round_trip"],
    14: [
        f"{PROPOSER}::test_row_14_a_prompt_of_one_token",
        f"{SERVICES}::test_row_14_a_prompt_of_one_token_is_handed_over",
    ],
    15: [
        f"{WORLD}::test_tokens_are_those_of_plain_decoding",
        f"{ENGINE_RATIO}::test_the_emitted_law_is_the_processed_target_law",
    ],
    19: [
        f"{PROPOSER}::test_row_19_only_real_tokens_are_proposed",
        f"{LOOP}::test_ids_that_are_none_never_reach_the_model",
        "unit/speculative/test_acceptance.py::test_bug_19_only_token_ids_reach_the_target",
    ],
    21: [f"{WORLD}::test_accepted_counts_are_the_reference_loops"],
    22: [
        f"{LAW}::test_bug_22_a_seeds_tokens_do_not_depend_on_the_draft_length",
        f"{WORLD}::test_tokens_are_those_of_plain_decoding",
    ],
    24: [f"{WORLD}::test_tokens_are_those_of_plain_decoding"],
    25: [
        f"{WORLD}::test_tokens_are_those_of_plain_decoding",
        f"{TRACES}::test_windows_1_to_1000_are_the_reference_loops",
    ],
    27: [
        f"{RATIO}::test_bug_27_a_greedy_drafter_is_a_point_mass_and_equals_exact_match",
        f"{ENGINE_RATIO}::test_controls_drafts_of_another_law_than_stated_are_caught",
    ],
    28: [f"{PROPOSER}::test_row_28_a_prompt_longer_than_a_chunk"],
    29: [f"{DIALECTS}::test_row_29_one_kimi_k3_draft_is_not_read_as_the_other"],
    31: [f"{SERVICES}::test_sampling_penalties_stops_and_logprobs_do_not_change"],
    32: [f"{POLICY}::test_bug_32_a_saturated_batch_is_not_sped_down_by_a_fixed_length"],
    33: [f"{POLICY}::test_bug_33_drafts_that_confidence_cuts_off_are_never_verified"],
    34: [
        "unit/speculative/test_verify_budget.py"
        "::test_bug_34_one_bit_of_a_confidence_can_change_the_width_so_one_rank_decides",
        "unit/engine/test_debug_guard.py"
        "::test_every_rank_stops_at_the_first_step_that_differs_and_names_rank_and_part",
    ],
    35: [
        "unit/speculative/test_acceptance.py"
        "::test_counts_by_position_are_recomputed_from_the_windows"
    ],
    37: [f"{RATIO}::test_bug_37_accept_if_equal_then_a_fresh_redraw_is_caught"],
    38: [f"{RATIO}::test_bug_38_greedy_draft_with_softmax_q_is_caught"],
    39: [f"{WORLD}::test_a_window_is_verified_from_every_rank_of_a_stripe"],
    41: [f"{PROPOSER}::test_row_41_pages_that_fit_neither_block_nor_target"],
}

CANNOT_HAPPEN = {
    12: "a drafter is whole on one rank, so ranks decide nothing about its embedding",
    17: "there is no constrained decoding",
    18: "there is no constrained decoding",
    26: "drafts are chains, and the next step is planned when the last one is done",
    36: "about training",
}
NUMBERS = {*range(1, 42)} - {13, 16, 20, 23, 30, 40}  # that the log has


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    return frozenset(
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_every_row_is_a_test_or_has_a_reason() -> None:
    assert ROWS.keys() | CANNOT_HAPPEN.keys() == NUMBERS
    assert not ROWS.keys() & CANNOT_HAPPEN.keys()


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_of_a_row_exist(row: int) -> None:
    assert ROWS[row]
    for test in ROWS[row]:
        path, _, name = test.partition("::")
        assert name in names_in(path), test
