"""The sections of a profile, in the order of `moe.settings.Profile`: keys, defaults, meanings."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from moe.hooks import Registry
from moe.section import Settings

Off = BeforeValidator(lambda value: "off" if value is False else value)
"""YAML reads a bare ``off`` as false."""

DAY_S = 86_400.0
"""The longest time limit: a longer one overflows the integers of sockets, threads and torch."""

_MOST_GIB = 1 << 20
"""More than any machine has, and so few that the number of bytes fits 64 bits."""

_KV_POLICIES = Registry[object]("memory.kv_policy")

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def one_of(key: str, *values: str) -> AfterValidator:
    """A validator that takes these values, and those that methods add to the key."""
    known = [*values, *Registry[object](key).names()]

    def check(value: str) -> str:
        if value not in known:
            *first, last = map(repr, known)
            raise PydanticCustomError("one_of", f"must be {', '.join(first)} or {last}")
        return value

    return AfterValidator(check)


class ModelSettings(Settings):
    """Number formats of the weights, and checks while they are loaded."""

    dtype: Dtype = "auto"
    """Number format of the backbone (attention, norms, embeddings) and of the activations. auto:
    float32 on the CPU, the checkpoint's own on CUDA."""

    proof_cache: bool = True
    """Keep what a load proves about a model, so that the next load of the same model starts sooner.
    Changed code, weights, settings, libraries or processors are proven anew. How fast disks and
    processors were found to be is kept for a day."""

    expert_dtype: Dtype = "auto"
    """Number format of the expert weights in memory. auto: the checkpoint's own."""

    context_length: int | None = Field(default=None, ge=1)
    """Most tokens of a sequence, prompt and new ones together. null: the model's
    max_position_embeddings."""

    expert_bits: Literal[2, 3, 4, 8, 16] | None = None
    """Bits of expert weights: 8, or the first 4, 3 or 2 of them. 16: not quantized, in
    expert_dtype. null: as in the model's files."""

    trunk_bits: Literal[4, 8, 16] | None = None
    """Bits of the other linear layers: attention, shared experts, dense layers. Routers, norms and
    embeddings are never quantized. 16: not quantized. null: as in the model's files."""

    head_bits: Literal[4, 8, 16] | None = None
    """Bits of the output head. 16: not quantized. null: as in the model's files."""

    group_size: Literal[32, 64] = 64
    """Number of weights that share a scale when weights are quantized while loading. A store keeps
    its own."""

    images: bool = False
    """Load the parts of a multimodal model that read images, so that prompts may have some. false:
    they are neither read nor in memory."""

    image_pixels: int = Field(default=2**25, ge=1)
    """Most pixels of all images of a prompt together, before the model's processor scales them."""

    check_finite: bool = False
    """Refuse weights that contain NaN or infinity. Costs one more pass over them while loading; of
    experts on disk, each is looked at when it is first read."""

    verify: bool = False
    """Compare a store's files with their checksums. Costs one more pass over them."""


class KernelSettings(Settings):
    """The code that computes the experts."""

    backend: Annotated[str, one_of("kernels.backend", "auto", "triton", "reference")] = "auto"
    """auto: the compiled kernel on the CPU, Triton on CUDA, plain torch if neither is available.
    triton: this one, or an error (CUDA). reference: plain torch, which is slow, for comparison.
    Methods bring others (`moe methods`)."""


class RoutingSettings(Settings):
    """Changes to the model's choice of experts."""

    policies: tuple[str, ...] = Field(default=(), strict=False)
    """Policies applied to every routing decision, in this order. Each is NAME:ARGUMENTS, as in
    top_k:2: top_k, top_p, and those of `moe methods`; `moe eval` measures what each costs. Empty:
    the model's own routing."""


