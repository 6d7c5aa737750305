"""From a name and a profile to a model that is ready to run: `load_model`.

It has two halves. `_read` plans the memory and reads the files. `_prepare` puts the experts behind
the MoE seam, finds out by probes which faster ways the model can go, and only then lets policies
change its results. What comes out is a `moe.loaded.LoadedModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kernels import Backend, BackendError, choose_backend, experts_forward
from kernels.cpu import choose_kernel
from kernels.cpu.kv import BLOCK
from kernels.reference import AnyExperts
from moe.cache_dir.proofs import current_proofs, proofs_of
from moe.calibration.predictors import make_prefetcher
from moe.decode.chain import make_chain
from moe.decode.enable import FUSED_OFF, Fused, enable_fused
from moe.decode.proof import prove_policy
from moe.describe.attention import check_views, seen_windows
from moe.describe.description import NotDescribed
from moe.describe.probe import Packing, enable_packing, find_visits
from moe.describe.routers import enable_policies, find_selectors
from moe.describe.row_wise import linears_are_faster, make_linears_row_wise, make_row_wise
from moe.engine.request_order import ORDER, MakeOrder
from moe.engine.writer import REFUSE, WRITER, Writer
from moe.errors import CheckpointError, ProfileError
from moe.extras import install_line, is_installed
from moe.hooks import Hook, Registry
from moe.images.reader import ImageReader, conversation, enable_images, load_processor
from moe.kv.blocks import BlockPool
from moe.kv.host_blocks import HostBlocks
from moe.kv.ledger import Windows
from moe.kv.prefix_store import prepare_directory
from moe.loaded import LoadedModel
from moe.loading.checkpoint import model_files
from moe.loading.hub import resolve_model
from moe.loading.load import LoadReport
from moe.loading.memory_plan import MemoryPlan
from moe.loading.prefix_key import prefix_key
from moe.loading.progress import LoadProgress, Report, reporting
from moe.loading.quantized import decoding_notices
from moe.loading.sources import missing_experts, total_bytes
from moe.loading.takeover import arrange_linears, mend_linears, precision_notices
from moe.machine import keep_freed_memory
from moe.memory.kv_precision import KVPrecision
from moe.memory.planning import GENERATION, PlannedModel, check_fit, planning
from moe.network.backbone import Backbone
from moe.network.moe_layer import MoELayers
from moe.network.mtp import MtpHead, take_head
from moe.network.seam import attach, experts_modules
from moe.notices import card_notices, notices_of, tensor_notices, why_no_prefix_store
from moe.sampling.constraint import Structures
from moe.settings import Profile
from moe.settings.device import use_device
from moe.speculate import Speculation, enable_speculation
from moe.speculate.draft import DRAFT_RULES
from moe.text.generation_config import ModelSampling
from moe.text.tokenizer import TextCodec
from offload.layer import LayerExperts, held_experts
from offload.offloaded import Offloaded
from offload.prefetch import Prefetcher
from routing import PolicyChain, RoutingError, parse_policies
from routing.policies import ParsePolicy

ALTER = Hook[Callable[[Profile, Backbone, MoELayers], None]]("alter")
"""Lets a method change a model that is ready, behind all probes; raises `ProfileError` where it
cannot."""
BACKENDS = Registry[Callable[[torch.device], Backend]]("kernels.backend")
"""Kernels that methods bring; raises `BackendError` where they cannot run on the device."""
ROUTING_POLICIES = Registry[ParsePolicy]("routing.policies")
"""Policies that methods add to ``top_k`` and ``top_p``."""


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
        CheckpointError, UnsupportedModelError: see `moe.loading` and `moe.network.seam`; or the
            model was replaced meanwhile.
        DoesNotFitError: the memory plan says so; nothing has been read.
        ProfileError: the device or the kernels' backend is absent, or a routing policy is not valid
            for this profile.
    """
    with reporting(progress) as report:
        report(LoadProgress("planning"))
        policies = routing_policies(profile)
        device = use_device(profile)
        path = resolve_model(path_or_hub_id, report)
        if profile.memory.prefix_dir is not None:
            prepare_directory(Path(profile.memory.prefix_dir).expanduser())
        backend = expert_backend(profile, device)  # compiles kernels now, not in the first request
        before = model_files(path)
        with proofs_of(path, profile, ranks, device) as proofs:
            read = _read(path, profile, device, ranks, report, on_plan)
            nbytes = read.planned.weights.bytes_to_read
            report(LoadProgress("preparing", nbytes, nbytes))
            loaded = _prepare(read, profile, policies, backend, ranks)
            # Else weights of one model meet the tokenizer, or the saved prefixes, of another
            if changed := sorted({name for name, _ in model_files(path).items() ^ before.items()}):
                raise CheckpointError(
                    f"{path} was changed while it was loaded ({', '.join(changed[:3])}); "
                    "load it again"
                )
        return replace(loaded, proofs=proofs.status)


