"""`CanvasDriver`: runs the model's own generation code in lanes, and joins its passes.

The code runs inside a lane (`moe.network.lanes`), so its schedule, its sampler and its rule to stop
are what the model says. The lane rests before each pass and after each final canvas, and sleeps at
MoE layers like any other. All sequences of a step meet there, whatever their step of refinement:

    driver = CanvasDriver(network)
    lane = driver.lane(prompt, num_new=64, seed=0, rows=KVCache(len(prompt) + 64))
    while not lane.ended:
        driver.step([lane], experts.run)   # one pass: of the prompt, a final canvas or one in work
        lane.take_final()                  # tokens, a whole canvas at a time

Lanes of their own read what such code reads, prompts and final canvases, for it
(`CanvasDriver.reading`): in parts, and after known beginnings. They run the same code, which ends
after its first pass. The code that writes is then told that it has been read (`CacheView`). So a
sequence can lose its keys and values, and have them read again, while its canvas stays.

Where the generation code has the structure that `denoise` knows, and a proof holds, a lane asks for
its steps of refinement, and canvases that are refined in one step share a pass.
Legend: C tokens of a canvas, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe.describe.probe import stand_in
from moe.errors import UnsupportedModelError
from moe.kv.cache import KVCache
from moe.kv.layout import KVFormat
from moe.kv.ledger import Windows
from moe.methods.diffusion.cache_view import CacheView, canvas_windows, layer_windows
from moe.methods.diffusion.denoise import OWN, STEP, Acceptance, CanvasCall, Denoiser, Result
from moe.methods.diffusion.kept_rows import KeptRows
from moe.methods.diffusion.kind import link_shared, schedule_of
from moe.methods.diffusion.lane import CanvasLane, PromptLane, TrialLane, begin_pass
from moe.network.attention import MaskRule
from moe.network.lanes import ExpertsRunner, Lane, LaneRandom, current_lane, run_lanes
from moe.network.own_cache import CACHE_ARGUMENT
from moe.network.packed_pass import Work
from moe.network.prompt_rows import EMBEDDINGS, MASK, given
from moe.sampling.batch import Token
from offload.errors import OffloadError

NO_TOKEN = -1
"""Given to the model's code as its end token, as each request has its own."""
GREEDY = "temperature 0"
_PROMPTS = [0, 1, 2], [3, 4, 5, 6, 7]
"""Whose canvases are compared with the model's own."""
_PROVEN = 2  # canvases: the second is written after one that has been read


class _PromptRead(Exception):
    """Ends a model's generation code after its first pass."""


