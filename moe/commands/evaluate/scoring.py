"""Score a model on a text, window by window, and compare it with another reading of the same text.

A `WindowReading` has the log probabilities and the chosen experts of a window. A reading may
replace the experts of some layers, which measures the effect of one layer's precision without a
second model. Legend: T tokens of a window, V vocabulary, L MoE layers, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kernels import experts_forward
from kernels.reference import AnyExperts
from moe.errors import RequestError
from moe.kv.blocks import BlockPool
from moe.model import MoE
from moe.network.backbone import SHORT, Backbone
from moe.network.lanes import ExpertCall, run_lanes
from moe.network.moe_layer import MoELayers
from moe.network.packed_pass import Work
from routing import Phase, Routing

WINDOW = 512
"""Most tokens of a window; its first token is not predicted."""

_ROWS = 64  # compared at once: with a large vocabulary, a window's rows are as large as a layer


@dataclass(frozen=True, eq=False)
class WindowReading:
    """A model's output for a window.

    Attributes:
        token_ids: T of them.
        logprobs_TV: float32, of the token after each.
        experts_LTK: the experts that the routers chose for each token, ascending; -1 for none.
        weights_LTK: float32, their routing weights.
    """

    token_ids: Sequence[int]
    logprobs_TV: Tensor
    experts_LTK: Tensor
    weights_LTK: Tensor

    @property
    def bits(self) -> float:
        """Information of the tokens after the first."""
        after = torch.tensor(self.token_ids[1:], device=self.logprobs_TV.device)
        taken = self.logprobs_TV[:-1].gather(1, after[:, None])
        return float(-taken.double().sum()) / math.log(2)


def read_text(path: Path) -> str:
    """The text of a file. Raises `RequestError` if it cannot be read."""
    try:
        return path.read_bytes().decode()  # `Path.read_text` would change "\r\n" to "\n"
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the text {path}: {error}") from error


def windows_of(model: MoE, text: str, tokens: int | None = None) -> list[list[int]]:
    """The first ``tokens`` tokens of a text, in windows that overlap by one token, so that each
    token but the first is predicted once.

    Raises:
        RequestError: the model's context is a single token.
    """
    ids = model.codec.encode(text)[:tokens] if text else []
    size = min(WINDOW, model.context_length or WINDOW)
    if size < 2:
        raise RequestError(
            "the context is 1 token, and a token is predicted from at least one before it; "
            "raise model.context_length"
        )
    return [ids[at : at + size] for at in range(0, len(ids) - 1, size - 1)]


@contextmanager
def read_once(backbone: Backbone, experts: MoELayers) -> Iterator[None]:
    """Read every token once within this context, whatever a method does."""
    reader, transform = backbone.reader, experts.transform
    backbone.set_reader(None)
    experts.set_transform(None)
    try:
        yield
    finally:
        backbone.set_reader(reader)
        experts.set_transform(transform)


@torch.inference_mode()
def read(
    model: MoE,
    token_ids: Sequence[int],
    instead: Mapping[int, AnyExperts] | None = None,
    *,
    routed_as: WindowReading | None = None,
    phase: Phase = "prefill",
) -> WindowReading:
    """Read one window. Tokens that a `PassReader` excludes keep the probability that they have
    without it, so that every text has a score.

    Args:
        instead: experts that replace the model's own, by layer.
        routed_as: a reading of the same tokens, whose routing is used instead of the routers'.
        phase: the phase that routing policies see.
    """
    if model.backbone.reader is None:
        return _read(model, token_ids, instead or {}, routed_as, phase)
    with read_once(model.backbone, model.experts):
        plain = _read(model, token_ids, instead or {}, routed_as, phase).logprobs_TV
    reading = _read(model, token_ids, instead or {}, routed_as, phase)
    cut_TV = reading.logprobs_TV == -torch.inf
    share_T1 = plain.masked_fill(cut_TV, -torch.inf).logsumexp(-1, keepdim=True)
    return replace(reading, logprobs_TV=plain.where(cut_TV, reading.logprobs_TV + share_T1))


def _read(
    model: MoE,
    token_ids: Sequence[int],
    instead: Mapping[int, AnyExperts],
    routed_as: WindowReading | None,
    phase: Phase,
) -> WindowReading:
    chosen: dict[int, Routing] = {}

    def run(layer: int, calls: Sequence[ExpertCall]) -> Sequence[Tensor | Exception]:
        (call,) = calls
        chosen[layer] = call.routing
        if routed_as is not None:
            given = Routing(routed_as.experts_LTK[layer], routed_as.weights_LTK[layer])
            call = replace(call, routing=given)
        if layer not in instead:
            return model.experts.run(layer, [call])
        own = call.hidden_states, call.routing.expert_ids, call.routing.weights
        return [experts_forward(*own, instead[layer])]

    backbone = model.backbone
    work = Work(list(token_ids), backbone.new_cache(len(token_ids)), all_logits=True)
    lanes = backbone.lanes([work], phase)
    run_lanes(lanes, run)
    (logits,) = lanes[0].result()
    routings = [chosen[layer] for layer in sorted(chosen)]
    ids, weights = (
        torch.stack([getattr(own, name)[: len(token_ids)] for own in routings])
        for name in ("expert_ids", "weights")
    )
    return WindowReading(token_ids, logits.log_softmax(-1), ids, weights)


@torch.inference_mode()
def price_kv_policy(model: MoE, token_ids: Sequence[int]) -> float | None:
    """Return how many times as many bits the second halves of windows take under
    `memory.kv_policy`, read by decode steps after the first halves; None if the text is shorter
    than four times the tokens that the policy leaves, or the model has no policy."""
    pool = model.backbone.pool
    policy = None if pool is None else pool.policy
    if pool is None or policy is None or not policy.lossy:
        return None
    size = min(4 * policy.tokens, model.context_length or 4 * policy.tokens)
    windows = [token_ids[at : at + size] for at in range(0, len(token_ids) - size + 1, size)]
    bits = []
    for own in (policy, None):
        model.backbone.blocks = BlockPool(pool.memory, pool.windows, own)
        try:
            bits.append(sum(_bits_by_steps(model, window) for window in windows))
        finally:
            model.backbone.blocks = pool
    return bits[0] / bits[1] if windows else None


def _bits_by_steps(model: MoE, token_ids: Sequence[int]) -> float:
    half = len(token_ids) // 2
    cache = model.backbone.new_cache(len(token_ids))
    parts = [token_ids[:half]]
    parts += [token_ids[at : at + SHORT] for at in range(half, len(token_ids) - 1, SHORT)]
    rows = []
    for part in parts:
        work = [Work(list(part), cache, all_logits=part is not parts[0])]
        lanes = model.backbone.lanes(work, "decode" if cache.length else "prefill")
        run_lanes(lanes, model.experts.run)
        rows.append(lanes[0].result()[0])
        if len(rows) == 1:
            cache.prompt_read()
    found = torch.cat(rows)[: len(token_ids) - half].log_softmax(-1)
    wanted = torch.tensor(token_ids[half:])[:, None]
    return float(-found.gather(1, wanted).double().sum()) / math.log(2)


def divergence(own_TV: Tensor, other_TV: Tensor) -> float:
    """Sum over rows of KL(own || other) in bits, of log probabilities."""
    pairs = zip(own_TV.split(_ROWS), other_TV.split(_ROWS), strict=True)
    nats = sum(float((own.exp() * (own - other)).sum(-1).double().sum()) for own, other in pairs)
    return nats / math.log(2)


@dataclass(frozen=True)
class Difference:
    """The differences of readings from those of the original model.

    Attributes:
        kl: mean over tokens of KL(original || other), in bits.
        agreement: share of tokens whose most likely next token is the same.
        routing: for each MoE layer, the share of the original's chosen experts that are chosen.
    """

    kl: float
    agreement: float
    routing: tuple[float, ...]


class Score:
    """Sums over readings and over their differences from the original's readings."""

    def __init__(self) -> None:
        self.bits = 0.0
        self.predicted = 0
        self._tokens = 0
        self._kl = 0.0
        self._same = 0
        self._kept: Tensor | float = 0.0
        self._chosen: Tensor | float = 0.0

    def add(self, reading: WindowReading, original: WindowReading | None = None) -> None:
        self.bits += reading.bits
        self.predicted += len(reading.token_ids) - 1
        if original is None:
            return
        own, other = original.logprobs_TV, reading.logprobs_TV
        self._tokens += len(own)
        self._kl += divergence(own, other)
        self._same += int((own.argmax(-1) == other.argmax(-1)).sum())
        before, after = original.experts_LTK, reading.experts_LTK
        kept = (before[..., :, None] == after[..., None, :]).any(-1) & (before >= 0)
        self._kept = self._kept + kept.sum((1, 2)).double()
        self._chosen = self._chosen + (before >= 0).sum((1, 2)).double()

    def difference(self) -> Difference:
        assert isinstance(self._kept, Tensor), "nothing was compared"
        return Difference(
            max(self._kl / self._tokens, 0.0),
            self._same / self._tokens,
            tuple((self._kept / self._chosen).tolist()),
        )