@dataclass(frozen=True)
class _Read:
    """A model whose files have been read, and of which nothing has run yet.

    Attributes:
        path: its directory.
        device: where it runs.
        planned: what was planned; its network has its weights.
        experts: of all MoE layers, those of a multi-token-prediction layer last.
        codec, sampling: from its small files.
        vision: what reads images, or why nothing does.
        differences: between the checkpoint and the architecture.
    """

    path: Path
    device: torch.device
    planned: PlannedModel
    experts: list[AnyExperts] | Offloaded
    codec: TextCodec
    sampling: ModelSampling
    vision: PreTrainedModel | str
    differences: LoadReport

    @property
    def network(self) -> PreTrainedModel:
        return self.planned.network

    @property
    def offloaded(self) -> Offloaded | None:
        return self.experts if isinstance(self.experts, Offloaded) else None

    @property
    def layers(self) -> Sequence[LayerExperts]:
        """The MoE layers, without those that `take_mtp` took."""
        return self.experts.layers if isinstance(self.experts, Offloaded) else self.experts

    @property
    def nbytes(self) -> int:
        """Bytes of the network and of its experts, wherever they are."""
        return total_bytes(self.network, self.layers)

    def take_mtp(self) -> tuple[PreTrainedModel | None, Sequence[LayerExperts], int]:
        """Take the multi-token-prediction layer out, if there is one: its network, its experts, and
        the bytes that only it has."""
        before, head = self.nbytes, take_head(self.network)
        count = len(experts_modules(self.network))
        behind: Sequence[LayerExperts]
        if isinstance(self.experts, Offloaded):
            behind = self.experts.take_behind(count)
        else:
            behind = self.experts[count:]
            del self.experts[count:]
        return head, behind, before - self.nbytes


def _read(
    path: Path,
    profile: Profile,
    device: torch.device,
    ranks: int,
    report: Report,
    on_plan: Callable[[MemoryPlan], object],
) -> _Read:
    """Plan a model, refuse it if it does not fit, and read its files."""
    with planning(path, profile, device, report, ranks) as planned:
        network, config = planned.network, planned.config
        sampling = ModelSampling({"temperature": 1.0})
        if (refuse := REFUSE.of(network)) is not None:
            refuse(network, profile)
        _check_policy(profile, planned.kv)
        on_plan(planned.memory)
        check_fit(planned.memory, profile, planned.why_resident)
        # Small files first: a fault in them must not show up minutes later, after the weights.
        codec = TextCodec.from_directory(path, config)
        if GENERATION.of(network) is None:
            sampling = ModelSampling.from_directory(path)
        experts, differences = planned.source.load(planned.weights, device, report, planned.room)
        towers = planned.towers
        vision = towers if isinstance(towers, str) else towers.load(device, report)
    if profile.memory.keep_freed and device.type == "cpu" and not isinstance(experts, Offloaded):
        keep_freed_memory()
    return _Read(path, device, planned, experts, codec, sampling, vision, differences)


