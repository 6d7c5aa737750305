"""Models that write whole blocks: a canvas of tokens is refined in several passes, then final.

Their generation code is the architecture's own and stays so: it runs inside a lane
(`moe.network.lanes`), so its schedule, its sampler and its rule to stop are what the model says.
The lane rests before each pass and after each final block, and sleeps at MoE layers like any other;
all sequences of a step meet there, whatever their step of refinement:

    writer = BlockWriter(network)
    lane = writer.lane(prompt, num_new=64, seed=0, rows=KVCache(len(prompt) + 64))
    while not lane.ended:
        writer.step([lane], experts.run)   # one pass: of the prompt, a final block or a canvas
        lane.take_final()                  # tokens, a whole block at a time

What such code reads, prompts and final blocks, is read for it by lanes of their own
(`BlockWriter.reading`), in parts and behind known beginnings if need be: the same code, ended
behind its first pass. The code that writes is then told that it has been read (`BlockCache`). So a
sequence can lose its keys and values, and have them read again, while its canvas stays.

Where the generation code has the structure that `moe.network.denoise` knows, and a proof holds, a
lane asks for its steps of refinement, and canvases that are refined in one step share a pass.

What a model must have is its structure, not its name: a ``generate`` that is not transformers'
common one, a ``canvas_length``, an encoder that reads, and a decoder that refines.
Legend: C tokens of a canvas, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin

from moe.errors import CheckpointError, UnsupportedModelError
from moe.kv.blocks import Windows
from moe.kv.cache import KVCache, KVFormat
from moe.network.attention import MaskRule
from moe.network.block_cache import BlockCache, layer_windows, seen_by_blocks
from moe.network.block_lane import BlockLane, CanvasLane, PromptLane, begin_pass
from moe.network.denoise import OWN, STEP, Acceptance, CanvasCall, Denoiser, Result
from moe.network.kept_rows import KeptRows
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
"""Whose blocks are compared with the model's own."""
_PROVEN = 2  # blocks: the second is written behind one that has been read


def writes_blocks(model: PreTrainedModel) -> bool:
    """Whether a model generates blocks by code of its own, by its class and configuration."""
    own = not isinstance(model, GenerationMixin) and hasattr(model, "generate")
    return own and isinstance(getattr(model.config, "canvas_length", None), int)


def text_model(model: PreTrainedModel) -> nn.Module:
    """What turns embeddings of a prompt into keys and values: the decoder of text, or what reads
    for a decoder of blocks."""
    reader: Any = model.get_encoder() if writes_blocks(model) else model
    found: nn.Module = reader.get_decoder()
    return found


def set_generation(model: PreTrainedModel, stored: dict[str, Any]) -> None:
    """Let a model generate by the settings stored beside it, of its own class.

    Raises:
        CheckpointError: they are not valid for this model.
    """
    kind: Any = type(model).generation_config_class
    known = vars(kind())
    settings = {name: value for name, value in stored.items() if name in known and name[0] != "_"}
    try:
        defaults = kind._get_default_generation_params()
        for name, value in settings.items():
            # The file names a class; only that of the default is made.
            own: Any = defaults.get(name)
            if isinstance(value, dict) and is_dataclass(own):
                given = {key: item for key, item in value.items() if key != "_cls_name"}
                made: Any = type(own)
                settings[name] = made(**given)
        model.generation_config = kind(**settings)
    except Exception as error:  # the class checks values with its own types of errors
        raise CheckpointError(
            f"generation_config.json is not valid for {type(model).__name__}: {error}; repair or "
            "remove the file"
        ) from error


def share_tied_modules(model: PreTrainedModel) -> None:
    """Let modules whose parameters are all tied to another's be that other module.

    An encoder and a decoder with the same weights then have one set of experts, linear layers and
    norms, whatever is done to them: experts taken away, matrices cut into planes. Modules that are
    replaced meanwhile want `link_shared` again.
    """
    ties = model.all_tied_weights_keys
    shared: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        own = [f"{name}.{leaf}" for leaf, _ in module.named_parameters(remove_duplicate=False)]
        if not own or not all(one in ties for one in own) or not _is_registered(model, name):
            continue
        sources = {ties[one].removesuffix(one.removeprefix(name)) for one in own}
        if len(sources) != 1:
            continue
        (source_name,) = sources
        source = model.get_submodule(source_name)
        if type(source) is not type(module) or _kept_buffers(source) or _kept_buffers(module):
            continue
        path, _, leaf = name.rpartition(".")
        del model.get_submodule(path)._modules[leaf]
        shared[name] = source_name
        for one in own:
            del ties[one]
    model.shared_modules = shared  # type: ignore[assignment]
    link_shared(model)


