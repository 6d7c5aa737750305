"""Multi-token prediction: the layer that a checkpoint brings to draft the tokens after the next.

Such a layer reads the embedding of a token and the model's final hidden state of the token before
it, joined by a projection, and gives the hidden state from which the model's own head predicts the
token after. Applied to its own hidden states, it goes on (DeepSeek-V3, arXiv 2412.19437).

Here it is a network of the model's own class with one decoder layer, whose embedding is an
`MtpInput` and whose head is the model's: so packing, compiled steps, quantisation and the expert
cache serve it as they serve the model. `build_head` makes it on meta, as a submodule ``mtp`` that
is loaded with the model; `take_head` takes it out again, ready to run.
Legend: T tokens, H hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from experts.manifest import MTP_MODULE
from moe.network.backbone import Backbone
from moe.network.moe_layer import MoELayers
from moe.network.packed_pass import Work
from moe.sampling.batch import Proposal


class MtpInput(nn.Module):
    """The input of the layer: ``project(norm(embedding), norm(hidden state of the token before))``.

    It stands where a network has its embedding, and is called with token ids only: `reading` gives
    the hidden states. Probes, which have none, get the embeddings in their place.

    Args:
        norm: of the network's class, to be copied.
        width: H.
        hidden_first: the projection has the columns of the hidden state first.
    """

    def __init__(self, norm: nn.Module, width: int, *, hidden_first: bool) -> None:
        super().__init__()
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        dtype = next(norm.parameters()).dtype
        linear = nn.Linear(2 * width, width, bias=False, device="meta", dtype=dtype)
        # The name says the order of its columns, also in stores.
        self.add_module("he_proj" if hidden_first else "eh_proj", linear)
        self.embedding_dim, self.num_embeddings = width, 0
        self._embedding: tuple[nn.Module, ...] = ()  # the model's, so not registered
        self._hidden_TH: Tensor | None = None

    def share(self, embedding: nn.Module) -> None:
        """Use the model's embedding."""
        self._embedding = (embedding,)
        self.num_embeddings = embedding.num_embeddings  # type: ignore[assignment]

    @property
    def embedding(self) -> nn.Module:
        """The model's own."""
        (embedding,) = self._embedding
        return embedding

    @property
    def projection(self) -> nn.Module:
        """Reads both inputs, joined."""
        return next(self._modules[name] for name in ("eh_proj", "he_proj") if name in self._modules)  # type: ignore[return-value]

    @property
    def hidden_first(self) -> bool:
        """The projection has the columns of the hidden state first."""
        return "he_proj" in self._modules

    @property
    def hidden_TH(self) -> Tensor | None:
        """The hidden states that `reading` was given."""
        return self._hidden_TH

    @contextmanager
    def reading(self, hidden_TH: Tensor) -> Iterator[None]:
        """These are the hidden states of the tokens before those of the next pass."""
        self._hidden_TH = hidden_TH
        try:
            yield
        finally:
            self._hidden_TH = None

    def forward(self, input_ids: Tensor) -> Tensor:
        """``(..., T, H)`` for ``(..., T)`` ids."""
        embedded = self.embedding(input_ids)
        hidden = self._hidden_TH
        hidden = embedded if hidden is None else hidden.to(embedded.dtype).view_as(embedded)
        parts = [self.enorm(embedded), self.hnorm(hidden)]
        joined: Tensor = self.projection(torch.cat(parts[::-1] if self.hidden_first else parts, -1))
        return joined


def place_of(model: PreTrainedModel, module: nn.Module | None) -> str:
    """The name of a module in a model."""
    return next(name for name, each in model.named_modules() if each is module)


def width_of(network: PreTrainedModel) -> int:
    """H of a network."""
    width = network.get_input_embeddings().embedding_dim
    assert isinstance(width, int)
    return width


def final_norm(model: PreTrainedModel) -> tuple[str, nn.Module]:
    """The norm behind the last decoder layer, and its name.

    Raises:
        ValueError: the decoder does not have exactly one norm beside its layers.
    """
    decoder = model.get_decoder()
    found = [
        (name, child)
        for name, child in decoder.named_children()
        if [p.ndim for p in child.parameters()] == [1] and "norm" in name
    ]
    if len(found) != 1:
        raise ValueError(f"{type(decoder).__name__} has {len(found)} norms behind its layers")
    before = place_of(model, decoder)
    return f"{before}.{found[0][0]}" if before else found[0][0], found[0][1]


def prepare_head(head: PreTrainedModel, *, hidden_first: bool) -> PreTrainedModel:
    """Make a network of one layer a head: it joins its inputs, and has no table of its own."""
    width = width_of(head)
    _, norm = final_norm(head)
    output = place_of(head, head.get_output_embeddings())
    head.set_input_embeddings(MtpInput(norm, width, hidden_first=hidden_first))
    head.set_submodule(output, nn.Identity())
    head.all_tied_weights_keys.clear()
    return head


def take_head(network: PreTrainedModel) -> PreTrainedModel | None:
    """Take the head out of a network, and share the network's embedding and head with it."""
    head = network._modules.pop(MTP_MODULE, None)
    if head is None:
        return None
    assert isinstance(head, PreTrainedModel)
    joined = head.get_input_embeddings()
    assert isinstance(joined, MtpInput)
    joined.share(network.get_input_embeddings())
    # The head's own place for it, which `prepare_head` has emptied.
    name = place_of(network, network.get_output_embeddings())
    head.set_submodule(name, network.get_output_embeddings())
    return head


class ChainStart(NamedTuple):
    """The beginning of a sequence's draft.

    Attributes:
        work: what it reads first; its cache grows by that.
        hidden_TH: the hidden states of the tokens before.
        depth: most tokens, at least 1.
        temperature: above 0: at which tokens are drawn, and their confidence stated.
        draw: gives numbers in [0, 1) to draw tokens by; None: the likeliest are drafted.
    """

    work: Work
    hidden_TH: Tensor
    depth: int
    temperature: float
    draw: Callable[[], float] | None


class DraftChain(Protocol):
    """Drafts several tokens by the layer in one compiled call (`moe.decode.chain`)."""

    @property
    def ready(self) -> bool:
        """It can draft now: all experts that it may need are in memory."""

    def draft(
        self, starts: Sequence[ChainStart], accepted: Sequence[float], price: float
    ) -> ChainedDrafts:
        """Draft tokens of sequences.

        Args:
            accepted: how often a drafted token at each position is right if those before it are;
                one more than the greatest depth.
            price: tokens that a further one has to bring.
        """


class ChainedDrafts(NamedTuple):
    """Tokens of each sequence, the probability of each, and what it was drawn from; and the rows of
    each pass."""

    tokens: list[list[int]]
    confidence: list[list[float]]
    proposals: list[list[Proposal | None]]
    rows: list[int]


@dataclass(frozen=True)
class MtpHead:
    """The layer, loaded and probed.

    Attributes:
        backbone: runs it.
        experts: its own, none if it is dense.
        chain: drafts by it in one call; None: it is not compiled.
    """

    backbone: Backbone
    experts: MoELayers
    chain: DraftChain | None = None

    @property
    def input(self) -> MtpInput:
        joined = self.backbone.model.get_input_embeddings()
        assert isinstance(joined, MtpInput)
        return joined
