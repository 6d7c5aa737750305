"""An input embedding that stays as small as its checkpoint; its rows get the backbone's dtype.

On a CPU the backbone computes in float32. The embedding table is read one row a token, so keeping
it in half precision costs no time; at a few bits a weight, it is among the larger tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from experts.embedding import QuantizedEmbedding

_HALF = (torch.bfloat16, torch.float16)


class StoredEmbedding(nn.Embedding):
    """`torch.nn.Embedding` on meta whose rows come out in `given`, whatever the table's dtype.

    Args:
        plain: the embedding that it replaces; `given` is its dtype.
    """

    def __init__(self, plain: nn.Embedding) -> None:
        super().__init__(
            plain.num_embeddings,
            plain.embedding_dim,
            plain.padding_idx,
            device="meta",
            dtype=plain.weight.dtype,
        )
        self.given = plain.weight.dtype
        self._is_hf_initialized = True  # transformers asks every module

    def give(self, dtype: torch.dtype) -> None:
        """Return rows of this dtype from now on."""
        self.given = dtype

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).to(self.given)


def keep_embedding(network: PreTrainedModel) -> str | None:
    """Let the input embedding of a network on meta be kept in half precision.

    Returns:
        The parameter's name; None if the table is no plain embedding, or another layer multiplies
        by it.
    """
    embedding = network.get_input_embeddings()
    name = next(n for n, module in network.named_modules() if module is embedding)
    tied = network.all_tied_weights_keys
    if type(embedding) is not nn.Embedding or f"{name}.weight" in {*tied, *tied.values()}:
        return None
    network.set_submodule(name, StoredEmbedding(embedding))
    return f"{name}.weight"


def backbone_dtype(network: PreTrainedModel) -> torch.dtype:
    """The dtype a network computes in; transformers' `dtype` is that of its first parameter."""
    embedding = network.get_input_embeddings()
    if isinstance(embedding, StoredEmbedding | QuantizedEmbedding):
        return embedding.given
    return network.dtype


def is_half(dtype: torch.dtype) -> bool:
    return dtype in _HALF
