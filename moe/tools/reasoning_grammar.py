"""Grammars of answers that must keep to a structure and may reason before it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from moe.sampling.structure import Structure
from moe.tools.call_grammar import ANY_TEXT, cut, json_of, quoted, written
from moe.tools.reasoning import ReasoningFormat

CAN_FOLLOW = ("json_schema", "choice")
"""Kinds of structures that requests ask for and that can follow reasoning."""


def after_reasoning(
    structure: Structure, format: ReasoningFormat, special: Mapping[str, int], *, inside: bool
) -> Structure:
    """The structure behind free text that ends with what closes reasoning.

    Args:
        structure: one of the kinds above, or a grammar of `CallGrammar`.
        special: ids of the special tokens that reasoning is written with, by their texts.
        inside: the prompt has opened the reasoning; else the answer may, or may do without.
    """
    first, *rest = cut(format.close, special)
    closed = written("".join(rest), special)
    thought = (
        f"thought: THOUGHT {written(first, special)} {closed}\nTHOUGHT: {ANY_TEXT}"
        if first in special
        else f"thought: closed {closed}\nclosed[suffix={quoted(first)}]: {ANY_TEXT}"
    )
    opened = "" if inside else f"BLANK? {written(format.open, special)} "
    start = f"start: {opened}thought BLANK? answer"
    if not inside:
        start += f" | {written(format.lead, special)} answer"
    blank = r"BLANK: /[ \n]{1,4}/"
    text = "\n".join([start, thought, blank, _answer(structure)]) + "\n"
    return Structure.grammar(text, structure.parts or [(structure.name, structure)])


def _answer(structure: Structure) -> str:
    if structure.kind == "json_schema":
        return f"answer: {json_of(json.loads(structure.source))}"
    if structure.kind == "choice":
        return f"answer: {' | '.join(map(quoted, json.loads(structure.source)))}"
    assert structure.source.startswith("start:")
    return structure.source.replace("start:", "answer:", 1)
