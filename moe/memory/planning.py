"""The first half of loading: what a model takes and where it goes, before its weights are read.

`planning` opens a model and yields a `PlannedModel`; `check_fit` refuses one that does not fit and
says what to change.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from experts.placement import slots_for
from kernels.triton import triton_status
from moe.calibration.files import CALIBRATION_FOLDER, load_manifest
from moe.errors import CalibrationError, DoesNotFitError, ProfileError
from moe.hooks import ModelHook, readings, reads_again
from moe.images.towers import PlannedTowers, plan_towers
from moe.kv.hidden import KEPT
from moe.kv.layout import KVFormat
from moe.kv.visibility import HeadScores, RowVisibility
from moe.loading.hub import read_config
from moe.loading.load import DtypeFor, WeightPlan
from moe.loading.memory_plan import GIB, MemoryPlan, Offloadable
from moe.loading.meta_model import build_meta_model, has_towers
from moe.loading.mtp import NOT_ASKED
from moe.loading.progress import Report, size_text
from moe.loading.quantized import decoding_notices
from moe.loading.sources import WeightSource, open_source
from moe.machine import memory_available, memory_total, spread_memory
from moe.memory.budget import (
    WAVES,
    available_for,
    leaves_room,
    plan_memory,
    prefill_batch_tokens,
    step_rows,
)
from moe.memory.footprint import Footprint, measure_footprint
from moe.memory.kv_precision import KVPrecision, choose_kv_precision
from moe.network.mtp import take_head, width_of
from moe.network.own_cache import OwnCache
from moe.network.seam import experts_modules
from moe.network.stored_embedding import is_half, keep_embedding
from moe.settings import Profile
from moe.text.generation_config import read_generation_config
from offload.capacity import Capacity
from offload.offloaded import HOST

GENERATION = ModelHook[Callable[[PreTrainedModel, dict[str, Any]], None]]("generation")
"""Takes the settings of generation that are stored beside a model, in place of our sampler."""
Measure = Callable[[PreTrainedModel, int, KVFormat | None, Profile], Footprint]
MEASURE = ModelHook[Measure]("measure")
"""Measures a model on the meta device, given the tokens of the longest prompt and how keys and
values are stored, as `measure_footprint` does."""
HOST_RESERVE = 1 / 10
"""Share of free main memory that experts which a GPU does not hold leave to others."""


@dataclass(frozen=True)
class PlannedModel:
    """A model that can be loaded.

    Attributes:
        config: of transformers.
        network: on the meta device.
        source: of its weights, open.
        weights: what to read of them.
        memory: what everything takes.
        footprint: what running it takes beside weights, with this profile's passes.
        kv: how keys and values are to be kept, if the decode step can be compiled.
        logits_size: V of the logits.
        context_length: most tokens of a sequence; None for no limit.
        towers: what reads images, or why nothing is to.
        why_resident: why its experts cannot stay on disk and what would help; empty if they can.
        room: how many experts fit where; None if the device holds all.
        least_experts: the fewest that must be in memory.
    """

    config: PreTrainedConfig
    network: PreTrainedModel
    source: WeightSource
    weights: WeightPlan
    memory: MemoryPlan
    footprint: Footprint
    kv: KVPrecision
    logits_size: int
    context_length: int | None
    towers: PlannedTowers | str
    why_resident: str
    room: Capacity | None
    least_experts: int = 0


@contextmanager
def planning(
    path: Path, profile: Profile, device: torch.device, report: Report, ranks: int = 1
) -> Iterator[PlannedModel]:
    """Plan the model in a directory; its files stay open in the context.

    On a CPU this process takes memory from all memory nodes from now on, for the weights as for
    what a plan measures.

    Args:
        ranks: that share the experts; each holds its part in memory.

    Raises:
        CheckpointError, UnsupportedModelError: see `moe.loading` and `moe.network.seam`.
    """
    if device.type == "cpu":
        spread_memory()
    config = read_config(path)
    network = build_meta_model(config, dtype=_backbone_dtype(profile, device))
    if (take := GENERATION.of(network)) is not None:
        take(network, read_generation_config(path))
    no_mtp = _why_no_mtp(profile, ranks)
    with open_source(path, config, network, profile, device, report, no_mtp=no_mtp) as source:
        weights = source.plan(_dtypes(network, profile, device, keep_embedding(network)))
        offloadable = source.offloadable()
        if ranks > 1 and isinstance(offloadable, Offloadable):
            most = _rank_experts(network, ranks, profile.parallel.replicas)
            offloadable = replace(offloadable, most=most)
        host = host_room(profile, device, ranks)
        kv = choose_kv_precision(
            profile, device, network.dtype, quantized=_quantized(network, weights)
        )
        towers = _towers(path, config, network, profile, device, ranks)
        if kv.policy is not None and kv.policy.by_heads:
            scores = _head_scores(path, config, network, kv.policy, ranks)
            kv = replace(kv, policy=kv.policy.scored(scores))
        footprint, memory = _plan_waves(
            network, weights, towers, profile, device, kv, offloadable, host, ranks
        )
        notices = decoding_notices(config, profile.model.expert_bits, weights.kept)
        memory = replace(memory, notice="".join(notices))
        yield PlannedModel(
            config=config,
            network=network,
            source=source,
            weights=weights,
            memory=memory,
            footprint=footprint,
            kv=kv.for_layers(footprint.shapes),
            logits_size=network.get_output_embeddings().weight.shape[0],
            context_length=_context_length(config, profile),
            towers=towers,
            why_resident=offloadable if isinstance(offloadable, str) else "",
            room=_room(memory, profile, device, ranks),
            least_experts=offloadable.least if isinstance(offloadable, Offloadable) else 0,
        )


def _head_scores(
    path: Path,
    config: PreTrainedConfig,
    network: PreTrainedModel,
    policy: RowVisibility,
    ranks: int,
) -> HeadScores:
    """Return what `moe calibrate` has measured of key heads, for a policy by heads."""
    if ranks > 1:  # rank 0 would have to know of parts of the blocks that others hold
        raise ProfileError(
            f"memory.kv_policy is {policy}, and several ranks share the experts, which know no "
            "policy by heads; set memory.kv_policy: null, or window:TOKENS"
        )
    counts = [module.num_experts for _, module in experts_modules(network)]
    try:
        return load_manifest(path / CALIBRATION_FOLDER, config, counts).head_scores
    except CalibrationError as error:
        raise ProfileError(
            f"memory.kv_policy is {policy}, and moe calibrate finds the key heads that keep all: "
            f"{error}"
        ) from error


def _why_no_mtp(profile: Profile, ranks: int) -> str:
    if profile.speculation.mode not in ("mtp", "auto"):
        return NOT_ASKED
    return "several ranks share the experts" if ranks > 1 else ""


def host_room(profile: Profile, device: torch.device, ranks: int) -> int | None:
    """Bytes of host memory for experts that are not on the device; None if the device is a CPU."""
    if device.type == "cpu":
        return None
    free, wanted = memory_available(), profile.memory.host_gib
    limit = 0 if free is None else int(free * (1 - HOST_RESERVE)) // ranks
    if wanted is None:
        return limit
    return int(wanted * GIB) if free is None else min(int(wanted * GIB), free)


def _room(plan: MemoryPlan, profile: Profile, device: torch.device, ranks: int) -> Capacity | None:
    if not plan.tiers:
        return None
    near, host = plan.tiers[0], next((tier for tier in plan.tiers if tier.name == HOST), None)
    if host is None:
        return Capacity(device, near.experts)
    gib = profile.memory.pinned_gib
    limit = (memory_total() or 0) // (2 * ranks) if gib is None else int(gib * GIB)
    pinned = min(host.experts, limit * host.experts // host.bytes)
    return Capacity(device, near.experts, host.experts, pinned)


def _rank_experts(network: PreTrainedModel, ranks: int, replicas: float) -> int:
    """Experts that each of several ranks holds, replicas included."""
    counts = [module.num_experts for _, module in experts_modules(network)]
    return sum(slots_for(count, ranks, replicas) for count in counts) // ranks


def _quantized(network: PreTrainedModel, weights: WeightPlan) -> bool:
    """Return whether the experts have fewer than 16 bits."""
    numbers = sum(p.numel() for _, m in experts_modules(network) for p in m.parameters())
    return _expert_bytes(network, weights) < 2 * numbers


def _expert_bytes(network: PreTrainedModel, weights: WeightPlan) -> int:
    prefixes = tuple(f"{name}." for name, _ in experts_modules(network))
    return sum(size for name, size in weights.nbytes.items() if name.startswith(prefixes))


def _footprint(
    network: PreTrainedModel, profile: Profile, device: torch.device, kv: KVPrecision, ranks: int
) -> Footprint:
    batch = prefill_batch_tokens(profile)
    longest = min(_context_length(network.config, profile) or batch, batch)
    form = kv.form if kv.in_blocks else None
    on_cuda = device.type == "cuda"
    measure = MEASURE.of(network)
    if measure is not None:
        whole = measure(network, longest, form, profile)
    else:
        whole = measure_footprint(network, batch, longest, on_cuda=on_cuda, form=form)
    if ranks > 1 or readings(profile) > 1:
        # Rank 0 does not know what sequences of another rank give up, and several readings are not
        # in blocks.
        whole = replace(whole, windows={})
    head = take_head(copy.deepcopy(network))
    if head is None:
        return whole
    most = 2 * KEPT  # it never reads more at a time
    own = measure_footprint(head, most, most, on_cuda=on_cuda)
    hidden = most * width_of(head) * head.dtype.itemsize
    return replace(
        whole,
        kv_bytes_per_token=whole.kv_bytes_per_token + own.kv_bytes_per_token,
        kv_plain_bytes=whole.kv_plain_bytes + own.kv_bytes_per_token,
        activation_bytes=whole.activation_bytes + profile.engine.max_batch_size * hidden,
    )


def _plan_waves(
    network: PreTrainedModel,
    weights: WeightPlan,
    towers: PlannedTowers | str,
    profile: Profile,
    device: torch.device,
    kv: KVPrecision,
    offloadable: Offloadable | str,
    host_bytes: int | None,
    ranks: int,
) -> tuple[Footprint, MemoryPlan]:
    """The plan with the largest prefill batch that leaves room for experts.

    Several ranks read the same batches, so that they cannot each choose their size.
    """

    in_blocks = kv.in_blocks and device.type == "cpu"
    own_policy = OwnCache.of(network).policy if in_blocks else None

    def planned(footprint: Footprint, own: Profile) -> MemoryPlan:
        how = offloadable, host_bytes, own_policy or kv.for_layers(footprint.shapes).policy
        return _plan(network, weights, towers, own, device, footprint, *how)

    prefill = profile.prefill
    fixed = prefill.wave_tokens != "auto" or prefill.mode in ("whole", "chunked") or ranks > 1
    measured, sized = WAVES[0], _with_wave(profile, prefill.most_tokens)
    footprint = _footprint(network, sized, device, kv, ranks)
    memory = planned(footprint, sized)
    for wave in () if fixed else WAVES[1:]:
        if leaves_room(memory):
            break
        sized = _with_wave(profile, wave)
        # Activations grow with the tokens, so that only a plan which is likely is measured.
        scaled = replace(footprint, activation_bytes=footprint.activation_bytes * wave // measured)
        memory = planned(scaled, sized)
        if leaves_room(memory) or wave == WAVES[-1]:
            footprint, measured = _footprint(network, sized, device, kv, ranks), wave
            memory = planned(footprint, sized)
    return footprint, memory


def _with_wave(profile: Profile, tokens: int) -> Profile:
    prefill = profile.prefill.model_copy(update={"wave_tokens": tokens})
    return profile.model_copy(update={"prefill": prefill})


def _towers(
    path: Path,
    config: PreTrainedConfig,
    network: PreTrainedModel,
    profile: Profile,
    device: torch.device,
    ranks: int,
) -> PlannedTowers | str:
    """Plan the reader of images, if the profile wants one; else say why there is none."""
    if not has_towers(network):
        return "this model reads text only"
    if not profile.model.images:
        return "this model is loaded without what reads images (model.images=true loads it)"
    if ranks > 1:
        return (
            "several ranks share the experts, and images are read by one process only: start "
            "without the launcher for them"
        )
    if readings(profile) > 1:
        return f"{reads_again(profile)} reads each token twice, which images do not support"
    return plan_towers(path, config, network, _backbone_dtype(profile, device))


def _plan(
    network: PreTrainedModel,
    weights: WeightPlan,
    towers: PlannedTowers | str,
    profile: Profile,
    device: torch.device,
    footprint: Footprint,
    offloadable: Offloadable | str,
    host_bytes: int | None,
    kv_policy: RowVisibility | None,
) -> MemoryPlan:
    experts = _expert_bytes(network, weights)
    on_cuda = device.type == "cuda"
    vision = {} if isinstance(towers, str) else {"image towers": towers.nbytes}
    return plan_memory(
        {"trunk": sum(weights.nbytes.values()) - experts, "experts": experts, **vision},
        footprint,
        profile,
        place=str(device) if on_cuda else "memory",
        available_bytes=_free_on(device) if on_cuda else memory_available(),
        context_length=_context_length(network.config, profile),
        logits_size=network.get_output_embeddings().weight.shape[0],
        offloadable=None if isinstance(offloadable, str) else offloadable,
        host_bytes=host_bytes,
        kv_policy=kv_policy,
        recordings_bytes=_recordings_bytes(network, profile, footprint) if on_cuda else 0,
    )


def _recordings_bytes(network: PreTrainedModel, profile: Profile, footprint: Footprint) -> int:
    """Bytes of a GPU for recorded decode steps; 0 where there are none."""
    if profile.engine.fused == "off" or not footprint.shapes:
        return 0
    if triton_status()["name"] != "triton":
        return 0
    from moe.decode.cuda_graph import recordings_bytes  # needs Triton

    config = network.config.get_text_config()
    return recordings_bytes(
        step_rows(profile),
        vocabulary=network.get_output_embeddings().weight.shape[0],
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        shapes=footprint.shapes.values(),
        moe_layers=len(experts_modules(network)),
        row_bytes=-(-footprint.activation_bytes // prefill_batch_tokens(profile)),
        dtype=network.dtype,
    )


def _free_on(device: torch.device) -> int:
    """Free bytes of a GPU. What torch keeps of closed models would count as taken: it goes back to
    the system first."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _backbone_dtype(profile: Profile, device: torch.device) -> torch.dtype | None:
    """Dtype of all weights but experts; None for the checkpoint's own."""
    if profile.model.dtype != "auto":
        return _dtype(profile.model.dtype)
    return torch.float32 if device.type == "cpu" else None


