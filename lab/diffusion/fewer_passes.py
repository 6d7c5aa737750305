"""What other rules of fewer passes could give a model that writes canvases (`lab.diffusion`).

`watch` keeps what each pass of the model's own schedule reads and says. What follows from that
changes no token:

`drafts` (FreeDave, 2510.00294): how often a canvas is what earlier passes foresee, so that a pass
over several canvases could verify it. Random numbers to come are known, so all of a canvas is
drafted, noise included. But a pass also reads the logits of the pass before, which nobody knows yet
when it is verified: "with older logits" says how often it makes the same canvas of those before.

`anchors` (LocalLeap, 2510.07081): how often a likely token within 4 of a likelier one is what its
place ends with, beside tokens as likely that are far from any.

`settling`: from which pass on tokens are what they end as, which bounds each rule that ends early;
how many are the same in two passes, which bounds what keys and values that are kept could save.

`borders` (AdaBlock, 2509.26432) writes: of each canvas it keeps the first tokens, a share of them
or those up to a likely border, and begins the next one behind them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from moe import MoE, SamplingParams
from moe.kv.cache import KVCache
from moe.methods.diffusion.denoise import OWN, Acceptance, CanvasCall, draw, entropies
from moe.methods.diffusion.driver import CanvasDriver
from moe.methods.diffusion.evaluate import driver_of
from moe.network.lanes import Lane, LaneRandom, run_lanes

Row = dict[str, Any]
AHEAD = (1, 2, 3)
RADIUS = 4
BOUNDS = ((0.9, 0.75), (0.7, 0.5), (0.5, 0.3), (0.3, 0.2))
"""Least probabilities of an anchor and of a token near one; the first ones are LocalLeap's."""
BORDER = 0.3
"""Least probability of a border, as AdaBlock has it for a model trained from scratch."""


@dataclass(frozen=True)
class Watching(Acceptance):
    """The model's own rule, which keeps what each pass says.

    Attributes:
        said: of each pass, ``(1, C)`` entropies in nats and ``(1, C, V)`` probabilities.
    """

    said: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def kept(self, entropy_1C: Tensor, probabilities_1CV: Tensor, own_bound: float) -> Tensor:
        self.said.append((entropy_1C, probabilities_1CV))
        return super().kept(entropy_1C, probabilities_1CV, own_bound)


class Pass(NamedTuple):
    """A pass over a canvas but for the first of a canvas.

    Attributes:
        call: with what it reads.
        random: a copy of its lane's, as the pass finds it.
        before: entropies and probabilities of the pass before, at its temperature.
    """

    call: CanvasCall
    random: LaneRandom
    before: tuple[Tensor, Tensor]

    @property
    def canvas(self) -> Tensor:
        """``(1, C)`` token ids."""
        return self.call.given["current_canvas"]

    def foreseen(self, earlier: Pass) -> Tensor:
        """``(1, C)``: the canvas that it would make if it said what the pass before ``earlier``
        did."""
        logits = earlier.before[1].log() * (self._cold(0) / earlier._cold(1))
        probabilities = logits.softmax(-1)
        entropy = entropies(logits, probabilities, logits.argmax(-1))
        return self.next_canvas(entropy, probabilities)

    def _cold(self, before: int) -> Tensor:
        """Return what its logits, or those of so many passes before, are multiplied by."""
        given = self.call.given
        step = torch.tensor(given["cur_step"] + before, dtype=torch.int32)
        return given["logits_processor"](given["input_ids"], torch.ones(1), cur_step=step)

    def next_canvas(self, entropy_1C: Tensor, probabilities_1CV: Tensor) -> Tensor:
        """``(1, C)``: what it makes of these by its random numbers."""
        sampler = self.call.given["sampler"]
        with copy.copy(self.random).active():
            drawn = draw(probabilities_1CV[0])[None]
            noise = sampler.initialize_canvas(1, entropy_1C.device)
        kept = OWN.kept(entropy_1C, probabilities_1CV, sampler.entropy_bound)
        return torch.where(kept, drawn, noise)