class GenerationSettings(Settings):
    """Sampling of requests that do not set it themselves."""

    config: Annotated[Literal["auto", "off"], Off] = "auto"
    """auto: a sampling key that is null here has the value of the model's generation_config.json.
    off: ignore that file."""

    max_new_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Most tokens to generate. null: until the context or the KV cache is full. auto: the model's
    own value, else null for chats, which a model ends by itself, and 128 for other prompts."""

    temperature: float | None = Field(default=None, ge=0.0)
    """Divisor of the logits before sampling. 0: always the most likely token (greedy). null: the
    model's value, else 0."""

    top_p: float | None = Field(default=None, ge=0.0, le=1.0)
    """Sample among the most likely tokens whose probabilities add up to this. 1: all tokens; 0: the
    most likely one. null: the model's value, else 1."""

    top_k: int | None = Field(default=None, ge=0)
    """Sample among this many most likely tokens. 0: all tokens. null: the model's value, else 0."""

    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    """Sample among tokens whose probability is at least this share of the most likely one's. 0: all
    tokens. null: the model's value, else 0."""

    repetition_penalty: float | None = Field(default=None, gt=0.0)
    """Above 1, tokens of the prompt and the answer become less likely to repeat. 1: no penalty.
    null: the model's value, else 1."""

    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Seed of the sampling. null: a new one for each request."""


class EngineSettings(Settings):
    """The scheduler, and how decode steps are run."""

    max_batch_size: int = Field(default=64, ge=1)
    """Most sequences that are decoded together."""

    priority_steps: int = Field(default=64, ge=0)
    """Number of steps of waiting that outweigh one level of priority. 0: priority does not count;
    first come, first served."""

    fused: Annotated[Literal["auto", "off"], Off] = "auto"
    """auto: compiled code runs the decode steps, from recorded CUDA graphs on a GPU, if a probe at
    load time shows that it equals transformers' layers. off: always transformers' layers."""

    pin_threads: bool = False
    """Keep each thread that computes a step on a physical core of its own (CPUs, Linux). Not for
    several engines on the same cores: all would take the first ones."""


class PrefillSettings(Settings):
    """The processing of prompts beside sequences that are decoding."""

    mode: Literal["auto", "whole", "chunked", "layered"] = "auto"
    """whole: a prompt in one step. chunked: a token budget for each step. layered: whole prompts,
    one group of layers in each step, so that each expert is read once for a prompt. auto: layered
    or chunked, whichever is predicted to read fewer experts."""

    wave_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Most prompt tokens in one prefill batch. Longer prompts are cut (not by whole). auto: 8192,
    or fewer where their activations would leave too little memory for experts."""

    chunk_tokens: int = Field(default=512, ge=1)
    """chunked: tokens of a step, prompts and decoding sequences together."""

    group_tokens: int = Field(default=512, ge=1)
    """layered: layer groups are cut so that no step takes longer than a chunk of this many tokens:
    about one group for each such number of tokens in the prefill batch."""

    @property
    def most_tokens(self) -> int:
        """wave_tokens as a number; where auto has not been decided, its most."""
        return 8192 if self.wave_tokens == "auto" else self.wave_tokens

    @property
    def longest_part(self) -> int | None:
        """Most tokens that a pass reads of a prompt which may be cut; None: all of it."""
        if self.mode == "whole":
            return None
        parts = {"chunked": self.chunk_tokens, "layered": self.most_tokens}
        return parts.get(self.mode, max(parts.values()))


