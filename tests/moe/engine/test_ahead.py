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
from moe.sequence import Delta

ROOT = Path(__file__).parents[3]
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
        patch.setattr(model.backbone, "_decodes_ahead", lambda: ahead)
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


@given(st.lists(requests(), min_size=1, max_size=5), st.sampled_from([1024, 1024, 16]))
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
    left = set(range(len(asked)))
    with like_a_device(model, first_guess=first_guess) as seen:
        step = 0
        while left or not engine.idle:
            for at, request in enumerate(asked):
                if at in left and request.arrives <= step:
                    engine.submit(groups[at])
                    left.discard(at)
                if request.cancelled is not None and step == request.arrives + request.cancelled:
                    engine.cancel(groups[at])
                if request.expires is not None and step == request.arrives + request.expires:
                    for sequence in groups[at].sequences:
                        sequence.expire()
            for sequence, one in engine.step():
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
