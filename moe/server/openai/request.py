"""Bodies of OpenAI's chats and completions; `moe.server.unsupported` has what they leave out.

`moe.requests` fills in sampling that a request leaves out. Ranges are those of OpenAI's API;
`top_k` and the fields below it are additions, named as in vLLM.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, model_validator

from moe.sampling.params import MAX_LOGPROBS, MAX_SEED, MAX_SEQUENCES, MIN_SEED
from moe.server.bodies import EndpointBody, LabelFields, RequestBody, ResentMessage, StreamOptions
from moe.server.contents import Content, Text
from moe.server.fields import (
    MAX_INT,
    MAX_MESSAGES,
    NO_LIMIT,
    LogitBias,
    PromptList,
    StopList,
    TokenIds,
    TokenLimit,
)
from moe.server.openai.options import ReasoningBody, StructuredBody
from moe.server.openai.tools import MAX_CALLS, CallId, ToolCall
from moe.text.chat import REASONING_KEY
from moe.text.tokenizer import Prompt
from moe.text.tool_calls.grammar import CAN_FOLLOW


class ChatMessage(ResentMessage):
    """One message of a chat."""

    place = "messages."
    labels = frozenset(
        {"annotations", "id", "provider_specific_fields", "reasoning_details", "refusal"}
    )

    role: str = Field(min_length=1, max_length=64)
    """Who speaks. The model's chat template decides which roles are valid."""
    content: Content | None = None
    """Text, or a list of ``{"type": "text", "text": ...}`` and ``{"type": "image_url", "image_url":
    {"url": "data:image/png;base64,..."}}`` (png, jpeg or webp); null only beside tool_calls."""
    reasoning_content: Text | None = None
    """The reasoning before this answer, for chat templates that read it."""
    reasoning: Text | None = None
    """Another name of the same."""
    name: str | None = Field(default=None, min_length=1, max_length=64)
    """Which of several speakers with this role, for chat templates that write names."""
    tool_calls: list[ToolCall] | None = Field(default=None, min_length=1, max_length=MAX_CALLS)
    """The calls in this answer."""
    tool_call_id: CallId | None = None
    """With role tool: the call whose result this is."""

    @model_validator(mode="before")
    @classmethod
    def _read_other_names(cls, value: Any, info: ValidationInfo) -> Any:
        """Take the refusal and the reasoning from the names that other servers give them."""
        if not isinstance(value, dict) or info.context is None or value.get("role") != "assistant":
            return value
        if value.get("function_call"):
            raise ValueError("function_call is not supported: send tool_calls in its place")
        made = {key: v for key, v in value.items() if key != "function_call"}
        if not made.get("content") and isinstance(made.get("refusal"), str):
            made["content"] = made["refusal"]
        details = made.get("reasoning_details")
        told = made.get("reasoning_content") or made.get("reasoning")
        if not told and isinstance(details, list):
            texts = [part.get("text") for part in details if isinstance(part, dict)]
            made["reasoning"] = "".join(text for text in texts if isinstance(text, str)) or None
        return made

    @model_validator(mode="after")
    def _check_fields(self) -> ChatMessage:
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"tool_calls are of role assistant; got role {self.role!r:.80}")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(f"tool_call_id is of role tool; got role {self.role!r:.80}")
        for thought in (self.reasoning_content, self.reasoning):
            if thought is not None and self.role != "assistant":
                raise ValueError(f"reasoning is of role assistant; got role {self.role!r:.80}")
        if isinstance(self.content, list) and self.role in ("assistant", "system", "developer"):
            raise ValueError(f"images are of role user or tool; got role {self.role!r:.80}")
        if self.content is None and self.tool_calls is None:
            raise ValueError("content is missing or has nothing in it")
        return self


