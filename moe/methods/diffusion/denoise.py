"""One step of refinement of the canvases of several sequences, and what stays of each.

A model's generation code has a function for it: a pass of the decoder over one canvas, then a
sampler that keeps some of the predictions, and a rule that says whether the canvas is final.
`Denoiser` does the same for all canvases of an engine step: they are the rows of one pass, in which
only attention sees each by itself (its keys are those of its own sequence), and the sampler's
numbers are computed once. What it draws is what torch would draw for the lane alone. A pass may
leave rows of a canvas out (`moe.methods.diffusion.kept_rows`).

A pass also reads what the pass before said: the model turns those logits into soft embeddings. The
model's own decoder does so at once, and only these stay until then: of a vocabulary of 262,144
words, 268 MB of logits would be kept for each canvas of 256 tokens, and 3 MB are.

Which predictions stay is a policy, `Acceptance`: it looks at one pass, and returns a mask.
Legend: C tokens of a canvas, R rows of a pass, V vocabulary, H hidden size, N key/value heads, D
head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels import draw_rows
from moe.methods.diffusion import DiffusionSettings
from moe.methods.diffusion.cache_view import CacheView, layer_windows
from moe.methods.diffusion.kept_rows import KeptRows, Refresh, Said
from moe.network.lanes import LaneRandom
from moe.sampling.batch import Token, score

STEP = "_denoising_step"
"""The function of a model's generation code that is done for all canvases together."""
_OWN, _CANVASES = "sdpa", "moe_canvases"
_CONDITIONING = "self_conditioning"
"""The module of a decoder that adds soft embeddings of the pass before to those of the canvas."""
_ARGUMENTS = frozenset({
    *("decoder_forward", "current_canvas", "argmax_canvas", "input_ids", "decoder_position_ids"),
    *("self_conditioning_logits", "mask_mapping", "cache", "finished_denoising", "cur_step"),
    *("sampler", "logits_processor", "diffusion_stopping_criteria", "model_kwargs"),
})  # fmt: skip
_LOGIT_BYTES = 1 << 26  # of the canvases of one pass, at most, unless one canvas alone has more
_MOST = 16  # canvases of one pass: more share no Python worth counting, and take memory
_DRAWN_AT_ONCE = 1 << 20  # random numbers in float64

Result = tuple[Tensor, Tensor, Tensor, Tensor]
"""The next canvas, the likeliest tokens, what the next pass reads of this one, and whether it is
final."""


@dataclass(frozen=True)
class Acceptance:
    """Which predictions of a pass stay on the canvas; the others become noise again.

    Attributes:
        max_steps: passes of a canvas at most; None: as many as the model's schedule has.
        refresh: which rows a pass computes; None: all.
    """

    max_steps: int | None = None
    refresh: Refresh | None = None

    @classmethod
    def of(cls, settings: DiffusionSettings) -> Acceptance:
        """As a profile asks for it."""
        return cls(settings.max_steps, Refresh.of(settings.refresh))

    def kept(self, entropy_1C: Tensor, probabilities_1CV: Tensor, own_bound: float) -> Tensor:
        """``(1, C)`` bool: the predictions that stay, by the model's rule of bounded entropy.

        Args:
            entropy_1C: of each prediction, in nats.
            probabilities_1CV: of all tokens, or of the likeliest alone.
            own_bound: on the entropy, of the model's sampler.
        """
        ascending, places = torch.sort(entropy_1C, dim=-1)
        within = ascending.cumsum(-1) - ascending <= own_bound
        return torch.zeros_like(within).scatter(-1, places, within)


OWN = Acceptance()


@dataclass(eq=False)
class CanvasCall:
    """A step that a lane's generation code asks for.

    Attributes:
        given: the arguments of the model's own function.
        random: of the lane.
        greedy: predict each position's likeliest token instead of drawing one.
        scored: most likely tokens of each position whose log probabilities are wanted beside the
            likeliest one's; None: none are.
        kept: of the sequence's canvas, if passes leave rows out.
        result: what the function would have returned, or why there is none.
        scores: the likeliest tokens with their log probabilities, if they are wanted.
    """

    given: dict[str, Any]
    acceptance: Acceptance
    random: LaneRandom
    greedy: bool
    scored: int | None = None
    kept: KeptRows | None = None
    result: Result | Exception | None = None
    scores: list[Token] | None = None


