"""What a request may say: every field is honoured or refused, none is ignored.

Sampling that a request leaves out comes from the profile's ``generation`` section. Ranges are
those of OpenAI's API; `top_k` and the fields below it are our own additions, named as in vLLM.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moe.sampling_params import MAX_LOGPROBS, MAX_SEED, MAX_SEQUENCES, SamplingParams
from moe.server.fields import MAX_INT, PromptList, StopList, Text, TokenCount, TokenIds
from moe.server.unsupported import NEUTRAL, NEUTRAL_CHAT, NEUTRAL_COMPLETIONS, supported
from moe.settings import GenerationSettings

MAX_MESSAGES = 4096


class _Body(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Message(_Body):
    """One turn of a chat. Its other fields in OpenAI's API are refused unless null."""

    role: str = Field(min_length=1, max_length=64)
    """Who speaks; the model's chat template decides which roles there are."""
    content: Text
    """Text, or a list of ``{"type": "text", "text": ...}``."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        """OpenAI's clients send back the null fields of messages that they got."""
        if isinstance(value, dict):
            return {key: v for key, v in value.items() if v is not None}
        return value


class StreamOptions(_Body):
    include_usage: bool = False
    """End the stream with a chunk that has the token counts."""


class GenerationRequest(_Body):
    """What chats and completions have in common."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = NEUTRAL

    model: str
    max_tokens: TokenCount | None = None
    """Most tokens to generate."""
    n: int = Field(default=1, ge=1, le=MAX_SEQUENCES)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    stop: StopList = []
    """A string or a list of strings; text ends before the first of them."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    """Only with stream."""
    user: str | None = Field(default=None, max_length=512)
    """A name for the end user. Not stored, not logged."""
    top_k: int | None = Field(default=None, ge=0, le=MAX_INT)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    stop_token_ids: TokenIds = []
    ignore_eos: bool = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, value: Any) -> Any:
        return supported(value, cls.neutral) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options may be given only with stream: true")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Number of likely tokens to report beside the chosen one; None for nothing."""
        return None

    def sampling(self, defaults: GenerationSettings, max_new_tokens: int) -> SamplingParams:
        """Raises `RequestError` where a value is not valid."""
        chosen: dict[str, Any] = {
            name: getattr(defaults if getattr(self, name) is None else self, name)
            for name in ("temperature", "top_p", "top_k", "seed")
        }
        return SamplingParams(
            **chosen,
            max_new_tokens=max_new_tokens,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=self.num_logprobs,
            n=self.n,
        )


class ChatRequest(GenerationRequest):
    neutral: ClassVar[dict[str, tuple[object, ...]]] = NEUTRAL | NEUTRAL_CHAT

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: TokenCount | None = None
    """The newer name of max_tokens."""
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Only with logprobs."""

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs may be given only with logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are the same: give one")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    neutral: ClassVar[dict[str, tuple[object, ...]]] = NEUTRAL | NEUTRAL_COMPLETIONS

    prompt: PromptList
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_size(self) -> CompletionRequest:
        if len(self.prompt) * self.n > MAX_SEQUENCES:
            raise ValueError(
                f"{len(self.prompt)} prompts with n = {self.n} are more than {MAX_SEQUENCES} "
                "sequences; send several requests"
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class TokenizeRequest(_Body):
    """A prompt or messages, as one of the two routes above would read them."""

    model: str | None = None
    prompt: str | None = Field(default=None, min_length=1)
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, one of them")
        return self


class DetokenizeRequest(_Body):
    model: str | None = None
    tokens: list[int]
