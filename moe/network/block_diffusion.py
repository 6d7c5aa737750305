"""Models that write whole blocks: a canvas of tokens is refined in several passes, then final.

Their generation code is the architecture's own and stays so: it runs inside a lane
(`moe.network.lanes`), so its schedule, its sampler, its rule to stop and its cache are what the
model says. The lane rests before each pass and after each final block, and sleeps at MoE layers
like any other; all sequences of a step meet there, whatever their step of refinement:

    writer = BlockWriter.of(network)
    lane = writer.lane(prompt, num_new=64, seed=0)
    while not lane.finished:
        run_lanes([lane], experts.run)   # one pass: of the prompt, a final block or a canvas
        lane.take_final()                # token ids, a whole block at a time

What a model must have is its structure, not its name: a ``generate`` that is not transformers'
common one, a ``canvas_length``, an encoder that reads, and a decoder that refines.
Legend: C tokens of a canvas, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin

from moe.errors import CheckpointError, UnsupportedModelError
from moe.network.lanes import ExpertsRunner, Lane, LaneRandom, current_lane, run_lanes
from moe.settings import DiffusionSettings
from routing import Phase

NO_TOKEN = -1
"""Given to the model's code as its end token, as each request has its own."""
GREEDY = "temperature 0"


def writes_blocks(model: PreTrainedModel | type[PreTrainedModel], config: Any = None) -> bool:
    """Whether a model generates blocks by code of its own, by its class and configuration."""
    of_class = model if isinstance(model, type) else type(model)
    config = model.config if isinstance(model, PreTrainedModel) else config
    own = not issubclass(of_class, GenerationMixin) and hasattr(of_class, "generate")
    return own and isinstance(getattr(config, "canvas_length", None), int)


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


Kind = Literal["own", "confidence", "entropy"]


@dataclass(frozen=True)
class Acceptance:
    """Which predictions of a pass stay on the canvas; the others become noise again.

    Attributes:
        kind: ``own``: as the model's sampler decides. ``confidence``: those whose probability is at
            least ``bound``, and the most likely one. ``entropy``: the model's own rule of bounded
            entropy with another ``bound``.
        bound: of the kind; None with ``own``.
        max_steps: passes of a canvas at most; None: as many as the model's schedule has.
        stable: the canvas is final after this many passes with the same tokens, whatever their
            entropy; None: by the model's own rule.
    """

    kind: Kind = "own"
    bound: float | None = None
    max_steps: int | None = None
    stable: int | None = None

    @classmethod
    def of(cls, settings: DiffusionSettings) -> Acceptance:
        """As a profile asks for it."""
        kind, _, bound = settings.accept.partition(":")
        return cls(
            cast(Kind, kind), float(bound) if bound else None,
            settings.max_steps, settings.stable_steps,
        )  # fmt: skip


OWN = Acceptance()


class BlockLane(Lane[None]):
    """A sequence that is being written, over all of its passes.

    Attributes:
        passes: forward passes so far, by phase.
    """

    can_rest = True

    def __init__(
        self, forward: Callable[[], None], random: LaneRandom, sampling: _Sampling
    ) -> None:
        super().__init__(forward, "prefill", random=random)
        self.sampling = sampling
        self.passes: dict[Phase, int] = {"prefill": 0, "denoise": 0}
        self._final: list[int] = []
        self._ran = False

    def begin_pass(self, phase: Phase) -> None:
        """Called by the model before each pass: only one is run at a time."""
        if self._ran:
            self.rest()
        self.phase, self._ran = phase, True
        self.passes[phase] += 1

    def add_final(self, token_ids: Sequence[int]) -> None:
        """Called by the model with each final block."""
        self._final += token_ids
        self.rest()

    def rest(self) -> None:
        super().rest()
        self._ran = False

    def take_final(self) -> list[int]:
        """Tokens that became final since the last call."""
        final, self._final = self._final, []
        return final


@dataclass(frozen=True)
class _Sampling:
    """How a sequence wants its canvases sampled."""

    acceptance: Acceptance
    greedy: bool


