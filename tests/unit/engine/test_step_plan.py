"""A step plan survives its flat form, whatever is in it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbraid.engine.step_plan import (
    AddPages,
    Admit,
    AppendToken,
    BeginSend,
    BindSend,
    CloseGrant,
    Decode,
    EndSend,
    Extend,
    OpenGrant,
    Operation,
    Release,
    StepPlan,
    Stop,
)
from kvbraid.request import SamplingParams

_small = st.integers(0, 2**31 - 1)
_ids = st.lists(_small, max_size=5).map(tuple)
_transfer_ids = st.binary(min_size=16, max_size=16)
_unit = st.floats(0, 1, width=32)
_samplings = st.builds(
    SamplingParams,
    temperature=_unit,
    top_k=st.none() | st.integers(1, 100),
    top_p=_unit,
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.dictionaries(_small, _unit, max_size=3),
    stop_token_ids=_ids,
    max_tokens=st.none() | _small,
    top_logprobs=st.none() | st.integers(0, 20),
)
_operations: st.SearchStrategy[Operation] = st.one_of(
    st.builds(
        Admit,
        slot=_small,
        sampling=_samplings,
        key=st.integers(0, 2**64 - 1),
        num_prompt_tokens=_small,
        num_computed=_small,
        token_ids=_ids,
        pages=_ids,
    ),
    st.builds(AddPages, _small, _ids),
    st.builds(AppendToken, _small, _small),
    st.builds(Release, _small),
    st.builds(OpenGrant, _small, st.dictionaries(st.text(max_size=4), st.text(max_size=9))),
    st.builds(BeginSend, st.just({"layout": {"kind": "gqa", "n": 3}})),
    st.builds(BindSend, _small, _transfer_ids),
    st.builds(CloseGrant, _transfer_ids),
    st.builds(EndSend, _transfer_ids),
    st.just(Stop()),
)
_plans = st.builds(
    StepPlan,
    operations=st.lists(_operations, max_size=6).map(tuple),
    decodes=st.lists(st.builds(Decode, _small, _ids), max_size=3).map(tuple),
    extends=st.lists(st.builds(Extend, _small, _small, _small, st.booleans()), max_size=3).map(
        tuple
    ),
    collect=st.lists(_transfer_ids, max_size=3).map(tuple),
    report_rows=st.booleans(),
    confirm=st.booleans(),
    taps=st.booleans(),
)


@given(_plans)
def test_a_decoded_plan_equals_the_encoded_one(plan: StepPlan) -> None:
    flat = plan.encode()
    assert flat.dtype == np.int64
    assert StepPlan.decode(flat) == plan


def test_a_plan_of_another_version_is_refused() -> None:
    flat = StepPlan(decodes=(Decode(1),)).encode()
    flat[0] += 1
    with pytest.raises(ValueError, match="version 4"):
        StepPlan.decode(flat)


def test_only_a_plan_without_anything_to_do_is_empty() -> None:
    assert StepPlan().is_empty
    assert not StepPlan(confirm=True).is_empty
    assert not StepPlan(operations=(Release(0),)).is_empty
    assert not StepPlan(operations=(Release(0),)).has_compute
