"""Would servers that only read prompts pay, beside others that decode? `moe plan --ranks` says it.

`serve_together` and `serve_apart` simulate the same requests, event by event: on engines that read
prompts between their decode steps, and on some that only read and others that only decode. An
engine that decodes gives each of its sequences a token a step; a chunk of a prompt makes the step
longer for all of them. `compare` tries every split and `recommend` says whether one is worth it.
Both take costs from the caller: `moe plan --ranks` from bytes, arithmetic and measured speeds,
`lab.simulation.apart` from published figures.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from moe.commands.plan.ranks import EngineCosts, RankAdvice

STALLS_FALL, FIRST_RISES = 0.5, 2.0
"""Bounds of a worthwhile split: the longest gaps between tokens fall to this share, while first
tokens come at most so many times as late."""
PROMPT, ANSWER, BUSY = 2048, 256, 0.6
"""Tokens of the requests that are simulated unless told otherwise."""
ENGINES = 8
"""Most engines that are simulated; more are taken as so many times these."""


@dataclass(frozen=True)
class Workload:
    """Requests that come at random times.

    Attributes:
        prompt: new tokens of each prompt.
        answer: tokens of each answer.
        requests_per_s: of all together.
        requests: how many are simulated.
    """

    prompt: int
    answer: int
    requests_per_s: float
    requests: int


@dataclass(frozen=True)
class Served:
    """The times of simulated requests.

    Attributes:
        name: of the arrangement.
        prefill: engines that only read prompts; 0: all do both.
        tbt_p50, tbt_p99: seconds between two tokens of an answer.
        ttft_p50, ttft_p99: seconds until the first token.
        seconds: until the last request was answered.
    """

    name: str
    prefill: int
    tbt_p50: float
    tbt_p99: float
    ttft_p50: float
    ttft_p99: float
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


_TITLE = "Prefill apart (methods.prefill_apart.role)"


def advise(costs: EngineCosts | None, ranks: int) -> RankAdvice:
    """Judge whether some of so many independent ranks should only read prompts; see
    `RANK_ADVICE`."""
    if costs is None:
        return RankAdvice("prefill_apart", f"{_TITLE}: no, a model must fit into each rank for it.")
    served = compare(costs, ranks, typical_load(costs, ranks))
    split, why = recommend(served)
    return RankAdvice(
        name="prefill_apart",
        advice=f"{_TITLE}: {'yes' if split else 'no'}, {why}.",
        simulated=[one.as_dict() for one in served],
        assumption=f"Prefill apart: simulated on as many independent ranks, prompts of {PROMPT:,} "
        f"new tokens in chunks of {costs.chunk_tokens} and answers of {ANSWER} that keep "
        f"{BUSY:.0%} of them busy.",
    )


def typical_load(costs: EngineCosts, engines: int, *, batch: int = 16) -> Workload:
    """Prompts of `PROMPT` tokens and answers of `ANSWER` that keep engines busy for `BUSY` of the
    time, if ``batch`` sequences decode together."""
    each = costs.prompt_s(PROMPT) + ANSWER * costs.step_s(batch) / batch
    return Workload(PROMPT, ANSWER, BUSY * engines / each, max(40, 4 * batch) * engines)


@dataclass(eq=False)
class _Request:
    arrived: float
    unread: int
    left: int


@dataclass(eq=False)
class _Engine:
    """An engine in a simulation; `step` runs it up to its next event."""

    costs: EngineCosts
    decodes: bool
    now: float = 0.0
    waiting: deque[_Request] = field(default_factory=deque)
    running: list[_Request] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running)

    def step(self) -> tuple[float, int, _Request | None]:
        """Run a step; its seconds, how many sequences got a token, and the prompt read to its end
        in it."""
        count, seconds = len(self.running), 0.0
        if count:
            seconds += self.costs.step_s(count)
        read = None
        if self.waiting:
            first = self.waiting[0]
            tokens = min(first.unread, self.costs.chunk_tokens)
            seconds += self.costs.chunk_s(tokens)
            first.unread -= tokens
            if not first.unread:
                read = self.waiting.popleft()
        self.now += seconds
        for request in self.running:
            request.left -= 1
        self.running = [request for request in self.running if request.left]
        if read is not None and self.decodes and read.left > 1:
            read.left -= 1
            self.running.append(read)
        return seconds, count, read


def serve_together(costs: EngineCosts, engines: int, work: Workload) -> Served:
    """On engines that read and decode, each request on the one with the fewest."""
    return _simulate("together", costs, engines, 0, work)


def serve_apart(costs: EngineCosts, prefill: int, decode: int, work: Workload) -> Served:
    """On engines that only read, and others that only decode."""
    return _simulate(f"{prefill} of {prefill + decode} read", costs, decode, prefill, work)


def _simulate(name: str, costs: EngineCosts, decode: int, prefill: int, work: Workload) -> Served:
    times = np.random.default_rng(0).exponential(1 / work.requests_per_s, work.requests).cumsum()
    readers = [_Engine(costs, decodes=False) for _ in range(prefill)]
    decoders = [_Engine(costs, decodes=True) for _ in range(decode)]
    engines = [*readers, *decoders]
    # What happens when: a request arrives at an engine of a kind, or an engine goes on.
    events: list[tuple[float, int, _Request | None, _Engine | None]] = []
    count = 0

    def at(time: float, request: _Request | None, engine: _Engine | None) -> None:
        nonlocal count
        count += 1
        heapq.heappush(events, (time, count, request, engine))

    for time in times.tolist():
        at(time, _Request(time, work.prompt, work.answer), None)
    gaps: list[tuple[float, int]] = []
    firsts: list[float] = []
    going: set[int] = set()
    while events:
        time, _, request, engine = heapq.heappop(events)
        if request is not None:
            is_read = request.unread == 0
            kind = decoders if is_read or not readers else readers
            engine = min(kind, key=lambda each: len(each.waiting) + len(each.running))
            if is_read:  # it reads what is behind the last whole block
                request.unread = 1
            engine.waiting.append(request)
        assert engine is not None
        if id(engine) in going and request is not None:
            continue
        engine.now = time
        going.discard(id(engine))
        if engine.idle:
            continue
        seconds, tokens, read = engine.step()
        gaps.append((seconds, tokens))
        if read is not None and engine.decodes:
            firsts.append(engine.now - read.arrived)
        elif read is not None:
            at(engine.now + costs.handover_s(work.prompt), read, None)
        going.add(id(engine))
        at(engine.now, None, engine)
    lengths, weights = np.array(gaps).T
    tbt_p50, tbt_p99 = _weighted(lengths, weights, (0.5, 0.99))
    ttft_p50, ttft_p99 = np.quantile(firsts, (0.5, 0.99)).tolist()
    end = max(engine.now for engine in engines)
    return Served(name, prefill, tbt_p50, tbt_p99, ttft_p50, ttft_p99, end)


def _weighted(values: Any, weights: Any, shares: Sequence[float]) -> list[float]:
    order = np.argsort(values)
    before = np.cumsum(weights[order]) / weights.sum()
    return [float(values[order][np.searchsorted(before, share)]) for share in shares]


def compare(costs: EngineCosts, engines: int, work: Workload) -> list[Served]:
    """Together, and apart in every split of at most `ENGINES` engines."""
    few = min(engines, ENGINES)
    own = replace(
        work,
        requests_per_s=work.requests_per_s * few / engines,
        requests=max(work.requests * few // engines, 1),
    )
    return [
        serve_together(costs, few, own),
        *(serve_apart(costs, read, few - read, own) for read in range(1, few)),
    ]


def recommend(served: Sequence[Served]) -> tuple[Served | None, str]:
    """The split that is worthwhile and stalls least, and why; None: to read and decode together."""
    together, *splits = served
    if not splits:
        return None, "it takes two engines at least"
    able = [each for each in splits if each.ttft_p99 <= FIRST_RISES * together.ttft_p99]
    best = min(able or splits, key=lambda each: (each.tbt_p99, each.ttft_p99))
    stalls, first = best.tbt_p99 / together.tbt_p99, best.ttft_p99 / together.ttft_p99
    figures = (
        f"{best.name}: the longest gaps between tokens (p99) are {1e3 * best.tbt_p99:.0f} ms in "
        f"place of {1e3 * together.tbt_p99:.0f}, and first tokens (p99) come after "
        f"{best.ttft_p99:.1f} s in place of {together.ttft_p99:.1f}"
    )
    if not able:
        return None, f"every split makes prompts wait too long; {figures}"
    if stalls > STALLS_FALL:
        return None, f"stalls hardly fall; {figures}"
    return best, figures + (f" ({first:.1f} times)" if first > 1 else "")
