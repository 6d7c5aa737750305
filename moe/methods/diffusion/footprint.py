"""Measures on the meta device what a model that writes canvases takes in memory."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from moe.cache_dir.proofs import current_proofs, outline
from moe.errors import UnsupportedModelError
from moe.kv.layout import KVFormat
from moe.memory.footprint import SHORT_PROMPT, Footprint, StorageCounter, stand_in_for_experts
from moe.methods.diffusion.cache_view import canvas_windows
from moe.methods.diffusion.denoise import Denoiser, canvases_of_a_pass
from moe.network.own_cache import CACHE_ARGUMENT
from moe.settings import Profile


def measure(
    network: PreTrainedModel, longest: int, form: KVFormat | None, profile: Profile
) -> Footprint:
    """Measure a model; see `moe.memory.planning.MEASURE`.

    Raises:
        UnsupportedModelError: a pass of the model cannot be planned.
    """
    shapes = {name: outline(own) for name, own in network.named_parameters()}
    subject = [type(network).__name__, shapes, longest, outline(form)]
    found = current_proofs().recall(
        "canvases", subject, Footprint, partial(_measured, network, longest, form)
    )
    if profile.methods.diffusion.refresh == "all":
        return found
    # Rows that a pass leaves out keep their keys, values and inputs.
    length, hidden = network.config.canvas_length, network.config.get_text_config().hidden_size
    row = found.kv_plain_bytes + hidden * network.dtype.itemsize
    return replace(
        found, between_steps={name: own + length * row for name, own in found.between_steps.items()}
    )


def _measured(network: PreTrainedModel, longest: int, form: KVFormat | None) -> Footprint:
    """The footprint with each prompt in a pass of its own, and canvases together.

    The sampler copies a canvas' logits several times: scaled, as probabilities, for entropies.
    A sequence keeps them until its next pass, or only soft embeddings (`denoise`).
    """
    network = copy.deepcopy(network)
    stand_in_for_experts(network)
    length = network.config.canvas_length
    logits = length * network.get_output_embeddings().weight.shape[0] * 4
    hidden = network.config.get_text_config(decoder=True).hidden_size
    kept = logits if Denoiser.why_not(network) else length * hidden * network.dtype.itemsize
    cache: Any
    try:
        long, cache = _probe(network, longest)
        together, _ = _probe(network, SHORT_PROMPT, canvases_of_a_pass(logits))
    except Exception as error:  # the architecture cannot run in this way
        raise UnsupportedModelError(
            f"{type(network).__name__} writes canvases, and a pass of it cannot be planned: "
            f"{type(error).__name__}: {error}"
        ) from error
    size = network.dtype.itemsize
    shapes = [(x.keys.shape[1], x.keys.shape[3], x.values.shape[3]) for x in cache.layers]
    plain = sum(heads * (keys + values) * size for heads, keys, values in shapes)
    how = "measured on the meta device, each prompt in a pass of its own, canvases together"
    peak = max(long, together) + 4 * logits
    footprint = Footprint(plain, plain, 0, peak, how, between_steps={"canvases": kept})
    if form is None:
        return footprint
    coded = {layer: form.token_bytes(*shape) for layer, shape in enumerate(shapes)}
    windows = canvas_windows(network.config, coded).token_bytes
    return replace(footprint, kv_bytes_per_token=sum(coded.values()), windows=windows)


def _probe(
    network: PreTrainedModel, num_tokens: int, sequences: int = 1
) -> tuple[int, DynamicCache]:
    """Read prompts of this length, and refine a canvas of each once; the most bytes alive, and the
    cache."""
    size, vocabulary = network.config.canvas_length, network.get_output_embeddings().weight.shape[0]
    network.set_attn_implementation("sdpa")
    ids = torch.zeros(sequences, num_tokens, dtype=torch.int64, device="meta")
    cache = DynamicCache(config=network.config.get_text_config(decoder=True))
    with torch.inference_mode(), StorageCounter() as counter:
        network(
            **{CACHE_ARGUMENT: cache},
            input_ids=ids,
            decoder_input_ids=torch.zeros(sequences, size, dtype=torch.int64, device="meta"),
            self_conditioning_logits=torch.zeros(sequences, size, vocabulary, device="meta"),
        )
    return counter.peak, cache
