"""Probes: a faster way to compute is used only if it gives what transformers' own forward gives.

Both ways read the same random tokens. `enable_packing` decides so whether sequences may share a
forward pass; `compare` is the judge of described decode steps (`moe.decode.proof`): logits, expert
choices, their weights and the caches must agree. Experts are replaced by `stand_in`, so that
probing a large model reads its backbone only. No architecture is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, isnan

import torch
from torch import Tensor
from transformers import PreTrainedModel

from experts.linear import QuantizedLinear
from moe.cache_dir.proofs import current_proofs
from moe.describe.description import NotDescribed
from moe.describe.stateful import find_stateful
from moe.kv.cache import KVCache, SequenceCache
from moe.kv.layout import LayerKey
from moe.network.backbone import SHORT, Backbone
from moe.network.lanes import ExpertCall, Lane, run_lanes
from moe.network.packed_pass import Work
from moe.network.per_sequence import depends_on_length
from moe.network.recurrent_kernels import without_advice
from moe.network.stored_embedding import backbone_dtype
from routing import Phase, Routing

PROMPT_LENGTHS = (7, 4)
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of logits allowed, relative to the largest logit, by the backbone's dtype."""
QUANTIZED_VALUES = 3e-2
"""The same if linear layers round their input to 8 bits: a last bit that differs before such a
layer, as by another number of threads, may be a whole code behind it. A wrong mask differs by far
more."""
_OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)


