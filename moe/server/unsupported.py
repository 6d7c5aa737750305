"""Fields that clients know and this server does not honour: one table for all dialects.

Every other field is honoured (it is a field of the dialect's body) or unknown. A field of this
table is a **label** that changes nothing about an answer; a **hint**, which asks for what this
server cannot do and an answer can do without; or it is **refused**, as the answer would be another
one than was asked for. Each may have values that ask for nothing, which always pass.

Hints and unknown fields are taken and named (`moe.server.ignored`). Under ``server.unknown_fields:
refuse`` only the values that ask for nothing pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import PydanticCustomError

from moe.server.ignored import Ignored

Verdict = Literal["label", "hint", "refused"]
Dialect = Literal["chat", "completions", "responses", "messages"]


@dataclass(frozen=True)
class Unsupported:
    """The treatment of a field that is not honoured.

    Attributes:
        neutral: values that ask for nothing.
        why: said with a refusal.
        code: of a refusal, for programs.
    """

    verdict: Verdict
    neutral: tuple[object, ...] = ()
    why: str = ""
    code: str | None = None

    def asks_for_nothing(self, value: object) -> bool:
        """Return whether a value is one of the neutral ones, of their type."""
        return any(type(value) is type(own) and value == own for own in self.neutral)


def _label() -> Unsupported:
    return Unsupported("label")


def _hint(*neutral: object, why: str = "") -> Unsupported:
    return Unsupported("hint", neutral, why)


def _refused(why: str, *neutral: object, code: str | None = None) -> Unsupported:
    return Unsupported("refused", neutral, f": {why}" if why else "", code)


_STATELESS = "the server keeps no answers, so send the whole conversation"
_STRUCTURE = "send structured_outputs in its place"
_SAMPLER = "this server does not sample that way"
_TEXT_ONLY = "answers are text"
_CLIENT_RUNS = ": the client runs all tools"
_CACHE = {"prompt_cache_options": _hint(), "prompt_cache_retention": _hint()}
"""Known prefixes are found by their tokens, for as long as they fit."""
_STRUCTURES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar")
_SAMPLERS: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "mirostat": (0,),
    "samplers": ([],),
    "top_a": (0, 0.0),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "xtc_probability": (0, 0.0),
}
_OTHER_ENGINES = {
    # Fields of vLLM, SGLang, llama.cpp, Ollama and others that change an answer.
    **dict.fromkeys((*_STRUCTURES, "json_schema", "regex", "ebnf"), _refused(_STRUCTURE)),
    **{name: _refused(_SAMPLER, *neutral) for name, neutral in _SAMPLERS.items()},
    "chat_template": _refused("the model's own template is used"),
    "documents": _refused("put their text into a message", []),
    "include_stop_str_in_output": _refused("texts end before a stop string", False),
    "lora_path": _refused("this server has one model"),
    "min_new_tokens": _refused("send min_tokens in its place", 0),
    "n_predict": _refused("send max_tokens in its place", -1),
    "options": _refused("send its fields by themselves", {}),
    "prompt_embeds": _refused("prompts are text or token ids"),
    "prompt_logprobs": _refused("send echo and logprobs to /v1/completions"),
    "random_seed": _refused("send seed in its place"),
    "return_tokens_as_token_ids": _refused("send return_token_ids in its place", False),
    "skip_special_tokens": _refused("special tokens are not part of a text", True),
    "structural_tag": _refused(_STRUCTURE),
    "truncate_prompt_tokens": _refused("shorten the prompt"),
}

UNSUPPORTED: Mapping[Dialect, Mapping[str, Unsupported]] = {
    "chat": {
        **_CACHE,
        **_OTHER_ENGINES,
        "add_special_tokens": _refused("the chat template writes them", False),
        "audio": _refused(_TEXT_ONLY),
        "echo": _refused("answers do not repeat the prompt", False),
        "function_call": _refused("send tool_choice in its place", "none"),
        "functions": _refused("send tools in their place", []),
        "modalities": _refused(_TEXT_ONLY, ["text"]),
        "moderation": _refused("this server moderates nothing"),
        "prediction": _hint(),
        "service_tier": _hint("auto", "default"),
        "store": _hint(False),
        "verbosity": _hint(),
        "web_search_options": _hint(),
    },
    "completions": {
        **_OTHER_ENGINES,
        "add_special_tokens": _refused("the tokenizer adds its own", True),
        "best_of": _refused("send n, and choose", 1),
        "suffix": _refused("put it into the prompt, as the model was taught", ""),
    },
    "responses": {
        **_CACHE,
        "access_programs": _hint(),
        "background": _refused("the server keeps no answers; leave it out, or stream", False),
        "background_options": _hint(),
        "context_management": _hint([]),
        "conversation": _refused(_STATELESS),
        "image": _hint(),
        "max_tool_calls": _hint(why=": it is of tools that a server runs, and this one runs none"),
        "moderation": _refused("this server moderates nothing"),
        "personality": _hint(),
        "previous_response_id": _refused(_STATELESS),
        "prompt": _refused("the server keeps no templates; send the text itself"),
        "service_tier": _hint("auto", "default"),
    },
    "messages": {
        "betas": _label(),
        "billing_policy": _hint(),
        "compaction": _refused("ask for a summary in a message"),
        "container": _hint(),
        "context_management": _hint(
            {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        ),
        "diagnostics": _hint(),
        "fallback_credit_token": _hint(),
        "fallbacks": _hint([]),
        "inference_geo": _hint(),
        "mcp_servers": _hint([], why=_CLIENT_RUNS),
        "service_tier": _hint("auto", "standard_only"),
        "speed": _hint("standard"),
        # With this code, Anthropic's client goes on without the field.
        "thread": _refused(_STATELESS, code="thread_unsupported_request"),
        "user_profile_id": _label(),
        "workspace_id": _label(),
    },
}
CODES = {name: row.code for rows in UNSUPPORTED.values() for name, row in rows.items() if row.code}


def without_unsupported(
    body: Mapping[str, Any], dialect: Dialect, ignored: Ignored | None
) -> dict[str, Any]:
    """The body without the fields of the table.

    Args:
        ignored: hears of hints; None: all that asks for anything is refused.

    Raises `PydanticCustomError` for a field that is refused.
    """
    table = UNSUPPORTED[dialect]
    for name in body.keys() & table.keys():
        row = table[name]
        if row.asks_for_nothing(body[name]):
            continue
        if ignored is None or row.verdict == "refused":
            about = {"name": name, "why": row.why}
            raise PydanticCustomError("not_supported", "{name} is not supported{why}", about)
        if row.verdict == "hint":
            ignored.add(name)
    return {name: value for name, value in body.items() if name not in table}
