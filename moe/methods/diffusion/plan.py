"""Estimates what steps over canvases read, for `moe plan`."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from moe.commands.plan.command import flops_a_token
from moe.commands.plan.decode_speed import DecodeSizes
from moe.methods.diffusion.kind import schedule_of
from moe.settings import Profile


def canvas_sizes(network: PreTrainedModel, sizes: DecodeSizes, profile: Profile) -> DecodeSizes:
    """The sizes of a step over canvases, and as many steps as the schedule has."""
    length = network.config.canvas_length
    most = profile.methods.diffusion.max_steps or schedule_of(network)["max_denoising_steps"] or 1
    steps = 1 + most
    # A canvas also goes through the head, and what that predicts through the embedding.
    ends = 4.0 * network.get_output_embeddings().weight.numel()
    return replace(
        sizes,
        rows=length,
        steps=steps,
        flops=flops_a_token(network, sizes) + ends,
        about=f"Canvases: each step refines {length} tokens of every sequence. A canvas is counted "
        f"with {steps} passes: as many as the schedule has at most, and one that reads it. The "
        "sampler's time is not counted.",
    )