def random_prompts(backbone: Backbone, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids to probe a model with, the same each time."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = backbone.model.get_input_embeddings().num_embeddings
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def stand_in(_layer: int, calls: Sequence[ExpertCall]) -> list[Tensor]:
    """Run no experts: rows that cost little, and hardly depend on which experts are chosen."""
    pairs = [(call.hidden_states, call.routing.weights) for call in calls]
    return [(rows * (0.25 + w.sum(1, keepdim=True))).to(rows.dtype) for rows, w in pairs]


def find_visits(backbone: Backbone, num_layers: int) -> Sequence[int]:
    """The MoE layer of each visit of a pass over text, which looped models come to again; of other
    models all layers in turn, those for images among them."""
    seen: list[int] = []

    def run(layer: int, calls: Sequence[ExpertCall]) -> list[Tensor]:
        seen.append(layer)
        return stand_in(layer, calls)

    (prompt,) = random_prompts(backbone, (4,))
    with torch.inference_mode():
        run_lanes(backbone.lanes([Work(prompt, backbone.new_cache(4))]), run)
    return seen if len(seen) > len(set(seen)) else range(num_layers)


@dataclass(frozen=True)
class Tolerance:
    """Bounds of the differences between two runs.

    Attributes:
        values: relative to the largest value.
        choices: share of the choices of experts.
        noise: the gaps that rounding alone makes, by part of a run; three times as much is allowed.
    """

    values: float
    choices: float
    noise: Mapping[str, Gap] = field(default_factory=dict)

    def allows(self, part: str, gap: Gap) -> bool:
        """False for NaN."""
        least = self.choices if part == _CHOICES else self.values
        noise = self.noise[part].size if part in self.noise else 0.0
        return gap.size <= max(least, _NOISES * noise)


@dataclass(frozen=True)
class Gap:
    """The difference of two runs in one part; ``text`` says so for people."""

    size: float
    text: str


EXACT = Tolerance(values=1e-4, choices=0.0)
QUANTIZED = Tolerance(values=QUANTIZED_VALUES, choices=0.1)
ROUNDED = Tolerance(values=1e-4, choices=0.05)
"""For half precision, beside its noise; a choice between two nearly equal experts may change."""

_NOISES = 3
_CHOICES, _LOGITS = "choices", "logits"


@dataclass
class ComparedRun:
    """The results of one way of reading the tokens; stands in for the experts."""

    caches: list[KVCache]
    logits: list[Tensor] = field(default_factory=list)
    routings: list[tuple[int, Routing]] = field(default_factory=list)

    def experts(self, layer: int, calls: Sequence[ExpertCall]) -> list[Tensor]:
        self.routings += [(layer, call.routing) for call in calls]
        return stand_in(layer, calls)

    def routed_experts(self, layer: int, rows: Tensor, routing: Routing) -> Tensor:
        return self.experts(layer, [ExpertCall(layer, rows, routing)])[0]


def compare(
    theirs: ComparedRun, ours: ComparedRun, layers: Sequence[LayerKey], tolerance: Tolerance
) -> float:
    """Largest difference of logits; raises `NotDescribed` for one that is too large."""
    found = gaps(theirs, ours, layers)
    for part, gap in found.items():
        if not tolerance.allows(part, gap):
            raise NotDescribed(gap.text)
    return found[_LOGITS].size


def gaps(theirs: ComparedRun, ours: ComparedRun, layers: Sequence[LayerKey]) -> dict[str, Gap]:
    """Return how far two runs differ, part by part: routings, caches of these layers, logits.

    Raises:
        NotDescribed: they ran other MoE layers, or read other numbers of tokens.
    """
    found = _routing_gaps(theirs.routings, ours.routings)
    for name, part in (("keys", 0), ("values", 1)):
        sizes: list[float] = []
        for mine, other in zip(ours.caches, theirs.caches, strict=True):
            if mine.length != other.length:
                raise NotDescribed(f"a sequence has {mine.length} tokens, not {other.length}")
            pairs = [
                (mine.read(layer, mine.length)[part], other.read(layer, mine.length)[part])
                for layer in layers
            ]
            sizes += [difference(own, its) for own, its in pairs if its.numel()]
        found[name] = _gap(f"cached {name}", *sizes) if sizes else Gap(0.0, "")
    found["states"] = _state_gap(theirs.caches, ours.caches)
    found[_LOGITS] = _gap("logits", difference(torch.cat(ours.logits), torch.cat(theirs.logits)))
    return found


def _state_gap(theirs: Sequence[KVCache], ours: Sequence[KVCache]) -> Gap:
    """Return how far recurrent states differ."""
    sizes = [
        difference(mine.states[key], state)
        for mine, other in zip(ours, theirs, strict=True)
        for key, state in other.states.items()
    ]
    return _gap("recurrent states", *sizes) if sizes else Gap(0.0, "")


def _routing_gaps(
    theirs: Sequence[tuple[int, Routing]], ours: Sequence[tuple[int, Routing]]
) -> dict[str, Gap]:
    if [layer for layer, _ in theirs] != [layer for layer, _ in ours]:
        raise NotDescribed("other MoE layers are visited")
    rows, wrong, weights = 0, list[int](), dict[int, list[float]]()
    for (layer, expected), (_, actual) in zip(theirs, ours, strict=True):
        order, mine = expected.expert_ids.cpu().sort(1), actual.expert_ids.cpu().sort(1)
        same = (order.values == mine.values).all(1)
        rows += len(same)
        wrong += [layer] * int((~same).sum())
        a = actual.weights.cpu().gather(1, mine.indices)[same]
        b = expected.weights.cpu().gather(1, order.indices)[same]
        weights.setdefault(layer, []).append(difference(a, b) if len(a) else 0.0)
    found = {
        f"weights {layer}": _gap(f"weights of MoE layer {layer}", *sizes)
        for layer, sizes in weights.items()
    }
    if wrong:
        text = f"{len(wrong)} of {rows} choices of experts differ, first in MoE layer {min(wrong)}"
        found[_CHOICES] = Gap(len(wrong) / rows, text)
    return found


def _gap(what: str, *sizes: float) -> Gap:
    size = max(sizes, key=lambda size: inf if isnan(size) else size)
    return Gap(size, f"{what} differ by {size:.1e}")


def difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest value; NaN where there is a NaN."""
    actual, expected = actual.float().cpu(), expected.float().cpu()
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


@dataclass(frozen=True)
class Packing:
    """The finding whether several sequences share one forward pass, and why (not).

    Attributes:
        whole: why prompts cannot be cut; empty if they can.
        slow: which of transformers' own functions recurrent layers run where we have kernels, and
            why; empty if none.
    """

    enabled: bool
    reason: str
    whole: str = ""
    slow: str = ""


@without_advice()
def enable_packing(backbone: Backbone) -> Packing:
    """Pack sequences from now on if a probe shows that nothing changes by it."""
    tokens = random_prompts(backbone, PROMPT_LENGTHS)[0]
    lane = Lane(partial(find_stateful, backbone.model, tokens), "prefill")
    run_lanes([lane], stand_in)
    with suppress(Exception):  # it wants a cache of its own class, and the probe says so
        backbone.serve_each(lane.result())
    subject = [type(backbone.model).__name__, sum(1 for _ in backbone.model.parameters())]
    proofs = current_proofs()
    try:
        packing = proofs.recall("packing", subject, Packing, partial(_probe, backbone))
    except _OUT_OF_MEMORY as error:  # of this moment: no verdict about the model
        packing = Packing(False, _raised(error))
    backbone.set_packed(packing.enabled)
    if packing.enabled:
        kept = [f"{name} ({why})" for name, why in backbone.recurrent_kernels.items() if why]
        packing = replace(packing, slow=", ".join(kept))
    whole = ""
    if any(map(depends_on_length, backbone.model.modules())):
        whole = "rotary positions depend on the length of the prompt"
    elif (
        backbone.recurrent
        and packing.enabled
        and not proofs.recall("cut prompts", subject, bool, partial(_cuts_change_nothing, backbone))
    ):
        whole = "a recurrent layer forgets its state between passes"
    if whole:
        backbone.read_whole()
    return replace(packing, whole=whole if packing.enabled else "")


def _probe(backbone: Backbone) -> Packing:
    """Run random prompts and decode steps both ways and compare all logits."""
    prompts = random_prompts(backbone, PROMPT_LENGTHS)
    with torch.inference_mode():
        expected = _logits(backbone, prompts, packed=False)
        try:
            packed = _logits(backbone, prompts, packed=True)
        except _OUT_OF_MEMORY:
            raise
        except Exception as error:
            return Packing(False, _raised(error))
    found = max(difference(a, b) for a, b in zip(packed, expected, strict=True))
    if found <= _tolerance(backbone.model):
        return Packing(True, f"equal to transformers' own attention (difference {found:.1e})")
    return Packing(False, f"differs from transformers' own attention by {found:.1e}")


def _raised(error: Exception) -> str:
    return f"packed attention raised {type(error).__name__}: {error}"


def _cuts_change_nothing(backbone: Backbone) -> bool:
    """Return whether a prompt that is read in two passes has the logits of one pass."""
    prompt = random_prompts(backbone, (2 * max(PROMPT_LENGTHS),))[0]
    half = len(prompt) // 2
    with torch.inference_mode():
        whole = _read(backbone, [prompt], [backbone.new_cache(len(prompt))], "prefill")
        caches = [backbone.new_cache(len(prompt))]
        cut = [
            rows
            for part in (prompt[:half], prompt[half:])
            for rows in _read(backbone, [part], caches, "prefill")
        ]
    return difference(torch.cat(cut), torch.cat(whole)) <= _tolerance(backbone.model)


def _tolerance(model: PreTrainedModel) -> float:
    rounds = any(isinstance(module, QuantizedLinear) for module in model.modules())
    return max(TOLERANCE[backbone_dtype(model)], QUANTIZED_VALUES if rounds else 0.0)


def _logits(backbone: Backbone, prompts: Sequence[list[int]], *, packed: bool) -> list[Tensor]:
    """Return logits of prompts, and of one token after each; or of more than the model sees of an
    answer."""
    backbone.set_packed(packed)
    answers = [prompt[:1] for prompt in prompts]
    if (own := backbone.own_cache.policy) is not None:
        answers = random_prompts(backbone, [own.tokens + len(prompt) for prompt in prompts])
    pairs = list(zip(prompts, answers, strict=True))
    caches = [backbone.new_cache(len(prompt) + len(answer)) for prompt, answer in pairs]
    logits = _read(backbone, prompts, caches, "prefill")
    for cache in caches:
        cache.prompt_read()
    for begin in range(0, max(map(len, answers)), SHORT):
        parts = [answer[begin : begin + SHORT] for answer in answers]
        left = [index for index, part in enumerate(parts) if part]
        own_caches = [caches[index] for index in left]
        logits += _read(backbone, [parts[index] for index in left], own_caches, "decode")
    return logits


def _read(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    caches: Sequence[SequenceCache],
    phase: Phase,
) -> list[Tensor]:
    """All logits of each prompt."""
    work = [Work(ids, cache, all_logits=True) for ids, cache in zip(prompts, caches, strict=True)]
    lanes = backbone.lanes(work, phase)
    run_lanes(lanes, stand_in)
    return [rows for lane in lanes for rows in lane.result()]
