"""Prompts of more than token ids: what the text model of a multimodal model is given for them.

A multimodal model turns a prompt with images into embeddings and positions, and hands these to its
text model, some with further rows (features that are added behind its first layers, modalities of
tokens). `caught` catches that call. `PromptRows` keeps it, and hands out what belongs to some of
the tokens, however the prompt is read; `given` puts it in place of what token ids give. Embeddings,
positions, masks and the cache are known by their names; of all else the dimension of tokens is
found by their number. Legend: T tokens, H hidden.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moe.network.attention import MaskRule
from moe.network.own_cache import CACHE_ARGUMENT, tensors_in

POSITIONS, EMBEDDINGS, MASK = "position_ids", "inputs_embeds", "attention_mask"
_IDS = "input_ids"
_OURS = {CACHE_ARGUMENT, "past_key_values", "cache_position", "use_cache", "return_dict"}
"""Arguments that a pass gives itself."""

_given: ContextVar[Mapping[str, Any] | None] = ContextVar("_given", default=None)
_caught: ContextVar[dict[str, Any] | None] = ContextVar("_caught", default=None)


class NotRows(ValueError):
    """An argument of a text model does not belong to tokens."""


class _Caught(Exception):
    """Ends a forward where its text model begins."""


@dataclass(frozen=True)
class _Rows:
    """Something with rows of tokens: of all (`dim`), or of those that a mask ``(T,)`` names."""

    value: Any
    dim: int
    mask: Tensor | None = None

    def part(self, start: int, stop: int) -> Any:
        if self.mask is not None:
            start, stop = int(self.mask[:start].sum()), int(self.mask[:stop].sum())
        return _map(lambda tensor: tensor.narrow(self.dim, start, stop - start), self.value)


class PromptRows:
    """Arguments of a text model for the T tokens of a prompt.

    Args:
        arguments: of its forward by name, for a prompt with one more token of text at its end.
        tokens: T.

    Attributes:
        offset: what the position of each later token differs by from its index.
        places: positions are given, so they need not be the tokens' indices.
        whole: a token sees later ones, so that the prompt must be read in one pass.

    Raises:
        NotRows: an argument has rows that are not those of tokens; or positions behind the prompt
            do not go on by one a token.
    """

    def __init__(self, arguments: Mapping[str, Any], tokens: int) -> None:
        self.tokens, self.offset, self.whole = tokens, 0, False
        found = {name: value for name, value in arguments.items() if name not in _OURS}
        embeddings = found.get(EMBEDDINGS)
        if not isinstance(embeddings, Tensor) or embeddings.shape[:2] != (1, tokens + 1):
            raise NotRows("the text model is not given embeddings of all tokens")
        mask = found.pop(MASK, None)
        self._constant: dict[str, Any] = {}
        given = list(mask.values()) if isinstance(mask, dict) else [mask]
        rules = [rule for rule in given if isinstance(rule, MaskRule)]
        if any(isinstance(rule, Tensor) and rule.ndim != 2 for rule in given):
            raise NotRows("the text model is given a mask of its own")
        if rules:
            self._constant[MASK] = mask
            self.whole = any(_looks_ahead(rule, tokens) for rule in rules)
        self._rows: dict[str, _Rows] = {}
        self.places = isinstance(found.get(POSITIONS), Tensor)
        if self.places:
            self.offset = _offset(found[POSITIONS], tokens)
        masks = [_token_mask(value, tokens + 1) for value in found.values()]
        for name, value in found.items():
            self._add(name, value, [mask for mask in masks if mask is not None])
        found.setdefault(_IDS, None)
        if found[_IDS] is None:
            self._constant[_IDS] = None

    def _add(self, name: str, value: Any, masks: list[Tensor]) -> None:
        tensors = list(tensors_in(value))
        total = self.tokens + 1
        if not tensors:
            return  # a flag: the pass has its own
        if name == POSITIONS and all(t.shape[-1] == total for t in tensors):
            self._rows[name] = _Rows(value, -1)
        elif all(t.ndim > 1 and t.shape[:2] == (1, total) for t in tensors):
            self._rows[name] = _Rows(value, 1)
        else:
            own = (mask for mask in masks if all(len(t) == int(mask.sum()) for t in tensors))
            mask = next(own, None)
            if mask is None:
                shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
                raise NotRows(f"{name} {shapes} has no rows of {total} tokens")
            self._rows[name] = _Rows(value, 0, mask)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(t.nbytes for rows in self._rows.values() for t in tensors_in(rows.value))

    def part(self, start: int, stop: int) -> dict[str, Any]:
        """Arguments for the tokens ``[start, stop)``; see `given`."""
        return self._constant | {name: r.part(start, stop) for name, r in self._rows.items()}

    @cached_property
    def keys(self) -> list[int]:
        """``T`` negative numbers that stand for the content of each token, for `PrefixCache`: two
        are equal only if the text model is given the same."""
        lines = [
            _bytes(tensor.movedim(rows.dim, 0).reshape(self.tokens + 1, -1))
            for rows in self._rows.values()
            if rows.mask is None
            for tensor in tensors_in(rows.value)
        ]
        keys = []
        for token in range(self.tokens):
            digest = hashlib.blake2b(digest_size=8)
            for line in lines:
                digest.update(line[token].data)
            for rows in self._rows.values():
                if rows.mask is not None and rows.mask[token]:
                    for tensor in tensors_in(rows.part(token, token + 1)):
                        digest.update(_bytes(tensor).data)
            keys.append(-1 - (int.from_bytes(digest.digest(), "little") >> 1))
        return keys


def watch(decoder: nn.Module) -> None:
    """Let `given` and `caught` serve this text model from now on."""
    names = list(inspect.signature(decoder.forward).parameters)

    def replace(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        given, found = _given.get(), _caught.get()
        if given is None and found is None:
            return None
        named = dict(zip(names, args, strict=False)) | kwargs
        if found is not None:
            found.update(named)
            raise _Caught
        return (), named | dict(given or {})

    decoder.register_forward_pre_hook(replace, with_kwargs=True)


@contextmanager
def given(arguments: Mapping[str, Any] | None) -> Iterator[None]:
    """Give the text model these arguments (`PromptRows.part`) in place of what token ids give."""
    token = _given.set(arguments)
    try:
        yield
    finally:
        _given.reset(token)


def caught(forward: Callable[[], object]) -> dict[str, Any]:
    """The arguments that a forward gives to its text model, which does not run."""
    found: dict[str, Any] = {}
    token = _caught.set(found)
    try:
        forward()
    except _Caught:
        return found
    finally:
        _caught.reset(token)
    raise NotRows("the text model was not called")


def _offset(positions: Tensor, tokens: int) -> int:
    if positions.shape[-1] != tokens + 1:
        raise NotRows(f"positions {tuple(positions.shape)} are not of {tokens + 1} tokens")
    last = positions[..., -1].unique()
    if len(last) > 1:  # a first row of plain indices says only which tokens are one sequence
        last = positions[1:, ..., -1].unique()
    if len(last) != 1:
        raise NotRows("the position behind the prompt is not one number")
    return int(last) - tokens


def _bytes(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor, those of its last dimension side by side."""
    plain = tensor.cpu().clone(memory_format=torch.contiguous_format)
    return np.asarray(plain.view(torch.uint8).numpy())


def _looks_ahead(rule: MaskRule, tokens: int) -> bool:
    if rule.is_plain(tokens):
        return False
    mask = rule.evaluate(tokens, tokens, torch.device("cpu")).expand(tokens, tokens)
    return bool(mask.triu(1).any())


def _token_mask(value: Any, total: int) -> Tensor | None:
    if isinstance(value, Tensor) and value.dtype == torch.bool and value.shape == (1, total):
        return value[0].cpu()
    return None


def _map(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _map(change, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map(change, each) for each in value)
    return value