def _dtypes(
    network: PreTrainedModel, profile: Profile, device: torch.device, embedding: str | None
) -> DtypeFor:
    """Experts keep their dtype or get the profile's; other weights get one that is fast."""
    experts = tuple(f"{name}." for name, _ in experts_modules(network))
    backbone_dtype = _backbone_dtype(profile, device)

    def dtype_for(name: str, stored: torch.dtype) -> torch.dtype:
        if not stored.is_floating_point or (name == embedding and is_half(stored)):
            return stored
        if not name.startswith(experts):
            return backbone_dtype or stored
        wanted = profile.model.expert_dtype
        return stored if wanted == "auto" else _dtype(wanted)

    return dtype_for


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _context_length(config: PreTrainedConfig, profile: Profile) -> int | None:
    own = _positions(config.get_text_config())
    wanted = profile.model.context_length
    if own is not None and wanted is not None and wanted > own:
        raise ProfileError(
            f"model.context_length is {wanted}, and the model's max_position_embeddings is {own}; "
            f"set it to {own} or less, or to null"
        )
    return own if wanted is None else wanted


def _positions(config: PreTrainedConfig) -> int | None:
    """Most positions; ``dynamic`` rotary tables multiply those that a model was trained with."""
    own: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    factor = rope.get("factor") if rope.get("rope_type") == "dynamic" else None
    return own if own is None or not factor else int(own * factor)