def link_shared(model: PreTrainedModel) -> None:
    """Let the modules of `share_tied_modules` be what now has their sources' names."""
    links: Any = model.shared_modules
    for name, source_name in links.items():
        path, _, leaf = name.rpartition(".")
        # Not registered: it has one name, and one place in the state of the model.
        object.__setattr__(model.get_submodule(path), leaf, model.get_submodule(source_name))


def _is_registered(model: nn.Module, name: str) -> bool:
    """Whether the module is still there under its name: one around it may be shared by now."""
    for part in name.split("."):
        found = model._modules.get(part)
        if found is None:
            return False
        model = found
    return True


def _kept_buffers(module: nn.Module) -> bool:
    """Whether it has buffers that a checkpoint holds."""
    return any(
        name not in one._non_persistent_buffers_set
        for one in module.modules()
        for name in one._buffers
    )


class _PromptRead(Exception):
    """Ends a model's generation code behind its first pass."""


class BlockWriter:
    """Runs the generation code of a model whose experts have been taken over.

    Args:
        model: of which `writes_blocks` holds, in evaluation mode.

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
        refiner.register_forward_pre_hook(partial(begin_pass, "denoise"))
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
    ) -> BlockLane:
        """A lane that writes at least ``num_new`` tokens after a prompt, in whole blocks.

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
        special = {GREEDY: temperature == 0, "confidence": acceptance.kind == "confidence"}
        special |= {"logprobs": scored is not None, "refresh": acceptance.refresh is not None}
        if self.denoiser is None and any(special.values()):
            wanted = next(name for name, asked in special.items() if asked)
            raise UnsupportedModelError(f"{wanted} is not possible here: {self.no_policies}")
        prompt = list(token_ids)
        cache = BlockCache(self._windows, len(prompt) - 1, rows)
        random = LaneRandom(seed, self.model.device)
        refresh = acceptance.refresh
        kept = None if refresh is None else KeptRows(refresh)
        call = CanvasCall({}, acceptance, random, temperature == 0, scored, kept)
        changed, blocks = self._changed(temperature, acceptance), _ToLane()
        # The code hears of the last token only, as it wants to read something.
        count = math.ceil(num_new / self.canvas_length)
        forward = partial(self._generate, prompt[-1:], count, changed, blocks, cache)
        return BlockLane(forward, random, cache, prompt, count * self.canvas_length, call)

    def reading(self, work: Work) -> Lane[list[Tensor]]:
        """A lane that reads tokens of a sequence. There are no logits: it gives an empty row."""
        return PromptLane(partial(self._read_prompt, work))

    def windows(self, form: KVFormat, run_experts: ExpertsRunner) -> Windows:
        """Layers of which sequences keep no more than the last tokens.

        Args:
            form: how keys and values will be stored.
            run_experts: as in `prove`.
        """
        rows = KVCache(1)
        run_lanes([self.reading(Work([0], rows))], run_experts)
        return seen_by_blocks(self.model.config, rows.layer_bytes(form))

    def logits(
        self, token_ids: Sequence[int], canvas: Sequence[int], run_experts: ExpertsRunner
    ) -> Tensor:
        """``(C, V)`` raw logits of a canvas behind a text, in a first pass over it."""

        def forward() -> list[Tensor]:
            ids, tokens = (
                torch.tensor([list(own)], device=self.model.device) for own in (token_ids, canvas)
            )
            return [self.model(input_ids=ids, decoder_input_ids=tokens).logits[0]]

        lane = CanvasLane(forward)
        run_lanes([lane], run_experts)
        return lane.result()[0]

    def step(
        self,
        lanes: Sequence[BlockLane],
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

    def _reading_of(self, lane: BlockLane) -> Lane[list[Tensor]] | None:
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
            Lane(partial(self.denoiser.run, group), "denoise")  # type: ignore[union-attr]
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

    def prove(self, run_experts: ExpertsRunner) -> None:
        """Compare short blocks written in lanes with those that the model writes by itself.

        If they differ where canvases share passes, they do not from then on.

        Args:
            run_experts: stands in for the experts.

        Raises:
            UnsupportedModelError: they differ, or this class cannot drive the model.
        """
        name = type(self.model).__name__
        try:
            if self.denoiser is not None and self._differs(run_experts):
                self.denoiser = None
                self.no_policies = "canvases that share passes become others than by themselves"
            differs = self.denoiser is None and self._differs(run_experts)
        except Exception as error:  # generation code of an architecture that is not known
            raise UnsupportedModelError(
                f"{name} writes blocks, and its generation code cannot be driven: "
                f"{type(error).__name__}: {error}"
            ) from error
        if differs:
            raise UnsupportedModelError(
                f"{name} writes blocks, and its generation code gives something else in a lane "
                "than by itself; it is not supported"
            )

    def _differs(self, run_experts: ExpertsRunner) -> bool:
        """Whether lanes write something else than the model by itself."""
        few = {"max_denoising_steps": 2}
        own = Acceptance(max_steps=2)
        num_new = _PROVEN * self.canvas_length
        lanes = [
            self.lane(prompt, num_new, seed, acceptance=own, rows=KVCache(len(prompt) + num_new))
            for seed, prompt in enumerate(_PROMPTS)
        ]
        written = write(self, lanes, run_experts)
        for seed, (prompt, lane, found) in enumerate(zip(_PROMPTS, lanes, written, strict=True)):
            lane.result()
            blocks = _Blocks()
            by_itself = Lane(partial(self._generate, prompt, _PROVEN, few, blocks))
            with LaneRandom(seed, self.model.device).active():
                run_lanes([by_itself], run_experts)
            by_itself.result()
            if [token.id for token in found] != blocks.token_ids:
                return True
            if lane.passes != {"prefill": _PROVEN, "denoise": 2 * _PROVEN}:
                return True
        return False

    def _refine(self, own: Callable[..., Result], **given: Any) -> Result:
        """Stands in for the model's function that does a step of refinement."""
        lane = current_lane()
        if self.denoiser is None or not isinstance(lane, BlockLane):
            return own(**given)
        if not self.denoiser.takes(given):
            return own(**given)
        return lane.ask(given)

    def _read(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stands in for what reads: lanes that write do not, and those that read do no more."""
        lane = current_lane()
        if isinstance(lane, BlockLane):
            return SimpleNamespace(**{CACHE_ARGUMENT: lane.take_reading()})
        result = own(*args, **kwargs)
        if isinstance(lane, PromptLane):
            raise _PromptRead
        return result

    def _read_prompt(self, work: Work) -> list[Tensor]:
        cache, tokens = BlockCache(self._windows, work.cache.length, work.cache.kv), work.token_ids
        # Rows take the place of what ids give, and the code warns of an image's.
        ids = list(tokens) if work.rows is None else [0] * len(tokens)
        with suppress(_PromptRead), given(_rows_of(work)):
            self._generate(ids, 1, {}, None, cache)
        work.cache.kv.advance({}, len(tokens))
        return [torch.empty(1, 0)]

    def _generate(
        self,
        token_ids: list[int],
        blocks: int,
        changed: dict[str, Any],
        streamer: _Blocks | None,
        cache: BlockCache | None = None,
    ) -> None:
        """The model's own code, with a cache of its own or this one."""
        self.model.generate(
            torch.tensor([token_ids], device=self.model.device),
            streamer=streamer,
            max_new_tokens=blocks * self.canvas_length,
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
        if acceptance.stable is not None:
            changed |= {"stability_threshold": acceptance.stable, "confidence_threshold": math.inf}
        if acceptance.kind == "entropy":
            own = self.model._prepare_generation_config(None)[0].sampler_config
            changed["sampler_config"] = type(own)(entropy_bound=acceptance.bound)
        return changed


def schedule_of(model: PreTrainedModel) -> dict[str, Any]:
    """The settings by which a model writes blocks, as far as it has them, ready for JSON."""
    own: Any = model
    try:
        settings, _ = own._prepare_generation_config(None)
    except Exception:  # generation code of an architecture that is not known
        settings = None
    names = ("max_denoising_steps", "t_min", "t_max", "stability_threshold")
    schedule = {name: getattr(settings, name, None) for name in (*names, "confidence_threshold")}
    config = getattr(settings, "sampler_config", None)
    return schedule | {"entropy_bound": getattr(config, "entropy_bound", None)}


def _parts(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """What reads tokens, and what refines a canvas."""
    reader, refiner = model.get_encoder(), model.get_decoder()
    if reader is None or refiner is None or reader is refiner or reader is model:
        raise UnsupportedModelError(
            f"{type(model).__name__} writes blocks, but not by an encoder that reads and a decoder "
            "that refines; only such block-diffusion models are supported"
        )
    return reader, refiner


def write(
    writer: BlockWriter, lanes: Sequence[BlockLane], run_experts: ExpertsRunner
) -> list[list[Token]]:
    """Let lanes write to their ends, all together; the tokens of each."""
    written: list[list[Token]] = [[] for _ in lanes]
    while not all(lane.ended for lane in lanes):
        writer.step([lane for lane in lanes if not lane.ended], run_experts)
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


class _Blocks:
    """Receives what the model's code writes: first the prompt, then each block that is final."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        if self._has_prompt:
            self.add(value.flatten().tolist())
        self._has_prompt = True

    def add(self, token_ids: list[int]) -> None:
        """A block is final."""
        self.token_ids += token_ids

    def end(self) -> None:
        """Nothing is left."""


class _ToLane(_Blocks):
    """Hands blocks to the running lane, which rests then."""

    def add(self, token_ids: list[int]) -> None:
        lane = current_lane()
        assert isinstance(lane, BlockLane)
        lane.add_final(token_ids)
