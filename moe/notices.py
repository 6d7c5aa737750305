"""Says what fell back or was turned off while a model was loaded: one sentence each
(`MoE.notices`)."""

from __future__ import annotations

from pathlib import Path

import yaml

from experts.files import read_small
from moe.decode.enable import FUSED_OFF, Fused
from moe.describe.probe import Packing
from moe.engine.borrowing import borrowing_notice
from moe.engine.pinning import pinned_cpus
from moe.loaded import LoadedModel
from moe.loading.load import LoadReport
from moe.loading.sources import missing_experts
from moe.settings import Profile
from moe.text.tokenizer import TextCodec

CARD = "README.md"
_LONGEST_NOTICE, _LONGEST_HEADER = 200, 16_384


def notices_of(loaded: LoadedModel, profile: Profile, ranks: int) -> list[str]:
    """Say what a model does otherwise than its profile asks, or than it could."""
    borrowing = borrowing_notice(loaded.offloaded, profile)
    return [
        *loaded.sampling.notices,
        *(pass_notices(loaded.packing, loaded.fused) if loaded.writer is None else []),
        *prompt_notices(loaded.codec),
        *_image_notices(loaded, profile),
        *loaded.speculation.notices,
        *filter(None, [borrowing, loaded.kv.notice(profile)]),
        *_prefix_notices(loaded, profile, ranks),
        *_eviction_notices(loaded, profile),
        *_low_bit_notices(loaded, profile),
        *_pinning_notices(loaded, profile),
    ]


def pass_notices(packing: Packing, fused: Fused) -> list[str]:
    """Say how forward passes are slower, or prompts less free, than they might be."""
    made = []
    if not packing.enabled:
        made.append(
            f"each sequence runs in a pass of its own, and prompts are neither cut nor kept for "
            f"others that begin alike: {packing.reason}"
        )
    if packing.whole:
        made.append(
            f"prompts are neither cut nor kept for others that begin alike: {packing.whole}"
        )
    if packing.slow:
        made.append(f"recurrent layers run transformers' own functions: {packing.slow}")
    if packing.enabled and not fused.enabled and fused is not FUSED_OFF:
        made.append(f"decode steps run through transformers' own layers: {fused.reason}")
    return made


def prompt_notices(codec: TextCodec) -> list[str]:
    """What prompts cannot be."""
    if codec.tokenizer is not None:
        return []
    return [f"prompts can only be token ids: {codec.no_tokenizer_reason}"]


def card_notices(directory: Path) -> list[str]:
    """Return what the card of a model (README.md) says to its users, as ``notice`` in its YAML
    header."""
    try:
        _, header, _ = read_small(directory / CARD).decode().split("---\n", 2)
        about = yaml.load(header, Loader=yaml.BaseLoader) if len(header) < _LONGEST_HEADER else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return []  # nobody has checked it, and nothing depends on it
    said = about.get("notice") if isinstance(about, dict) else None
    if not isinstance(said, str):
        return []
    text = " ".join("".join(filter(str.isprintable, said.replace("\n", " "))).split())
    return [f"the model's card says: {text[:_LONGEST_NOTICE]}"]


def tensor_notices(report: LoadReport) -> list[str]:
    """Tensors of the checkpoint that are not used, and of the model that it lacks."""
    ignored = "in the checkpoint are not used by this architecture"
    computed = "are not in the checkpoint and were filled by the architecture's own rule"
    return [
        f"{len(names)} tensors {what} (the first: {names[0]})"
        for names, what in ((report.ignored, ignored), (report.computed, computed))
        if names
    ]


def why_no_prefix_store(loaded: LoadedModel, profile: Profile, ranks: int) -> str:
    """Why prompts cannot be kept on disk; empty if they can."""
    backbone = loaded.backbone
    if ranks > 1:
        return "several ranks share the model"
    if not backbone.can_cut or profile.memory.prefix_tokens == 0:
        return "there is no prefix cache"
    if backbone.pool is None:
        return "keys and values are not in blocks (keys_and_values in the status says why)"
    if backbone.pool.counts_blocks:
        return "keys and values on a GPU are not saved"
    if backbone.recurrent:
        return "the model has recurrent states, which are not saved"
    if backbone.keeps_hidden:
        return "drafts read hidden states, which are not saved (speculation.mode)"
    return ""


def _prefix_notices(loaded: LoadedModel, profile: Profile, ranks: int) -> list[str]:
    why = why_no_prefix_store(loaded, profile, ranks)
    if profile.memory.prefix_dir is None or not why:
        return []
    return [f"memory.prefix_dir changes nothing: {why}"]


def _pinning_notices(loaded: LoadedModel, profile: Profile) -> list[str]:
    _, why = pinned_cpus(profile, loaded.backbone.device)
    return [f"engine.pin_threads changes nothing: {why}"] if why else []


def _image_notices(loaded: LoadedModel, profile: Profile) -> list[str]:
    images = loaded.codec.images
    if not profile.model.images or not isinstance(images, str):
        return []
    return [f"prompts with images are refused: {images}"]


def _eviction_notices(loaded: LoadedModel, profile: Profile) -> list[str]:
    wanted, offloaded = profile.offload.policy, loaded.offloaded
    if offloaded is None or offloaded.cache.policy.name == wanted:
        return []
    return [
        f"offload.policy: {wanted} needs the compiled kernels, which did not build here; the cache "
        f"evicts by {offloaded.cache.policy.name} (moe doctor says what is missing)"
    ]


def _low_bit_notices(loaded: LoadedModel, profile: Profile) -> list[str]:
    offloaded = loaded.offloaded
    missing = missing_experts(profile)
    if missing is None or (offloaded is not None and offloaded.cache.prefixed):
        return []
    why = "all experts are in memory"
    if offloaded is not None:
        why = f"no expert has more than {missing.bits} bits"
    return [f"offload.late: {profile.offload.late} changes nothing: {why}"]