class MemorySettings(Settings):
    """Limits on memory: KV cache, experts and reserve."""

    kv_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of all sequences in the KV cache. null: as many as kv_gib holds, or else as fit
    beside the weights."""

    kv_gib: float | None = Field(default=None, gt=0.0, le=_MOST_GIB)
    """The same limit in GiB; set only one of the two."""

    kv_bits: Literal["auto", 32, 16, 8, 4] = "auto"
    """Bits of a number in keys and values on a CPU: 32 (float32), 16 (bf16), or 8 or 4 in groups of
    32 with a scale. auto: 16 if the experts are quantised, else 32. With 16 or fewer, prompts also
    multiply in bf16, where the CPU can. Without compiled decode steps keys and values stay at 32,
    on a GPU at the dtype of the weights; the status and a notice say so."""

    kv_policy: str | None = None
    """Lossy: NAME:TOKENS, a method by which decode steps attend to no more than TOKENS tokens of a
    sequence, by blocks of 64, on a CPU with compiled decode steps; window, select and heads, see
    `moe methods`. Prompts are read with attention to all. null: no policy."""

    reserve_gib: float | None = Field(default=None, ge=0.0, le=_MOST_GIB)
    """GiB that the memory plan leaves free. null: 5 % of the available memory, at most 1 GiB."""

    device_gib: float | None = Field(default=None, gt=0.0, le=_MOST_GIB)
    """GiB of the device (of main memory on a CPU) that the memory plan may fill in total. null:
    what is free. Experts of a store that do not fit stay on disk, and memory becomes their
    cache."""

    host_gib: float | None = Field(default=None, gt=0.0, le=_MOST_GIB)
    """GiB of main memory for experts that a GPU does not hold. null: 90 % of what is free, but no
    more than all experts, which are then read from disk once. Without a GPU this has no effect."""

    pinned_gib: float | None = Field(default=None, ge=0.0, le=_MOST_GIB)
    """GiB of host_gib that may be pinned (page-locked), from which copies to the GPU overlap with
    its computing. null: at most half of main memory."""

    keep_freed: bool = True
    """Keep up to 1 GiB of freed memory for the next long prompt, if all experts are in memory on a
    CPU. Applies to the whole process. false: return it to the system at once."""

    prefix_tokens: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Most tokens in the prefix cache, which keeps the KV of prompts for others that begin alike;
    part of kv_tokens, and gives way to requests. auto: half of kv_tokens, at most 4 GiB. 0: no
    prefix cache."""

    reuse_answers: bool = False
    """The prefix cache keeps answers too, so that the next turn of a chat reads only what is new.
    Decode steps sum attention in another order than prompts, also with bit planes, so the last bits
    of such a turn depend on whether its beginning was still kept."""

    prefix_dir: str | None = None
    """Directory where the prefix cache keeps what it evicts, and all at the end of a run, for
    others that ask for it: later runs, and servers that share it. It is made with mode 0700, and
    holds what users have written. Keys and values must be in blocks (kv_bits). null: none."""

    prefix_dir_gib: float = Field(default=8.0, gt=0.0, le=_MOST_GIB)
    """Most GiB of files in prefix_dir; the least recently used are deleted."""

    @field_validator("kv_policy")
    @classmethod
    def _check_policy(cls, value: str | None) -> str | None:
        if value is None:
            return None
        name, *numbers = value.split(":")
        names = _KV_POLICIES.names()
        known = all(re.fullmatch(r"[1-9]\d{0,8}", number, re.ASCII) for number in numbers)
        known = known and bool(numbers) and name in names
        if not (known and int(numbers[0]) >= 256 and int(numbers[0]) % 64 == 0):
            raise PydanticCustomError(
                "kv_policy",
                "must be NAME:TOKENS, NAME one of {names} and TOKENS a multiple of 64, 256 or "
                "more, or null; moe methods says what each is, and what may follow TOKENS",
                {"names": ", ".join(names)},
            )
        return value

    @field_validator("kv_gib")
    @classmethod
    def _check_one(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("kv_tokens") is not None:
            raise PydanticCustomError(
                "both", "and memory.kv_tokens are two ways to set one limit: give one of them"
            )
        return value


class OffloadSettings(Settings):
    """Caching of a store's experts, and reads from disk, if memory does not hold them all."""

    policy: Literal["forecast", "frequency_recency", "lru", "lfu"] = "forecast"
    """Eviction policy of the expert cache. forecast: keep the experts that are expected soonest, by
    their rates of use and by which experts follow which. frequency_recency: by rates of use alone.
    lru: keep the most recently used. lfu: keep the most often used."""

    predictor: Annotated[str, Off] = "auto"
    """Which predictor of `moe calibrate` tells what is needed next. auto: the ensemble of all, if
    the model has been calibrated. off: none."""

    prefetch: bool = True
    """Read experts before they are needed: those that the predictor names, if that has been found
    to pay, and those of the next layer if nearly all experts of a layer are in use, as with
    prompts."""

    late: Annotated[str, one_of("offload.late", "wait", "host", "host_int8")] = "wait"
    """Experts that are not in memory when the router chooses them. wait: wait until they are read
    or copied. host: beside a GPU, the CPU computes as many of them from main memory as saves time,
    by a measurement at start; the order of sums, and so the last bits of an answer's numbers, then
    depend on what was where. host_int8: so, but the CPU rounds activations to 8 bits, which takes a
    third of the time for experts with many rows.
    ``lossless: true`` refuses host_int8. Methods bring others (`moe methods`)."""

    reader: Literal["auto", "direct", "deepspeed", "buffered"] = "auto"
    """The reader of experts on disk. auto: the fastest reader that bypasses the page cache, by a
    short trial. direct: O_DIRECT. deepspeed: DeepSpeed's asynchronous reader. buffered: through the
    page cache."""

    borrow: bool = False
    """Let the expert cache use memory that the KV cache does not need at the moment (main memory
    only; on a GPU the slots are fixed, and a notice says so)."""

    hot_set: bool = True
    """At the end of a run, write beside the store which experts were worth keeping, and read those
    first at the next start."""


class SpeculationSettings(Settings):
    """Speculative decoding: tokens are drafted, and the model verifies several in one pass."""

    mode: Annotated[Literal["off", "auto", "elastic", "mtp", "ngram", "recycling"], Off] = "off"
    """Who drafts. mtp: the multi-token-prediction layer that the model's checkpoint brings.
    elastic: the model itself, with fewer bits and experts. ngram: what followed the last tokens
    earlier in the text. recycling: the tokens that the model last predicted after each token.
    auto: mtp, elastic or ngram, whichever is predicted to gain, if one does. off: no drafts."""

    max_depth: int = Field(default=4, ge=1, le=15)
    """Most tokens of a draft."""

    bits: Literal[2, 3, 4, 8] = 4
    """elastic: most bits of an expert in a draft."""

    experts: int | None = Field(default=None, ge=1)
    """elastic: most experts of a token in a draft. null: as many as the model uses."""


class ParallelSettings(Settings):
    """Expert parallelism: the ranks of one launch share the experts of a model."""

    enabled: bool = False
    """Be one of the ranks that a launcher has started (``deepspeed --module moe ...``). Without a
    launcher there is one rank, and nothing changes."""

    timeout_s: float = Field(default=10.0, ge=1.0, le=DAY_S)
    """Seconds after which a rank counts as lost if it sends nothing, or makes no progress in a
    step. Must be longer than the slowest layer, reads from disk included."""

    start_timeout_s: float = Field(default=300.0, gt=0.0, le=DAY_S)
    """Seconds within which all ranks must have started. Loading has no time limit."""

    on_rank_loss: Literal["stop", "continue"] = "stop"
    """stop: all waiting requests fail, and all ranks end with an error. continue: the other ranks
    go on without the lost one and compute the KV of all sequences again; the loss of rank 0 still
    ends all."""

    placement: Literal["packed", "eplb", "linear"] = "packed"
    """Which rank holds which experts at first. packed: even loads and few transfers. eplb:
    DeepSeek's load balancer. linear: in order of their ids."""

    replicas: float = Field(default=0.25, ge=0.0, le=1.0)
    """Additional copies of experts, as a share of all experts. The busiest experts get them."""

    rebalance: Literal["auto", "off"] = "auto"
    """auto: change the placement between steps if the time saved is more than moving the experts
    costs. off: never."""

    rebalance_horizon_s: float = Field(default=60.0, gt=0.0)
    """Seconds within which a change of placement must save more time than it costs."""

    combine: Literal["auto", "exact", "summed"] = "auto"
    """The rows that a rank returns for a token. exact: a row for each expert, which the token's own
    rank adds up in the order of a single rank, so that the number of ranks and the placement change
    no bit. summed: one row, the fewest bytes; equal up to the order of the sums. auto: exact on
    CPUs, summed on GPUs, where exact sends float32 rows and reads their number back at each layer.
    """

    payload: Literal["plain", "int8"] = "plain"
    """Format of hidden states sent to other ranks. plain: unchanged. int8: 8 bits and a scale for
    each token, which ``lossless: true`` refuses."""

    buffer_rows: int | None = Field(default=None, ge=0)
    """Static buffers: the first message of a layer carries rows for up to this many tokens of a
    rank to all ranks, which saves an exchange if they suffice, and sends more bytes. 0: exact
    sizes. null: rows of decode steps are included if at least 15 of 16 of them are needed on all
    ranks anyway; half of them, between processes of one machine. On GPUs, summed rows of up to 256
    tokens of a rank."""


def _check_network(text: str) -> str:
    try:
        ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(
            f"must be an address or a network, like 127.0.0.1 or 192.168.0.0/16; got {text!r:.60}"
        ) from error
    return text


def _check_origin(text: str) -> str:
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#*\"']+", text):
        raise PydanticCustomError("origin", 'must be like "https://example.org", or "*" for all')
    return text


class ServerSettings(Settings):
    """Limits of ``moe serve``."""

    max_waiting: int = Field(default=256, ge=1)
    """Most requests without a first token. Further ones are refused with status 429."""

    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1)
    """Most bytes of a request's body. Larger ones are refused with status 413."""

    read_timeout_s: float = Field(default=60.0, gt=0.0, le=DAY_S)
    """Seconds within which a request's headers must arrive, and after them its body."""

    send_timeout_s: float = Field(default=60.0, gt=0.0, le=DAY_S)
    """A request is cancelled if the client accepts nothing of its stream for this many seconds."""

    request_timeout_s: float | None = Field(default=None, gt=0.0, le=DAY_S)
    """Seconds after which an answer ends with what is there; null: never. A request may ask for
    fewer (``timeout``)."""

    drain_timeout_s: float = Field(default=30.0, ge=0.0, le=DAY_S)
    """Seconds that running requests get to finish after SIGTERM."""

    page: bool = True
    """Serve a page at ``/`` for browsers: a chat, and the experts at work."""

    traces: bool = False
    """Send an OpenTelemetry trace of each request over OTLP/HTTP, to where the variables OTEL_...
    say (http://localhost:4318 without any). Needs the packages of the extra ``telemetry``."""

    unknown_fields: Literal["take", "refuse"] = "take"
    """The treatment of fields of a request that are unknown, and of wishes that cannot be granted.
    take: it is answered without them, and they are named in the header ``x-moe-ignored``, and once
    in the log. refuse: status 400."""

    any_model: bool = False
    """Answer requests for every model name; ``--served-model-name '*'`` does the same."""

    allow_image_urls: bool = False
    """Fetch images that chats link to over http and https, from public addresses only, with at most
    ``max_body_bytes`` for those of a request. false: images come as data URLs."""

    trusted_proxies: tuple[Annotated[str, AfterValidator(_check_network)], ...] = Field(
        default=(), strict=False
    )
    """Addresses or networks of proxies whose ``X-Forwarded-For`` and ``X-Forwarded-Proto`` are
    believed, such as 127.0.0.1 or 192.168.0.0/16. Empty: no one's."""

    allowed_origins: tuple[Annotated[str, AfterValidator(_check_origin)], ...] = Field(
        default=(), strict=False
    )
    """Origins of web pages that may use the server from a browser (CORS), such as
    https://example.org; "*": all. Empty: none."""
