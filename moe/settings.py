"""The settings tree: every key that a profile has, its default and what it does.

Defaults are written here and nowhere else (a test holds ``configs/default.yaml`` to them). The
docstring under a field is its description, also in ``Profile.model_json_schema()``.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def _check_device(device: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise PydanticCustomError("device", "must be 'auto', 'cpu', 'cuda' or 'cuda:N'")
    return device


_Off = BeforeValidator(lambda value: "off" if value is False else value)
"""YAML reads a bare ``off`` as false."""


class _Settings(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class ModelSettings(_Settings):
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


class KernelSettings(_Settings):
    """What multiplies the experts."""

    backend: Literal["auto", "triton", "megablocks", "reference"] = "auto"
    """auto: the compiled kernel on the CPU, Triton on CUDA, plain torch where neither can be had.
    triton, megablocks: that or an error (CUDA; megablocks wants bfloat16 experts and the package).
    reference: plain torch, slow, to compare with."""


class RoutingSettings(_Settings):
    """Which experts a token goes to."""

    policies: tuple[str, ...] = Field(default=(), strict=False)
    """Policies applied to every routing decision, in this order; each is NAME:ARGUMENTS, as in
    top_k:2 (des_seq, des_vote, odp, pesf, resident, top_k and top_p; `moe eval` says what each
    costs). Empty: the model's own routing."""


class GenerationSettings(_Settings):
    """What a request gets when it does not say."""

    max_new_tokens: int = Field(default=128, ge=1)
    """Most tokens to generate."""

    temperature: float = Field(default=0.0, ge=0.0)
    """Divisor of the logits before sampling. 0: the most likely token always (greedy)."""

    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample among the most likely tokens whose probabilities add up to this. 1: all tokens."""

    top_k: int = Field(default=0, ge=0)
    """Sample among this many most likely tokens. 0: all tokens."""

    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Seed of the sampling. null: a new one each time."""


class EngineSettings(_Settings):
    """How requests share the machine."""

    max_batch_size: int = Field(default=64, ge=1)
    """Most sequences decoded together."""

    priority_steps: int = Field(default=64, ge=0)
    """Steps of waiting that outweigh one level of priority. 0: first come, first served."""

    overlap_patience: int = Field(default=0, ge=0)
    """How often a waiting request may be overtaken by others that are expected to need the experts
    of those that run, where that saves experts. Needs a calibration. 0: never."""

    fused: Annotated[Literal["auto", "off"], _Off] = "auto"
    """auto: decode steps run by compiled code, on a GPU from recordings, wherever a probe at load
    time shows that it equals transformers' own layers. off: transformers' layers always."""


class PrefillSettings(_Settings):
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


class MemorySettings(_Settings):
    """What may be held in memory."""

    kv_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of all sequences whose keys and values are in memory at once.
    null: as many as kv_gib holds, or else as fit beside the weights."""

    kv_gib: float | None = Field(default=None, gt=0.0)
    """The same limit in GiB; give one of the two."""

    reserve_gib: float | None = Field(default=None, ge=0.0)
    """GiB that the memory plan leaves free.
    null: a twentieth of what is available, at most 1 GiB."""

    device_gib: float | None = Field(default=None, gt=0.0)
    """GiB of the device (main memory on a CPU) that the memory plan may fill with everything.
    null: what is free. Experts of a store that do not fit stay on disk, and the rest is a cache."""

    host_gib: float | None = Field(default=None, gt=0.0)
    """GiB of main memory for experts that a GPU does not hold. null: what is free but a tenth, at
    most all experts, which are read from disk once then. Without a GPU there is no such tier, and
    this changes nothing."""

    pinned_gib: float | None = Field(default=None, ge=0.0)
    """GiB of those that may be page-locked, from where copies to the GPU run beside its computing.
    null: at most half of main memory."""

    keep_freed: bool = True
    """Keep freed memory for the next pass over a long prompt, up to 1 GiB, where all experts are
    in memory on a CPU. Concerns all of the process; false gives it back to the system at once."""

    prefix_tokens: int = Field(default=0, ge=0)
    """Most tokens of ended sequences that are kept for prompts that begin alike, within kv_tokens.
    0: every prompt is read from its start."""

    @field_validator("kv_gib")
    @classmethod
    def _check_one(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("kv_tokens") is not None:
            raise PydanticCustomError(
                "both", "and memory.kv_tokens are two ways to set one limit: give one of them"
            )
        return value


class OffloadSettings(_Settings):
    """How experts come from disk where memory does not hold them all."""

    policy: Literal["forecast", "frequency_recency", "lru", "lfu"] = "forecast"
    """Which experts are worth keeping. forecast: those expected soonest, going by what has
    predicted well: habits of the routing, frequencies, forecasts made to prefetch.
    frequency_recency: those used most often of late. lru: those used last. lfu: those used most
    often."""

    predictor: Annotated[str, _Off] = "auto"
    """Which predictor of `moe calibrate` says what comes next. auto: the ensemble of all, where the
    model has been calibrated. off: none."""

    prefetch: bool = True
    """Read experts before they are needed, as the predictor says, wherever that is found to pay."""

    late: Literal["wait", "host"] = "wait"
    """Beside a GPU, experts that it lacks. wait: until they have been copied. host: the processor
    computes as many of them from main memory as is sooner, by a measurement at start; it rounds
    activations to 8 bits, which ``lossless: true`` refuses."""

    reader: Literal["auto", "direct", "deepspeed", "buffered"] = "auto"
    """What reads them. auto: the fastest that passes by the system's file cache, by a short trial;
    buffered: through that cache."""

    borrow: bool = False
    """Let experts have the room that keys and values do not need for the moment (main memory; on a
    GPU slots are fixed, and a notice says so)."""

    hot_set: bool = True
    """Write down at the end which experts were worth keeping, beside the store, and read those
    first at the next start."""


class SpeculationSettings(_Settings):
    """How the next tokens are drafted, for the model to verify several in one pass."""

    mode: Annotated[Literal["off", "auto", "elastic", "ngram", "recycling"], _Off] = "off"
    """elastic: by the model itself with less of its experts. ngram: what followed the last tokens
    before. recycling: what the model last thought follows a token. auto: whichever is predicted to
    pay, where one does. off: one token at a time."""

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

    contrast: float = Field(default=0.0, ge=0.0)
    """Self-contrast: how much is taken off of what the model would say with one weak expert a
    layer. It changes what the model says, so ``lossless: true`` refuses it, and each token is read
    twice. 0: off; 0.5 in the paper."""

    contrast_rank: int = Field(default=2, ge=0)
    """Which expert of a token is the weak one, from 0 for the router's first choice."""

    contrast_floor: float = Field(default=0.1, gt=0.0, le=1.0)
    """Tokens below this share of the likeliest one's probability are not drawn under contrast."""


