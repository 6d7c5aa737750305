"""Proves a decode step for a model by trying it beside transformers' own forward.

transformers reads sequences of different lengths; then both ways read the same further tokens.
Logits, expert choices, their weights and the caches must agree. The tolerance allows for another
order of sums. Quantized layers round their input to 8 bits, so tiny differences become larger: the
tolerance is then wider, and still far below the error of a wrong description.

On a GPU the description is proven on a float32 copy (`moe.decode.recorded`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from experts.linear import QuantizedLinear
from kernels import PlaneMatrix
from kernels.cpu.kv import BLOCK
from moe.decode.reference import reference_step
from moe.decode.step import StepFunction
from moe.describe.decoder import decoder_layers
from moe.describe.description import Description, LatentAttention, NotDescribed
from moe.describe.observe import observe
from moe.describe.probe import (
    EXACT,
    QUANTIZED,
    ComparedRun,
    Tolerance,
    compare,
    difference,
    random_prompts,
    stand_in,
)
from moe.kv.blocks import BlockPool
from moe.kv.host_blocks import HostBlocks
from moe.kv.layout import KVFormat, LayerKey
from moe.network.backbone import Backbone
from moe.network.lanes import Lane, run_lanes
from moe.network.packed_pass import Work
from routing import Phase

PROMPT_LENGTHS = (9, 4, 13)
STEPS = ((1, 1, 1), (1, 1, 1), (2, 1, 3))
"""Tokens that each sequence gets in each step."""
_ANSWER_TOKENS = 2  # of an answer that a token sees, where the model has a window there

Part = TypeVar("Part")

TRIES = 2
"""Attempts: between two equal experts either may be chosen, but that will not happen twice."""


@torch.inference_mode()
def prove(backbone: Backbone, description: Description, step: StepFunction) -> str:
    """Compare a described step with transformers' forward; returns how well they agree, for people.

    Raises:
        NotDescribed: it disagrees; the message says where.
    """
    attentions = [layer.attention for layer in description.layers]
    latent = {a.kv_b_leaf: a.kv_b for a in attentions if isinstance(a, LatentAttention)}
    tolerance = tolerance_of(description)
    locate = partial(_first_difference, backbone, description, tolerance=tolerance)
    with whole_expansions(backbone, latent):
        return _prove(backbone, step, caches_of(description), tolerance, locate)


@torch.inference_mode()
def prove_traced(
    backbone: Backbone,
    step: StepFunction,
    layers: Sequence[LayerKey],
    latent: Mapping[nn.Module, Tensor],
    every: int = 1,
) -> str:
    """Compare a traced step with transformers' forward; see `prove`.

    Args:
        every: tokens after which it does something that other tokens do not; a sequence comes there
            from a token that does not.
        layers: attention layers with a cache.
        latent: of each module that expands latents, its weight ``(heads, rows, R)``.
    """
    tolerance, lengths = traced_tolerance(backbone), PROMPT_LENGTHS
    if every > 1:
        lengths = (*lengths[:-1], -(-lengths[-1] // every) * every - 2)
    with whole_expansions(backbone, latent):
        return _prove(backbone, step, layers, tolerance, lengths=lengths)


def traced_tolerance(backbone: Backbone) -> Tolerance:
    """Return how far a step of a recorded token may be from transformers' forward."""
    quantized = any(isinstance(module, QuantizedLinear) for module in backbone.model.modules())
    return QUANTIZED if quantized else EXACT


def _prove(
    backbone: Backbone,
    step: StepFunction,
    layers: Sequence[LayerKey],
    tolerance: Tolerance,
    locate: Callable[[Sequence[list[int]]], int | None] = lambda _: None,
    lengths: Sequence[int] = PROMPT_LENGTHS,
) -> str:
    """
    Args:
        locate: the first layer that differs when tokens are read.
        lengths: of the prompts.
    """
    for attempt in range(TRIES):
        theirs, ours, tokens = read_both_ways(backbone, step, attempt, lengths)
        try:
            worst = compare(theirs, ours, layers, tolerance)
            return f"equal to transformers' forward (difference {worst:.1e})"
        except NotDescribed as error:
            failure = error
    layer = locate(tokens)
    where = "" if layer is None else f"; the first to differ is layer {layer}"
    raise NotDescribed(f"{failure}{where}") from failure


