"""One of four ranks: logits of the same sequences alone, on two ranks and on four.

Started by test_receipts.py with a directory; says in `<rank>.json` whether the sequences
of this rank got the bits that they get where one process has all experts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from experts.dispatch import (
    AllToAllDispatcher,
    DeviceDispatcher,
    Exchange,
    GroupExchange,
    RankDispatcher,
    RowKind,
    prefer_local_sockets,
)
from experts.dispatch.native import NativeDispatch
from experts.manifest import read_manifest
from experts.placement import Placement, linear
from moe import MoE
from moe.engine.runner import HALVES
from moe.hooks import methods
from moe.kv.cache import SequenceCache
from moe.loading.memory_plan import GIB
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work
from offload.capacity import slot_bytes
from routing import Phase, Routing
from tests.experts.dispatch_cases import random_placement

RANKS = 4
SECONDS = 300.0
PROMPTS = [[20, 7, 31, 5], [90], [11, 64, 33, 2, 8], [3, 3], [70, 12, 1]]
SETTINGS: dict[str, Any] = {
    "memory": {"kv_tokens": 1024, "reserve_gib": 0.0},
    "prefill": {"wave_tokens": 128},
    "engine": {"max_batch_size": 8},
    "offload": {"hot_set": False},
    "threads": 1,
}
STEPS = 6
CARRIED = tuple(f"device-{one.name}" for one in methods() if "dispatcher" in one.hooks)
HALVES_WAYS = tuple("halves" for one in methods() if HALVES.name in one.hooks)
DEVICE_WAYS = ("device", "device-exact", *CARRIED)
"""`DeviceDispatcher`: its tensors are in main memory, and gloo moves them. "deep_ep": prompts by a
stand-in for its kernels."""
MOVES = {2: "another", 4: "copies"}
"""Steps before which placements change."""


class Ranks:
    """How a model's experts are shared, and which sequences are whose."""

    def __init__(
        self,
        model: MoE,
        exchange: Exchange | None = None,
        extra: int = 0,
        how: str = "exact",
        host: Exchange | None = None,
    ) -> None:
        self.experts, self.halves, self.joint = model.experts, how == "halves", how == "joint"
        self.rank, self.size = (exchange.rank, exchange.size) if exchange else (0, 1)
        self.counts = [layer.num_experts for layer in self.experts.layers]
        self.dispatcher: RankDispatcher[Any] | None = None
        if exchange is not None:
            size = self.size
            placements = [linear(count, -(-count // size) * size, size) for count in self.counts]
            if extra:
                placements = self._random(extra, 0)
            self.dispatcher = self._dispatcher(exchange, placements, how, host)
        self.walked = 0
        if isinstance(self.dispatcher, AllToAllDispatcher) and self.dispatcher.native is not None:
            self._watch(self.dispatcher.native)

    def _dispatcher(
        self, exchange: Exchange, placements: list[Placement], how: str, host: Exchange | None
    ) -> RankDispatcher[Any]:
        combine: Any = "summed" if how in ("summed", "device") else "exact"
        if how.startswith("device"):
            assert host is not None
            if how == "device-deep_ep":
                return self._by_deep_ep(exchange, host, placements)
            # Prompts of more tokens are of exact size.
            return DeviceDispatcher(exchange, host, placements, combine=combine, buffer_rows=4)
        rows = 3 if self.halves or self.joint else None
        return AllToAllDispatcher(exchange, placements, combine=combine, buffer_rows=rows)

    def _by_deep_ep(
        self, exchange: Exchange, host: Exchange, placements: list[Placement]
    ) -> RankDispatcher[Any]:
        """Prompts go by a stand-in for its kernels; decode steps as ever."""
        from moe.methods.deep_ep.dispatcher import DeepEPBuffer, DeepEPDispatcher
        from tests.methods.elastic_buffer import ElasticBuffer

        rows = RowKind(self.experts.layers[0].hidden_size, 8, torch.float32)
        buffer = ElasticBuffer(
            exchange, num_max_tokens_per_rank=64, hidden=rows.hidden, num_topk=rows.slots
        )
        kernels = DeepEPBuffer(buffer, rows, 64, torch.int64)
        return DeepEPDispatcher(exchange, host, placements, kernels, buffer_rows=4)

    def _watch(self, native: NativeDispatch) -> None:
        """Count layers dispatched within a call for a whole step."""
        own = native.finish_step

        def noted(layers: int) -> Any:
            self.walked += layers
            return own(layers)

        native.finish_step = noted  # type: ignore[method-assign]

    def _random(self, extra: int, seed: int) -> list[Placement]:
        return [random_placement(count, self.size, extra, seed + count) for count in self.counts]

    def owns(self, sequence: int) -> bool:
        return sequence % self.size == self.rank and (self.size < 4 or sequence != 3)

    def together(self, layers: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext() if self.dispatcher is None else self.experts.lockstep(layers)

    def move(self, step: int) -> None:
        if self.dispatcher is not None and step in MOVES:
            extra = 0 if MOVES[step] == "another" else 3
            self.dispatcher.apply_placements(step, dict(enumerate(self._random(extra, step))))


@torch.inference_mode()
def read(model: MoE, ranks: Ranks) -> dict[int, list[Tensor]]:
    """Logits of each own sequence's last tokens: of its prompt, then of greedy steps.

    Each sequence is a lane of its own, so that only the experts see company, or (`joint`) all that
    decode are one; prompts are read in two stages, as layered prefill does.
    """
    backbone, own = model.backbone, [s for s in range(len(PROMPTS)) if ranks.owns(s)]
    everywhere = range(len(ranks.counts))
    if ranks.dispatcher is not None:
        model.experts.dispatcher = ranks.dispatcher
    caches = {s: backbone.new_cache(32) for s in own}
    found: dict[int, list[Tensor]] = {s: [] for s in own}
    tokens = {s: PROMPTS[s] for s in own}
    for step in range(STEPS):
        ranks.move(step)
        joint = ranks.joint and step > 0 and bool(own)
        if joint:
            work = [Work(tokens[s], caches[s]) for s in own]
            lanes = dict.fromkeys(own, backbone.lanes(work, "decode")[0])
        else:
            lanes = {s: _lane(model, tokens[s], caches[s], step) for s in own}
        stages: Sequence[int | None] = [1, None] if step == 0 else [None]
        first = 0
        for end in stages:
            pauses = {} if end is None else dict.fromkeys(lanes.values(), end)
            with ranks.together(everywhere[first:end]):
                if ranks.halves:
                    both = list(lanes.values())
                    (run_halves,) = HALVES.of_all()
                    run_halves((both[::2], both[1::2]), model.experts, pauses)
                else:
                    each = list(dict.fromkeys(lanes.values()))
                    run_lanes(each, model.experts.run, pause_at=pauses)
            first = end or 0
        for s, lane in lanes.items():
            found[s].append(lane.result()[own.index(s) if joint else 0][-1])
            tokens[s] = [int(found[s][-1].argmax())]
    return found


def _lane(model: MoE, tokens: list[int], cache: SequenceCache, step: int) -> Any:
    phase: Phase = "prefill" if step == 0 else "decode"
    return model.backbone.lanes([Work(tokens, cache)], phase)[0]


def open_quarter(store: Path, resident: MoE, bits: int) -> MoE:
    """A quarter of the experts in memory."""
    rest = sum(line.bytes for line in resident.memory_plan.lines if line.name != "experts")
    total = sum(layer.num_experts for layer in resident.experts.layers)
    room = total // 4 * slot_bytes(read_manifest(store), bits) + 64
    memory = SETTINGS["memory"] | {"device_gib": (rest + room) / GIB}
    offload = SETTINGS["offload"] | {"predictor": "off"}
    model = MoE.from_pretrained(store, SETTINGS | {"memory": memory, "offload": offload})
    assert model.memory_plan.expert_slots is not None
    assert model.memory_plan.expert_slots <= total // 4 + 1
    return model


def main(directory: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=RANKS
    )
    pair = dist.new_group([0, 1])
    by_gloo: dict[int, Exchange] = {4: GroupExchange()}
    by_sockets = {4: prefer_local_sockets(by_gloo[4], SECONDS)}
    if rank < 2:
        by_gloo[2] = GroupExchange(pair)
        by_sockets[2] = prefer_local_sockets(by_gloo[2], SECONDS)
    results: dict[str, Any] = {}
    for bits, exchanges in ((8, by_gloo), (16, by_sockets)):
        store = directory / f"store{bits}"
        resident = MoE.from_pretrained(store, SETTINGS)
        local = read(resident, Ranks(resident))
        quarter = open_quarter(store, resident, bits)
        ways = ("exact", "summed", *HALVES_WAYS, "joint")
        cases = product((resident, quarter), exchanges, (0, 3), ways)
        for model, size, extra, how in cases:
            residency = "resident" if model is resident else "quarter"
            ranks = Ranks(model, exchanges[size], extra, how)
            found = compare(read(model, ranks), local)
            assert ranks.dispatcher is not None
            found["travelled"] = ranks.dispatcher.statistics.pairs
            found["walked"] = ranks.walked
            results[f"{bits}-{residency}-{size}-{extra}-{how}"] = found
        for size, extra, how in product(by_gloo if bits == 16 else (), (0, 3), DEVICE_WAYS):
            ranks = Ranks(resident, by_gloo[size], extra, how, by_sockets[size])
            found = compare(read(resident, ranks), local)
            if how in CARRIED:
                dispatcher: Any = ranks.dispatcher
                found["dispatched"] = dispatcher._kernels.buffer.dispatched
            results[f"{size}-{extra}-{how}"] = found
    for size, exchange in by_gloo.items():
        results[f"{size}-meanwhile"] = works_meanwhile(exchange, by_sockets[size])
    (directory / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def works_meanwhile(exchange: Exchange, host: Exchange) -> bool:
    """Whether rows that come back over gloo beside other work have the bits they have alone."""
    dispatcher = DeviceDispatcher(exchange, host, [linear(8, 8, exchange.size)], buffer_rows=0)
    hidden = torch.randn(64, 512, generator=torch.Generator().manual_seed(exchange.rank))
    ids = torch.arange(64)[:, None] * (exchange.rank + 1) % 8
    found, made = list[Tensor](), list[Tensor]()
    works = (lambda: None, lambda: made.append(hidden @ hidden.T))
    for work in works:
        arrived = dispatcher.dispatch(0, hidden, Routing(ids, torch.ones(ids.shape)))
        rows = arrived.hidden_states * (1.0 + arrived.routing.expert_ids)
        found.append(dispatcher.combine(arrived, rows, {}, work).rows)
    return torch.equal(*found) and torch.equal(found[0], hidden * (1.0 + ids)) and len(made) == 1


def compare(found: dict[int, list[Tensor]], local: dict[int, list[Tensor]]) -> dict[str, Any]:
    pairs = [(a, b) for s, rows in found.items() for a, b in zip(rows, local[s], strict=True)]
    return {
        "rows": len(pairs),
        "equal": sum(torch.equal(a, b) for a, b in pairs),
        "tokens": sum(int(a.argmax()) == int(b.argmax()) for a, b in pairs),
        "error": max((float((a - b).abs().max()) for a, b in pairs), default=0.0),
    }


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    main(Path(sys.argv[1]), int(os.environ["RANK"]))
