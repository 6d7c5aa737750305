"""Models and pools under a policy on keys and values, for tests of the methods that bring one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from examples.models.tiny import tiny_config, tiny_model
from kernels.cpu import choose_kernel
from kernels.cpu.kv import BLOCK
from moe import MoE, SamplingParams
from moe.calibration.files import (
    CALIBRATION_FOLDER,
    MANIFEST_FILE,
    CalibrationManifest,
    SavedRouterRule,
    fingerprint,
)
from moe.engine.engine import Engine
from moe.kv.blocks import BlockKVCache, BlockPool
from moe.kv.host_blocks import HostBlocks
from moe.kv.layout import Shape
from moe.kv.visibility import VISIBILITIES, visibility
from moe.memory.kv_precision import KVPrecision
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work
from moe.sequence import Delta, RunningSequence
from moe.settings import PrefillSettings
from routing import Phase

NATIVE, WHY = choose_kernel()
NAMES = tuple(name for name in ("window", "select", "heads") if name in VISIBILITIES.names())
IDS = [(7 * i * i + 3 * i) % 57 + 3 for i in range(700)]
LOSSY = {"lossless": False, "memory.kv_bits": 16, "memory.kv_tokens": 8192}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the heads' scores beside it, as `moe calibrate` leaves them."""
    path, config = tmp_path_factory.mktemp("models"), tiny_config("qwen3_moe")
    config.max_position_embeddings = 2048
    tiny_model("qwen3_moe", config=config).save_pretrained(path)
    heads = Shape(config.num_key_value_heads, 16, 16)
    write_scores(path, scores_of(dict.fromkeys(range(config.num_hidden_layers), heads)))
    return path


def write_scores(path: Path, induction: dict[int, tuple[float, ...]]) -> None:
    config = AutoConfig.from_pretrained(path)
    counts = (config.num_experts,) * config.num_hidden_layers
    rule = SavedRouterRule(top_k=2, score="softmax", groups=1, groups_kept=1, group_score="max")
    manifest = CalibrationManifest(
        model=fingerprint(config), architecture="?", text="none", tokens=1, vocabulary=1,
        num_experts=counts, rules=(rule,) * len(counts), unavailable={}, made_by={}, files={},
        head_scores=induction,
    )  # fmt: skip
    (path / CALIBRATION_FOLDER).mkdir(exist_ok=True)
    (path / CALIBRATION_FOLDER / MANIFEST_FILE).write_text(manifest.model_dump_json())


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Iterator[MoE]:
    with MoE.from_pretrained(checkpoint, LOSSY) as loaded:
        yield loaded


def pool_of(model: MoE, spec: str | None, bits: int = 16) -> BlockPool:
    """Lets the model keep its keys and values under a policy from now on, and forget others."""
    assert NATIVE is not None
    prefixes = model.engine().scheduler.prefixes
    while prefixes is not None and prefixes.evict():
        pass
    assert model.backbone.blocks is not None
    windows, shapes = model.backbone.blocks.windows, shapes_of(model)
    seeing = {layer: own for layer, own in shapes.items() if layer not in windows.of_layer}
    policy = visibility(spec)
    if policy is not None:
        policy = policy.scored(scores_of(seeing))
    kv = KVPrecision(bits, "asked for", True, policy).for_layers(shapes)
    pool = BlockPool(HostBlocks(NATIVE.kv, kv.form), windows, kv.policy, shapes)
    model.backbone.blocks = pool
    return pool


def spec_of(name: str, tokens: int) -> str:
    return f"{name}:{tokens}" + (":1" if name == "heads" else "")


@torch.inference_mode()
def shapes_of(model: MoE) -> dict[int, Shape]:
    cache = model.backbone.new_cache(BLOCK)
    assert isinstance(cache, BlockKVCache)
    read(model, cache, [7], "prefill")
    return {layer: shape for layer, shape in cache.shapes.items() if isinstance(layer, int)}


def scores_of(shapes: Mapping[int, Shape]) -> dict[int, tuple[float, ...]]:
    """Made up: the last head of the last layer looks up the most."""
    return {
        layer: tuple(layer + head / shape.heads for head in range(shape.heads))
        for layer, shape in shapes.items()
    }


def read(model: MoE, cache: object, ids: list[int], phase: Phase) -> Tensor:
    lanes = model.backbone.lanes([Work(ids, cache)], phase)  # type: ignore[arg-type]
    run_lanes(lanes, model.experts.run)
    return lanes[0].result()[0]


def answers(
    model: MoE, prompts: list[list[int]], *, chunk: int | None = None, preempt: bool = False
) -> list[list[tuple[int, float | None]]]:
    """Of each prompt 90 tokens with their log probabilities.

    Args:
        chunk: prompts are read in parts of so many tokens.
        preempt: the last one gives way in between, and is read again.
    """
    params = SamplingParams(max_new_tokens=90, temperature=0.0, ignore_eos=True, logprobs=0)
    engine, pool = model.engine(), model.backbone.blocks
    if chunk is not None:
        engine.scheduler.prefill = PrefillSettings(mode="chunked", chunk_tokens=chunk)
        engine.scheduler._choose_mode = None
    groups = [model.request(prompt, params) for prompt in prompts]
    for group in groups:
        engine.submit(group)
    found: dict[RunningSequence, list[tuple[int, float | None]]] = {}
    while not engine.idle:
        for sequence, event in engine.step():
            assert isinstance(event, Delta)
            token = event.token
            found.setdefault(sequence, []).append((token.id, token.logprob))
        running = engine.scheduler.running
        if preempt and len(running) == len(prompts) and len(running[-1].token_ids) == 70:
            while len(engine.scheduler.running) == len(prompts):  # known prefixes go first
                assert engine.scheduler._preempt()
            preempt = False
        assert pool is not None
        assert pool.held_tokens <= engine.scheduler.num_used_tokens() + 2 * BLOCK * len(prompts)
    assert not preempt
    return [found[group.sequences[0]] for group in groups]


def finish(engine: Engine) -> None:
    while not engine.idle:
        engine.step()