@torch.inference_mode()
def prove_prompts(
    backbone: Backbone,
    layers: Sequence[LayerKey],
    tolerance: Tolerance,
    step: StepFunction,
    pool: BlockPool,
) -> None:
    """Read prompts both ways, the step's into blocks of ``pool``, and then more tokens of each.

    Args:
        layers: attention layers with a cache.

    Raises:
        NotDescribed: they disagree.
    """
    for attempt in range(TRIES):
        theirs, ours = read_prompts(backbone, [backbone], step, pool, attempt)
        try:
            compare(theirs, ours, layers, tolerance)
            return
        except NotDescribed as error:
            failure = error
    raise failure


def read_prompts(
    original: Backbone,
    plain: Sequence[Backbone],
    step: StepFunction,
    pool: Backbone | BlockPool,
    seed: int,
) -> list[ComparedRun]:
    """Read prompts and more tokens of each: by transformers' forward of some backbones, and, last,
    by the step.

    Args:
        original: the model.
        pool: makes the caches of the step.
    """
    prompts = random_prompts(original, [length + seed for length in PROMPT_LENGTHS])
    runs = [
        ComparedRun([owner.new_cache(2 * len(ids)).kv for ids in prompts])
        for owner in (*plain, pool)
    ]
    *theirs, ours = runs
    for tokens in (prompts, [ids[::-1] for ids in prompts]):
        for backbone, run in zip(plain, theirs, strict=True):
            read_plainly(backbone, tokens, run)
        work = [Work(t, c, all_logits=True) for t, c in zip(tokens, ours.caches, strict=True)]
        ours.logits += step(work, ours.routed_experts)
    return runs


@contextmanager
def whole_expansions(backbone: Backbone, whole: Mapping[nn.Module, Tensor]) -> Iterator[None]:
    """Let transformers expand latents as the step does: unquantized."""
    places = [
        (parent, name, child)
        for parent in backbone.model.modules()
        for name, child in parent.named_children()
        if child in whole
    ]
    for parent, name, child in places:
        weight = whole[child].flatten(0, 1).float()
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        setattr(parent, name, linear)
    try:
        yield
    finally:
        for parent, name, child in places:
            setattr(parent, name, child)


