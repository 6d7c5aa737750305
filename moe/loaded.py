"""`LoadedModel`: what loading leaves, with its counters and what `/v1/status` shows of it.

`moe.loader.load_model` makes it; `moe.model.MoE` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kernels import Backend
from kernels.cpu.kv import BLOCK
from moe.decode.enable import Fused
from moe.describe.probe import Packing
from moe.engine.request_order import MakeOrder
from moe.engine.writer import Writer
from moe.images.reader import ImageReader
from moe.loading.memory_plan import MemoryPlan
from moe.memory.kv_precision import KVPrecision
from moe.network.backbone import Backbone
from moe.network.moe_layer import MoELayers
from moe.network.mtp import MtpHead
from moe.sampling.constraint import Structures
from moe.speculate import Speculation
from moe.text.generation_config import ModelSampling
from moe.text.tokenizer import TextCodec
from offload.offloaded import Offloaded
from routing import LOADED_FOR


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
        writer: writes its sequences in place of the sampler; None: the model is autoregressive.
        make_order: makes the order of a queue of requests; None: they go by their queue keys.
        sampling: how the model itself wants its tokens sampled.
        prefix_key: names everything that the bits of keys and values depend on; empty: prefixes are
            not kept on disk.
        notices: what fell back or was turned off, one sentence each.
        proofs: when the ways that it goes were proven (`moe.cache_dir.proofs.Proofs.status`).
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
    writer: Writer | None = None
    make_order: MakeOrder | None = None
    sampling: ModelSampling = field(default_factory=ModelSampling)
    prefix_key: str = ""
    notices: list[str] = field(default_factory=list)
    proofs: str = "proven now"

    def stats(self) -> dict[str, Any]:
        """See `moe.model.MoE.stats`; of this rank."""
        experts = self.experts
        bytes_by, layers = experts.expert_bytes_read_by, experts.statistics.snapshot()
        speculator, images = self.speculation.speculator, self.codec.images
        return {
            "weight_bytes": self.weight_bytes,
            "expert_bytes": experts.expert_bytes,
            "expert_bytes_read": sum(bytes_by.values()),
            "expert_bytes_read_by": bytes_by,
            "expert_loads_by": {
                reader: sum(layer["expert_loads_by"][reader] for layer in layers)
                for reader in LOADED_FOR
            },
            "layers": layers,
            "offload": None if self.offloaded is None else self.offloaded.statistics(),
            "speculation": None if speculator is None else speculator.figures(),
            "images": images.towers.figures() if isinstance(images, ImageReader) else None,
        }

    def reset_stats(self) -> None:
        """Count from here on."""
        self.experts.statistics.reset()
        if self.offloaded is not None:
            self.offloaded.reset_statistics()
        if self.speculation.speculator is not None:
            self.speculation.speculator.report.reset()
        if isinstance(self.codec.images, ImageReader):
            self.codec.images.towers.reset()

    def status(self) -> dict[str, Any]:
        """See `moe.model.MoE.status`; of this rank."""
        return {
            "architecture": type(self.backbone.model).__name__,
            "device": str(self.backbone.device),
            "proofs": self.proofs,
            "packing": {"enabled": self.packing.enabled, "why": self.packing.reason},
            "writer": None if self.writer is None else self.writer.status(),
            "fused": {"enabled": self.fused.enabled, "why": self.fused.reason},
            "speculation": {
                "enabled": self.speculation.speculator is not None,
                "why": self.speculation.reason,
            },
            "keys_and_values": self._kv_status(),
            "expert_kernel": {"name": self.backend.name, "reason": self.backend.reason},
            "offload": None if self.offloaded is None else self.offloaded.status(),
            "images": _support(self.codec.images, "equal to transformers' own forward"),
            "tools": self.codec.tools.as_dict(),
            "reasoning": self.codec.reasoning.as_dict(),
            "response_template": _support(
                self.codec.response_template, "the tokenizer carries one"
            ),
            "notices": list(self.notices),
        }

    def _kv_status(self) -> dict[str, Any]:
        return {
            "bits": self.kv.bits,
            "block_tokens": BLOCK if self.kv.in_blocks else None,
            "bytes_per_token": self.memory_plan.kv_bytes_per_token,
            "bytes_in_windows": dict(self.memory_plan.kv_windows),
            "policy": None if self.kv.policy is None else str(self.kv.policy),
            "why": self.kv.why,
        }


def _support(found: object, why: str) -> dict[str, Any]:
    """Status of a part that is there, for the reason ``why``, or of a text why it is not."""
    absent = isinstance(found, str)
    return {"enabled": not absent, "why": found if absent else why}
