"""An embedding table that stays as small as it came; its rows become the trunk's dtype in use.

On a CPU the trunk is float32. A table is read a row a token, so half precision costs nothing there,
and at a few bits a weight it is among the larger things in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_HALF = (torch.bfloat16, torch.float16)


class StoredEmbedding(nn.Embedding):
    """`torch.nn.Embedding` whose rows come out in `given`, whatever the table is kept in."""

    given: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).to(self.given)


def keep_embedding(network: PreTrainedModel) -> str | None:
    """Let the input embedding of a network on meta be kept in half precision.

    Returns:
        The parameter's name; None where the table is something else than a plain embedding, or
        another layer multiplies by it.
    """
    embedding = network.get_input_embeddings()
    name = next(n for n, module in network.named_modules() if module is embedding)
    tied = network.all_tied_weights_keys
    if type(embedding) is not nn.Embedding or f"{name}.weight" in {*tied, *tied.values()}:
        return None
    kept = StoredEmbedding(
        embedding.num_embeddings,
        embedding.embedding_dim,
        embedding.padding_idx,
        device="meta",
        dtype=embedding.weight.dtype,
    )
    kept.given = embedding.weight.dtype
    kept._is_hf_initialized = True  # type: ignore[assignment]  # transformers asks every module
    network.set_submodule(name, kept)
    return f"{name}.weight"


def trunk_dtype(network: PreTrainedModel) -> torch.dtype:
    """What a network computes in; transformers' `dtype` is that of its first parameter."""
    embedding = network.get_input_embeddings()
    return embedding.given if isinstance(embedding, StoredEmbedding) else network.dtype


def is_half(dtype: torch.dtype) -> bool:
    return dtype in _HALF
