"""Steps that are launched before the tokens of the step before are read give the same tokens.

Main memory stands for a device's: transformers' forward takes tokens from where they are drawn, and
sampling goes the way of a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from moe import MoE, SamplingParams
from moe.engine.engine import Engine
from moe.engine.prefill_batch import SequenceGroup
from moe.engine.runner import ModelRunner
from moe.sampling import batch, host
from moe.sampling.batch import LogitsError
from moe.sampling.params import Structure
from moe.sequence import Delta

DEMO = Path(__file__).parents[3] / "examples/demo-model"
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
VOCABULARY = 128


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[str], Path]) -> MoE:
    return MoE.from_pretrained(
        tiny_checkpoint("qwen3_moe"),
        engine={"fused": "off", "max_batch_size": 3},
        memory={"kv_tokens": 48},
    )


class Seen(NamedTuple):
    """What happened, in order: ``launch``, ``ahead`` (a launch) and ``read`` of steps."""

    order: list[str]


@contextmanager
def like_a_device(model: MoE, *, ahead: bool = True, first_guess: int = 1024) -> Iterator[Seen]:
    seen = Seen([])

    def noting(name: str, true: Callable[..., Any]) -> Callable[..., Any]:
        def method(*arguments: Any, **named: Any) -> Any:
            seen.order.append(name)
            return true(*arguments, **named)

        return method

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "on_host", lambda _: False)
        patch.setattr(batch, "_FIRST_GUESS", first_guess)
        patch.setattr(model.backbone, "_runs_ahead", lambda: ahead)
        for owner, name in ((ModelRunner, "launch"), (ModelRunner, "launch_ahead")):
            patch.setattr(owner, name, noting(name.removeprefix("launch_"), getattr(owner, name)))
        patch.setattr(batch._Sent, "read", noting("read", batch._Sent.read))
        yield seen


def run(engine: Engine, groups: list[SequenceGroup]) -> list[list[Delta | Exception]]:
    """The events of each sequence."""
    for group in groups:
        engine.submit(group)
    found: dict[Any, list[Delta | Exception]] = {s: [] for g in groups for s in g.sequences}
    while not engine.idle:
        for sequence, one in engine.step():
            found[sequence].append(one)
    return [*found.values()]


def test_a_step_is_launched_before_the_one_before_is_read(model: MoE) -> None:
    """But not the first, behind a prompt, and none behind the last tokens."""
    with like_a_device(model) as seen:
        run(model.engine(), [model.request([5, 6, 7], GREEDY)])
    # The prompt, with the first token; then seven steps.
    assert seen.order == ["launch", "read", "launch", *["ahead", "read"] * 6, "read"]
    with like_a_device(model, ahead=False) as seen:
        run(model.engine(), [model.request([5, 6, 7], GREEDY)])
    assert seen.order == ["launch", "read"] * 8


@pytest.mark.parametrize(
    "own",
    [
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
    ],
)
def test_what_needs_tokens_on_the_host_waits_for_them(model: MoE, own: dict[str, Any]) -> None:
    params = replace(GREEDY, **own)
    with like_a_device(model) as seen:
        run(model.engine(), [model.request([5, 6, 7], params), model.request([8, 9], GREEDY)])
    assert "ahead" not in seen.order


class Request(NamedTuple):
    """A request, when it comes, and after how many steps it is cancelled, if it is."""

    prompt: list[int]
    params: SamplingParams
    stops: frozenset[int]
    arrives: int
    cancelled: int | None
    expires: int | None


@st.composite
def requests(draw: st.DrawFn) -> Request:
    params = SamplingParams(
        max_new_tokens=draw(st.integers(1, 9)),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.5])),
        seed=draw(st.integers(0, 99)),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        top_k=draw(st.sampled_from([0, 0, 20])),
        presence_penalty=draw(st.sampled_from([0.0] * 5 + [1.0])),
        logprobs=draw(st.sampled_from([None, None, 2])),
        n=draw(st.sampled_from([1, 1, 1, 2])),
        ignore_eos=True,
    )
    few = st.frozensets(st.integers(0, VOCABULARY - 1), max_size=VOCABULARY)
    return Request(
        draw(st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=7)),
        params,
        draw(st.one_of(st.just(frozenset()), few.map(lambda s: frozenset(list(s)[:30])))),
        draw(st.integers(0, 8)),
        draw(st.one_of(st.none(), st.none(), st.integers(1, 8))),
        draw(st.one_of(st.none(), st.none(), st.integers(1, 8))),
    )


def made(model: MoE, request: Request) -> SequenceGroup:
    group = model.request(request.prompt, request.params)
    for sequence in group.sequences:
        sequence._stop_token_ids = request.stops
    return group


@given(st.lists(requests(), min_size=1, max_size=5), st.sampled_from([1024, 1024, 77]))
def test_tokens_are_those_of_the_synchronous_order(
    model: MoE, asked: list[Request], first_guess: int
) -> None:
    """Whoever arrives, ends by a token, by number or by time, or is cancelled meanwhile."""
    alone = []
    with like_a_device(model, ahead=False):
        for request in asked:
            alone.append(run(model.engine(), [made(model, request)]))
    engine, groups = model.engine(), [made(model, request) for request in asked]
    found: dict[Any, list[Any]] = {s: [] for group in groups for s in group.sequences}
    left, cancelled = set(range(len(asked))), set[Any]()
    with like_a_device(model, first_guess=first_guess) as seen:
        step = 0
        while left or not engine.idle:
            for at, request in enumerate(asked):
                if at in left and request.arrives <= step:
                    engine.submit(groups[at])
                    left.discard(at)
                if request.cancelled is not None and step == request.arrives + request.cancelled:
                    engine.cancel(groups[at])
                    cancelled.update(groups[at].sequences)
                if request.expires is not None and step == request.arrives + request.expires:
                    for sequence in groups[at].sequences:
                        sequence.expire()
            for sequence, one in engine.step():
                assert sequence not in cancelled
                found[sequence].append(one)
            step += 1
            assert engine.scheduler.num_used_tokens() <= engine.kv_tokens
    event(f"{min(seen.order.count('ahead') // 4 * 4, 12)} or more steps ahead")
    assert engine._ahead is None
    assert set(engine.occupancy().values()) == {0}
    for request, group, expected in zip(asked, groups, alone, strict=True):
        for sequence, own in zip(group.sequences, expected, strict=True):
            events = found[sequence]
            assert not any(isinstance(one, Exception) for one in events)
            ends = [one.finish_reason for one in events]
            assert sequence.cache is None
            if request.cancelled is None and request.expires is None:
                assert len(events) == len(own)
            if request.expires is not None and len(events) < len(own) and events:
                assert request.cancelled is not None or ends.pop() == "length"
                events = events[:-1] + [replace(events[-1], finish_reason=None)]
            for one, other in zip(events, own, strict=False):
                assert isinstance(other, Delta)
                assert one.token.id == other.token.id
                assert one.finish_reason == other.finish_reason
                assert (one.token.logprob is None) == (other.token.logprob is None)


def test_a_token_that_is_drawn_again_is_not_what_was_read_ahead(model: MoE) -> None:
    """Top-p needs more tokens than were looked at, for some draws; then the host draws."""
    params = replace(GREEDY, temperature=1.0, top_p=0.9, max_new_tokens=24)
    each, prompts = [replace(params, seed=seed) for seed in range(2)], [[5, 6], [7, 8, 9]]
    with like_a_device(model, ahead=False):
        expected = [one.token_ids for one in model.generate(prompts, each)]
    again = 0
    for first_guess in (75, 77):
        with like_a_device(model, first_guess=first_guess) as seen:
            found = [one.token_ids for one in model.generate(prompts, each)]
        assert found == expected
        launched = len(seen.order) - seen.order.count("read")
        again += launched - len(found[0])
        assert "ahead" in seen.order
    assert again > 0


def test_a_failing_step_takes_nothing_from_the_one_before(
    model: MoE, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own sequences end with the error, one step later."""
    expected = model.generate([5, 6, 7], GREEDY)[0].token_ids
    true, calls = model.backbone.forward_packed, []

    def failing(work: Any, **how: Any) -> Any:
        calls.append(work[0].ahead is not None)
        if len(calls) == 4:
            raise RuntimeError("the device")
        return true(work, **how)

    monkeypatch.setattr(model.backbone, "forward_packed", failing)
    engine = model.engine()
    with like_a_device(model):
        (events,) = run(engine, [model.request([5, 6, 7], GREEDY)])
    assert calls == [False, False, True, True]
    *tokens, error = events
    assert [one.token.id for one in tokens if isinstance(one, Delta)] == expected[:3]
    assert isinstance(error, RuntimeError)
    assert set(engine.occupancy().values()) == {0}


