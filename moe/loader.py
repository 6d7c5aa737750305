"""From a name and a profile to a model that is ready to run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kernels import backend_status
from moe.errors import ProfileError
from moe.loading.checkpoint import Checkpoint
from moe.loading.hub import read_config, resolve_model
from moe.loading.load import DtypeFor, LoadReport, load_weights
from moe.loading.meta_model import build_meta_model
from moe.moe_layer import MoELayers
from moe.packing import Packing, enable_packing
from moe.profile import Profile
from moe.seam import attach, experts_modules, take_experts
from moe.text import TextCodec
from moe.trunk import Trunk
from routing import PolicyChain, RoutingError, parse_policies


@dataclass
class LoadedModel:
    """Everything that belongs to one loaded model.

    Attributes:
        trunk: the model without its experts.
        experts: its MoE layers.
        codec: tokenizer and vocabulary rules.
        packing: whether sequences share a forward pass, and why.
        weight_bytes: memory of all weights.
        logits_size: V of the logits (it can differ from the tokenizer's vocabulary).
        context_length: most tokens of a sequence, None where nothing limits it.
        notices: what fell back or was turned off, one sentence each.
    """

    trunk: Trunk
    experts: MoELayers
    codec: TextCodec
    packing: Packing
    weight_bytes: int
    logits_size: int
    context_length: int | None
    notices: list[str] = field(default_factory=list)


def load_model(path_or_hub_id: str | Path, profile: Profile, *, progress: bool) -> LoadedModel:
    """Load, take the experts over, and find out how the rest may run.

    Raises:
        CheckpointError, UnsupportedModelError: see `moe.loading` and `moe.seam`.
        ProfileError: the device is absent, or a routing policy is not valid for this profile.
    """
    policies = _policies(profile)
    device = _device(profile)
    if profile.threads is not None:
        torch.set_num_threads(profile.threads)
    path = resolve_model(path_or_hub_id)
    if device.type == "cpu":
        backend_status()  # compiles the kernel on its first use, so that no request waits for it
    config = read_config(path)
    network = build_meta_model(config, dtype=_trunk_dtype(profile, device))
    dtype_for = _dtypes(network, profile, device)
    with Checkpoint.open(path) as checkpoint:
        report = load_weights(
            network,
            checkpoint,
            device=device,
            dtype_for=dtype_for,
            progress=progress,
            check_finite=profile.model.check_finite,
        )
    experts = MoELayers(take_experts(network), policies)
    attach(network, experts.layers, experts.run)
    trunk = Trunk(network)
    packing = enable_packing(trunk)
    codec = TextCodec.from_directory(path, config)
    return LoadedModel(
        trunk=trunk,
        experts=experts,
        codec=codec,
        packing=packing,
        weight_bytes=report.weight_bytes,
        logits_size=network.get_output_embeddings().weight.shape[0],
        context_length=_context_length(config, profile),
        notices=_notices(packing, codec, report),
    )


def _policies(profile: Profile) -> PolicyChain:
    try:
        return parse_policies(profile.routing.policies, lossless=profile.lossless)
    except RoutingError as error:
        raise ProfileError(f"routing.policies: {error}") from error


def _device(profile: Profile) -> torch.device:
    if profile.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if profile.device.startswith("cuda") and not torch.cuda.is_available():
        raise ProfileError(
            f"device is '{profile.device}', and torch finds no CUDA device on this machine; "
            "set device to cpu or auto"
        )
    return torch.device(profile.device)


def _trunk_dtype(profile: Profile, device: torch.device) -> torch.dtype | None:
    """What the trunk is kept in; None for the checkpoint's own dtype."""
    if profile.model.dtype != "auto":
        return _dtype(profile.model.dtype)
    return torch.float32 if device.type == "cpu" else None


def _dtypes(network: PreTrainedModel, profile: Profile, device: torch.device) -> DtypeFor:
    """Trunk weights become what arithmetic is fast in; experts stay as small as they came."""
    experts = tuple(f"{name}." for name, _ in experts_modules(network))
    trunk_dtype = _trunk_dtype(profile, device)

    def dtype_for(name: str, stored: torch.dtype) -> torch.dtype:
        if not stored.is_floating_point:
            return stored
        if not name.startswith(experts):
            return trunk_dtype or stored
        wanted = profile.model.expert_dtype
        return stored if wanted == "auto" else _dtype(wanted)

    return dtype_for


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _context_length(config: PreTrainedConfig, profile: Profile) -> int | None:
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    limits = [limit for limit in (own, profile.model.context_length) if limit is not None]
    return min(limits) if limits else None


def _notices(packing: Packing, codec: TextCodec, report: LoadReport) -> list[str]:
    notices = []
    if not packing.enabled:
        notices.append(
            f"each sequence runs in a pass of its own and prompts are not cut: {packing.reason}"
        )
    if codec.tokenizer is None:
        notices.append(f"prompts can only be token ids: {codec.no_tokenizer_reason}")
    for names, what in (
        (report.ignored, "in the checkpoint are not used by this architecture"),
        (
            report.computed,
            "are not in the checkpoint and were filled by the architecture's own rule",
        ),
    ):
        if names:
            notices.append(f"{len(names)} tensors {what} (the first: {names[0]})")
    return notices
