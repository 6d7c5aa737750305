"""Measures the memory of sequences and of a batch of prompts without taking any.

The model runs on the meta device, where a tensor has a shape and no memory, and a counter follows
every storage that is made and freed. So the figures hold for any architecture: grouped and latent
attention, windows, recurrent state, masks that are really built. Stand-ins take the place of the
experts' kernel, with the scratch memory it would use, and of compiled attention, which keeps no
scores. Recurrent layers have their compiled kernels, of which only the outputs take memory.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from kernels import backend_status
from kernels.cpu.experts import tokens_a_call
from moe.cache_dir.proofs import current_proofs, outline
from moe.describe.attention import seen_windows
from moe.describe.stateful import find_stateful
from moe.kv.cache import SequenceCache
from moe.kv.layout import KVFormat, Shape
from moe.memory.estimate import estimate_sequence
from moe.network.attention import MaskRule, packed_attention, packed_mask
from moe.network.backbone import Backbone
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work
from moe.network.recurrent_kernels import without_advice
from moe.network.seam import experts_modules

SHORT_PROMPT = 64
"""Tokens of the first probe; a second, longer one shows what grows with the length."""

PROBE_TOKENS = 512
"""Most tokens of a probe if the architecture loops over tokens."""

_FEW = 8  # tokens that show which modules have states
_STAND_IN = "moe_footprint"


@dataclass(frozen=True)
class Footprint:
    """Bytes that running a model takes beside its weights.

    Attributes:
        kv_bytes_per_token: of a sequence's keys and values, in the form that was asked for.
        kv_plain_bytes: the same in the network's dtype.
        bytes_per_sequence: of what does not grow with its length: recurrent state, windows.
        activation_bytes: most that everything else takes while a batch of prompts is read.
        how: where the figures come from.
        windows: of the layers that keep no more than so many last tokens, the bytes of a token.
        shapes: of the layers that keep keys and values in blocks.
        bounds_bytes: of a token, what bounds of the keys take if a policy chooses by them
            (`KVFormat.bounds`).
        between_steps: bytes that a sequence keeps from one step for the next beside these, by the
            name of their line in the plan.
    """

    kv_bytes_per_token: int
    kv_plain_bytes: int
    bytes_per_sequence: int
    activation_bytes: int
    how: str
    windows: Mapping[int, int] = field(default_factory=dict)
    bounds_bytes: int = 0
    shapes: Mapping[int, Shape] = field(default_factory=dict)
    between_steps: Mapping[str, int] = field(default_factory=dict)


def measure_footprint(
    network: PreTrainedModel,
    batch_tokens: int,
    longest: int,
    *,
    on_cuda: bool = False,
    form: KVFormat | None = None,
) -> Footprint:
    """Measure a model on the meta device; if it cannot run there, estimate from its configuration.

    Args:
        network: as `build_meta_model` makes it; it is copied.
        batch_tokens: of the largest batch of prompts.
        longest: tokens of the longest prompt.
        on_cuda: the experts will run on CUDA.
        form: how keys and values are stored; None: in the network's dtype.
    """
    measure = partial(_measured, network, batch_tokens, longest, on_cuda=on_cuda, form=form)
    shapes = {name: outline(own) for name, own in network.named_parameters()}
    subject = [type(network).__name__, shapes, batch_tokens, longest, on_cuda, outline(form)]
    return current_proofs().recall("footprint", subject, Footprint, measure)


@without_advice()
def _measured(
    network: PreTrainedModel,
    batch_tokens: int,
    longest: int,
    *,
    on_cuda: bool,
    form: KVFormat | None,
) -> Footprint:
    network = copy.deepcopy(network)
    stand_in_for_experts(network, on_cuda=on_cuda)
    backbone = Backbone(network)
    if _compiled(on_cuda):
        with suppress(Exception):  # it wants a cache of its own class
            backbone.serve_each(find_stateful(network, range(_FEW)))
    reason = ""
    for packed in (True, False):
        backbone.set_packed(packed)
        keeps_scores = not (form is not None if on_cuda else _compiled(on_cuda))
        if packed and not keeps_scores and (on_cuda or network.dtype == torch.float32):
            configs: list[Any] = [m.config for m in network.modules() if hasattr(m, "config")]
            for config in configs:
                config._attn_implementation = _STAND_IN
        try:
            longest = min(longest, batch_tokens)
            return _measure(backbone, packed, batch_tokens, longest, form, on_cuda=on_cuda)
        except Exception as error:  # the architecture cannot run in this way
            message = str(error).strip().splitlines()[0][:100] if str(error) else ""
            reason = f"{type(error).__name__}: {message}"
    return _from_configuration(network, batch_tokens, reason)


def stand_in_for_experts(network: PreTrainedModel, *, on_cuda: bool = False) -> None:
    """Let the experts only take the scratch memory that their kernel would."""
    native = _compiled(on_cuda)
    for _, module in experts_modules(network):
        module.config._experts_implementation = _STAND_IN
        module.scratch_is_small = native


def _compiled(on_cuda: bool) -> bool:
    return not on_cuda and backend_status()["name"] == "native"


def _measure(
    backbone: Backbone,
    packed: bool,
    batch_tokens: int,
    longest: int,
    form: KVFormat | None,
    *,
    on_cuda: bool,
) -> Footprint:
    if packed:  # two sequences show what a packed pass takes; more only repeat it
        sizes = [part for part in (longest, min(longest, batch_tokens - longest)) if part]
    else:
        short = _probe(backbone, [SHORT_PROMPT])
        # A loop over all tokens would take minutes and show no more than one over some.
        loops = _probe(backbone, [2 * SHORT_PROMPT]).operations > short.operations
        sizes = [min(longest, PROBE_TOKENS) if loops else longest]
    size, count = sum(sizes), len(sizes)
    short, long = _probe(backbone, [SHORT_PROMPT] * count), _probe(backbone, sizes)
    # Keys and values grow with the length, which batches of a few tokens do not show.
    grown, length = long, size
    if size <= SHORT_PROMPT * count:
        grown, length = _probe(backbone, [2 * SHORT_PROMPT] * count), 2 * SHORT_PROMPT * count
    per_token = (grown.kept - short.kept) // (length - SHORT_PROMPT * count)
    rest = max(long.kept - per_token * size, 0) // count
    own = long.peak - long.kept
    if packed:
        how, activations = "measured on the meta device", own * batch_tokens // size
        if form is None:
            return Footprint(per_token, per_token, rest, activations, how)
        coded = per_token - grown.saved_bytes(form)
        shapes = grown.cache.buffer_shapes
        if on_cuda:
            return Footprint(coded, per_token, rest, activations, how, shapes=shapes)
        windows = seen_windows(backbone, form).token_bytes
        plain, bounded = (grown.saved_bytes(form._replace(bounds=b)) for b in (False, True))
        return Footprint(coded, per_token, rest, activations, how, windows, plain - bounded, shapes)
    # The batch's other prompts wait at an MoE layer meanwhile, with their rows.
    waiting = (
        4 * backbone.model.config.get_text_config().hidden_size * backbone.model.dtype.itemsize
    )
    activations = own * longest // size + waiting * (batch_tokens - longest)
    how = f"measured on the meta device with {size} tokens, each sequence in a pass of its own"
    return Footprint(per_token, per_token, rest, activations, how)


def _from_configuration(network: PreTrainedModel, batch_tokens: int, reason: str) -> Footprint:
    """The sizes of layers as the configuration says them, and ample activations."""
    config = network.config.get_text_config()
    size = network.dtype.itemsize
    own = estimate_sequence(config, size)
    activations = 32 * batch_tokens * config.hidden_size * size
    how = f"estimated from the configuration, as a probe failed: {reason}"
    return Footprint(own.per_token, own.per_token, own.fixed, activations, how)


@dataclass(frozen=True)
class _ProbedPass:
    """Most bytes alive, bytes that the sequences' caches keep, number of operations, and the cache
    of one sequence."""

    peak: int
    kept: int
    operations: int
    cache: SequenceCache

    def saved_bytes(self, form: KVFormat) -> int:
        """Bytes that a token takes less if keys and values are stored in this form."""
        return sum(self.cache.layer_bytes().values()) - sum(self.cache.layer_bytes(form).values())


def _probe(backbone: Backbone, sizes: Sequence[int]) -> _ProbedPass:
    """Run prompts of these lengths."""
    caches = [backbone.new_cache(size) for size in sizes]
    with torch.inference_mode(), StorageCounter() as counter:
        works = [Work([0] * size, cache) for size, cache in zip(sizes, caches, strict=True)]
        lanes = backbone.lanes(works)
        run_lanes(lanes, lambda *_: [])  # never called: `_scratch` takes the experts' place
        for lane in lanes:
            lane.result()
    return _ProbedPass(counter.peak, tensor_bytes(caches), counter.operations, caches[0])


class StorageCounter(TorchDispatchMode):
    """While it is entered, counts the storages that operations make, for as long as they live.

    Attributes:
        peak: most bytes alive after an operation.
        operations: how many there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.operations = 0
        self._total = 0  # may still include storages that were freed since `alive` was called
        # A weak reference keeps the address from being used again.
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.operations += 1
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._storages:
                    self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self._total += storage.nbytes()
        if self._total > self.peak:
            self.peak = max(self.peak, self.alive())
        return result

    def alive(self) -> int:
        """Bytes alive now."""
        gone = [key for key, (reference, _) in self._storages.items() if reference.expired()]
        self._total -= sum(self._storages.pop(key)[1] for key in gone)
        return self._total


