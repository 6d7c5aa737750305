"""Papers' ways to keep keys and values in less, tried on real ones of the shipped model.

    python -m lab.keys_values.codes [--quick]

As in `lab.keys_values.policies`, a prompt of 1,536 tokens is read, its keys and values are replaced
by what a way would have kept of them, and decode steps over the next 512 tokens are scored. Bytes
are counted, not stored. What the product has is marked so. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import environment, print_header, print_json, print_table
from lab.keys_values.policies import Steps, policy_pool
from moe.kv.blocks import BlockKVCache
from moe.kv.visibility import turn

Kept = tuple[Tensor, Tensor, float]
"""Keys and values ``(layers, N, L, D)`` as read back, and bytes a token of all layers."""
Way = Callable[[Tensor, Tensor], Kept]


def codes(x: Tensor, bits: int, dim: int, group: int) -> tuple[Tensor, float]:
    """Asymmetric codes in groups along a dimension; bits a number with a bf16 scale and offset."""
    size = x.shape[dim] // group * group
    part, rest = x.split([size, x.shape[dim] - size], dim)
    grouped = part.unflatten(dim, (-1, group))
    inner = dim + 1 if dim >= 0 else dim
    low, high = grouped.amin(inner, True), grouped.amax(inner, True)
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-12)
    back = ((grouped - low) / step).round() * step + low
    return torch.cat([back.reshape(part.shape), rest], dim), bits + 32 / group


def built_in(bits: int) -> Way:
    """Symmetric codes of turned rows, in groups of 32: `memory.kv_bits`, in its own cache."""

    def way(keys: Tensor, values: Tensor) -> Kept:
        def own(x: Tensor) -> Tensor:
            x = turn(x).unflatten(-1, (-1, 32))
            step = x.abs().amax(-1, True).clamp_min(1e-12) / (127 if bits == 8 else 7.4)
            most = 2 ** (bits - 1)
            return turn(((x / step).round().clamp(-most, most - 1) * step).flatten(-2))

        return own(keys), own(values), token_bytes(keys, bits + 0.5)

    return way


def token_bytes(rows: Tensor, bits: float) -> float:
    """Of keys and values, both of so many bits a number."""
    layers, heads, _, size = rows.shape
    return 2 * layers * heads * size * bits / 8


def kivi(bits: int, residual: int = 128) -> Way:
    """Keys by channel in groups of 64 tokens, values by token; the last tokens whole."""

    def way(keys: Tensor, values: Tensor) -> Kept:
        cut, length = keys.shape[2] - residual, keys.shape[2]
        k, key_bits = codes(keys[:, :, :cut], bits, 2, 64)
        v, value_bits = codes(values[:, :, :cut], bits, -1, 32)
        share = cut / length
        used = share * (key_bits + value_bits) / 2 + (1 - share) * 16
        back = [torch.cat([a, b[:, :, cut:]], 2) for a, b in ((k, keys), (v, values))]
        return back[0], back[1], token_bytes(keys, used)

    return way


def gear(bits: int, rank: int = 4, outliers: float = 0.02) -> Way:
    """KIVI's codes, the largest entries apart, and a low-rank part of what is left."""

    def way(keys: Tensor, values: Tensor) -> Kept:
        def own(x: Tensor, dim: int, group: int) -> tuple[Tensor, float]:
            count = max(int(x[0, 0].numel() * outliers), 1)
            flat = x.flatten(2)
            places = flat.abs().topk(count, -1).indices
            apart = torch.zeros_like(flat).scatter(-1, places, flat.gather(-1, places)).view_as(x)
            coded, used = codes(x - apart, bits, dim, group)
            u, s, v = torch.linalg.svd(x - apart - coded, full_matrices=False)
            low = (u[..., :rank] * s[..., None, :rank]) @ v[..., :rank, :]
            length, size = x.shape[2:]
            extra = 16 * rank * (length + size) / (length * size) + outliers * (16 + 24)
            return coded + apart + low, used + extra

        (k, first), (v, second) = own(keys, 2, 64), own(values, -1, 32)
        return k, v, token_bytes(keys, (first + second) / 2)

    return way