def _prepare(
    read: _Read, profile: Profile, policies: PolicyChain, backend: Backend, ranks: int
) -> LoadedModel:
    """Join the network and its experts, find the fastest proven ways, then alter what the profile
    asks to be altered."""
    planned, offloaded = read.planned, read.offloaded
    head, head_layers, head_bytes = read.take_mtp()
    _check_backend(backend, read.layers)
    arrange_linears(read.network, read.device)
    forecasts = _forecasts(offloaded, read.layers, read.path, planned.config, profile)
    experts = MoELayers(read.layers, backend.forward, forecasts.prefetcher)
    attach(read.network, experts.layers, experts.run)
    backbone = Backbone(read.network)
    writer = _writer(backbone, profile)
    if writer is None:
        make_row_wise(backbone)
    mtp = _mtp(head, head_layers, backend, planned, profile)
    if writer is None:
        backbone.blocks = _blocks_on_device(planned, read.device)
        found = _probe(backbone, experts, profile, mtp)
    else:
        found = _Found.without(writer.why)
    images = _images(backbone, read.vision, read.codec, read.path, planned.config, profile)
    if ranks > 1 and writer is None:
        experts.set_visits(find_visits(backbone, len(experts.layers)))
    _alter(backbone, experts, offloaded, policies, profile, writer)
    kv = _keep_in_blocks(backbone, planned, found.fused, profile, writer)
    _check_policy(profile, kv)
    codec, plan = read.codec.with_images(images), planned.memory
    loaded = LoadedModel(
        backbone=backbone,
        experts=experts,
        backend=backend,
        codec=codec,
        structures=Structures(codec, planned.logits_size),
        packing=found.packing,
        fused=found.fused,
        speculation=found.speculation,
        kv=kv,
        memory_plan=plan if kv.in_blocks else plan.in_buffers(planned.footprint.kv_plain_bytes),
        weight_bytes=read.nbytes + head_bytes,
        logits_size=planned.logits_size,
        context_length=planned.context_length,
        offloaded=offloaded,
        mtp=mtp,
        writer=writer,
        make_order=forecasts.make_order,
        sampling=read.sampling,
    )
    stored = profile.memory.prefix_dir and not why_no_prefix_store(loaded, profile, ranks)
    return replace(
        loaded,
        prefix_key=prefix_key(read.path, profile, read.device, kv.bits) if stored else "",
        notices=[
            *card_notices(read.path),
            *notices_of(loaded, profile, ranks),
            *tensor_notices(read.differences),
            *decoding_notices(planned.config, profile.model.expert_bits, planned.weights.kept),
            *precision_notices(read.network, read.layers, found.mended),
            *filter(None, forecasts.notices),
        ],
    )


@dataclass(frozen=True)
class _Forecasts:
    """The predictors of the need for experts.

    Attributes:
        prefetcher: reads experts on disk before they are needed.
        make_order: makes the order of waiting requests.
        notices: why something is absent although the profile asks for it; may have empty ones.
    """

    prefetcher: Prefetcher | None
    make_order: MakeOrder | None
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
    counts = [layer.num_experts for layer in layers]
    orders = [make(profile, path, config, counts) for make in ORDER.filled(profile)]
    make_order, no_order = next(iter(orders), (None, ""))
    return _Forecasts(prefetcher, make_order, [no_prefetcher, no_order])


@dataclass(frozen=True)
class _Found:
    """Faster ways that a model can go; ``mended``: see `moe.loading.takeover.mend_linears`."""

    packing: Packing
    mended: list[str]
    fused: Fused
    speculation: Speculation

    @classmethod
    def without(cls, why: str) -> _Found:
        """None of them, for this reason."""
        return cls(Packing(False, why), [], Fused(False, why), Speculation(None, why))


_SPARE_BLOCKS = 8  # for copies of a block that the scheduler learns of a step later


def _writer(backbone: Backbone, profile: Profile) -> Writer | None:
    """The writer that a method brings for this model; None: it is autoregressive."""
    make = WRITER.of(backbone.model)
    if make is None:
        return None
    writer = make(backbone, profile)
    backbone.read_prompts_by(writer.reading)
    return writer


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
    step = None if fused.forward is None else fused.forward.step
    rules = [make(profile) for make in DRAFT_RULES.filled(profile)]
    speculation = enable_speculation(
        profile.speculation, backbone, experts, experts.forward, mtp, step, rules
    )
    return _Found(packing, mended, fused, speculation)