class Denoiser:
    """Does steps of refinement in place of a model's generation code.

    Args:
        model: of which `why_not` says nothing.
    """

    def __init__(self, model: Any) -> None:
        self._dtype: torch.dtype = model.get_decoder().embed_tokens.weight.dtype
        vocabulary: int = model.config.get_text_config(decoder=True).vocab_size
        self._most = canvases_of_a_pass(4 * vocabulary * model.config.canvas_length)
        self._no_keys = _NoKeys(len(layer_windows(model.config)), self._dtype, model.device)
        self._decoder = model.get_decoder()
        getattr(self._decoder, _CONDITIONING).register_forward_pre_hook(_condition)
        for module in model.modules():
            config = getattr(module, "config", None)
            if getattr(config, "_attn_implementation", None) == _OWN:
                config._attn_implementation = _CANVASES  # type: ignore[union-attr]

    @staticmethod
    def why_not(model: Any) -> str:
        """Why a model's steps cannot be done here; empty if they can."""
        own = getattr(model, STEP, None)
        if own is None or set(inspect.signature(own).parameters) != _ARGUMENTS:
            return f"its generation code has no {STEP} that is known"
        try:
            settings, _ = model._prepare_generation_config(None)
            sampler = model._prepare_sampler(settings)
            stop = model._prepare_diffusion_stopping_criteria(settings)
        except Exception as error:  # generation code of an architecture that is not known
            return f"its generation code has no sampler that can be asked for ({error})"
        conditioning = getattr(model.get_decoder(), _CONDITIONING, None)
        if conditioning is None or len(inspect.signature(conditioning.forward).parameters) != 2:
            return f"its decoder has no {_CONDITIONING} that is known"
        wanted = [(sampler, "entropy_bound"), (sampler, "initialize_canvas")]
        if stop is not None:
            wanted += [(stop, "stability_threshold"), (stop, "confidence_threshold")]
        missing = [name for part, name in wanted if not hasattr(part, name)]
        if missing:
            return f"its generation code has no {' and no '.join(missing)}"
        implementation = model.config.get_text_config(decoder=True)._attn_implementation
        if implementation not in (_OWN, _CANVASES):
            return f"its attention is {implementation}, not {_OWN}"
        return ""

    @staticmethod
    def takes(given: dict[str, Any]) -> bool:
        """Whether a step is one that canvases can do together: one sequence, without padding."""
        return (
            len(given["current_canvas"]) == 1
            and all(mask is None for mask in given["mask_mapping"].values())
            and not given["cache"].is_compileable
            and set(given) == _ARGUMENTS - {"model_kwargs"}
        )

    def groups(self, calls: Sequence[CanvasCall]) -> Iterator[list[CanvasCall]]:
        """Calls that one pass can serve."""
        for begin in range(0, len(calls), self._most):
            yield [*calls[begin : begin + self._most]]

    def run(self, calls: Sequence[CanvasCall]) -> list[range]:
        """One pass of the canvases of `groups`, and its results; the rows of each in the pass.
        Called in a lane."""
        parts, end = list[_Part](), 0
        for call in calls:
            parts.append(_Part(call, self._places(call), end))
            end = parts[-1].rows.stop
        raw = self._logits(parts)
        for part in parts:
            try:
                part.call.result = self._decide(part.call, raw[:, part.rows.start : part.rows.stop])
            except Exception as error:  # of this canvas only
                part.call.result = error
        del raw
        self._soften([part for part in parts if not isinstance(part.call.result, Exception)])
        return [part.rows for part in parts]

    def _places(self, call: CanvasCall) -> Tensor | slice:
        """The rows of a canvas that a pass computes."""
        if call.kept is None:
            return slice(None)
        embedded = self._decoder.embed_tokens(call.given["current_canvas"])
        soft = call.given["self_conditioning_logits"]
        read = torch.zeros_like(embedded) if soft is None else soft
        inputs = getattr(self._decoder, _CONDITIONING)(embedded, read)
        return call.kept.choose(inputs, first=soft is None)

    def _logits(self, parts: Sequence[_Part]) -> Tensor:
        """``(1, R, V)`` raw logits."""
        before = [part.call.given["self_conditioning_logits"] for part in parts]
        some = next((rows for rows in before if rows is not None), None)
        soft = None
        if some is not None:  # a first pass reads zeros
            each = [torch.zeros_like(some) if rows is None else rows for rows in before]
            soft = _packed(each, parts)
        with _within(_parts, parts), _within(_conditioning, soft):
            logits: Tensor = self._forward(parts, None).logits
        return logits

    def _soften(self, parts: Sequence[_Part]) -> None:
        """Let soft embeddings be all that is kept of the logits of canvases that go on."""
        results = [cast(Result, part.call.result) for part in parts]
        going = [
            (part, result[2])
            for part, result in zip(parts, results, strict=True)
            if part.call.given["cur_step"] > 1 and not result[3]
        ]
        soft = dict(zip((part for part, _ in going), self._embedded(going), strict=True))
        for part, (canvas, likeliest, _, final) in zip(parts, results, strict=True):
            rows = soft.get(part, likeliest[:, :0])
            before = part.call.given["self_conditioning_logits"]
            if part in soft and rows.shape[1] < likeliest.shape[1]:
                rows = before.index_copy(1, part.places, rows)
            part.call.result = canvas, likeliest, rows, final

    def _embedded(self, going: Sequence[tuple[_Part, Tensor]]) -> Sequence[Tensor]:
        """``(1, R, H)`` of each canvas: what the decoder makes of its ``(1, R, V)`` logits."""
        if not going:
            return ()
        parts, logits = [part for part, _ in going], [rows for _, rows in going]
        try:
            with _within(_conditioning, _TAKE):  # a copy of one is as large as it
                self._forward(parts, torch.cat(logits, 1) if len(logits) > 1 else logits[0])
        except _Softened as ended:
            return ended.rows_1RH.split([rows.shape[1] for rows in logits], 1)
        raise RuntimeError(f"a pass of the decoder goes past its {_CONDITIONING}")

    def _forward(self, parts: Sequence[_Part], logits_1RV: Tensor | None) -> Any:
        given = [part.call.given for part in parts]
        return given[0]["decoder_forward"](
            cache=self._no_keys,
            decoder_input_ids=_packed([each["current_canvas"] for each in given], parts),
            self_conditioning_logits=logits_1RV,
            decoder_attention_mask=given[0]["mask_mapping"],
            decoder_position_ids=_packed([each["decoder_position_ids"] for each in given], parts),
        )

    def _decide(self, call: CanvasCall, raw_1RV: Tensor) -> Result:
        """What the model's own function makes of the logits of a canvas; the result has logits of
        the rows that were computed."""
        given, sampler = call.given, call.given["sampler"]
        step = torch.tensor(given["cur_step"], device=raw_1RV.device, dtype=torch.int32)
        logits = given["logits_processor"](given["input_ids"], raw_1RV, cur_step=step)
        likeliest, probabilities = logits.argmax(-1), logits.softmax(-1, dtype=torch.float32)
        entropy = entropies(logits, probabilities, likeliest)
        if not bool(entropy.isfinite().all()):  # torch's own draw refuses them, too
            raise RuntimeError("a canvas has logits that are not finite numbers")
        if call.scored is not None:
            call.scores = score(likeliest[0].tolist(), raw_1RV[0], call.scored)
        with call.random.active():
            drawn = draw(probabilities[0])[None]
            noise = sampler.initialize_canvas(1, raw_1RV.device)
        said = Said(likeliest, likeliest if call.greedy else drawn, entropy, probabilities)
        if call.kept is not None:
            said, call.scores = call.kept.merge(said, call.scores)
        stays = call.acceptance.kept(said.entropy, said.probabilities, sampler.entropy_bound)
        canvas = torch.where(stays, said.drawn, noise)
        final = _is_final(given["diffusion_stopping_criteria"], said.likeliest, said.entropy)
        return canvas, said.likeliest, logits.to(self._dtype), given["finished_denoising"] | final


