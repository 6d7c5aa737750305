"""Models that write whole blocks: a canvas of tokens is refined in several passes, then final.

Their generation code is the architecture's own and stays so: it runs inside a lane
(`moe.network.lanes`), so its schedule, its sampler, its rule to stop and its cache are what the
model says. The lane rests before each pass and after each final block, and sleeps at MoE layers
like any other; all sequences of a step meet there, whatever their step of refinement:

    writer = BlockWriter(network)
    lane = writer.lane(prompt, num_new=64, seed=0)
    while not lane.finished:
        writer.step([lane], experts.run)   # one pass: of the prompt, a final block or a canvas
        lane.take_final()                  # token ids, a whole block at a time

Where the generation code has the structure that `moe.network.denoise` knows, and a proof holds, a
lane asks for its steps of refinement, and canvases that are refined in one step share a pass.

What a model must have is its structure, not its name: a ``generate`` that is not transformers'
common one, a ``canvas_length``, an encoder that reads, and a decoder that refines.
Legend: C tokens of a canvas, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin

from moe.errors import CheckpointError, UnsupportedModelError
from moe.network.denoise import OWN, STEP, Acceptance, CanvasCall, Denoiser, Result
from moe.network.lanes import ExpertsRunner, Lane, LaneRandom, current_lane, run_lanes
from routing import Phase

NO_TOKEN = -1
"""Given to the model's code as its end token, as each request has its own."""
GREEDY = "temperature 0"
_PROMPTS = [0, 1, 2], [3, 4, 5, 6, 7]
"""Whose blocks are compared with the model's own."""


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


class BlockLane(Lane[None]):
    """A sequence that is being written, over all of its passes.

    Attributes:
        passes: forward passes so far, by phase.
        asked: the step of refinement that it rests for; None: it rests before or behind a pass of
            its own.
    """

    can_rest = True

    def __init__(
        self, forward: Callable[[], None], random: LaneRandom, acceptance: Acceptance, greedy: bool
    ) -> None:
        super().__init__(forward, "prefill", random=random)
        self._own_random, self._acceptance, self._greedy = random, acceptance, greedy
        self.passes: dict[Phase, int] = {"prefill": 0, "denoise": 0}
        self.asked: CanvasCall | None = None
        self._final: list[int] = []
        self._ran = False

    def begin_pass(self, phase: Phase) -> None:
        """Called by the model before each pass: only one is run at a time."""
        if self._ran:
            self.rest()
        self.phase, self._ran = phase, True
        self.passes[phase] += 1

    def ask(self, given: dict[str, Any]) -> Result:
        """Called by the model: rest until a step of refinement is done.

        Args:
            given: the arguments of the model's own function.
        """
        self.asked = call = CanvasCall(given, self._acceptance, self._own_random, self._greedy)
        self.rest()
        self.asked = None
        self.passes["denoise"] += 1
        if isinstance(call.result, Exception):
            raise call.result
        assert call.result is not None, "woken without a result"
        return call.result

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
        reader, refiner = _parts(model)
        reader.register_forward_pre_hook(partial(_begin_pass, "prefill"))
        refiner.register_forward_pre_hook(partial(_begin_pass, "denoise"))
        self.schedule = self._own_schedule()
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
        if (temperature == 0 or acceptance.kind == "confidence") and self.denoiser is None:
            wanted = GREEDY if temperature == 0 else "confidence"
            raise UnsupportedModelError(f"{wanted} is not possible here: {self.no_policies}")
        return BlockLane(
            partial(self._write, list(token_ids), num_new, temperature, acceptance),
            LaneRandom(seed, self.model.device),
            acceptance,
            temperature == 0,
        )

    def logits(
        self, token_ids: Sequence[int], canvas: Sequence[int], run_experts: ExpertsRunner
    ) -> Tensor:
        """``(C, V)`` raw logits of a canvas behind a text, in a first pass over it."""
        found: list[Tensor] = []

        def forward() -> None:
            ids, tokens = (
                torch.tensor([list(own)], device=self.model.device) for own in (token_ids, canvas)
            )
            found.append(self.model(input_ids=ids, decoder_input_ids=tokens).logits[0])

        lane = BlockLane(forward, LaneRandom(0, self.model.device), OWN, greedy=False)
        while not lane.finished:
            run_lanes([lane], run_experts)
        lane.result()
        return found[0]

    def step(self, lanes: Sequence[BlockLane], run_experts: ExpertsRunner) -> None:
        """One pass of every lane; those that ask for a step of refinement share passes.

        What a pass raises is raised in each of its lanes, whose `Lane.result` says so. If several
        canvases shared it, each is tried by itself first.
        """
        asking = {lane.asked: lane for lane in lanes if lane.asked is not None}
        others = [lane for lane in lanes if lane.asked is None]
        groups = list(self.denoiser.groups(list(asking))) if self.denoiser is not None else []
        failed = self._share_passes(groups, others, run_experts)
        self._share_passes([[call] for call in failed], [], run_experts)
        for lane in asking.values():
            lane.wake()

    def _share_passes(
        self, groups: Sequence[list[CanvasCall]], others: Sequence[Lane], run_experts: ExpertsRunner
    ) -> list[CanvasCall]:
        """Run a pass of each group beside other lanes; returns calls of several that failed."""
        assert self.denoiser is not None or not groups
        passes = [
            Lane(partial(self.denoiser.run, group), "denoise")  # type: ignore[union-attr]
            for group in groups
        ]
        run_lanes([*others, *passes], run_experts)
        failed: list[CanvasCall] = []
        for group, one in zip(groups, passes, strict=True):
            try:
                one.result()
            except Exception as error:
                without = [call for call in group if call.result is None]
                for call in without:
                    call.result = error
                failed += without if len(group) > 1 else []
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
        lanes = [
            self.lane(prompt, self.canvas_length, seed, acceptance=own)
            for seed, prompt in enumerate(_PROMPTS)
        ]
        blocks: list[list[int]] = [[] for _ in lanes]
        while not all(lane.finished for lane in lanes):
            self.step([lane for lane in lanes if not lane.finished], run_experts)
            for lane, block in zip(lanes, blocks, strict=True):
                block += lane.take_final()
        for seed, (prompt, lane, block) in enumerate(zip(_PROMPTS, lanes, blocks, strict=True)):
            lane.result()
            by_itself = Lane(partial(self._generate, prompt, 1, few, _Blocks()))
            with LaneRandom(seed, self.model.device).active():
                run_lanes([by_itself], run_experts)
            if block != by_itself.result().token_ids:
                return True
            if lane.passes != {"prefill": 1, "denoise": 2}:
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

    def _own_schedule(self) -> dict[str, Any]:
        """The model's settings of generation, as far as it has them."""
        try:
            settings, _ = self.model._prepare_generation_config(None)
        except Exception:  # generation code of an architecture that is not known
            return {}
        names = ("max_denoising_steps", "t_min", "t_max", "stability_threshold")
        schedule = {
            name: getattr(settings, name, None) for name in (*names, "confidence_threshold")
        }
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