class CanvasDriver:
    """Runs the generation code of a model whose experts have been taken over.

    Args:
        model: one that `kind.serves`, in evaluation mode.

    Attributes:
        canvas_length: C.
        schedule: the model's own settings of generation, ready for JSON.
        denoiser: does steps of refinement for all canvases together; None: each lane's own code
            does them.
        no_policies: why there is none, so that only the model's own procedure can be had; empty if
            there is one.

    Raises:
        UnsupportedModelError: the model lacks what this class drives.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        link_shared(model)  # linear layers may be planes by now
        self.canvas_length: int = model.config.canvas_length
        self._windows = layer_windows(model.config)
        reader, refiner = _parts(model)
        reader.forward = partial(self._read, reader.forward)
        reader.register_forward_pre_hook(partial(begin_pass, "prefill"))
        refiner.register_forward_pre_hook(partial(begin_pass, "decode"))
        self.schedule = schedule_of(model)
        self.no_policies = Denoiser.why_not(model)
        self.denoiser: Denoiser | None = None
        if not self.no_policies:
            self.denoiser = Denoiser(model)
            setattr(self.model, STEP, partial(self._refine, getattr(self.model, STEP)))

    def lane(
        self,
        token_ids: Sequence[int],
        num_new: int,
        seed: int,
        *,
        temperature: float = 1.0,
        acceptance: Acceptance = OWN,
        scored: int | None = None,
        rows: KVCache | None = None,
    ) -> CanvasLane:
        """A lane that writes at least ``num_new`` tokens after a prompt, in whole canvases.

        Args:
            seed: of all its random numbers, as ``torch.manual_seed`` takes it.
            temperature: multiplies those of the model's schedule; 0: each position takes its most
                likely token, while the schedule decides which are kept.
            acceptance: which predictions stay.
            scored: as `CanvasCall` has it.
            rows: keys and values of the sequence, of which the prompt may have been read.

        Raises:
            UnsupportedModelError: the model's sampler cannot be replaced for that.
        """
        special = {GREEDY: temperature == 0, "logprobs": scored is not None}
        special["refresh"] = acceptance.refresh is not None
        if self.denoiser is None and any(special.values()):
            wanted = next(name for name, asked in special.items() if asked)
            raise UnsupportedModelError(f"{wanted} is not possible here: {self.no_policies}")
        prompt = list(token_ids)
        cache = CacheView(self._windows, len(prompt) - 1, rows)
        random = LaneRandom(seed, self.model.device)
        refresh = acceptance.refresh
        kept = None if refresh is None else KeptRows(refresh)
        call = CanvasCall({}, acceptance, random, temperature == 0, scored, kept)
        changed, finals = self._changed(temperature, acceptance), _ToLane()
        # The code hears of the last token only, as it wants to read something.
        count = math.ceil(num_new / self.canvas_length)
        forward = partial(self._generate, prompt[-1:], count, changed, finals, cache)
        return CanvasLane(forward, random, cache, prompt, count * self.canvas_length, call)

    def reading(self, work: Work) -> Lane[list[Tensor]]:
        """A lane that reads tokens of a sequence. There are no logits: it gives an empty row."""
        return PromptLane(partial(self._read_prompt, work))

    def windows(self, form: KVFormat) -> Windows:
        """The layers of which sequences keep no more than the last tokens.

        Args:
            form: how keys and values will be stored.
        """
        rows = KVCache(1)
        run_lanes([self.reading(Work([0], rows))], stand_in)
        return canvas_windows(self.model.config, rows.layer_bytes(form))

    def logits(
        self, token_ids: Sequence[int], canvas: Sequence[int], run_experts: ExpertsRunner
    ) -> Tensor:
        """``(C, V)`` raw logits of a canvas behind a text, in a first pass over it."""

        def forward() -> list[Tensor]:
            ids, tokens = (
                torch.tensor([list(own)], device=self.model.device) for own in (token_ids, canvas)
            )
            return [self.model(input_ids=ids, decoder_input_ids=tokens).logits[0]]

        lane = TrialLane(forward)
        run_lanes([lane], run_experts)
        return lane.result()[0]

    def step(
        self,
        lanes: Sequence[CanvasLane],
        run_experts: ExpertsRunner,
        beside: Sequence[Lane[Any]] = (),
        pauses: Mapping[Lane[Any], int] | None = None,
    ) -> None:
        """One pass of every lane: over what it has yet to read, or over its canvas. Those that ask
        for a step of refinement share passes.

        What a pass raises is raised in each of its lanes, whose `Lane.result` says so. If experts
        could not be read in one that several canvases share, each is tried by itself.

        Args:
            beside: other lanes that meet them at the MoE layers.
            pauses: as in `run_lanes`.
        """
        reads = {lane: self._reading_of(lane) for lane in lanes}
        reading = {lane: own for lane, own in reads.items() if own is not None}
        writing = [lane for lane in lanes if lane not in reading]
        for lane in writing:
            if lane.asked is None:
                lane.proceed()
        asking = {lane.asked: lane for lane in writing if lane.asked is not None}
        others = [lane for lane in writing if lane.asked is None]
        groups = list(self.denoiser.groups(list(asking))) if self.denoiser is not None else []
        beside = [*beside, *reading.values(), *others]
        failed = self._share_passes(groups, beside, run_experts, pauses)
        self._share_passes([[call] for call in failed], [], run_experts)
        for lane, own in reading.items():
            lane.passes["prefill"] += 1
            lane.error = _error_of(own)
        for lane in others:
            lane.error = lane.lost_error()
        for lane in asking.values():
            lane.wake()

    def _reading_of(self, lane: CanvasLane) -> Lane[list[Tensor]] | None:
        """What reads the tokens that a lane's rows lack next."""
        rows, tokens = lane.cache.rows, lane.unread(self.canvas_length)
        return self.reading(Work(tokens, rows)) if rows is not None and tokens else None

    def _share_passes(
        self,
        groups: Sequence[list[CanvasCall]],
        others: Sequence[Lane[Any]],
        run_experts: ExpertsRunner,
        pauses: Mapping[Lane[Any], int] | None = None,
    ) -> list[CanvasCall]:
        """Run a pass of each group beside other lanes; returns calls of several that lack experts.

        With several ranks there are none: there, a pass has rows that are lost.
        """
        assert self.denoiser is not None or not groups
        passes = [
            Lane(partial(self.denoiser.run, group), "decode")  # type: ignore[union-attr]
            for group in groups
        ]
        run_lanes([*others, *passes], run_experts, pause_at=pauses)
        failed: list[CanvasCall] = []
        for group, one in zip(groups, passes, strict=True):
            try:
                rows = one.result()
            except Exception as error:
                again = isinstance(error, OffloadError) and len(group) > 1
                failed += group if again else []
                for call in group:
                    call.result = error
                continue
            for call, own in zip(group, rows, strict=True):
                call.result = one.lost_error(own) or call.result
        return failed

    def prove(self) -> None:
        """Compare short canvases written in lanes with those that the model writes by itself.

        If they differ where canvases share passes, they do not from then on.

        Raises:
            UnsupportedModelError: they differ, or this class cannot drive the model.
        """
        name = type(self.model).__name__
        try:
            if self.denoiser is not None and self._differs():
                self.denoiser = None
                self.no_policies = "canvases that share passes become others than by themselves"
            differs = self.denoiser is None and self._differs()
        except Exception as error:  # generation code of an architecture that is not known
            raise UnsupportedModelError(
                f"{name} writes canvases, and its generation code cannot be driven: "
                f"{type(error).__name__}: {error}"
            ) from error
        if differs:
            raise UnsupportedModelError(
                f"{name} writes canvases, and its generation code gives something else in a lane "
                "than by itself; it is not supported"
            )

    def _differs(self) -> bool:
        """Whether lanes write something else than the model by itself; experts stand in."""
        few = {"max_denoising_steps": 2}
        own = Acceptance(max_steps=2)
        num_new = _PROVEN * self.canvas_length
        lanes = [
            self.lane(prompt, num_new, seed, acceptance=own, rows=KVCache(len(prompt) + num_new))
            for seed, prompt in enumerate(_PROMPTS)
        ]
        written = write(self, lanes, stand_in)
        for seed, (prompt, lane, found) in enumerate(zip(_PROMPTS, lanes, written, strict=True)):
            lane.result()
            finals = _Finals()
            by_itself = Lane(partial(self._generate, prompt, _PROVEN, few, finals))
            with LaneRandom(seed, self.model.device).active():
                run_lanes([by_itself], stand_in)
            by_itself.result()
            if [token.id for token in found] != finals.token_ids:
                return True
            if lane.passes != {"prefill": _PROVEN, "decode": 2 * _PROVEN}:
                return True
        return False

    def _refine(self, own: Callable[..., Result], **given: Any) -> Result:
        """Stands in for the model's function that does a step of refinement."""
        lane = current_lane()
        if self.denoiser is None or not isinstance(lane, CanvasLane):
            return own(**given)
        if not self.denoiser.takes(given):
            return own(**given)
        return lane.ask(given)

    def _read(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stands in for what reads: lanes that write do not, and those that read do no more."""
        lane = current_lane()
        if isinstance(lane, CanvasLane):
            return SimpleNamespace(**{CACHE_ARGUMENT: lane.take_reading()})
        result = own(*args, **kwargs)
        if isinstance(lane, PromptLane):
            raise _PromptRead
        return result

    def _read_prompt(self, work: Work) -> list[Tensor]:
        cache, tokens = CacheView(self._windows, work.cache.length, work.cache.kv), work.token_ids
        # Rows take the place of what ids give, and the code warns of an image's.
        ids = list(tokens) if work.rows is None else [0] * len(tokens)
        with suppress(_PromptRead), given(_rows_of(work)):
            self._generate(ids, 1, {}, None, cache)
        work.cache.kv.advance({}, len(tokens))
        return [torch.empty(1, 0)]

    def _generate(
        self,
        token_ids: list[int],
        canvases: int,
        changed: dict[str, Any],
        streamer: _Finals | None,
        cache: CacheView | None = None,
    ) -> None:
        """The model's own code, with a cache of its own or this one."""
        self.model.generate(
            torch.tensor([token_ids], device=self.model.device),
            streamer=streamer,
            max_new_tokens=canvases * self.canvas_length,
            max_length=None,
            eos_token_id=NO_TOKEN,
            **({} if cache is None else {CACHE_ARGUMENT: cache}),
            **changed,
        )

    def _changed(self, temperature: float, acceptance: Acceptance) -> dict[str, Any]:
        """What differs from the model's own settings of generation."""
        changed: dict[str, Any] = {}
        if temperature not in (0.0, 1.0):
            for name in ("t_min", "t_max"):
                changed[name] = self.schedule[name] * temperature
        if acceptance.max_steps is not None:
            changed["max_denoising_steps"] = acceptance.max_steps
        return changed


def _parts(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """What reads tokens, and what refines a canvas."""
    reader, refiner = model.get_encoder(), model.get_decoder()
    if reader is None or refiner is None or reader is refiner or reader is model:
        raise UnsupportedModelError(
            f"{type(model).__name__} writes canvases, but not by an encoder that reads and a "
            "decoder that refines; only such diffusion models are supported"
        )
    return reader, refiner


def write(
    driver: CanvasDriver, lanes: Sequence[CanvasLane], run_experts: ExpertsRunner
) -> list[list[Token]]:
    """Let lanes write to their ends, all together; the tokens of each."""
    written: list[list[Token]] = [[] for _ in lanes]
    while not all(lane.ended for lane in lanes):
        driver.step([lane for lane in lanes if not lane.ended], run_experts)
        for lane, tokens in zip(lanes, written, strict=True):
            tokens += lane.take_final()
    return written


def _rows_of(work: Work) -> dict[str, Any] | None:
    """What the model's text part is given in place of what token ids give (`Work.rows`), with bool
    masks in place of rules.

    Behind a beginning the code makes its masks itself: only prompts in which no token sees a later
    one are read in parts.
    """
    if work.rows is None:
        return None
    rows, size = dict(work.rows), len(work.token_ids)
    rules = rows.pop(MASK, None)
    if rules is not None and work.cache.length == 0:
        device = rows[EMBEDDINGS].device

        def mask(rule: Any) -> Any:
            found = rule.mask(size, size, device) if isinstance(rule, MaskRule) else None
            return None if found is None else found.expand(1, 1, size, size)

        by_name = isinstance(rules, dict)
        rows[MASK] = {k: mask(rule) for k, rule in rules.items()} if by_name else mask(rules)
    return rows


def _error_of(lane: Lane[Any]) -> Exception | None:
    """Why a lane has no result that holds."""
    try:
        lane.result()
    except Exception as error:
        return error
    return lane.lost_error()


class _Finals:
    """Receives what the model's code writes: first the prompt, then each final canvas."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        if self._has_prompt:
            self.add(value.flatten().tolist())
        self._has_prompt = True

    def add(self, token_ids: list[int]) -> None:
        """Take a canvas that is final."""
        self.token_ids += token_ids

    def end(self) -> None:
        """Nothing is left."""


class _ToLane(_Finals):
    """Hands final canvases to the running lane, which rests then."""

    def add(self, token_ids: list[int]) -> None:
        lane = current_lane()
        assert isinstance(lane, CanvasLane)
        lane.add_final(token_ids)