def check_fit(plan: MemoryPlan, profile: Profile, why_resident: str = "") -> None:
    """Raise `DoesNotFitError`, with all numbers and what to change, if a plan does not fit.

    Args:
        why_resident: why experts cannot stay on disk and what would help.
    """
    if plan.fits:
        return
    if plan.host_bytes is not None and plan.host_needed_bytes > plan.host_bytes:
        raise DoesNotFitError(
            f"the model does not fit: beside {plan.place}, {size_text(plan.host_bytes).strip()} of "
            f"main memory are available for experts, too little to bring them there: {plan}\n"
            f"  - memory.host_gib of at least {_gib(plan.host_needed_bytes)}, if so much is free"
        )
    assert plan.available_bytes is not None
    needed, free = size_text(plan.needed_bytes).strip(), size_text(plan.available_bytes).strip()
    raise DoesNotFitError(
        f"the model does not fit: it needs {needed} and {free} are available in {plan}\n"
        + "\n".join(f"  - {remedy}" for remedy in _remedies(plan, profile, why_resident))
    )


def _remedies(plan: MemoryPlan, profile: Profile, why_resident: str) -> list[str]:
    """Return ways to make room, the most effective first; the last one always helps."""
    assert plan.available_bytes is not None
    size = {line.name: line.bytes for line in plan.lines}
    missing = plan.needed_bytes - plan.available_bytes
    remedies = [why_resident] if why_resident else []
    if profile.memory.kv_tokens is not None or profile.memory.kv_gib is not None:
        fit = (size["keys and values"] - missing) // plan.kv_bytes_per_token
        if fit > 0:
            remedies.append(f"memory.kv_tokens={fit} would fit ({fit * plan.kv_bytes_per_token} B)")
    batch = prefill_batch_tokens(_with_wave(profile, plan.wave_tokens))
    if batch > 512 and size["activations"] > missing // 4:
        key = "chunk_tokens" if profile.prefill.mode == "chunked" else "wave_tokens"
        remedies.append(f"a smaller prefill.{key} lowers the activations (it is {batch})")
    if profile.model.expert_dtype == "float32":
        half = size_text(size["experts"] // 2).strip()
        remedies.append(f"model.expert_dtype=bfloat16 lowers the experts to {half}")
    least = available_for(profile, plan)
    limit = profile.memory.device_gib
    if limit is not None and int(limit * GIB) == plan.available_bytes:
        remedies.append(f"memory.device_gib of at least {_gib(least)} (it is the limit here)")
    if not plan.tiers:
        remedies.append(f"a machine with {-(-least // GIB)} GiB of free memory")
    else:
        remedies.append(
            f"{_gib(least)} GiB of free memory are the least for this model and profile: "
            f"{plan.expert_slots} experts in memory, the others on disk"
        )
    return remedies


def _gib(size: int) -> str:
    """Bytes in GiB, rounded up so that this many GiB are enough."""
    return f"{math.ceil(size / GIB * 1000) / 1000:g}"