def read_both_ways(
    backbone: Backbone, step: StepFunction, seed: int, lengths: Sequence[int] = PROMPT_LENGTHS
) -> tuple[ComparedRun, ComparedRun, list[list[int]]]:
    """Read tokens by transformers' forward and by the step; returns both, and the tokens of each
    sequence."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = backbone.model.get_input_embeddings().num_embeddings

    def draw(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=generator).tolist()

    tokens = [draw(length) for length in lengths]
    room = max(lengths) + sum(map(max, STEPS))
    theirs = ComparedRun([backbone.new_cache(room).kv for _ in tokens])
    read_plainly(backbone, tokens, theirs)
    ours = ComparedRun([cache.fork(room + 1, cache.length) for cache in theirs.caches])
    for cache in (*theirs.caches, *ours.caches):
        if cache.policy is not None:  # so few that the steps leave some out
            cache.policy = cache.policy.of_tokens(_ANSWER_TOKENS)
        cache.prompt_read()
    theirs.logits.clear()
    theirs.routings.clear()
    for counts in STEPS:
        new = [draw(count) for count in counts]
        read_plainly(backbone, new, theirs, "decode")
        work = [Work(t, c, all_logits=True) for t, c in zip(new, ours.caches, strict=True)]
        ours.logits += step(work, ours.routed_experts)
        tokens = [old + more for old, more in zip(tokens, new, strict=True)]
    return theirs, ours, tokens


@torch.inference_mode()
def prove_policy(backbone: Backbone, pool: BlockPool) -> str:
    """Compare decode steps under a policy on keys and values with transformers' forward over the
    keys that it leaves; returns how well they agree, for people.

    Args:
        pool: as the model will have it. The same kind of policy is tried with fewer tokens, and
            with whole rows, as the two ways do not round alike.

    Raises:
        NotDescribed: they disagree, or the model keeps something else beside keys and values.
    """
    assert isinstance(pool.memory, HostBlocks)
    assert pool.policy is not None
    small = pool.policy.of_tokens(4 * BLOCK)
    form = KVFormat.of_bits(32, bounds=pool.policy.bounds)
    memory, before = HostBlocks(pool.memory.kernel, form), backbone.blocks
    prompt, *tokens = random_prompts(backbone, (7 * BLOCK - 3, 2, 4, 1))
    backbone.blocks = BlockPool(memory, pool.windows, small)
    runs = []
    try:
        for plain in (False, True):
            cache = backbone.new_cache(7 * BLOCK + 8).kv
            run_lanes(backbone.lanes([Work(prompt, cache)]), stand_in)
            if any(isinstance(layer, tuple) for layer in cache.layers):
                raise NotDescribed("its layers keep more of a token than keys and values")
            cache.prompt_read()
            for ids in tokens:
                work = [Work(ids, cache, all_logits=True)]
                lanes = backbone.lanes(work, "decode")
                if plain:
                    lanes = [Lane(partial(backbone.forward_packed, work, decoding=True), "decode")]
                run_lanes(lanes, stand_in)
                runs.append(lanes[0].result()[0])
    finally:
        backbone.blocks = before
    half = len(tokens)
    worst = max(map(difference, runs[:half], runs[half:]))
    if not worst <= QUANTIZED.values:
        raise NotDescribed(f"decode steps differ by {worst:.1e} from transformers' own")
    return f"equal to transformers' forward over the same keys (difference {worst:.1e})"


def read_plainly(
    backbone: Backbone, tokens: Sequence[list[int]], run: ComparedRun, phase: Phase = "prefill"
) -> None:
    """Read further tokens of each sequence by transformers' own forward."""
    work = [Work(t, c, all_logits=True) for t, c in zip(tokens, run.caches, strict=True)]
    lanes = backbone.lanes(work, phase)
    run_lanes(lanes, run.experts)
    run.logits += [rows for lane in lanes for rows in lane.result()]


def _first_difference(
    backbone: Backbone,
    description: Description,
    tokens: Sequence[list[int]],
    *,
    tolerance: Tolerance,
) -> int | None:
    """The first layer whose output differs when the last tokens are read by description."""
    run = ComparedRun([backbone.new_cache(len(ids)).kv for ids in tokens])
    read_plainly(backbone, [ids[:-1] for ids in tokens], run)
    outputs: list[Tensor] = []
    work = [Work(ids[-1:], cache) for ids, cache in zip(tokens, run.caches, strict=True)]
    reference_step(description, work, run.routed_experts, lambda _layer, rows: outputs.append(rows))
    seen = observe(backbone, tokens)
    modules = [module for module, _ in decoder_layers(backbone.model, seen)]
    last = torch.tensor([len(ids) for ids in tokens]).cumsum(0) - 1
    for index, (module, rows) in enumerate(zip(modules, outputs, strict=True)):
        expected = seen.only(module).output.reshape(-1, rows.shape[1])[last]
        if not difference(rows, expected) <= tolerance.values:
            return index
    return None


def tolerance_of(description: Description) -> Tolerance:
    """Return how far a step by this description may be from transformers' forward."""
    return QUANTIZED if any(True for _ in parts_of(description, PlaneMatrix)) else EXACT


def caches_of(description: Description) -> list[int]:
    """The index of each layer's cache."""
    return [layer.attention.layer for layer in description.layers]


def parts_of(part: object, kind: type[Part]) -> Iterator[Part]:
    """All parts of a kind in a description; parts inside such a part are not searched."""
    if isinstance(part, kind):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from parts_of(item, kind)
    elif is_dataclass(part):
        for field in fields(part):
            yield from parts_of(getattr(part, field.name), kind)