class Canvas(NamedTuple):
    """Passes over a canvas but for the first, and the ``(C,)`` tokens it ends with."""

    passes: list[Pass]
    final: Tensor

    def said(self) -> Iterator[tuple[Tensor, Tensor]]:
        """``(C,)`` likeliest tokens of each pass but the last, and their probabilities."""
        for one in self.passes:
            probability, token = one.before[1][0].max(-1)
            yield token, probability


@torch.inference_mode()
def watch(model: MoE, prompts: Sequence[list[int]]) -> list[Canvas]:
    """One canvas behind each prompt, all together, by the model's own schedule."""
    driver = denoising(model)
    size = driver.canvas_length
    rules = [Watching() for _ in prompts]
    lanes = [
        driver.lane(prompt, size, seed, acceptance=own, rows=KVCache(len(prompt) + size))
        for seed, (prompt, own) in enumerate(zip(prompts, rules, strict=True))
    ]
    canvases = [Canvas([], torch.empty(0)) for _ in lanes]
    while running := [lane for lane in lanes if not lane.ended]:
        driver.step(running, model.experts.run)
        for at, lane in enumerate(lanes):
            if lane.asked is not None and (said := rules[at].said):
                random = copy.copy(lane.asked.random)
                canvases[at].passes.append(Pass(lane.asked, random, said[-1]))
            if tokens := lane.take_final():
                canvases[at] = canvases[at]._replace(final=torch.tensor([one.id for one in tokens]))
    for canvas in canvases:
        for one, after in zip(canvas.passes, canvas.passes[1:], strict=False):
            assert torch.equal(one.next_canvas(*after.before), after.canvas), "replayed otherwise"
    return canvases


def denoising(model: MoE) -> CanvasDriver:
    driver = driver_of(model)
    assert driver.denoiser is not None, driver.no_policies
    return driver


@torch.inference_mode()
def drafts(model: MoE, canvases: Sequence[Canvas]) -> list[Row]:
    """Canvases foreseen, and passes over several that verify them."""
    right: dict[int, list[bool]] = {ahead: [] for ahead in AHEAD}
    tokens: dict[int, list[Tensor]] = {ahead: [] for ahead in AHEAD}
    older: list[bool] = []
    rounds = dict.fromkeys(AHEAD, 0)
    for passes, _ in canvases:
        foreseen = []  # of each pass: how many canvases in a row
        for at, source in enumerate(passes):
            hits = []
            for ahead in AHEAD:
                if at + ahead < len(passes):
                    maker, made = passes[at + ahead - 1], passes[at + ahead].canvas
                    same = maker.foreseen(source) == made
                    right[ahead].append(bool(same.all()))
                    tokens[ahead].append(same.float().mean())
                    hits.append(right[ahead][-1])
            foreseen.append((*hits, False).index(False))
        for source, maker, after in zip(passes, passes[1:], passes[2:], strict=False):
            older.append(torch.equal(_reading_of(model, maker, source), after.canvas))
        for ahead in AHEAD:
            done = 1
            while done <= len(passes):
                done += 1 + min(foreseen[done - 1], ahead)
                rounds[ahead] += 1
            rounds[ahead] += 1
    every = sum(len(passes) + 1 for passes, _ in canvases)
    return [
        {
            "way": f"{ahead} ahead",
            "canvases right": sum(right[ahead]) / len(right[ahead]),
            "tokens right": float(torch.stack(tokens[ahead]).mean()),
            "with older logits": sum(older) / len(older),
            "passes": rounds[ahead] / every,
        }
        for ahead in AHEAD
    ]


def _reading_of(model: MoE, one: Pass, other: Pass) -> Tensor:
    """``(1, C)``: the canvas that a pass makes if it reads of the pass before what another does."""
    name = "self_conditioning_logits"
    given = one.call.given | {name: other.call.given[name]}
    given["diffusion_stopping_criteria"] = None  # it would remember
    call = CanvasCall(given, OWN, copy.copy(one.random), greedy=False)
    denoiser = denoising(model).denoiser
    assert denoiser is not None
    lane = Lane(partial(denoiser.run, [call]), "decode")
    run_lanes([lane], model.experts.run)
    lane.result()
    assert isinstance(call.result, tuple)
    return call.result[0]


