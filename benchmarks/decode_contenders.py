"""Who takes part in `benchmarks.decode`: this engine at some numbers of bits, and its peers."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.decode_peers import BuiltLlamaCpp, Contender, LlamaCpp, Tokens, Transformers
from examples.models.random_models import bench_dir, random_2b
from examples.models.random_store import random_30b, random_latent
from experts.manifest import is_store
from moe import MoE, SamplingParams
from moe.sampling.batch import Row, Token
from moe.sampling.sampler import Sampler

ROOT = Path(__file__).parents[1]

Make = Callable[[], Contender]

UNFUSED: dict[str, Any] = {"engine": {"fused": "off"}}
"""Decode steps, and what is between the products of prompts, by transformers' own layers."""


def model_folder(name: str | None) -> Path | None:
    if name in (None, "2b"):
        return random_2b()
    if name == "30b":
        return random_30b()
    if name == "latent":
        return random_latent()
    return ROOT / "examples/demo-model" if name == "demo" else Path(str(name))


GREEDY = SamplingParams(temperature=0)


class _Given(Sampler):
    """Takes the likeliest token's time, gives a token from a list."""

    def __init__(self, params: SamplingParams, token_ids: list[int]) -> None:
        super().__init__(params, [], 0)
        self._token_ids = iter(token_ids)

    def row(self, place: int = 0) -> Row:
        return Row(GREEDY, 0.0)

    def accept(self, token: Token) -> Token:
        return Token(next(self._token_ids))


class Ours:
    """This engine at a number of bits; `bytes_a_step` of the last decoding."""

    def __init__(self, path: Path, bits: int | None, **overrides: Any) -> None:
        self.name = f"moe {bits} bits" if bits else "moe as it is"
        if overrides == UNFUSED:
            self.name += ", unfused"
        whole = None if is_store(path) else 16
        trunk = max(bits, 4) if bits else whole  # the trunk has no 2 bits
        settings = {"expert_bits": bits or whole, "trunk_bits": trunk, "head_bits": trunk}
        memory = {"prefix_tokens": 0} | overrides.pop("memory", {})  # prompts are timed
        overrides = {"prefill": {"mode": "whole"}, "memory": memory} | overrides
        self.model = MoE.from_pretrained(path, model=settings, **overrides)
        self.bytes_a_step = 0.0

    def prefill(self, prompt: list[int]) -> float:
        engine, start = self.model.engine(), time.perf_counter()
        engine.submit(self.model.request(prompt, SamplingParams(max_new_tokens=1)))
        while not engine.idle:
            engine.step()
        return time.perf_counter() - start

    def decode(self, prompts: Tokens, following: Tokens) -> list[float]:
        engine = self.model.engine()
        params = SamplingParams(max_new_tokens=len(following[0]) + 1, ignore_eos=True)
        for prompt, tokens in zip(prompts, following, strict=True):
            group = self.model.request(prompt, params)
            group.sequences[0].sampler = _Given(params, [*tokens, 0])
            engine.submit(group)
        while len(engine.scheduler.running) < len(prompts):
            engine.step()
        before = self.model.stats()["expert_bytes_read"]
        times = []
        while not engine.idle:
            start = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start)
        stats = self.model.stats()
        backbone = stats["weight_bytes"] - stats["expert_bytes"] - _embedding_bytes(self.model)
        self.bytes_a_step = backbone + (stats["expert_bytes_read"] - before) / len(times)
        return times

    def close(self) -> None:
        del self.model


def _embedding_bytes(model: MoE) -> int:
    """Bytes of an input embedding, of which a step reads a few rows; 0 where it is the head's."""
    network: Any = model.backbone.model
    table = network.get_input_embeddings().weight
    tied = network.get_output_embeddings() is not None and network.config.tie_word_embeddings
    return 0 if tied else table.numel() * table.element_size()


def contenders(path: Path, options: argparse.Namespace) -> list[list[Make]]:
    """Groups of contenders that are in memory together."""
    found: list[Make] = [partial(Ours, path, bits or None) for bits in options.bits]
    peers = options.peer.split(",")
    if "unfused" in peers:
        found += [partial(Ours, path, bits or None, **UNFUSED) for bits in options.bits]
    stored = is_store(path)
    if "transformers" in peers and not stored:
        found += [
            partial(Transformers, path, dtype, "grouped_mm")
            for dtype in (torch.float32, torch.bfloat16)[: 1 if options.quick else 2]
        ]
    kinds = ("Q4_0",) if stored else ("Q8_0", "Q4_0")
    threads = torch.get_num_threads()
    for checkout in (Path(peer) for peer in peers if "/" in peer):
        found += [
            partial(BuiltLlamaCpp, checkout, gguf_file(path, kind), kind, threads) for kind in kinds
        ]
    if "llama.cpp" in peers:
        if find_spec("llama_cpp") and find_spec("gguf"):
            found += [partial(LlamaCpp, gguf_file(path, kind), kind, threads) for kind in kinds]
        else:
            print("llama.cpp is left out: pip install llama-cpp-python gguf")
    return [[make] for make in found] if stored else [found]


def gguf_file(path: Path, kind: str) -> Path:
    """The model for llama.cpp, made where it is not there yet; of a store, one of its shape."""
    file = bench_dir() / f"{path.name}-{kind}.gguf"
    if not file.exists():
        from benchmarks.gguf_files import write_gguf, write_random_gguf  # needs the package gguf

        if is_store(path):
            write_random_gguf(AutoConfig.from_pretrained(path), kind, file)
        else:
            write_gguf(path, kind, file)
    return file