def canvases_of_a_pass(logit_bytes: int) -> int:
    """How many canvases share a pass at most, of which each has so many bytes of logits."""
    return min(_MOST, max(1, _LOGIT_BYTES // logit_bytes))


def entropies(logits_1CV: Tensor, probabilities_1CV: Tensor, likeliest_1C: Tensor) -> Tensor:
    """``(1, C)`` in nats: what ``torch.distributions.Categorical`` says, in fewer passes over the
    logits; not a number where they are not."""
    likeliest_1C1 = likeliest_1C[..., None]
    behind_1CV = logits_1CV - logits_1CV.gather(-1, likeliest_1C1)
    lowest = torch.finfo(behind_1CV.dtype).min  # a token that cannot be adds nothing
    behind_1C = behind_1CV.clamp_(min=lowest).mul_(probabilities_1CV).sum(-1)
    return -probabilities_1CV.gather(-1, likeliest_1C1)[..., 0].log() - behind_1C


def draw(probabilities_CV: Tensor) -> Tensor:
    """``(C,)``: what ``torch.multinomial(probabilities, 1)`` draws with the same random numbers.

    On CPUs torch makes an exponential variate of each in turn, by itself; this makes the same
    uniform ones all at once, and few variates of them.
    """
    if probabilities_CV.device.type != "cpu":
        return torch.multinomial(probabilities_CV, 1)[:, 0]
    rows = max(1, _DRAWN_AT_ONCE // probabilities_CV.shape[1])
    drawn = []
    for part in probabilities_CV.split(rows):
        drawn.append(draw_rows(part, torch.rand(part.shape, dtype=torch.float64)))
    return torch.cat(drawn)


def _is_final(criteria: Any, likeliest_1C: Tensor, entropy_1C: Tensor) -> Tensor:
    """``(1,)`` bool: the tokens have been the same for long enough, and are certain enough."""
    if criteria is None:
        return torch.zeros(1, dtype=torch.bool, device=entropy_1C.device)
    count = criteria.stability_threshold
    history: list[Tensor] = criteria.argmax_canvas_history or []
    stable = len(history) == count and all(bool((past == likeliest_1C).all()) for past in history)
    criteria.argmax_canvas_history = [*history, likeliest_1C][-count:] if count else []
    if not stable:
        return torch.zeros(1, dtype=torch.bool, device=entropy_1C.device)
    certain: Tensor = entropy_1C.mean(-1) < criteria.confidence_threshold
    return certain


class _NoKeys:
    """Stands in for the cache in a pass of canvases: keys are added in `_attention`."""

    is_compileable = False

    def __init__(self, layers: int, dtype: torch.dtype, device: torch.device) -> None:
        nothing = torch.empty(0, dtype=dtype, device=device)  # may be joined with any rows
        self.layers = [SimpleNamespace(keys=nothing, values=nothing)] * layers


@dataclass(eq=False)
class _Part:
    """The rows of one canvas in a pass.

    Attributes:
        places: of them on the canvas.
        begin: the first one in the pass.
    """

    call: CanvasCall
    places: Tensor | slice
    begin: int

    @property
    def rows(self) -> range:
        """Of the pass."""
        canvas = self.call.given["current_canvas"].shape[1]
        size = canvas if isinstance(self.places, slice) else len(self.places)
        return range(self.begin, self.begin + size)


def _packed(canvases: Sequence[Tensor], parts: Sequence[_Part]) -> Tensor:
    """``(1, R, ...)`` of ``(1, C, ...)`` of each part."""
    return torch.cat([rows[:, part.places] for rows, part in zip(canvases, parts, strict=True)], 1)


# Of the running lane; every greenlet has a context of its own.
_parts: ContextVar[Sequence[_Part]] = ContextVar("_parts", default=())
"""The canvases of its pass."""
_TAKE = object()
_conditioning: ContextVar[Any] = ContextVar("_conditioning", default=None)
"""What the canvases of its pass read of the pass before, ``(1, R, H)``; `_TAKE`: end the pass where
that is known; None: as the model's own code says."""
_Value = TypeVar("_Value")


@contextmanager
def _within(variable: ContextVar[_Value], value: _Value) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class _Softened(Exception):
    """Ends a pass that only was to know what the next one reads."""

    def __init__(self, rows_1RH: Tensor) -> None:
        super().__init__()
        self.rows_1RH = rows_1RH


def _condition(_: nn.Module, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
    """A hook before the module of `_CONDITIONING`."""
    soft = _conditioning.get()
    if soft is _TAKE:
        raise _Softened(given[1])
    return None if soft is None else (given[0], soft)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention interface of transformers: each canvas sees the keys of its own sequence.

    Args:
        query: ``(1, heads, R, D)``.
        key, value: ``(1, N, R, D)`` of the canvases of a shared pass; else as for `_OWN`.
    """
    own: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS[_OWN]
    parts = _parts.get()
    if not parts:
        return own(module, query, key, value, attention_mask, **kwargs)
    layer, rows = cast(int, module.layer_idx), []
    for part in parts:
        at = slice(part.rows.start, part.rows.stop)
        fresh = key[:, :, at], value[:, :, at]
        if part.call.kept is not None:
            fresh = part.call.kept.join(layer, *fresh)
        cache: CacheView = part.call.given["cache"]
        keys, values = (
            torch.cat(both, -2) for both in zip(cache.layers[layer].seen(), fresh, strict=True)
        )
        rows.append(own(module, query[:, :, at], keys, values, None, **kwargs)[0])
    return torch.cat(rows, 1), None


AttentionInterface.register(_CANVASES, _attention)
AttentionMaskInterface.register(_CANVASES, ALL_MASK_ATTENTION_FUNCTIONS[_OWN])
