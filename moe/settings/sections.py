"""What all sections have in common."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

Off = BeforeValidator(lambda value: "off" if value is False else value)
"""YAML reads a bare ``off`` as false."""

DAY_S = 86_400.0
"""The longest wait: more overflows what sockets, threads and torch count it in."""


class Settings(BaseModel):
    """A section: immutable, and it knows its keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @field_validator("*")
    @classmethod
    def _check_width(cls, value: Any) -> Any:
        """Counts are compared with what torch and the system count in 64 bits."""
        if type(value) is int and value >= 1 << 63:
            raise PydanticCustomError("width", "must be less than 9223372036854775808")
        return value


# ---- What is held in memory, and how the rest comes from disk.

_MOST_GIB = 1 << 20
"""More than any machine has, and few enough that bytes fit 64 bits."""


class MemorySettings(Settings):
    """What may be held in memory."""

    kv_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of all sequences whose keys and values are in memory at once.
    null: as many as kv_gib holds, or else as fit beside the weights."""

    kv_gib: float | None = Field(default=None, gt=0.0, le=_MOST_GIB)
    """The same limit in GiB; give one of the two."""

    reserve_gib: float | None = Field(default=None, ge=0.0, le=_MOST_GIB)
    """GiB that the memory plan leaves free.
    null: a twentieth of what is available, at most 1 GiB."""

    device_gib: float | None = Field(default=None, gt=0.0, le=_MOST_GIB)
    """GiB of the device (main memory on a CPU) that the memory plan may fill with everything.
    null: what is free. Experts of a store that do not fit stay on disk, and the rest is a cache."""

    host_gib: float | None = Field(default=None, gt=0.0, le=_MOST_GIB)
    """GiB of main memory for experts that a GPU does not hold. null: what is free but a tenth, at
    most all experts, which are read from disk once then. Without a GPU there is no such tier, and
    this changes nothing."""

    pinned_gib: float | None = Field(default=None, ge=0.0, le=_MOST_GIB)
    """GiB of those that may be page-locked, from where copies to the GPU run beside its computing.
    null: at most half of main memory."""

    keep_freed: bool = True
    """Keep freed memory for the next pass over a long prompt, up to 1 GiB, where all experts are
    in memory on a CPU. Concerns all of the process; false gives it back to the system at once."""

    prefix_tokens: int = Field(default=0, ge=0)
    """Most tokens of prompts that are kept for others that begin alike, within kv_tokens. 0: every
    prompt is read from its start."""

    @field_validator("kv_gib")
    @classmethod
    def _check_one(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("kv_tokens") is not None:
            raise PydanticCustomError(
                "both", "and memory.kv_tokens are two ways to set one limit: give one of them"
            )
        return value


class OffloadSettings(Settings):
    """How experts come from disk where memory does not hold them all."""

    policy: Literal["forecast", "frequency_recency", "lru", "lfu"] = "forecast"
    """Which experts are worth keeping. forecast: those expected soonest, going by what has
    predicted better: habits of the routing, frequencies, or what `moe calibrate` has learnt.
    frequency_recency: those used most often of late. lru: those used last. lfu: those used most
    often."""

    predictor: Annotated[str, Off] = "auto"
    """Which predictor of `moe calibrate` says what comes next. auto: the ensemble of all, where the
    model has been calibrated. off: none."""

    prefetch: bool = True
    """Read experts before they are needed: as the predictor says, wherever that is found to pay,
    and those of the next layer where nearly all of a layer's are asked for, as by prompts."""

    late: Literal["wait", "prefix", "host"] = "wait"
    """Experts that are missing when the router asks for them. wait: until they have been read or
    copied. prefix: of those with little of their token's weight, wait for the first late_bits only;
    answers then depend on what was in memory. host: beside a GPU, the processor computes as many of
    them from main memory as is sooner, by a measurement at start; it rounds activations to 8 bits.
    ``lossless: true`` refuses both."""

    late_bits: Literal[2, 3, 4] = 2
    """prefix: bits of an expert that are read and kept instead of all, until it is evicted or is
    asked for with more weight."""

    late_share: float = Field(default=0.6, ge=0.0, le=1.0)
    """prefix: share of a token's router weight that has whole experts, the heaviest first; those
    behind it do with a prefix. 0: all do."""

    reader: Literal["auto", "direct", "deepspeed", "buffered"] = "auto"
    """What reads them. auto: the fastest that passes by the system's file cache, by a short trial;
    buffered: through that cache."""

    borrow: bool = False
    """Let experts have the room that keys and values do not need for the moment (main memory; on a
    GPU slots are fixed, and a notice says so)."""

    hot_set: bool = True
    """Write down at the end which experts were worth keeping, beside the store, and read those
    first at the next start."""