@pytest.mark.parametrize("at", [3, 4])
def test_a_row_without_a_token_ends_its_sequence_only(
    model: MoE, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[5, 6, 7], [9, 8]]
    expected = [completion.token_ids for completion in model.generate(prompts, GREEDY)]
    true, calls = model.backbone.forward_packed, []

    def damaged(work: Any, **how: Any) -> Any:
        calls.append(len(work))
        logits = true(work, **how)
        if len(calls) == at:
            logits[0].fill_(float("nan"))
        return logits

    monkeypatch.setattr(model.backbone, "forward_packed", damaged)
    with like_a_device(model) as seen:
        groups = [model.request(prompt, GREEDY) for prompt in prompts]
        first, second = run(model.engine(), groups)
    assert "ahead" in seen.order
    assert [type(one) for one in first] == [Delta] * (at - 1) + [LogitsError]
    assert groups[0].sequences[0].token_ids == expected[0][: at - 1]
    assert groups[1].sequences[0].token_ids == expected[1]
    # The first sequence was read once more, before that was known.
    assert calls == [2] * (at + 1) + [1] * (8 - at - 1)
    assert len(second) == 8


def test_the_prefix_cache_keeps_what_it_would_have_kept(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    """The answer ends by a token, so that it was read too far."""
    params, prompt, found = replace(GREEDY, max_new_tokens=60), list(range(3, 25)), []
    memory = {"reuse_answers": True, "kv_tokens": 400, "prefix_tokens": 200}
    for ahead in (False, True):
        model = MoE.from_pretrained(
            tiny_checkpoint("qwen3_moe"), engine={"fused": "off"}, memory=memory
        )
        answer = model.generate(prompt, params)[0].token_ids
        # 22 + 43 tokens: with the last one, which nobody has read, there would be a block more.
        stop = next(token for at, token in enumerate(answer) if at >= 42)
        prefixes = model._prefixes
        assert prefixes is not None
        while prefixes.evict():
            pass
        engine, group = model.engine(), model.request(prompt, params)
        (sequence,) = group.sequences
        sequence._stop_token_ids = frozenset([stop])
        with like_a_device(model, ahead=ahead) as seen:
            run(engine, [group])
        assert ("ahead" in seen.order) == ahead
        whole = [*prompt, *sequence.token_ids]
        known = [prefixes.num_cached("", [*whole[:end], 0]) for end in range(len(whole) + 1)]
        found.append((sequence.token_ids, known, engine.occupancy(), prefixes.num_tokens))
    assert found[0] == found[1]


def test_texts_are_those_of_the_synchronous_order() -> None:
    """Ends by stop strings and by structures."""
    model = MoE.from_pretrained(DEMO, engine={"fused": "off", "max_batch_size": 4})
    greedy = replace(GREEDY, max_new_tokens=24)
    params = [
        replace(greedy, stop=("e",)), replace(greedy, stop=("return", "self")), greedy,
        replace(greedy, structure=Structure.regex("[a-z]{3} [0-9]{2}")),
    ]  # fmt: skip
    prompts: list[Any] = ["def main():", "class A:\n    def", "import os", "x ="]
    for some in (slice(3), slice(4)):
        found = []
        for ahead in (False, True):
            with like_a_device(model, ahead=ahead) as seen:
                done = model.generate(prompts[some], params[some])
            found.append([(one.token_ids, one.text, one.finish_reason) for one in done])
            assert ("ahead" in seen.order) == ahead
        assert found[0] == found[1]
