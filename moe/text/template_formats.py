"""How a model writes calls of tools and reasoning, as its chat template shows."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, partial
from typing import TYPE_CHECKING

from moe.text.chat import render
from moe.text.detokenize import special_token_ids
from moe.tools.probe import Render, ToolSupport, probe_tools
from moe.tools.reasoning import ReasoningSupport, probe_reasoning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TemplateFormats:
    """What is found by probing the template of a tokenizer; each format when first asked for."""

    tokenizer: PreTrainedTokenizerBase | None
    no_tokenizer_reason: str
    eos_token_ids: frozenset[int]

    @cached_property
    def tools(self) -> ToolSupport:
        """Whether the model can be given tools, and how it calls them."""
        template = self._template()
        if isinstance(template, str):
            return ToolSupport(None, template)
        return probe_tools(template, list(self._special_texts().values()))

    @cached_property
    def reasoning(self) -> ReasoningSupport:
        """Whether it is known how the model writes what it thinks before it answers."""
        template = self._template()
        if isinstance(template, str):
            return ReasoningSupport(None, template)
        return probe_reasoning(template)

    @cached_property
    def call_tokens(self) -> dict[str, int]:
        """Special tokens that the model writes calls with: their texts and ids."""
        return {} if self.tools.format is None else self._written(self.tools.format.literals)

    @cached_property
    def reasoning_tokens(self) -> dict[str, int]:
        """Special tokens around reasoning, in the same way."""
        format = self.reasoning.format
        return {} if format is None else self._written(format.literals)

    def _template(self) -> Render | str:
        """The chat template, or why there is none."""
        if self.tokenizer is None:
            return self.no_tokenizer_reason
        if not self.tokenizer.chat_template:
            return "the model's tokenizer has no chat template"
        return partial(render, self.tokenizer)

    def _written(self, literals: Iterable[str]) -> dict[str, int]:
        written, ends = "\0".join(literals), self.eos_token_ids
        special = self._special_texts().items()
        return {text: i for i, text in special if text in written and i not in ends}

    def _special_texts(self) -> dict[int, str]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return {}
        ids = sorted(special_token_ids(tokenizer) | self.eos_token_ids)
        texts = {i: str(tokenizer.convert_ids_to_tokens(i) or "") for i in ids}
        return {i: text for i, text in texts.items() if text}