class ParallelSettings(_Settings):
    """How the processes of one launch (its ranks) share the experts of a model."""

    enabled: bool = False
    """Be one of the ranks that a launcher has started (``deepspeed --module moe ...``). Without a
    launcher there is one rank, and nothing changes."""

    timeout_s: float = Field(default=10.0, ge=1.0)
    """Seconds after which a rank is lost that is not heard of, or gets nowhere in a step. More than
    the longest layer takes, reading its experts from disk included."""

    start_timeout_s: float = Field(default=300.0, gt=0.0)
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
    decode steps go along where 15 of 16 or more are needed on all ranks anyway."""

    overlap: Annotated[Literal["auto", "on", "off"], _Off] = "auto"
    """Steps in two halves, of which one computes while rows of the other travel. auto: where that
    was measured to be faster."""


class ServerSettings(_Settings):
    """Limits of ``moe serve``."""

    max_waiting: int = Field(default=256, ge=1)
    """Most requests without a first token; more are refused with status 429."""

    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1)
    """Most bytes of a request's body; more are refused with status 413."""

    read_timeout_s: float = Field(default=60.0, gt=0.0)
    """Seconds in which a request's headers, and after them its body, must have come."""

    send_timeout_s: float = Field(default=60.0, gt=0.0)
    """Seconds that a client may take none of its stream before the request is cancelled."""

    drain_timeout_s: float = Field(default=30.0, ge=0.0)
    """Seconds that requests get to finish after SIGTERM."""


class Profile(_Settings):
    """Every setting of a run. Immutable: a changed setting is a new profile."""

    device: Annotated[str, AfterValidator(_check_device)] = "auto"
    """Where the model runs: cpu, cuda or cuda:N. auto: cuda where there is one, else cpu."""

    threads: int | None = Field(default=None, ge=1)
    """CPU threads used by torch. null: torch's own choice."""

    lossless: bool = True
    """Refuse everything that can change what the model says at the chosen precision."""

    model: ModelSettings = ModelSettings()
    """How the weights are held."""

    kernels: KernelSettings = KernelSettings()
    """What multiplies the experts."""

    routing: RoutingSettings = RoutingSettings()
    """Which experts a token goes to."""

    generation: GenerationSettings = GenerationSettings()
    """What a request gets when it does not say."""

    engine: EngineSettings = EngineSettings()
    """How requests share the machine."""

    prefill: PrefillSettings = PrefillSettings()
    """How prompts are read beside running sequences."""

    memory: MemorySettings = MemorySettings()
    """What may be held in memory."""

    offload: OffloadSettings = OffloadSettings()
    """How experts come from disk where memory does not hold them all."""

    speculation: SpeculationSettings = SpeculationSettings()
    """How the next tokens are drafted, for the model to verify several in one pass."""

    parallel: ParallelSettings = ParallelSettings()
    """How the processes of one launch share the experts of a model."""

    server: ServerSettings = ServerSettings()
    """Limits of ``moe serve``."""

    @model_validator(mode="after")
    def _check_contrast(self) -> Profile:
        if not self.speculation.contrast:
            return self
        for key, value, wrong in (
            ("lossless", "false", self.lossless),
            ("speculation.mode", "off", self.speculation.mode != "off"),
            ("parallel.enabled", "false", self.parallel.enabled),
        ):
            if wrong:
                raise PydanticCustomError(
                    "contrast",
                    "speculation.contrast changes what the model says and reads each token twice: "
                    "it needs {key}: {value}; set that, or speculation.contrast: 0",
                    {"key": key, "value": value},
                )
        return self

    @model_validator(mode="after")
    def _check_late(self) -> Profile:
        if self.lossless and self.offload.late == "host":
            raise PydanticCustomError(
                "late",
                "offload.late: host computes some experts of a GPU on the processor, which rounds "
                "what they read, and lossless: true refuses that; set lossless: false or "
                "offload.late: wait",
            )
        return self

    @model_validator(mode="after")
    def _check_payload(self) -> Profile:
        if self.lossless and self.parallel.payload == "int8":
            raise PydanticCustomError(
                "payload",
                "parallel.payload: int8 rounds what experts of other ranks read, which "
                "lossless: true refuses; set lossless: false or parallel.payload: plain",
            )
        return self
