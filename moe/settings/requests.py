"""How requests are answered, and within which limits."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from moe.settings.base import DAY_S, Off, Settings


def _check_origin(text: str) -> str:
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#*\"']+", text):
        raise PydanticCustomError("origin", 'must be like "https://example.org", or "*" for all')
    return text


class RoutingSettings(Settings):
    """Which experts a token goes to."""

    policies: tuple[str, ...] = Field(default=(), strict=False)
    """Policies applied to every routing decision, in this order; each is NAME:ARGUMENTS, as in
    top_k:2 (des_seq, des_vote, odp, pesf, resident, top_k and top_p; `moe eval` says what each
    costs). Empty: the model's own routing."""


class GenerationSettings(Settings):
    """What a request gets when it does not say."""

    config: Annotated[Literal["auto", "off"], Off] = "auto"
    """auto: sampling that is null here is what the model's generation_config.json says. off: its
    file does not count."""

    max_new_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Most tokens to generate. null: until the context, or the memory for keys and values, is full.
    auto: that for chats, which a model ends by itself, and 128 for the continuation of a text."""

    temperature: float | None = Field(default=None, ge=0.0)
    """Divisor of the logits before sampling. 0: the most likely token always (greedy). null: what
    the model says, else 0."""

    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    """Sample among the most likely tokens whose probabilities add up to this. 1: all tokens. null:
    what the model says, else 1."""

    top_k: int | None = Field(default=None, ge=0)
    """Sample among this many most likely tokens. 0: all tokens. null: what the model says, else
    0."""

    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    """Sample among tokens at least so many times as likely as the likeliest. 0: all tokens. null:
    what the model says, else 0."""

    repetition_penalty: float | None = Field(default=None, gt=0.0)
    """Makes tokens of prompt and answer less likely to come again. 1: no. null: what the model
    says, else 1."""

    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Seed of the sampling. null: a new one each time."""


class EngineSettings(Settings):
    """How requests share the machine."""

    max_batch_size: int = Field(default=64, ge=1)
    """Most sequences decoded together."""

    priority_steps: int = Field(default=64, ge=0)
    """Steps of waiting that outweigh one level of priority. 0: first come, first served."""

    overlap_patience: int = Field(default=0, ge=0)
    """How often a waiting request may be overtaken by others that are expected to need the experts
    of those that run, where that saves experts. Needs a calibration. 0: never."""

    fused: Annotated[Literal["auto", "off"], Off] = "auto"
    """auto: decode steps run by compiled code, on a GPU from recordings, wherever a probe at load
    time shows that it equals transformers' own layers. off: transformers' layers always."""


class PrefillSettings(Settings):
    """How prompts are read beside running sequences."""

    mode: Literal["auto", "whole", "chunked", "layered"] = "auto"
    """whole: all of a prompt in one step. chunked: a token budget a step. layered: whole prompts,
    one group of layers a step, so that each expert is read once a prompt. auto: layered or
    chunked, whichever is predicted to read fewer experts."""

    wave_tokens: int = Field(default=8192, ge=1)
    """Most prompt tokens that are read together; longer prompts are cut (not by whole)."""

    chunk_tokens: int = Field(default=512, ge=1)
    """chunked: tokens of a step, prompts and running sequences together."""

    group_tokens: int = Field(default=512, ge=1)
    """layered: groups of layers are cut so that no step is longer than a chunk of so many tokens,
    about one group for each so many tokens of the wave."""


class ServerSettings(Settings):
    """Limits of ``moe serve``."""

    max_waiting: int = Field(default=256, ge=1)
    """Most requests without a first token; more are refused with status 429."""

    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1)
    """Most bytes of a request's body; more are refused with status 413."""

    read_timeout_s: float = Field(default=60.0, gt=0.0, le=DAY_S)
    """Seconds in which a request's headers, and after them its body, must have come."""

    send_timeout_s: float = Field(default=60.0, gt=0.0, le=DAY_S)
    """Seconds that a client may take none of its stream before the request is cancelled."""

    drain_timeout_s: float = Field(default=30.0, ge=0.0, le=DAY_S)
    """Seconds that requests get to finish after SIGTERM."""

    allowed_origins: tuple[Annotated[str, AfterValidator(_check_origin)], ...] = Field(
        default=(), strict=False
    )
    """Web pages of other origins (CORS) that may ask from a browser, such as https://example.org;
    "*": all. Empty: none."""