class BlockWriter:
    """Runs the generation code of a model whose experts have been taken over.

    Args:
        model: of which `writes_blocks` holds, in evaluation mode.

    Attributes:
        canvas_length: C.
        schedule: the model's own settings of generation, ready for JSON.
        no_policies: why its sampler cannot be replaced, so that only its own procedure can be had;
            empty if it can.

    Raises:
        UnsupportedModelError: the model lacks what this class drives.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        link_shared(model)  # linear layers may be planes by now
        self.canvas_length: int = model.config.canvas_length
        reader, refiner = _parts(model)
        reader.register_forward_pre_hook(partial(_begin_pass, "prefill"))
        refiner.register_forward_pre_hook(partial(_begin_pass, "denoise"))
        self.schedule, self.no_policies = self._own_settings()
        if not self.no_policies:
            own: Any = self.model
            own._prepare_sampler = partial(_make_sampler, own._prepare_sampler)

    def lane(
        self,
        token_ids: Sequence[int],
        num_new: int,
        seed: int,
        *,
        temperature: float = 1.0,
        acceptance: Acceptance = OWN,
    ) -> BlockLane:
        """A lane that writes at least ``num_new`` tokens after a prompt, in whole blocks.

        Args:
            seed: of all its random numbers, as ``torch.manual_seed`` takes it.
            temperature: multiplies those of the model's schedule; 0: each position takes its most
                likely token, while the schedule decides which are kept.
            acceptance: which predictions stay.

        Raises:
            UnsupportedModelError: the model's sampler cannot be replaced for that.
        """
        if (temperature == 0 or acceptance.kind == "confidence") and self.no_policies:
            wanted = GREEDY if temperature == 0 else "confidence"
            raise UnsupportedModelError(f"{wanted} is not possible here: {self.no_policies}")
        device = self.model.device
        lane = BlockLane(
            partial(self._write, list(token_ids), num_new, temperature, acceptance),
            LaneRandom(seed, device),
            _Sampling(acceptance, temperature == 0),
        )
        return lane

    def prove(self, run_experts: ExpertsRunner) -> None:
        """Compare a short block written in a lane with one that the model writes by itself.

        Args:
            run_experts: stands in for the experts.

        Raises:
            UnsupportedModelError: they differ, or this class cannot drive the model.
        """
        prompt, few = [0, 1, 2], {"max_denoising_steps": 2}
        lane = self.lane(prompt, self.canvas_length, 0, acceptance=Acceptance(max_steps=2))
        theirs = Lane(lambda: self._generate(prompt, 1, few, _Blocks()))
        blocks: list[int] = []
        name = type(self.model).__name__
        try:
            while not lane.finished:
                run_lanes([lane], run_experts)
                blocks += lane.take_final()
            lane.result()
            with LaneRandom(0, self.model.device).active():
                run_lanes([theirs], run_experts)
            expected = theirs.result().token_ids
        except Exception as error:  # generation code of an architecture that is not known
            raise UnsupportedModelError(
                f"{name} writes blocks, and its generation code cannot be driven: "
                f"{type(error).__name__}: {error}"
            ) from error
        if blocks != expected or lane.passes != {"prefill": 1, "denoise": 2}:
            raise UnsupportedModelError(
                f"{name} writes blocks, and its generation code gives something else in a lane "
                "than by itself; it is not supported"
            )

    def _write(
        self, token_ids: list[int], num_new: int, temperature: float, acceptance: Acceptance
    ) -> None:
        blocks = math.ceil(num_new / self.canvas_length)
        self._generate(token_ids, blocks, self._changed(temperature, acceptance), _ToLane())

    def _generate(
        self, token_ids: list[int], blocks: int, changed: dict[str, Any], streamer: _Blocks
    ) -> _Blocks:
        self.model.generate(
            torch.tensor([token_ids], device=self.model.device),
            streamer=streamer,
            max_new_tokens=blocks * self.canvas_length,
            max_length=None,
            eos_token_id=NO_TOKEN,
            **changed,
        )
        return streamer

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

    def _own_settings(self) -> tuple[dict[str, Any], str]:
        """The model's settings of generation, and why its sampler cannot be replaced."""
        try:
            settings, _ = self.model._prepare_generation_config(None)
            sampler = self.model._prepare_sampler(settings)
        except Exception as error:  # generation code of an architecture that is not known
            return {}, f"its generation code has no sampler that can be asked for ({error})"
        missing = [
            name
            for name in ("accept_canvas", "renoise_canvas", "accepted_token_mask")
            if not hasattr(sampler, name)
        ]
        names = ("max_denoising_steps", "t_min", "t_max", "stability_threshold")
        schedule = {
            name: getattr(settings, name, None) for name in (*names, "confidence_threshold")
        }
        schedule["entropy_bound"] = getattr(settings.sampler_config, "entropy_bound", None)
        why = f"its sampler has no {' and no '.join(missing)}" if missing else ""
        return schedule, why


def _parts(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """What reads tokens, and what refines a canvas."""
    reader, refiner = model.get_encoder(), model.get_decoder()
    if reader is None or refiner is None or reader is refiner or reader is model:
        raise UnsupportedModelError(
            f"{type(model).__name__} writes blocks, but not by an encoder that reads and a decoder "
            "that refines; only such block-diffusion models are supported"
        )
    return reader, refiner


def _begin_pass(phase: Phase, *_: Any) -> None:
    if isinstance(lane := current_lane(), BlockLane):
        lane.begin_pass(phase)


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


def _make_sampler(make: Callable[[Any], Any], settings: Any) -> Any:
    """The model's own sampler, altered as the running lane wants it."""
    sampler, lane = make(settings), current_lane()
    if isinstance(lane, BlockLane) and (
        lane.sampling.greedy or lane.sampling.acceptance.kind == "confidence"
    ):
        sampler.accept_canvas = partial(_accept, sampler, sampler.accept_canvas, lane.sampling)
    return sampler


def _accept(
    sampler: Any,
    accept: Callable[..., Tensor],
    sampling: _Sampling,
    canvas: Tensor,
    drawn: Tensor,
    logits: Tensor,
    step: Any,
) -> Tensor:
    """The canvas with the predictions that are kept: ``(1, C)`` from ``(1, C, V)`` logits."""
    if sampling.greedy:
        drawn = logits.argmax(-1)
    if sampling.acceptance.kind != "confidence":
        return accept(canvas, drawn, logits, step)
    bound = sampling.acceptance.bound
    assert bound is not None
    likely = torch.softmax(logits, -1, dtype=torch.float32).amax(-1)
    kept = (likely >= bound) | (likely >= likely.amax(-1, keepdim=True))
    sampler.accepted_token_mask = kept
    return torch.where(kept, drawn, canvas)