# ---- How several ranks share a model.


class ParallelSettings(Settings):
    """How the processes of one launch (its ranks) share the experts of a model."""

    enabled: bool = False
    """Be one of the ranks that a launcher has started (``deepspeed --module moe ...``). Without a
    launcher there is one rank, and nothing changes."""

    timeout_s: float = Field(default=10.0, ge=1.0, le=DAY_S)
    """Seconds after which a rank is lost that is not heard of, or gets nowhere in a step. More than
    the longest layer takes, reading its experts from disk included."""

    start_timeout_s: float = Field(default=300.0, gt=0.0, le=DAY_S)
    """Seconds in which all ranks must have been started. Loading may take any time."""

    on_rank_loss: Literal["stop", "continue"] = "stop"
    """stop: every waiting request is told, and all ranks end with an error. continue: the others go
    on without the lost rank and read all sequences again; without rank 0 nobody goes on."""

    placement: Literal["packed", "eplb", "linear"] = "packed"
    """Which rank holds which experts at first. packed: even loads, few copies on the way; eplb: as
    DeepSeek's load balancer; linear: in order of their ids."""

    replicas: float = Field(default=0.25, ge=0.0, le=1.0)
    """Further copies of experts, as a share of all experts: the busiest get them."""

    rebalance: Literal["auto", "off"] = "auto"
    """auto: change the placement between steps wherever the time saved pays for what is moved."""

    rebalance_horizon_s: float = Field(default=60.0, gt=0.0)
    """Seconds in which a change of placement has to pay for itself."""

    combine: Literal["exact", "summed"] = "exact"
    """What comes back from ranks that served a token. exact: each expert's row, summed where the
    token came from in the order of one rank alone, so that ranks and placements change no bit;
    summed: one row a rank, the least there is to send, equal up to the order of sums."""

    payload: Literal["plain", "int8"] = "plain"
    """Hidden states on their way to other ranks. int8: in 8 bits with a scale for each token, which
    ``lossless: true`` refuses."""

    buffer_rows: int | None = Field(default=None, ge=0)
    """Static buffers: rows of so many tokens a rank go to all ranks in a layer's first message,
    which saves an exchange where they suffice and sends more bytes. 0: exact sizes. None: rows of
    decode steps go along where 15 of 16 or more are needed on all ranks anyway; half of them
    between processes of one machine."""

    overlap: Annotated[Literal["auto", "on", "off"], Off] = "auto"
    """on: steps in two halves, of which one computes while rows of the other travel. auto: off, as
    halves lost wherever they were measured."""


# ---- How requests are answered, and within which limits.


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


# ---- How tokens are drafted.


class SpeculationSettings(Settings):
    """How the next tokens are drafted, for the model to verify several in one pass."""

    mode: Annotated[Literal["off", "auto", "elastic", "ngram", "recycling"], Off] = "off"
    """elastic: by the model itself with less of its experts. ngram: what followed the last tokens
    before. recycling: what the model last thought follows a token. auto: whichever of elastic and
    ngram is predicted to pay, where one does. off: one token at a time."""

    max_depth: int = Field(default=4, ge=1, le=15)
    """Most tokens of a draft."""

    bits: Literal[2, 3, 4, 8] = 4
    """Most bits of an expert in an elastic draft."""

    experts: int | None = Field(default=None, ge=1)
    """Most experts of a token in an elastic draft. null: as many as the model takes."""

    core: Literal["all", "seq", "vote"] = "all"
    """Which of the experts in memory an elastic draft may use. seq: the two heaviest of each token
    that is drafted beside it. vote: those that these tokens weigh most. all: each of them."""

    core_share: float = Field(default=0.5, gt=0.0, le=1.0)
    """Share of a layer's experts that a vote elects."""

    skip_layers: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the MoE layers, from the middle, whose experts an elastic draft leaves out."""

    contrast: float = Field(default=0.0, ge=0.0, le=1000.0)
    """Self-contrast: how much is taken off of what the model would say with one weak expert a
    layer. It changes what the model says, so ``lossless: true`` refuses it, and each token is read
    twice. 0: off; 0.5 in the paper."""

    contrast_rank: int = Field(default=2, ge=0)
    """Which expert of a token is the weak one, from 0 for the router's first choice."""

    contrast_floor: float = Field(default=0.1, gt=0.0, le=1.0)
    """Tokens below this share of the likeliest one's probability are not drawn under contrast."""


# ---- What the weights are held as, and what multiplies them.

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
