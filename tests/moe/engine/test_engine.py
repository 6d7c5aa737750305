"""The step loop: cancellation, failures and refusals leave the others as they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from moe import MoE, SamplingParams
from moe.engine.runner import ModelRunner
from moe.errors import RequestError
from moe.network.lanes import ExpertCall, LaneState

GREEDY = SamplingParams(max_new_tokens=7, temperature=0.0, ignore_eos=True)


def test_cancelling_between_steps_frees_all_and_disturbs_nobody(
    tiny_moe: Callable[[str], MoE], tiny_checkpoint: Callable[[str], Path]
) -> None:
    plain = tiny_moe("qwen3_moe")
    prompts = [list(range(3, 40)), list(range(60, 90)), [5, 6, 7]]
    expected = [c.token_ids for c in plain.generate(prompts, GREEDY)]
    model = MoE.from_pretrained(
        tiny_checkpoint("qwen3_moe"), prefill={"mode": "layered", "group_tokens": 20}
    )
    engine = model.engine()
    groups = [model.request(prompt, GREEDY) for prompt in prompts]
    for group in groups:
        engine.submit(group)
    assert engine.step() == []  # the first stage of the batch
    engine.cancel(groups[1])
    while not engine.idle:
        engine.step()
    assert [g.sequences[0].token_ids for g in groups] == [expected[0], [], expected[2]]
    assert all(s.cache is None for g in groups for s in g.sequences)
    assert all(g.cache is None for g in groups)


def test_cancelling_the_last_reader_of_a_wave_frees_its_lanes_at_once(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    model = MoE.from_pretrained(
        tiny_checkpoint("qwen3_moe"), prefill={"mode": "layered", "group_tokens": 20}
    )
    engine = model.engine()
    group = model.request(list(range(3, 63)), GREEDY)
    engine.submit(group)
    engine.step()
    assert isinstance(engine.runner, ModelRunner)
    reading = engine.runner._prefill_pass
    assert reading is not None
    engine.cancel(group)
    assert engine.idle
    assert [lane.state for lane in reading.lanes] == [LaneState.CANCELLED]
    assert engine.runner._prefill_pass is None
    assert engine.occupancy()["kv_tokens"] == 0


def test_failing_experts_end_those_who_waited_there_and_nobody_else(
    tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts fail once, while a prompt is read in the middle of its batch."""
    model = MoE.from_pretrained(
        tiny_checkpoint("qwen3_moe"), prefill={"mode": "layered", "group_tokens": 20}
    )
    engine = model.engine()
    running = model.request([5, 6, 7], GREEDY)
    engine.submit(running)
    engine.step()
    real, broken = model.experts.run, [True]

    def fail_once(layer: int, calls: Sequence[ExpertCall]) -> Sequence[Tensor | Exception]:
        if layer == 1 and sum(len(call.hidden_states) for call in calls) > 10 and broken:
            broken.clear()
            raise OSError("an expert cannot be read")
        return real(layer, calls)

    monkeypatch.setattr(model.experts, "run", fail_once)
    arriving, late = model.request(list(range(3, 63)), GREEDY), model.request([9, 8], GREEDY)
    engine.submit(arriving)
    outcomes = []
    while broken:
        outcomes += engine.step()
    engine.submit(late)
    while not engine.idle:
        outcomes += engine.step()
    failed = [s for s, outcome in outcomes if isinstance(outcome, OSError)]
    assert arriving.sequences[0] in failed
    assert arriving.sequences[0].token_ids == []
    assert late.sequences[0].token_ids == model.generate([9, 8], GREEDY)[0].token_ids


def test_a_request_larger_than_memory_is_refused(tiny_checkpoint: Callable[[str], Path]) -> None:
    model = MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), memory={"kv_tokens": 10})
    with pytest.raises(RequestError, match=r"needs memory for 12 tokens and there is room for 10 "):
        model.stream([1, 2, 3, 4, 5], GREEDY)