def tensor_bytes(root: object) -> int:
    """Bytes of all tensors that an object holds, each storage counted once."""
    sizes: dict[int, int] = {}
    seen: dict[int, object] = {}
    left = [root]
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, Tensor):
            sizes[item.untyped_storage()._cdata] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            left += item.values()
        elif isinstance(item, list | tuple | set):
            left += item
        elif hasattr(item, "__dict__") and not isinstance(item, type):
            left += vars(item).values()
    return sum(sizes.values())


def _scratch(module: Any, hidden: Tensor, top_k_index: Tensor, _: Tensor) -> Tensor:
    """Allocate the float32 rows of the experts' kernel: inner and outer ones for each slot."""
    width = module.down_proj.numel() // (module.num_experts * hidden.shape[-1])
    inner = width * (3 if module.has_gate else 2)
    (tokens, slots), size = top_k_index.shape, hidden.shape[-1]
    row = 4 * size
    if module.scratch_is_small:
        row, tokens = inner + size, min(tokens, tokens_a_call(slots, size, width))
    rows = torch.empty(tokens * slots * row, dtype=torch.float32, device=hidden.device)
    del rows
    return torch.empty_like(hidden)


def _without_scores(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: MaskRule,
    scaling: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention like the compiled kernel, which keeps no scores, also with sinks or a soft cap."""
    return packed_attention(module, query, key, value, attention_mask, scaling)


ALL_EXPERTS_FUNCTIONS.register(_STAND_IN, _scratch)
AttentionInterface.register(_STAND_IN, _without_scores)
AttentionMaskInterface.register(_STAND_IN, packed_mask)