def anchors(canvases: Sequence[Canvas]) -> list[Row]:
    """Likely tokens near likelier ones, and far from any."""
    rows = []
    for least, relaxed in BOUNDS:
        found: dict[str, list[Tensor]] = {"anchors": [], "near": [], "far": []}
        for canvas in canvases:
            for token, probability in canvas.said():
                at = probability >= least
                around = torch.nn.functional.max_pool1d(
                    at[None].float(), 2 * RADIUS + 1, 1, RADIUS
                )[0].bool()
                likely, same = (probability >= relaxed) & ~at, token == canvas.final
                for name, mask in {
                    "anchors": at,
                    "near": likely & around,
                    "far": likely & ~around,
                }.items():
                    found[name].append(same[mask])
        row: Row = {"way": f"{least} and {relaxed}"}
        passes = len(found["near"])
        for name, each in found.items():
            all_of = torch.cat(each).float()
            row[f"{name} a pass"] = len(all_of) / passes
            row[f"{name} right"] = float(all_of.mean()) if len(all_of) else ""
        rows.append(row)
    return rows


def settling(canvases: Sequence[Canvas]) -> list[Row]:
    """When tokens are what they end as, and what two passes have in common."""
    tokens, whole, likeliest, same = [], [], [], []
    for canvas in canvases:
        said = torch.stack([token for token, _ in canvas.said()] + [canvas.final])
        wrong = (said != canvas.final).flip(0).float().cummax(0).values.flip(0)
        settled = wrong.sum(0) + 1  # the first pass from which a token stays
        tokens.append(settled.mean() / len(said))
        whole.append(settled.max() / len(said))
        likeliest.append((said[1:] == said[:-1]).float().mean())
        read = torch.cat([one.canvas for one in canvas.passes])
        same.append((read[1:] == read[:-1]).float().mean())
    names = {
        "a token stays from": tokens,
        "a canvas stays from": whole,
        "likeliest unchanged": likeliest,
        "canvas unchanged": same,
    }
    return [
        {"way": "own schedule"}
        | {name: float(torch.stack(each).mean()) for name, each in names.items()}
    ]


def borders(
    model: MoE,
    prompts: Sequence[list[int]],
    num_new: int,
    text_of: Callable[[int], str],
    judged: Callable[[list[list[int]]], Row],
) -> list[Row]:
    """Blocks that end before their canvas.

    Args:
        text_of: a token.
        judged: what is said of the texts behind the prompts.
    """
    size = denoising(model).canvas_length
    rules: dict[str, Callable[[list[int], list[float]], int]] = {
        "whole canvases": lambda ids, _: len(ids),
        "first half": lambda ids, _: len(ids) // 2,
        "first quarter": lambda ids, _: len(ids) // 4,
        "to the likeliest border": lambda ids, likely: _to_border(ids, likely, text_of),
    }
    rows = []
    for way, keep in rules.items():
        written: list[list[int]] = [[] for _ in prompts]
        canvases = 0
        while left := [at for at, text in enumerate(written) if len(text) < num_new]:
            params = [
                SamplingParams(max_new_tokens=size, ignore_eos=True, seed=canvases + at, logprobs=0)
                for at in left
            ]
            for at, done in zip(
                left,
                model.generate([prompts[at] + written[at] for at in left], params),
                strict=True,
            ):
                likely = [cast(float, one.logprob) for one in done.tokens]
                written[at] += done.token_ids[: keep(done.token_ids, likely)]
            canvases += len(left)
        tokens = sum(map(len, written))
        row = {"way": way, "tokens a canvas": tokens / canvases}
        rows.append(row | judged([text[:num_new] for text in written]))
    return rows


def _to_border(ids: list[int], likely: list[float], text_of: Callable[[int], str]) -> int:
    """Tokens up to the likeliest end of a line or sentence, if it is likely enough, else all."""
    ends = [at for at, one in enumerate(ids) if "\n" in text_of(one) or text_of(one).endswith(".")]
    at = max(ends, key=lambda place: likely[place], default=None)
    far = at is None or likely[at] < math.log(BORDER)
    return len(ids) if far or at is None else at + 1
