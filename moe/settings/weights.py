"""What the weights are held as, and what multiplies them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from moe.settings.base import Settings

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class ModelSettings(Settings):
    """How the weights are held."""

    dtype: Dtype = "auto"
    """Number format of the trunk (attention, norms, embeddings) and of the activations.
    auto: float32 on the CPU, the checkpoint's own on CUDA."""

    expert_dtype: Dtype = "auto"
    """Number format in which expert weights are kept. auto: the checkpoint's own."""

    context_length: int | None = Field(default=None, ge=1)
    """Most tokens a sequence may have, prompt and new ones together.
    null: the model's own max_position_embeddings."""

    expert_bits: Literal[2, 3, 4, 8, 16] | None = None
    """Bits of expert weights: 8, or the first 4, 3 or 2 of them. 16: whole, in expert_dtype.
    null: as the files have them."""

    trunk_bits: Literal[4, 8, 16] | None = None
    """Bits of the other linear layers: attention, shared experts, dense layers. Routers, norms and
    embeddings stay whole. 16: whole. null: as the files have them."""

    head_bits: Literal[4, 8, 16] | None = None
    """Bits of the output head, in the same way."""

    group_size: Literal[32, 64] = 64
    """Weights that share a scale when they are quantized while loading. A store has its own."""

    check_finite: bool = False
    """Refuse weights that hold NaN or infinity. Costs one more pass over them while loading."""

    verify: bool = False
    """Compare a store's files with their checksums. Costs one more pass over them."""


class KernelSettings(Settings):
    """What multiplies the experts."""

    backend: Literal["auto", "triton", "megablocks", "reference"] = "auto"
    """auto: the compiled kernel on the CPU, Triton on CUDA, plain torch where neither can be had.
    triton, megablocks: that or an error (CUDA; megablocks wants bfloat16 experts and the package).
    reference: plain torch, slow, to compare with."""
