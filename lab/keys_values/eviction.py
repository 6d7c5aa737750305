"""Papers' ways to give up keys and values, tried by masks on the shipped model.

    python -m lab.keys_values.eviction [--quick]

Windows of 2,048 held-out tokens are read in one pass of transformers' own forward. The first 1,536
attend to all before them, as a prompt does; what the last 512 attend to is masked as a way would
have it. Then the same with the first 512 tokens once more in place of the last, which only those
can predict that still find them. So a way needs no cache of its own to be priced. Each stands
beside a window that leaves as many tokens. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, scaled_dot_product_attention
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.scorer import ROOT, TEXTS
from moe import MoE

WINDOW, PROMPT, BLOCK = 2048, 1536, 64
SINKS, RECENT = 4, 64
NAME = "moe_kv_eviction"


class Layer(NamedTuple):
    """One layer's attention to windows of text. B windows, N key heads, G queries of each.

    Attributes:
        query: ``(B, N, G, WINDOW, D)``, scaled.
        key, value: ``(B, N, WINDOW, D)``.
    """

    number: int
    query: Tensor
    key: Tensor
    value: Tensor

    def weights(self, begin: int, end: int) -> Tensor:
        """``(B, N, G, end - begin, end)`` of queries that see all up to their own."""
        scores = self.query[..., begin:end, :] @ self.key[:, :, None, :end].mT
        later = torch.ones(end - begin, end, dtype=torch.bool).triu(begin + 1)
        return scores.masked_fill(later, -torch.inf).softmax(-1)

    def masked(self, seen: Tensor) -> Tensor:
        """``(B, N, G, T, D)`` of the last T tokens, which see so much: ``(..., T, WINDOW)``."""
        scores = self.query[..., PROMPT:, :] @ self.key[:, :, None].mT
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ self.value[:, :, None]


Way = Callable[[Layer], Tensor]
"""What the last tokens make of a layer: ``(B, N, G, T, D)``."""


def places() -> tuple[Tensor, Tensor]:
    """Of the last tokens ``(T, 1)``, and of all keys ``(WINDOW,)``."""
    return torch.arange(PROMPT, WINDOW)[:, None], torch.arange(WINDOW)


def window_mask(tokens: int) -> Tensor:
    """As `memory.kv_policy: window`."""
    position, key = places()
    begin = (position // BLOCK - tokens // BLOCK + 2) * BLOCK
    return (key <= position) & ((key < BLOCK) | (key >= begin))


def window(tokens: int, keep: frozenset[tuple[int, int]] = frozenset()) -> Way:
    """StreamingLLM; RazorAttention: all but these heads, by layer and number, which keep all."""
    position, key = places()
    short, whole = window_mask(tokens), key <= position

    def way(layer: Layer) -> Tensor:
        heads = range(layer.key.shape[1])
        masks = [whole if (layer.number, head) in keep else short for head in heads]
        return layer.masked(torch.stack(masks)[:, None])

    return way


def by_prompt_end(tokens: int, *, heads: bool) -> Way:
    """SnapKV: half for what the prompt's last tokens attended to, pooled, half for the last ones.
    Without heads: whole blocks, and one choice for all heads of a layer."""

    def way(layer: Layer) -> Tensor:
        got = layer.weights(PROMPT - RECENT, PROMPT).sum((2, 3))
        if heads:
            got = max_pool1d(got, 7, 1, 3)
        else:
            blocks = got.unflatten(-1, (-1, BLOCK)).sum((1, 3))
            got = blocks.repeat_interleave(BLOCK, 1)[:, None].expand_as(got).clone()
        got[..., :BLOCK], got[..., PROMPT - tokens // 2 :] = torch.inf, -1
        chosen = got.topk(tokens // 2, -1).indices
        kept = torch.zeros(*got.shape[:2], WINDOW, dtype=torch.bool).scatter(2, chosen, True)
        position, key = places()
        last = (key <= position) & (key > position - tokens // 2)
        return layer.masked(last | kept[:, :, None, None])

    return way


def by_all_attention(tokens: int) -> Way:
    """H2O: half for the last tokens, half for those that have got the most attention up to now,
    which is counted on while decoding; each head gives up one token a step."""
    half = tokens // 2

    def way(layer: Layer) -> Tensor:
        got = torch.zeros(*layer.key.shape[:2], WINDOW)
        got[..., :PROMPT] = layer.weights(0, PROMPT).sum((2, 3))
        kept, old = torch.zeros_like(got, dtype=torch.bool), got[..., : PROMPT - half].clone()
        old[..., :SINKS], kept[..., PROMPT - half : PROMPT] = torch.inf, True
        kept.scatter_(2, old.topk(half, -1).indices, True)
        rows = []
        for at in range(PROMPT, WINDOW):
            kept[..., at] = True
            scores = layer.query[..., at, :] @ layer.key[:, :, : at + 1].mT
            weights = scores.masked_fill(~kept[:, :, None, : at + 1], -torch.inf).softmax(-1)
            rows.append(weights @ layer.value[:, :, : at + 1])
            got[..., : at + 1] += weights.sum(2)
            old = got[..., : at + 2 - half].masked_fill(~kept[..., : at + 2 - half], torch.inf)
            old[..., :SINKS] = torch.inf
            kept.scatter_(2, old.argmin(-1, keepdim=True), False)
        return torch.stack(rows, 3)

    return way


class Masks:
    """The shipped model in transformers, with attention that a way masks."""

    def __init__(self) -> None:
        ALL_ATTENTION_FUNCTIONS.register(NAME, self._attend)
        folder = ROOT / "examples/demo-model"
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=NAME
        ).eval()
        self.way: Way | None = None
        self.told: Callable[[Layer], None] | None = None

    @torch.inference_mode()
    def nats(self, ids: Tensor, way: Way | None) -> Tensor:
        """``(windows,)``: of the last tokens of each."""
        self.way, found = way, []
        for rows in ids.split(3):
            logits = self.model(rows, use_cache=False).logits[:, PROMPT - 1 : -1].log_softmax(-1)
            found.append(-logits.gather(-1, rows[:, PROMPT:, None]).double().sum((1, 2)))
        return torch.cat(found)

    @torch.inference_mode()
    def echoes(self) -> Tensor:
        """``(layers, N)``: the attention that each head pays to the token that followed the same
        one before, where random tokens come again: what RazorAttention finds its heads by."""
        found: list[Tensor] = []

        def tell(layer: Layer) -> None:
            position, _ = places()
            after = (position - PROMPT + 1).expand(*layer.query.shape[:3], -1, 1)
            found.append(layer.weights(PROMPT, WINDOW).gather(-1, after).mean((0, 2, 3, 4)))

        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(5, self.model.config.vocab_size, (2, PROMPT), generator=generator)
        self.told = tell
        self.nats(torch.cat([ids, ids[:, : WINDOW - PROMPT]], 1), None)
        self.told = None
        return torch.stack(found)

    def _attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        query = (q * scaling).unflatten(1, (k.shape[1], -1))
        layer = Layer(module.layer_idx, query, k, v)
        if self.told is not None:
            self.told(layer)
        out = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        if self.way is not None:
            out = torch.cat([out[:, :, :PROMPT], self.way(layer).flatten(1, 2)], 2)
        return out.transpose(1, 2).contiguous(), None


def held_out(per_text: int) -> Tensor:
    """``(windows, WINDOW)``, so many of each text."""
    with MoE.from_pretrained(ROOT / "examples/demo-model") as model:
        texts = [(ROOT / f"tests/data/heldout_{name}.txt").read_text() for name in TEXTS]
        ids = [model.codec.encode(text) for text in texts]
    return torch.tensor([own[at * WINDOW :][:WINDOW] for own in ids for at in range(per_text)])


def ways_of(echo: Tensor, *, quick: bool) -> dict[str, tuple[float, Way]]:
    """By name, with the mean of the tokens that heads keep."""
    heads = [(int(i) // echo.shape[1], int(i) % echo.shape[1]) for i in echo.flatten().argsort()]
    heads.reverse()
    found: dict[str, tuple[float, Way]] = {}
    for tokens in (512,) if quick else (1024, 512, 256):
        found[f"SnapKV, blocks, heads together, {tokens}"] = (
            tokens, by_prompt_end(tokens, heads=False)
        )  # fmt: skip
        found[f"SnapKV, by head, {tokens}"] = tokens, by_prompt_end(tokens, heads=True)
        found[f"H2O, by head, {tokens}"] = tokens, by_all_attention(tokens)
    for count, tokens in ((2, 256),) if quick else ((1, 256), (2, 256), (2, 512), (3, 256)):
        mean = (count * WINDOW + (len(heads) - count) * tokens) / len(heads)
        keep, least = frozenset(heads[:count]), frozenset(heads[-count:])
        found[f"{count} heads keep all, others {tokens}"] = mean, window(tokens, keep)
        found[f"{count} heads of the least echo, others {tokens}"] = mean, window(tokens, least)
    layers = {layer for layer, _ in heads[:2]}
    keep = frozenset(head for head in heads if head[0] in layers)
    mean = (len(keep) * WINDOW + (len(heads) - len(keep)) * 256) / len(heads)
    found[f"{len(layers)} layers keep all, others 256"] = mean, window(256, keep)
    return found


def tried(per_text: int, *, quick: bool) -> tuple[list[dict[str, Any]], list[list[float]]]:
    """A row for each way, and what heads were chosen by."""
    masks, new = Masks(), held_out(per_text)
    again = torch.cat([new[:, :PROMPT], new[:, : WINDOW - PROMPT]], 1)
    texts = {"new text": new, "text again": again}
    whole = {name: masks.nats(ids, None) for name, ids in texts.items()}
    echo, rows, windows = masks.echoes(), [], dict[tuple[str, int], Tensor]()
    for name, (tokens, way) in ways_of(echo, quick=quick).items():
        row: dict[str, Any] = {"way": name, "tokens": round(tokens)}
        near = round(tokens / BLOCK) * BLOCK
        for text, ids in texts.items():
            if (text, near) not in windows:
                windows[text, near] = masks.nats(ids, window(near))
            own, beside, total = masks.nats(ids, way), windows[text, near], whole[text].sum()
            gap = own - beside
            error = float(gap.std() * len(gap) ** 0.5 / total)
            row[f"{text}, %"] = round(100 * float(own.sum() / total - 1), 2)
            row[f"{text}, window, %"] = round(100 * float(beside.sum() / total - 1), 2)
            row[f"{text}, gap's error"] = round(100 * error, 2)
        rows.append(row)
    return rows, echo.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a window of each text, fewer ways")
    options = parser.parse_args()
    print_header(environment())
    rows, echo = tried(1 if options.quick else 3, quick=options.quick)
    print_table("ways", list(rows[0]), [list(row.values()) for row in rows])
    print_json({"environment": environment(), "ways": rows, "echo by layer and head": echo})


if __name__ == "__main__":
    main()
