"""Which heads a rank computes and which KV heads its group keeps."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.layout import HeadLayout, kv_head_of_query_head, shard_range

shapes = st.sampled_from(
    [(4, 1), (4, 2), (8, 2), (9, 3), (12, 3), (20, 5), (24, 6), (32, 2), (32, 4), (5, 5), (7, 2)]
)
topologies = st.sampled_from([1, 2, 3, 4, 6, 8]).flatmap(
    lambda c: st.tuples(st.just(c), st.sampled_from([1, 2, 3]))
)


def layouts(num_q_heads: int, num_kv_heads: int, tp_size: int, dcp_size: int) -> list[HeadLayout]:
    return [HeadLayout(num_q_heads, num_kv_heads, tp_size, t, dcp_size) for t in range(tp_size)]


@given(st.integers(0, 200), st.integers(1, 16))
def test_shards_are_consecutive_and_cover_everything_evenly(size, num_parts):
    shards = [shard_range(size, part, num_parts) for part in range(num_parts)]
    assert [i for shard in shards for i in shard] == list(range(size))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_nine_heads_over_two_ranks():
    assert [len(shard_range(9, part, 2)) for part in range(2)] == [4, 5]


@pytest.mark.parametrize("part", [-1, 2])
def test_a_part_that_does_not_exist_is_refused(part):
    with pytest.raises(ValueError, match=rf"part {part} is outside \[0, 2\)"):
        shard_range(9, part, 2)


@given(shapes, topologies)
def test_group_heads_are_the_union_of_its_ranks(shape, topology):
    dcp_size, num_groups = topology
    ranks = layouts(*shape, dcp_size * num_groups, dcp_size)
    for group in range(num_groups):
        members = ranks[group * dcp_size : (group + 1) * dcp_size]
        heads = [h for member in members for h in member.local_q_heads]
        for dcp_rank, member in enumerate(members):
            assert (member.group, member.dcp_rank) == (group, dcp_rank)
            assert list(member.group_q_heads) == heads
            assert member.group_head_splits == tuple(len(m.local_q_heads) for m in members)
            inside = [member.group_q_heads[i] for i in member.local_heads_in_group]
            assert inside == list(member.local_q_heads)
    assert [h for r in ranks for h in r.local_q_heads] == list(range(shape[0]))


@given(shapes, topologies)
def test_kv_heads_are_those_of_the_global_query_heads(shape, topology):
    num_q_heads, num_kv_heads = shape
    dcp_size, num_groups = topology
    for rank in layouts(num_q_heads, num_kv_heads, dcp_size * num_groups, dcp_size):
        read = [int(Fraction(h, num_q_heads) * num_kv_heads) for h in rank.group_q_heads]
        assert [rank.group_kv_heads[i] for i in rank.kv_index_of_group_q_head] == read
        assert sorted(set(read)) == list(rank.group_kv_heads)


def test_global_head_ids_decide_the_kv_head_bug_13():
    """32 query heads, 2 KV heads, 4 ranks of a group: 0, 0, 1, 1, not 0 and 1 on each."""
    for rank, kv_head in enumerate([0, 0, 1, 1]):
        layout = HeadLayout(32, 2, 4, rank, 4)
        local = layout.local_heads_in_group
        assert {layout.kv_index_of_group_q_head[i] for i in local} == {kv_head}


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "dcp_size", "kv_heads_of_rank"),
    [
        (12, 3, 4, [{0}, {0, 1}, {1, 2}, {2}]),
        (24, 6, 4, [{0, 1}, {1, 2}, {3, 4}, {4, 5}]),
        (12, 3, 2, [{0, 1}, {1, 2}]),
        (20, 5, 4, [{0, 1}, {1, 2}, {2, 3}, {3, 4}]),
        (9, 3, 2, [{0, 1}, {1, 2}]),
    ],
)
def test_ranks_whose_heads_straddle_kv_heads(num_q_heads, num_kv_heads, dcp_size, kv_heads_of_rank):
    for rank, expected in enumerate(kv_heads_of_rank):
        layout = HeadLayout(num_q_heads, num_kv_heads, dcp_size, rank, dcp_size)
        local = layout.local_heads_in_group
        assert {layout.kv_index_of_group_q_head[i] for i in local} == expected


def test_kv_heads_follow_the_group_not_the_rank_bug_14():
    """Hkv 2, tp 4, c 2: rank t keeps KV head t // 2. Hkv 8, tp 16, c 4: 2 heads a rank."""
    kept = [list(layout.group_kv_heads) for layout in layouts(8, 2, 4, 2)]
    assert kept == [[0], [0], [1], [1]]
    assert {len(layout.group_kv_heads) for layout in layouts(32, 8, 16, 4)} == {2}


def test_projection_heads_equal_pool_heads_bug_16():
    """tp 2, c 2, Hkv 8: every rank computes and keeps all 8 KV heads."""
    assert [len(layout.group_kv_heads) for layout in layouts(16, 8, 2, 2)] == [8, 8]


def test_more_kv_heads_than_groups_keeps_several_a_rank_bug_17():
    """Hkv 4, tp 4, c 2 was silently corrupted elsewhere: each group keeps two heads."""
    assert [list(layout.group_kv_heads) for layout in layouts(8, 4, 4, 2)] == [
        [0, 1],
        [0, 1],
        [2, 3],
        [2, 3],
    ]


def test_a_draft_shards_kv_heads_over_tp_only():
    """Hkv 8, tp 8: the target with c = 4 keeps 4 heads a rank, its draft (c = 1) keeps 1."""
    assert {len(layout.group_kv_heads) for layout in layouts(16, 8, 8, 4)} == {4}
    assert {len(layout.group_kv_heads) for layout in layouts(16, 8, 8, 1)} == {1}


def test_ranks_without_heads_are_legal():
    ranks = layouts(4, 1, 6, 3)
    assert [len(rank.local_q_heads) for rank in ranks] == [0, 1, 1, 0, 1, 1]
    assert layouts(1, 1, 2, 1)[0].group_kv_heads == range(0)


def test_kv_head_of_query_head_is_monotone_and_reaches_both_ends():
    heads = [kv_head_of_query_head(h, 9, 3) for h in range(9)]
    assert heads == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 2, 2, 0, 4), "dcp_size 4 must divide tp_size 2"),
        ((8, 2, 6, 0, 4), "dcp_size 4 must divide tp_size 6"),
        ((8, 2, 0, 0, 1), "tp_size 0"),
        ((8, 2, 4, 4, 2), r"tp_rank 4 is outside \[0, 4\)"),
        ((8, 0, 4, 0, 2), r"num_kv_heads 0 is outside \[1, num_q_heads 8\]"),
        ((8, 9, 4, 0, 2), "num_kv_heads 9"),
    ],
)
def test_impossible_topologies_are_refused_bug_19(arguments, message):
    with pytest.raises(ValueError, match=message):
        HeadLayout(*arguments)
