"""What a request may say: every field is honoured or refused, none is ignored.

What a request leaves out of sampling is `moe.defaults`' business. Ranges are those of OpenAI's API;
`top_k` and the fields below it are our own additions, named as in vLLM.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from moe.sampling.params import MAX_LOGPROBS, MAX_SEED, MAX_SEQUENCES
from moe.server.base import Labels, Sharing, StreamOptions
from moe.server.fields import (
    MAX_INT,
    MAX_MESSAGES,
    LogitBias,
    PromptList,
    StopList,
    TokenCount,
    TokenIds,
)
from moe.server.openai.messages import ChatEnding, Message, conversation
from moe.server.openai.reasoning import ReasoningBody
from moe.server.openai.structured import StructuredBody
from moe.server.unsupported import NEUTRAL_CHAT, NEUTRAL_COMPLETIONS, Neutral, supported
from moe.text.prompts import Prompt


class GenerationRequest(StructuredBody, Labels, Sharing):
    """What chats and completions have in common."""

    neutral: ClassVar[Neutral]

    model: str | None = None
    """One of the names in ``/v1/models``; left out: the first of them."""
    max_tokens: TokenCount | None = None
    """Most tokens to generate."""
    n: int = Field(default=1, ge=1, le=MAX_SEQUENCES)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: LogitBias = Field(default_factory=dict)
    """Token id -> what is added to its logit, from -100 to 100."""
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    stop: StopList = Field(default_factory=list)
    """A string or a list of strings; text ends before the first of them."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    """Only with stream."""
    top_k: int | None = Field(default=None, ge=-1, le=MAX_INT)
    """0, and -1 as vLLM writes it: all tokens."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    stop_token_ids: TokenIds = Field(default_factory=list)
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
    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """What is to be continued or answered."""

    @property
    def scores_only(self) -> bool:
        """The prompt is to be reported, and nothing new."""
        return False

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Number of likely tokens to report beside the chosen one; None for nothing."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same of the prompt's tokens."""
        return None

    def sampling(self) -> dict[str, Any]:
        """Fields of `SamplingParams`, None where the request does not say."""
        with_default = ("max_new_tokens", "temperature", "top_p", "min_p", "seed")
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
        names = (*with_default, *penalties, "ignore_eos", "n", "structure")
        return {name: getattr(self, name) for name in names} | {
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "stop": tuple(self.stop),
            "stop_token_ids": tuple(self.stop_token_ids),
            "logprobs": self.num_logprobs,
            "prompt_logprobs": self.num_prompt_logprobs,
        }


class ChatRequest(ReasoningBody, ChatEnding, GenerationRequest):
    neutral = NEUTRAL_CHAT

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
        if self.continue_final_message and self.messages[-1].tool_calls:
            raise ValueError("messages: the last one calls tools, and cannot be continued")
        if self.offered_tools and self.structure is not None:
            raise ValueError(
                "an answer cannot both call tools and have a structure: send tool_choice: none, or "
                "leave out what asks for the structure"
            )
        return self

    @property
    def prompts(self) -> Sequence[Prompt]:
        return [conversation(self.messages)]

    @property
    def needs_tools(self) -> bool:
        """Only a model that can be given tools can answer."""
        called = any(message.tool_calls for message in self.messages)
        return called or self.offered_tools is not None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    neutral = NEUTRAL_COMPLETIONS

    prompt: PromptList
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    """Most tokens to generate; 0 only with echo."""
    echo: bool = False
    """Begin the text with the prompt, and the logprobs with those of its tokens."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Report the log probability of every token, and so many of the likeliest tokens."""

    @model_validator(mode="after")
    def _check_pairs(self) -> CompletionRequest:
        if self.scores_only and not self.echo:
            raise ValueError("max_tokens may be 0 only with echo: true")
        if len(self.prompt) * self.n > MAX_SEQUENCES:
            raise ValueError(
                f"{len(self.prompt)} prompts with n = {self.n} are more than {MAX_SEQUENCES} "
                "sequences; send several requests"
            )
        return self

    @property
    def prompts(self) -> Sequence[Prompt]:
        return self.prompt

    @property
    def scores_only(self) -> bool:
        return self.max_tokens == 0

    @property
    def max_new_tokens(self) -> int | None:
        return 1 if self.scores_only else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None
