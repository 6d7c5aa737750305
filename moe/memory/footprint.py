"""What sequences and a wave of prompts take in memory, measured without taking any.

The model is run on the meta device, where a tensor has a shape and no memory, and every storage
that comes and goes is counted. So the figures hold for any architecture: grouped and latent
attention, windows, recurrent state, masks that are really built. The experts' kernel is stood in
for by the scratch rows that it takes, and compiled attention by one that keeps no scores.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from kernels import backend_status
from moe.network.attention import MaskRule, packed_attention, packed_mask
from moe.network.backbone import Backbone
from moe.network.kv_cache import Work
from moe.network.lanes import run_lanes
from moe.network.seam import experts_modules

# ---- Counting the memory of tensors: those that an object holds, and those that come and go.
#
# Works on the meta device, where tensors have sizes and take no memory.


class StorageCounter(TorchDispatchMode):
    """Counts the storages that operations make while it is entered, for as long as they live.

    Attributes:
        peak: most bytes alive after an operation.
        operations: how many there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.operations = 0
        self._total = 0  # with those that are gone since the last look
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


# ----

SHORT = 64
"""Tokens of a prompt; another is longer: what grows with them, and what does not?"""

PROBE_TOKENS = 512
"""Most tokens of a probe where the architecture goes through them one by one."""

_STAND_IN = "moe_footprint"


@dataclass(frozen=True)
class Footprint:
    """Bytes that running a model takes beside its weights.

    Attributes:
        kv_bytes_per_token: of a sequence's keys and values.
        bytes_per_sequence: of what does not grow with it: recurrent state, windows.
        activation_bytes: largest sum of everything else alive while the wave is read.
        how: where the figures come from.
    """

    kv_bytes_per_token: int
    bytes_per_sequence: int
    activation_bytes: int
    how: str


def measure_footprint(
    network: PreTrainedModel, wave_tokens: int, longest: int, *, on_cuda: bool = False
) -> Footprint:
    """Measure a model on the meta device; it is copied.

    Args:
        network: as `build_meta_model` makes it.
        wave_tokens: tokens of the largest wave.
        longest: tokens of its longest prompt.
        on_cuda: the kernel of the experts will be that for CUDA.
    """
    network = copy.deepcopy(network)
    stand_in_for_experts(network, on_cuda=on_cuda)
    backbone = Backbone(network)
    reason = ""
    for packed in (True, False):
        backbone.set_packed(packed)
        if packed and _compiled(on_cuda) and network.dtype == torch.float32:
            configs: list[Any] = [m.config for m in network.modules() if hasattr(m, "config")]
            for config in configs:
                config._attn_implementation = _STAND_IN
        try:
            return _measure(backbone, packed, wave_tokens, min(longest, wave_tokens))
        except Exception as error:  # an architecture that cannot run in this way
            reason = _first_line(error)
    return _bound(network, wave_tokens, reason)


def stand_in_for_experts(network: PreTrainedModel, *, on_cuda: bool = False) -> None:
    """Let the experts only take the memory that their kernel would."""
    native = _compiled(on_cuda)
    for _, module in experts_modules(network):
        module.config._experts_implementation = _STAND_IN
        module.scratch_is_small = native


def _compiled(on_cuda: bool) -> bool:
    return not on_cuda and backend_status()["name"] == "native"


def _measure(backbone: Backbone, packed: bool, wave_tokens: int, longest: int) -> Footprint:
    short = _run(backbone, [SHORT])
    if packed:  # two sequences show what several in one pass take; more are more of the same
        sizes = [longest, min(longest, wave_tokens - longest)]
        size = sum(sizes)
        long = _run(backbone, [part for part in sizes if part])
    else:
        # A loop over the tokens would take minutes; more of the same operations do not.
        loops = _run(backbone, [2 * SHORT]).operations > short.operations
        size = min(longest, PROBE_TOKENS) if loops else longest
        long = _run(backbone, [size])
    per_token = (long.kept - short.kept) // max(size - SHORT, 1)
    rest = 0 if packed else max(long.kept - per_token * size, 0)
    own = long.peak - long.kept
    if packed:
        return Footprint(per_token, rest, own * wave_tokens // size, "measured on the meta device")
    # The other prompts of the wave sleep at an MoE layer meanwhile.
    asleep = 4 * backbone.model.config.get_text_config().hidden_size * backbone.model.dtype.itemsize
    activations = own * longest // size + asleep * (wave_tokens - longest)
    how = f"measured on the meta device with {size} tokens, each sequence in a pass of its own"
    return Footprint(per_token, rest, activations, how)


@dataclass(frozen=True)
class _ProbedPass:
    """Bytes alive at the worst moment, bytes that the sequences keep, operations."""

    peak: int
    kept: int
    operations: int


def _run(backbone: Backbone, sizes: Sequence[int]) -> _ProbedPass:
    caches = [backbone.new_cache(size) for size in sizes]
    with torch.inference_mode(), StorageCounter() as ledger:
        works = [Work([0] * size, cache) for size, cache in zip(sizes, caches, strict=True)]
        lanes = backbone.lanes(works)
        run_lanes(lanes, lambda *_: [])  # nobody visits: `_scratch` takes the experts' place
        for lane in lanes:
            lane.result()
    return _ProbedPass(ledger.peak, tensor_bytes(caches), ledger.operations)


def _scratch(module: Any, hidden: Tensor, top_k_index: Tensor, _: Tensor) -> Tensor:
    """Rows as the kernels hold them in float32: inner and outer ones for each slot of a token."""
    width = module.down_proj.numel() // (module.num_experts * hidden.shape[-1])
    inner = width * (3 if module.has_gate else 2)
    row = inner + hidden.shape[-1] if module.scratch_is_small else 4 * hidden.shape[-1]
    rows = torch.empty(top_k_index.numel() * row, dtype=torch.float32, device=hidden.device)
    del rows
    return torch.empty_like(hidden)


def _without_scores(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: MaskRule,
    scaling: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """As the compiled attention, which keeps no scores with sinks or a soft cap either."""
    return packed_attention(module, query, key, value, attention_mask, scaling)


ALL_EXPERTS_FUNCTIONS.register(_STAND_IN, _scratch)
AttentionInterface.register(_STAND_IN, _without_scores)
AttentionMaskInterface.register(_STAND_IN, packed_mask)


def _bound(network: PreTrainedModel, wave_tokens: int, reason: str) -> Footprint:
    """From the sizes in the configuration: keys and values for every query head of every layer."""
    config = network.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = network.dtype.itemsize
    per_token = 2 * config.num_hidden_layers * config.num_attention_heads * head * size
    activations = 32 * wave_tokens * config.hidden_size * size
    return Footprint(
        per_token, 0, activations, f"estimated from the configuration, as a probe failed: {reason}"
    )


def _first_line(error: Exception) -> str:
    return (
        f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100] if str(error) else ''}"
    )