class ChatEnding(RequestBody):
    """Fields that say how the prompt of a conversation ends, named as in vLLM."""

    add_generation_prompt: bool | None = None
    """Open the assistant's turn; left out: true, unless the last message is continued."""
    continue_final_message: bool = False
    """Leave the last message open, so that the model continues it."""

    @model_validator(mode="after")
    def _check_ending(self) -> ChatEnding:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                "continue_final_message and add_generation_prompt cannot both be true: a message "
                "is continued, or a turn is opened behind it"
            )
        return self

    @property
    def ending(self) -> Mapping[str, bool]:
        """The ending as `TextCodec.encode` takes it."""
        continues, opens = self.continue_final_message, self.add_generation_prompt
        return {
            "add_generation_prompt": not continues if opens is None else opens,
            "continue_final_message": continues,
        }


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, object]]:
    """Messages for `TextCodec.encode`."""
    made: list[dict[str, object]] = []
    for message in messages:
        turn = {"content": None, **message.model_dump(exclude_none=True, exclude={"reasoning"})}
        if message.reasoning:
            turn.setdefault(REASONING_KEY, message.reasoning)
        made.append(turn)
    return made


class GenerationRequest(StructuredBody, LabelFields, EndpointBody):
    """Fields that chats and completions have in common."""

    model: str | None = None
    """One of the names in ``/v1/models``; left out: the first of them."""
    max_tokens: TokenLimit | None = None
    """Most tokens to generate; -1: as many as there is room for."""
    n: int = Field(default=1, ge=1, le=MAX_SEQUENCES)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: LogitBias = Field(default_factory=dict)
    """Token id -> number added to its logit, from -100 to 100."""
    seed: int | None = Field(default=None, ge=MIN_SEED, le=MAX_SEED)
    stop: StopList = Field(default_factory=list)
    """A string or a list of strings; text ends before the first of them. The name of a special
    token ends it before that token, too."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    """Only with stream."""
    top_k: int | None = Field(default=None, ge=-1, le=MAX_INT)
    """0, and -1 as vLLM writes it: all tokens."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    stop_token_ids: TokenIds = Field(default_factory=list)
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0, le=MAX_INT)
    """Least tokens to generate, before anything ends the text."""
    return_token_ids: bool = False
    """Report the token ids of prompts and answers."""

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options may be given only with stream: true")
        return self

    @property
    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """The prompts to continue or answer."""

    @property
    def scores_only(self) -> bool:
        """Return whether only the prompt's log probabilities are wanted, and no new tokens."""
        return False

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens to report with each token; None: no log probabilities."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens."""
        return None

    def sampling(self) -> dict[str, Any]:
        """Fields of `SamplingParams`; None for those that the request leaves out."""
        with_default = ("max_new_tokens", "temperature", "top_p", "min_p", "seed")
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
        names = (*with_default, *penalties, "ignore_eos", "min_tokens", "n", "structure")
        return {name: getattr(self, name) for name in names} | {
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "stop": tuple(self.stop),
            "stop_token_ids": tuple(self.stop_token_ids),
            "logprobs": self.num_logprobs,
            "prompt_logprobs": self.num_prompt_logprobs,
        }


class ChatRequest(ReasoningBody, ChatEnding, GenerationRequest):
    dialect = "chat"

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: TokenLimit | None = None
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
        structure = self.structure if self.offered_tools else None
        if structure is not None and structure.kind not in CAN_FOLLOW:
            raise ValueError(
                f"{structure.name} is of the whole answer, which then cannot call tools: send a "
                "JSON schema or choices in its place, or tool_choice: none"
            )
        return self

    @property
    def prompts(self) -> Sequence[Prompt]:
        return [template_messages(self.messages)]

    @property
    def needs_tools(self) -> bool:
        """Return whether only a model with tool support can answer."""
        called = any(message.tool_calls for message in self.messages)
        return called or self.offered_tools is not None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    dialect = "completions"

    prompt: PromptList
    max_tokens: Annotated[int, Field(ge=NO_LIMIT, le=MAX_INT)] | None = None
    """Most tokens to generate; 0 only with echo; -1: as many as there is room for."""
    echo: bool = False
    """Begin the text with the prompt, and the logprobs with those of its tokens."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Report each token's log probability, and those of this many likeliest tokens (with the token
    itself, up to one more)."""

    @model_validator(mode="after")
    def _check_pairs(self, info: ValidationInfo) -> CompletionRequest:
        if self.max_tokens == NO_LIMIT and info.context is None:
            raise ValueError("max_tokens: Input should be greater than or equal to 0; got -1")
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