def pruned(share: float) -> Way:
    """Mustafar: of each row the smallest entries are left out; bf16 and a bit map stay."""

    def way(keys: Tensor, values: Tensor) -> Kept:
        def own(x: Tensor) -> Tensor:
            count = int(x.shape[-1] * share)
            return x.scatter(-1, x.abs().topk(count, -1, largest=False).indices, 0.0)

        return own(keys), own(values), token_bytes(keys, 16 * (1 - share) + 1)

    return way


def merged(keys: Tensor, values: Tensor) -> Kept:
    """MiniCache: pairs of layers of the upper half keep one direction and a length each."""
    back = []
    for x in (keys, values):
        x = x.clone()
        for layer in range(len(x) // 2, len(x) - 1, 2):
            sizes = x[layer : layer + 2].norm(dim=-1, keepdim=True).clamp_min(1e-12)
            both = (x[layer : layer + 2] / sizes).sum(0)
            x[layer : layer + 2] = both / both.norm(dim=-1, keepdim=True).clamp_min(1e-12) * sizes
        back.append(x)
    pairs = (len(keys) - len(keys) // 2) // 2
    share = 1 - pairs / len(keys) * (1 - 2 / keys.shape[-1])
    return back[0], back[1], token_bytes(keys, 16 * share)


WAYS: dict[str, Way] = {
    "8 bits (built in)": built_in(8),
    "4 bits (built in)": built_in(4),
    "KIVI, 4 bits": kivi(4),
    "KIVI, 2 bits": kivi(2),
    "GEAR, 4 bits, rank 4, 2 % apart": gear(4),
    "GEAR, 2 bits, rank 4, 2 % apart": gear(2),
    "Mustafar, half pruned": pruned(0.5),
    "Mustafar, 70 % pruned": pruned(0.7),
    "MiniCache, upper half": merged,
}


def tried(per_text: int) -> list[dict[str, Any]]:
    """A row for each way."""
    steps, used = Steps(per_text), dict[str, float]()

    def altering(name: str, way: Way) -> Callable[[BlockKVCache], None]:
        def alter(cache: BlockKVCache) -> None:
            layers = [layer for layer in cache.layers if isinstance(layer, int)]
            rows = [cache.read(layer, cache.length) for layer in layers]
            keys, values = (torch.cat(own) for own in zip(*rows, strict=True))
            keys, values, used[name] = way(keys, values)
            for layer, k, v in zip(layers, keys, values, strict=True):
                cache.memory.write(cache, layer, k[None], v[None], 0)

        return alter

    base, found = steps.score(policy_pool(32, None)).bits, []
    for name, way in WAYS.items():
        score = steps.score(policy_pool(32, None), altering(name, way))
        found.append(
            {
                "way": name,
                "bytes a token": round(used[name]),
                "bits per byte": round(score.bits, 5),
                "worse %": round(100 * (score.bits / base - 1), 3),
                "positions": score.positions,
            }
        )  # fmt: skip
    steps.model.close()
    return found


def packed(per_text: int) -> list[dict[str, Any]]:
    """CacheGen: whether the blocks that go to disk shrink, as they are and as differences of codes
    from those of the token before; deflate at its fastest."""
    steps, found = Steps(per_text), []
    for bits in (16, 8, 4):
        steps.model.backbone.blocks = policy_pool(bits, None)
        plain = sizes = deltas = 0
        for window in steps.windows:
            cache = steps._read(window)
            for at in range(cache.length // 64):
                for rows in cache.stored_block(at).rows:
                    own = rows.numpy()
                    heads = own.reshape(4, 64, -1)  # two heads of keys and two of values
                    delta = heads.copy()
                    delta[:, 1:] -= heads[:, :-1]
                    plain += own.nbytes
                    sizes += len(zlib.compress(own.tobytes(), 1))
                    deltas += len(zlib.compress(delta.tobytes(), 1))
        share = {"deflate %": 100 * sizes / plain, "of differences %": 100 * deltas / plain}
        found.append({"bits": bits} | {name: round(value, 1) for name, value in share.items()})
    steps.model.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a window of each text")
    options = parser.parse_args()
    print_header(environment())
    per_text = 1 if options.quick else 8
    result = {"ways": tried(per_text), "on disk": packed(1)}
    for part, rows in result.items():
        print_table(part, list(rows[0]), [list(row.values()) for row in rows])
    print_json({"environment": environment(), **result})


if __name__ == "__main__":
    main()
