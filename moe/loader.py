"""From a name and a profile to a model that is ready to run.

`load_model` plans the memory, reads the weights, puts the experts behind the MoE seam, and finds
out by probes which faster ways the model can go. The result is a `LoadedModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kernels import Backend, BackendError, choose_backend, experts_forward
from kernels.cpu import choose_kernel
from kernels.cpu.kv import BLOCK
from kernels.reference import AnyExperts
from moe.calibration.predictors import PromptEstimator, load_prompt_estimator, make_prefetcher
from moe.decode.chain import make_chain
from moe.decode.enable import FUSED_OFF, Fused, enable_fused
from moe.decode.proof import prove_policy
from moe.describe.attention import check_views, seen_windows
from moe.describe.description import NotDescribed
from moe.describe.probe import Packing, enable_packing, find_visits, stand_in
from moe.describe.routers import enable_policies
from moe.describe.row_wise import linears_are_faster, make_linears_row_wise, make_row_wise
from moe.engine.borrowing import borrowing_notice
from moe.engine.prefix_store import prefix_key, prepare_directory
from moe.errors import ProfileError, UnsupportedModelError
from moe.extras import install_line, is_installed
from moe.images.reader import ImageReader, conversation, enable_images, load_processor
from moe.loading.hub import resolve_model
from moe.loading.load import LoadReport
from moe.loading.memory_plan import MemoryPlan
from moe.loading.progress import LoadProgress, Report, reporting
from moe.loading.quantized import decoding_notices
from moe.loading.sources import total_bytes
from moe.loading.takeover import arrange_linears, mend_linears, precision_notices
from moe.machine import keep_freed_memory
from moe.memory.kv_precision import KVPrecision
from moe.memory.planning import PlannedModel, check_fit, planning
from moe.network.backbone import Backbone
from moe.network.block_diffusion import BlockWriter, set_generation, writes_blocks
from moe.network.kv_blocks import BlockPool, HostBlocks, Windows
from moe.network.moe_layer import MoELayers
from moe.network.mtp import MtpHead, take_head
from moe.network.seam import attach, experts_modules
from moe.sampling.constraint import Structures
from moe.settings import Profile
from moe.settings.device import use_device
from moe.speculate import Speculation, enable_speculation
from moe.speculate.contrast import enable_contrast
from moe.text.generation_config import ModelSampling, read_generation_config
from moe.text.tokenizer import TextCodec
from offload.layer import LayerExperts, held_experts
from offload.offloaded import Offloaded
from offload.prefetch import Prefetcher
from routing import PolicyChain, RoutingError, parse_policies


@dataclass(frozen=True)
class LoadedModel:
    """Everything that belongs to one loaded model.

    Attributes:
        backbone: the model without its experts.
        experts: its MoE layers.
        backend: what runs them.
        codec: tokenizer and vocabulary rules.
        structures: compiles the constraints that requests ask for.
        packing: whether sequences share a forward pass, and why.
        fused: whether decode steps bypass transformers' forward, and why.
        speculation: what drafts tokens for the model to verify, or why nothing does.
        kv: how keys and values are kept, and why.
        memory_plan: what was planned before loading.
        weight_bytes: memory of all weights.
        logits_size: V of the logits (it can differ from the tokenizer's vocabulary).
        context_length: most tokens of a sequence; None without a limit.
        offloaded: the cache of experts on disk; None if all experts are in memory.
        mtp: the multi-token-prediction layer that the model brings, or why none is loaded.
        blocks: writes whole blocks by the model's own generation code; None: it writes tokens one
            by one.
        expect: which experts a prompt needs, if requests may be ordered by it.
        sampling: how the model itself wants its tokens sampled.
        prefix_key: names everything that the bits of keys and values depend on; empty: prefixes are
            not kept on disk.
        notices: what fell back or was turned off, one sentence each.
    """

    backbone: Backbone
    experts: MoELayers
    backend: Backend
    codec: TextCodec
    structures: Structures
    packing: Packing
    fused: Fused
    speculation: Speculation
    kv: KVPrecision
    memory_plan: MemoryPlan
    weight_bytes: int
    logits_size: int
    context_length: int | None
    offloaded: Offloaded | None
    mtp: MtpHead | str
    blocks: BlockWriter | None = None
    expect: PromptEstimator | None = None
    sampling: ModelSampling = field(default_factory=ModelSampling)
    prefix_key: str = ""
    notices: list[str] = field(default_factory=list)


def load_model(
    path_or_hub_id: str | Path,
    profile: Profile,
    ranks: int = 1,
    *,
    progress: bool | Report = False,
    on_plan: Callable[[MemoryPlan], object] = lambda _: None,
) -> LoadedModel:
    """Load a model, and find out by probes how fast it may run.

    Args:
        ranks: number of processes that share the experts; each has room for its part of them.
        progress: see `moe.loading.progress.reporting`.
        on_plan: called with the memory plan before it is checked and anything is read.

    Raises:
        CheckpointError, UnsupportedModelError: see `moe.loading` and `moe.network.seam`.
        DoesNotFitError: the memory plan says so; nothing has been read.
        ProfileError: the device or the kernels' backend is absent, or a routing policy is not valid
            for this profile.
    """
    with reporting(progress) as report:
        report(LoadProgress("planning"))
        return _load(path_or_hub_id, profile, ranks, report, on_plan)


def _load(
    path_or_hub_id: str | Path,
    profile: Profile,
    ranks: int,
    report: Report,
    on_plan: Callable[[MemoryPlan], object],
) -> LoadedModel:
    policies = _policies(profile)
    device = use_device(profile)
    path = resolve_model(path_or_hub_id, report)
    if profile.memory.prefix_dir is not None:
        prepare_directory(Path(profile.memory.prefix_dir).expanduser())
    backend = _backend(profile, device)  # compiles kernels now, and not in the first request
    with planning(path, profile, device, report, ranks) as planned:
        network, weights, plan = planned.network, planned.weights, planned.memory
        in_blocks = writes_blocks(network)
        if in_blocks:
            _check_block_profile(network, profile, ranks)
            set_generation(network, read_generation_config(path))
        _check_policy(profile, planned.kv)
        on_plan(plan)
        check_fit(plan, profile, planned.why_resident)
        # Small files first: a fault in them must not show up minutes later, after the weights.
        codec = TextCodec.from_directory(path, planned.config)
        sampling = (
            ModelSampling({"temperature": 1.0}) if in_blocks else ModelSampling.from_directory(path)
        )
        made, read = planned.source.load(weights, device, report, planned.room)
        towers = planned.towers
        vision = towers if isinstance(towers, str) else towers.load(device, report)
    offloaded = made if isinstance(made, Offloaded) else None
    nbytes = total_bytes(network, made.layers if isinstance(made, Offloaded) else made)
    head, head_layers = take_head(network), _behind(made, len(experts_modules(network)))
    if profile.memory.keep_freed and offloaded is None and device.type == "cpu":
        keep_freed_memory()
    layers: Sequence[LayerExperts] = made.layers if isinstance(made, Offloaded) else made
    head_bytes = nbytes - total_bytes(network, layers)
    arrange_linears(network, device)
    _check_backend(backend, layers)
    report(LoadProgress("preparing", weights.bytes_to_read, weights.bytes_to_read))
    forecasts = _forecasts(offloaded, layers, path, planned.config, profile)
    experts = MoELayers(layers, backend.forward, forecasts.prefetcher)
    attach(network, experts.layers, experts.run)
    backbone = Backbone(network)
    blocks = _block_writer(backbone) if in_blocks else None
    if blocks is None:
        make_row_wise(backbone)
    mtp = _mtp(head, head_layers, backend, planned, profile)
    backbone.blocks = _blocks_on_device(planned, device)
    found = _probe(backbone, experts, profile, mtp) if blocks is None else _BLOCKS
    if blocks is not None and not isinstance(vision, str):
        vision = "images are not read by models that write whole blocks"
    codec = codec.with_images(_images(backbone, vision, codec, path, planned.config, profile))
    if ranks > 1:
        experts.set_visits(find_visits(backbone, len(experts.layers)))
    _alter(backbone, experts, offloaded, policies, profile, blocks)
    kv = _keep_in_blocks(backbone, planned, found.fused, profile)
    _check_policy(profile, kv)
    if not kv.in_blocks:
        plan = plan.in_buffers(planned.footprint.kv_plain_bytes)
    wanted, no_store = profile.memory.prefix_dir, prefix_notices(backbone, profile, ranks)
    return LoadedModel(
        backbone=backbone,
        experts=experts,
        backend=backend,
        codec=codec,
        structures=Structures(codec, planned.logits_size),
        packing=found.packing,
        fused=found.fused,
        speculation=found.speculation,
        kv=kv,
        memory_plan=plan,
        weight_bytes=total_bytes(network, layers) + head_bytes,
        logits_size=planned.logits_size,
        context_length=planned.context_length,
        offloaded=offloaded,
        mtp=mtp,
        blocks=blocks,
        expect=forecasts.expect,
        sampling=sampling,
        prefix_key="" if no_store or not wanted else prefix_key(path, profile, kv.bits),
        notices=[
            *sampling.notices,
            *load_notices(found.packing, found.fused, codec, read),
            *image_notices(codec, profile),
            *found.speculation.notices,
            *decoding_notices(planned.config, profile.model.expert_bits, weights.kept),
            *precision_notices(network, layers, found.mended),
            *filter(
                None, [*forecasts.notices, borrowing_notice(offloaded, profile), kv.notice(profile)]
            ),
            *no_store,
            *eviction_notices(offloaded, profile),
            *low_bit_notices(offloaded, profile),
        ],
    )


@dataclass(frozen=True)
class _Forecasts:
    """What predicts the need for experts.

    Attributes:
        prefetcher: reads experts on disk before they are needed.
        expect: which experts a prompt needs, to order requests by it.
        notices: why something is absent although the profile asks for it; may have empty ones.
    """

    prefetcher: Prefetcher | None
    expect: PromptEstimator | None
    notices: list[str]


def _forecasts(
    offloaded: Offloaded | None,
    layers: Sequence[LayerExperts],
    path: Path,
    config: PreTrainedConfig,
    profile: Profile,
) -> _Forecasts:
    prefetcher, no_prefetcher = None, ""
    if offloaded is not None:
        drafts = profile.speculation.mode in ("auto", "elastic")
        prefetcher, no_prefetcher = make_prefetcher(
            offloaded, path, config, profile.offload, drafts=drafts
        )
    expect, no_order = None, ""
    if profile.engine.overlap_patience:
        expect, no_order = load_prompt_estimator(
            path, config, [layer.num_experts for layer in layers]
        )
    return _Forecasts(prefetcher, expect, [no_prefetcher, no_order])


@dataclass(frozen=True)
class _Found:
    """Faster ways that a model can go; ``mended``: see `moe.loading.takeover.mend_linears`."""

    packing: Packing
    mended: list[str]
    fused: Fused
    speculation: Speculation


_SPARE_BLOCKS = 8  # for copies of a block that the scheduler learns of a step later
_OWN_CODE = "it writes whole blocks by its own generation code"
_BLOCKS = _Found(
    Packing(False, _OWN_CODE), [], Fused(False, _OWN_CODE), Speculation(None, _OWN_CODE)
)


def _check_block_profile(network: PreTrainedModel, profile: Profile, ranks: int) -> None:
    """Refuse what a profile asks for and a model that writes blocks cannot do."""
    name = type(network).__name__
    if ranks > 1:
        raise UnsupportedModelError(
            f"{name} writes whole blocks, which one rank does so far; start it without a launcher"
        )
    drafts, prefixes = profile.speculation.mode, profile.memory.prefix_tokens
    for key, value, instead in (
        ("speculation.mode", "off" if drafts == "auto" else drafts, "off"),
        ("speculation.contrast", profile.speculation.contrast, 0.0),
        ("memory.prefix_tokens", 0 if prefixes == "auto" else prefixes, 0),
        ("memory.kv_policy", profile.memory.kv_policy, None),
    ):
        if value != instead:
            raise ProfileError(
                f"{key} is {value}, and {name} writes whole blocks, for which that does not exist; "
                f"set {key}: {'null' if instead is None else instead}"
            )


def _block_writer(backbone: Backbone) -> BlockWriter:
    """What drives the model's own generation code, proven on short blocks."""
    make_linears_row_wise(backbone.model)
    writer = BlockWriter(backbone.model)
    with torch.inference_mode():
        writer.prove(stand_in)
    return writer


def _behind(made: list[AnyExperts] | Offloaded, count: int) -> Sequence[LayerExperts]:
    """Take away the experts of a multi-token-prediction layer, which come behind the model's."""
    if isinstance(made, Offloaded):
        return made.take_behind(count)
    behind = made[count:]
    del made[count:]
    return behind


def _mtp(
    network: PreTrainedModel | None,
    layers: Sequence[LayerExperts],
    backend: Backend,
    planned: PlannedModel,
    profile: Profile,
) -> MtpHead | str:
    """The multi-token-prediction layer, or why there is none."""
    if network is None:
        return planned.source.no_mtp
    experts = MoELayers(layers, backend.forward)
    attach(network, experts.layers, experts.run)
    backbone = Backbone(network)
    make_row_wise(backbone)
    packing = enable_packing(backbone)
    mend_linears(backbone.model)
    if not packing.enabled or backbone.recurrent:
        return f"its multi-token-prediction layer cannot be packed: {packing.reason}"
    fused = enable_fused(backbone, experts) if profile.engine.fused == "auto" else FUSED_OFF
    if not fused.keeps_hidden:
        backbone.decode_by(None)  # a further token of a draft reads the hidden state of the last
    backbone.keep_hidden()
    return MtpHead(backbone, experts, make_chain(fused.forward))


def _probe(backbone: Backbone, experts: MoELayers, profile: Profile, mtp: MtpHead | str) -> _Found:
    """Find out which faster ways give the same results as the model's own code."""
    packing = enable_packing(backbone)
    mended = mend_linears(backbone.model)
    if linears_are_faster(backbone):
        make_linears_row_wise(backbone.model)
    fused = enable_fused(backbone, experts) if profile.engine.fused == "auto" else FUSED_OFF
    if isinstance(mtp, MtpHead) and fused.enabled and not fused.keeps_hidden:
        mtp = "the model's decode steps do not hand on their hidden states"
    speculation = enable_speculation(profile.speculation, backbone, experts, experts.forward, mtp)
    return _Found(packing, mended, fused, speculation)


def _images(
    backbone: Backbone,
    towers: PreTrainedModel | str,
    codec: TextCodec,
    path: Path,
    config: PreTrainedConfig,
    profile: Profile,
) -> ImageReader | str:
    """What reads images, or why nothing does."""
    if isinstance(towers, str):
        return towers
    tokenizer = codec.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        return f"images come in chats: {codec.no_tokenizer_reason or 'it has no chat template'}"
    if not is_installed("images"):
        return f"images need Pillow, which is not installed: {install_line('images')}"
    processor = load_processor(path, config, tokenizer)
    if isinstance(processor, str):
        return processor
    text = partial(conversation, tokenizer)
    return enable_images(backbone, towers, processor, text, profile.model.image_pixels)


def image_notices(codec: TextCodec, profile: Profile) -> list[str]:
    """Why images are refused although the profile asks for them."""
    if not profile.model.images or not isinstance(codec.images, str):
        return []
    return [f"prompts with images are refused: {codec.images}"]


def _alter(
    backbone: Backbone,
    experts: MoELayers,
    offloaded: Offloaded | None,
    policies: PolicyChain,
    profile: Profile,
    blocks: BlockWriter | None,
) -> None:
    """Enable what changes the model's results, as the profile asks.

    Probes compare ways to compute the unaltered model, so they cannot run after this.
    """
    enable_policies(policies, backbone, experts, blocks)
    enable_contrast(profile.speculation, backbone, experts)
    if offloaded is not None and profile.offload.late == "prefix":
        offloaded.serve_prefixes(profile.offload.late_share)


def _keep_in_blocks(
    backbone: Backbone, planned: PlannedModel, fused: Fused, profile: Profile
) -> KVPrecision:
    """Keep keys and values as planned from now on if a compiled decode step reads them, or, on a
    GPU, as probes have read them already. Raises `ProfileError` for a policy that has no effect."""
    kv = planned.kv
    if not kv.in_blocks or backbone.blocks is not None:
        return kv
    kernel, _ = choose_kernel()
    if kernel is None or not fused.enabled:
        return kv.without_blocks(f"decode steps are not compiled: {fused.reason}")
    windows = seen_windows(backbone, kv.form) if planned.footprint.windows else Windows()
    memory = HostBlocks(kernel.kv, kv.form)
    pool = BlockPool(memory, windows, kv.policy, planned.footprint.shapes)
    backbone.blocks = pool
    if kv.policy is not None:
        try:
            check_views(backbone)
            return kv.with_policy(prove_policy(backbone, pool))
        except NotDescribed as error:
            _check_policy(profile, kv, str(error))
    return kv


def _check_policy(profile: Profile, kv: KVPrecision, why: str = "") -> None:
    """Refuse a policy on keys and values that does not take effect.

    Args:
        why: it cannot; empty: as far as this is known without it.
    """
    if kv.policy is None:
        why = why or kv.why
    if profile.memory.kv_policy is not None and why:
        raise ProfileError(
            f"memory.kv_policy is {profile.memory.kv_policy}, and decode steps attend to all that "
            f"their layers see: {why}; set memory.kv_policy: null"
        )


def _blocks_on_device(planned: PlannedModel, device: torch.device) -> BlockPool | None:
    """The pool of a GPU's keys and values, as the plan has it; None: there is none."""
    if device.type == "cpu" or not planned.kv.in_blocks:
        return None
    from moe.network.device_blocks import DeviceBlocks  # needs Triton

    count = -(-planned.memory.kv_tokens // BLOCK) + _SPARE_BLOCKS
    return BlockPool(DeviceBlocks(device, planned.network.dtype, count))


def _policies(profile: Profile) -> PolicyChain:
    try:
        return parse_policies(profile.routing.policies, lossless=profile.lossless)
    except RoutingError as error:
        raise ProfileError(f"routing.policies: {error}") from error


def _backend(profile: Profile, device: torch.device) -> Backend:
    try:
        return choose_backend(profile.kernels.backend, device, experts_forward)
    except BackendError as error:
        raise ProfileError(f"kernels.backend: {error}; or set it to auto") from error


def _check_backend(backend: Backend, layers: Sequence[LayerExperts]) -> None:
    try:
        backend.check([held_experts(layer) for layer in layers])
    except BackendError as error:
        raise ProfileError(f"kernels.backend: {error}") from error


def eviction_notices(offloaded: Offloaded | None, profile: Profile) -> list[str]:
    """That another eviction policy runs than the profile asks for."""
    wanted = profile.offload.policy
    if offloaded is None or offloaded.cache.policy.name == wanted:
        return []
    return [
        f"offload.policy: {wanted} needs the compiled kernels, which did not build here; the cache "
        f"evicts by {offloaded.cache.policy.name} (moe doctor says what is missing)"
    ]


def prefix_notices(backbone: Backbone, profile: Profile, ranks: int) -> list[str]:
    """Why ``memory.prefix_dir`` changes nothing; empty if it does, or is not asked for."""
    if profile.memory.prefix_dir is None:
        return []
    if ranks > 1:
        why = "several ranks share the model"
    elif not backbone.can_cut or profile.memory.prefix_tokens == 0:
        why = "there is no prefix cache"
    elif not backbone.block_tokens:
        why = "keys and values are not in blocks (keys_and_values in the status says why)"
    elif backbone.counts_blocks:
        why = "keys and values on a GPU are not saved"
    elif backbone.recurrent:
        why = "the model has recurrent states, which are not saved"
    elif backbone.keeps_hidden:
        why = "drafts read hidden states, which are not saved (speculation.mode)"
    else:
        return []
    return [f"memory.prefix_dir changes nothing: {why}"]


def low_bit_notices(offloaded: Offloaded | None, profile: Profile) -> list[str]:
    """Why ``offload.late: prefix`` changes nothing; empty if it does, or is not asked for."""
    bits = profile.offload.late_bits
    if profile.offload.late != "prefix" or (offloaded is not None and offloaded.cache.prefixed):
        return []
    if offloaded is None:
        return ["offload.late: prefix changes nothing: all experts are in memory"]
    return [
        f"offload.late: prefix changes nothing: no expert has more than {bits} bits "
        "(offload.late_bits)"
    ]


def load_notices(packing: Packing, fused: Fused, codec: TextCodec, report: LoadReport) -> list[str]:
    """What fell back or was ignored, and why: one sentence each."""
    made = []
    if not packing.enabled:
        what = "prompt" if packing is _BLOCKS.packing else "sequence"
        made.append(
            f"each {what} runs in a pass of its own, and prompts are neither cut nor kept for "
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
    if codec.tokenizer is None:
        made.append(f"prompts can only be token ids: {codec.no_tokenizer_reason}")
    for names, what in (
        (report.ignored, "in the checkpoint are not used by this architecture"),
        (
            report.computed,
            "are not in the checkpoint and were filled by the architecture's own rule",
        ),
    ):
        if names:
            made.append(f"{len(names)} tensors {what} (the first: {names[0]})")
    return made