def _images(
    backbone: Backbone,
    towers: PreTrainedModel | str,
    codec: TextCodec,
    path: Path,
    config: PreTrainedConfig,
    profile: Profile,
) -> ImageReader | str:
    """Make the reader of images, or say why there is none."""
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


def _alter(
    backbone: Backbone,
    experts: MoELayers,
    offloaded: Offloaded | None,
    policies: PolicyChain,
    profile: Profile,
    writer: Writer | None,
) -> None:
    """Enable what changes the model's results, as the profile asks.

    Probes compare ways to compute the unaltered model, so they cannot run after this.
    """
    find = find_selectors if writer is None else writer.selectors
    enable_policies(policies, backbone, experts, find)
    for alter in ALTER.filled(profile):
        alter(profile, backbone, experts)
    missing = missing_experts(profile)
    if offloaded is not None and missing is not None:
        offloaded.serve_prefixes(missing)


def _keep_in_blocks(
    backbone: Backbone,
    planned: PlannedModel,
    fused: Fused,
    profile: Profile,
    writer: Writer | None,
) -> KVPrecision:
    """Keep keys and values as planned from now on if a compiled decode step reads them, or a
    writer, or, on a GPU, as probes have read them already. Raises `ProfileError` for a
    policy that has no effect."""
    kv = planned.kv
    if not kv.in_blocks or backbone.blocks is not None:
        return kv
    kernel, _ = choose_kernel()
    if kernel is not None and writer is not None:
        backbone.blocks = BlockPool(HostBlocks(kernel.kv, kv.form), writer.windows(kv.form))
        return kv
    if kernel is None or not fused.enabled:
        return kv.without_blocks(f"decode steps are not compiled: {fused.reason}")
    windows = seen_windows(backbone, kv.form) if planned.footprint.windows else Windows()
    if kv.policy is not None and windows.of_layer.keys() & dict(kv.policy.heads).keys():
        why = "the calibration takes layers with windows for such that see all: make it again"
        _check_policy(profile, kv, why)
    memory = HostBlocks(kernel.kv, kv.form)
    own = backbone.own_cache.policy
    pool = BlockPool(memory, windows, own or kv.policy, planned.footprint.shapes)
    backbone.blocks = pool
    if kv.policy is not None:
        try:
            if own is not None:
                raise NotDescribed(
                    f"the prompt and, by the model's own window, {own.tokens} tokens"
                )
            check_views(backbone)
            subject = [str(kv.policy), type(backbone.model).__name__]
            proof = partial(prove_policy, backbone, pool)
            reason = current_proofs().recall("policy", subject, str, proof, NotDescribed)
            return kv.with_policy(reason)
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
    from moe.kv.device_blocks import DeviceBlocks  # needs Triton

    count = -(-planned.memory.kv_tokens // BLOCK) + _SPARE_BLOCKS
    return BlockPool(DeviceBlocks(device, planned.network.dtype, count))


def routing_policies(profile: Profile) -> PolicyChain:
    """`routing.policies`, parsed.

    Raises:
        ProfileError: one is not valid, or is lossy and the profile is lossless.
    """
    try:
        return parse_policies(
            profile.routing.policies, lossless=profile.lossless, more=ROUTING_POLICIES
        )
    except RoutingError as error:
        raise ProfileError(f"routing.policies: {error}") from error


def expert_backend(profile: Profile, device: torch.device) -> Backend:
    """Return the kernels that multiply the experts by `kernels.backend`; on a CPU they may be
    compiled now.

    Raises:
        ProfileError: it cannot run on the device.
    """
    try:
        if (make := BACKENDS.find(profile.kernels.backend)) is not None:
            return make(device)
        return choose_backend(profile.kernels.backend, device, experts_forward)
    except BackendError as error:
        raise ProfileError(f"kernels.backend: {error}; or set it to auto") from error


def _check_backend(backend: Backend, layers: Sequence[LayerExperts]) -> None:
    try:
        backend.check([held_experts(layer) for layer in layers])
    except BackendError as error:
        raise ProfileError(f"kernels.backend: {error}") from error
