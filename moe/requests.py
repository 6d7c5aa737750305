"""Make an engine's sequences from prompts and parameters, and fill in default parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from moe.engine.prefill_batch import SequenceGroup
from moe.errors import ContextError, RequestError
from moe.loaded import LoadedModel
from moe.sampling.params import SamplingParams
from moe.sampling.sampler import Sampler
from moe.sequence import RunningSequence, check_priority
from moe.settings import GenerationSettings
from moe.text.detokenize import StopStrings
from moe.text.generation_config import GENERATION_CONFIG, ModelSampling
from moe.text.tokenizer import ImagePrompt, Prompt, is_chat

CONTINUATION = 128
"""Most new tokens after a text prompt under ``max_new_tokens: auto``, if the model says nothing."""
_NEUTRAL = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def make_group(
    loaded: LoadedModel,
    prompt: Prompt,
    params: SamplingParams,
    room_for: Callable[[int], int],
    salt: str = "",
    priority: int = 0,
    shown: Collection[int] = (),
    *,
    chat: bool = False,
    ending: Callable[[], Callable[[str], bool]] | None = None,
) -> SequenceGroup:
    """The sequences of one request; see `MoE.request` and `MoE.room_for`. Raises `RequestError`."""
    ids = loaded.codec.encode(prompt)
    num_new = params.max_new_tokens
    if num_new is None:
        num_new = room_for(len(ids))
    if (writer := loaded.writer) is not None:
        params = writer.checked(params)
        check_length(loaded, len(ids), math.ceil(num_new / writer.unit) * writer.unit)
    check_length(loaded, len(ids), num_new)
    _check_biased(loaded, params.logit_bias)
    check_priority(priority)
    stop_tokens = loaded.codec.special_tokens(params.stop) if params.stop else {}
    if params.structure is not None:
        loaded.structures.check(params.structure)
    constraint = loaded.structures.constraint(params)
    lengths = loaded.structures.lengths(params)
    stop_token_ids = set(params.stop_token_ids)
    if not params.ignore_eos:
        stop_token_ids |= loaded.codec.eos_token_ids
    behind = () if chat or is_chat(prompt) else ids
    sequences = [
        RunningSequence(
            ids,
            Sampler(
                *(params, ids, loaded.logits_size, index),
                constraint and constraint.fork(),
                lengths and lengths.fork(),
            ),
            loaded.codec.decoder(shown, behind),
            StopStrings(params.stop, stop_tokens),
            stop_token_ids,
            num_new,
            salt,
            priority,
            rows=ids.rows if isinstance(ids, ImagePrompt) else None,
            is_over=None if ending is None else ending(),
        )
        for index in range(params.n)
    ]
    return SequenceGroup(sequences, prompt_logprobs=None if params.prompt_logprobs is None else [])


def check_length(loaded: LoadedModel, num_prompt: int, num_new: int) -> None:
    """Raise `ContextError` if a sequence would be longer than the model's context."""
    limit = loaded.context_length
    if limit is None or num_prompt + num_new <= limit:
        return
    if num_prompt + min(num_new, 1) > limit:
        raise ContextError(
            f"the prompt has {num_prompt} tokens, and the context is {limit} tokens, answer "
            "included; shorten the prompt",
            *(limit, num_prompt),
        )
    raise ContextError(
        f"the prompt has {num_prompt} tokens and {num_new} new ones are asked for, together more "
        f"than the context of {limit} tokens; shorten the prompt or ask for fewer",
        *(limit, num_prompt, num_new),
    )


def as_batch(
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
) -> list[tuple[Prompt, SamplingParams]]:
    """Every prompt with its parameters. Raises `RequestError` if their numbers differ."""
    batch = _prompts(prompts)
    if isinstance(params, SamplingParams):
        params = [params] * len(batch)
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(f"params must be SamplingParams or a list of them, got {params!r}")
    if len(params) != len(batch):
        raise RequestError(
            f"give one SamplingParams for all prompts or one each: got {len(params)} for "
            f"{len(batch)} prompts"
        )
    return list(zip(batch, params, strict=True))


class Defaults:
    """Parameters that a request does not set: the profile's, else the model's own, else neutral.

    Used by the command line, `MoE.generate`, batches and the server.

    Args:
        settings: the profile's ``generation`` section; null leaves the choice to the model.
        own: the sampling defaults of the model's generation_config.json.

    Attributes:
        origins: each sampling parameter's value and where it comes from, ready for JSON.
    """

    def __init__(self, settings: GenerationSettings, own: ModelSampling) -> None:
        self._settings = settings
        self._new_tokens_of_model = own.values.get("max_new_tokens")
        self.origins: dict[str, dict[str, Any]] = {}
        for name, neutral in _NEUTRAL.items():
            value, origin = getattr(settings, name), "profile"
            if value is None and settings.config == "auto" and name in own.values:
                value, origin = own.values[name], GENERATION_CONFIG
            elif value is None:
                value, origin = neutral, "default"
            self.origins[name] = {"value": value, "origin": origin}

    def params(self, *, chat: bool, room: int, **given: Any) -> SamplingParams:
        """The parameters of a request.

        Args:
            chat: the prompt is a conversation, so the model ends its answer by itself.
            room: most new tokens that fit in context and memory; a default is limited to that.
            **given: fields of `SamplingParams`; None: the request does not set it.

        Raises:
            RequestError: a value is not valid.
        """
        values = {name: about["value"] for name, about in self.origins.items()}
        values["seed"] = self._settings.seed
        values |= {name: value for name, value in given.items() if value is not None}
        if "max_new_tokens" not in values:
            values["max_new_tokens"] = self._new_tokens(chat, room)
        return SamplingParams(**values)

    def _new_tokens(self, chat: bool, room: int) -> int:
        most = self._settings.max_new_tokens
        if most == "auto":
            own = self._new_tokens_of_model if self._settings.config == "auto" else None
            most = own or (None if chat else CONTINUATION)
        return room if most is None else min(most, room)


def _check_biased(loaded: LoadedModel, token_ids: Iterable[int]) -> None:
    size = loaded.logits_size
    if (largest := max(token_ids, default=0)) >= size:
        raise RequestError(f"logit_bias names token {largest}; this model's ids end at {size - 1}")


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt becomes a batch of one; a batch is a sequence of strings or of sequences."""
    if isinstance(prompts, Sequence) and not isinstance(prompts, (str, bytes, bytearray)):
        if len(prompts) == 0:
            raise RequestError("no prompts were given; give at least one")
        if all(isinstance(prompt, Sequence) for prompt in prompts):
            return list(prompts)  # type: ignore[arg-type]
    return [prompts]  # type: ignore[list-item]
