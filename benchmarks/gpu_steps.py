"""The steps of `benchmarks.gpu`. Each returns numbers for JSON, and raises where it fails.

Models are random ones of Qwen3-30B-A3B's shape with 12 of its 48 layers, so that a store of any
width is written in half a minute and fits one GPU. Steps share the stores. With a stand-in for the
GPU everything is tiny, and says nothing but that the code runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks import gpu_tiles, kernels_gpu
from benchmarks.kernels_gpu import QWEN3_30B_A3B, Size, random_call, random_weights, read_bandwidth
from examples.models.loopback import ThreadExchange, on_ranks
from examples.models.random_store import SHAPE, write_random_store
from experts.dispatch import DeviceDispatcher
from experts.placement import first_placement
from kernels import ExpertWeights, experts_forward
from moe import MoE, SamplingParams
from moe.engine.engine import Engine
from routing import Routing

ROOT = Path(__file__).parents[1]
GIB = 2**30


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        device: of models and kernels.
        layer: one MoE layer.
        shape: of the model.
        tokens, batches, prompts: numbers that are tried.
        long: tokens of a long context.
        steps: decode steps that are timed.
        seconds: of `benchmarks.kernels_gpu`, a point.
        stores: folder of the models, which steps share.
    """

    device: torch.device
    layer: Size
    shape: dict[str, Any]
    tokens: tuple[int, ...]
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    long: int
    steps: int
    seconds: float
    stores: Path = Path()

    def store(self, bits: Literal[4, 8, 16]) -> Path:
        """A random model with this many bits a weight, written by the first step that wants it."""
        folder = self.stores / f"{bits}-bit"
        config = Qwen3MoeConfig(**self.shape, dtype=torch.bfloat16)
        return folder if folder.exists() else write_random_store(config, folder, bits)

    def settings(self, **more: Any) -> dict[str, Any]:
        memory = {"kv_tokens": 2 * max(self.long, *self.prompts), "prefix_tokens": 0}
        engine = {"max_batch_size": max(self.batches)}
        own = {"device": self.device.type, "memory": memory, "engine": engine}
        return own | {key: {**own.get(key, {}), **value} for key, value in more.items()}  # type: ignore[dict-item]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


REAL = Scale(
    torch.device("cuda"), QWEN3_30B_A3B, SHAPE | {"num_hidden_layers": 12},
    tokens=(1, 16, 2048), batches=(1, 8, 64), prompts=(2048, 8192), long=32_768, steps=50,
    seconds=0.5,
)  # fmt: skip
TINY = Scale(
    torch.device("cpu"), Size(hidden=64, experts=8, width=64, top_k=2, layers=2),
    SHAPE | {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "eos_token_id": None,
    },
    tokens=(1, 4), batches=(1, 2), prompts=(24,), long=64, steps=2, seconds=0.05,
)  # fmt: skip


def run_step(name: str, stores: Path, *, stand_in: bool) -> dict[str, Any]:
    """The results of a step; models are looked for in `stores`, and written there.

    Raises:
        KeyError: there is no such step.
    """
    return _STEPS[name](replace(TINY if stand_in else REAL, stores=stores))


def machine(scale: Scale) -> dict[str, Any]:
    """The device, and the rates that all others are measured by."""
    if scale.device.type != "cuda":
        return {"name": "stand-in", "triton": version_of("triton")}
    properties = torch.cuda.get_device_properties(scale.device)
    size, rates = 8192, []
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(10):
        rates.append(2 * size**3 / seconds_of(lambda: a @ b, scale) / 1e12)
    return {
        "name": properties.name,
        "memory_gib": properties.total_memory / GIB,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "triton": version_of("triton"),
        "read_gbps": read_bandwidth(scale.device),
        "bf16_tflops": max(rates),
        "host_to_device_gbps": {
            "pinned": _copy_rate(scale, pinned=True), "pageable": _copy_rate(scale, pinned=False),
        },
    }  # fmt: skip


def _copy_rate(scale: Scale, *, pinned: bool) -> float:
    nbytes = 1 << 28
    source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(nbytes, dtype=torch.uint8, device=scale.device)
    times = [seconds_of(lambda: target.copy_(source, non_blocking=True), scale) for _ in range(5)]
    return nbytes / min(times) / 1e9


def version_of(package: str) -> str:
    return str(getattr(__import__(package), "__version__", "?"))


def seconds_of(call: Callable[[], object], scale: Scale) -> float:
    """Of one call, with all that it leaves to the device."""
    scale.wait()
    began = time.perf_counter()
    call()
    scale.wait()
    return time.perf_counter() - began


TEST_PROCESSES = 10
"""That compile and run tests at the same time, where pytest-xdist is installed."""


def tests_of(path: str) -> Callable[[Scale], dict[str, Any]]:
    """Runs the tests marked `gpu` below a path. With a stand-in they are collected only."""

    def run(scale: Scale) -> dict[str, Any]:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        command += [path, *(["-n", f"{TEST_PROCESSES}"] if find_spec("xdist") else [])]
        on_device = scale.device.type == "cuda"
        interpret = {} if not on_device else {"TRITON_INTERPRET": "0"}
        command += ["-rf", "--tb=short"] if on_device else ["--collect-only"]
        ran = subprocess.run(
            command, cwd=ROOT, text=True, capture_output=True, env=os.environ | interpret
        )
        print(ran.stdout[-8000:], ran.stderr[-2000:])
        if ran.returncode not in (0, 1):
            raise RuntimeError(f"pytest ended with {ran.returncode}")
        counts = re.findall(r"(\d+)(?:/\d+)? (passed|failed|errors?|skipped|tests)", ran.stdout)
        failed = re.findall(r"^FAILED (\S+)", ran.stdout, re.MULTILINE)
        return {kind: int(count) for count, kind in counts} | {"failed_tests": failed}

    return run


@torch.inference_mode()
def ranks(scale: Scale) -> dict[str, Any]:
    """Logical ranks on one device: the rows of one rank, nothing that waits, and the time of a
    dispatch and combine without experts."""
    found: dict[str, Any] = {}
    layer = random_weights(scale.layer, scale.device)
    for count in (2, 4):
        for tokens in (scale.tokens[0] * count, scale.tokens[1] * count, scale.tokens[-1]):
            found[f"{count} ranks, {tokens} tokens"] = _shared(scale, layer, count, tokens)
    return found | {"waits": _ranks_wait(scale)}


def _shared(scale: Scale, layer: ExpertWeights, count: int, tokens: int) -> dict[str, float]:
    """Tokens dealt to ranks, against one rank. Raises AssertionError if they are not equal."""
    placement = first_placement("packed", layer.num_experts, count, 0.25)
    call = random_call(scale.layer, tokens, scale.device)
    routing = Routing(call.ids, call.weights).ascending()
    whole = experts_forward(call.hidden, routing.expert_ids, routing.weights, layer)

    @torch.inference_mode()
    def one(exchange: ThreadExchange) -> tuple[Tensor, float]:
        dispatcher = DeviceDispatcher(exchange, exchange, [placement])
        rows, ids, weights = (
            x.tensor_split(count)[exchange.rank]
            for x in (call.hidden, routing.expert_ids, routing.weights)
        )
        part = Routing(ids, weights)
        arrived = dispatcher.dispatch(0, rows, part)
        own, sums = arrived.routing, torch.zeros_like(arrived.hidden_states).float()
        experts_forward(arrived.hidden_states, own.expert_ids, own.weights, layer, sums)
        answer, times = dispatcher.combine(arrived, sums, {}).rows, []
        for _ in range(scale.steps):
            began = time.perf_counter()
            dispatcher.combine(dispatcher.dispatch(0, rows, part), sums, {})
            times.append(time.perf_counter() - began)
        return answer, median(times)

    answers = on_ranks(count, one, scale.device)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    rows = torch.cat([answer[0] for answer in answers])
    error, largest = (float(x.float().abs().max()) for x in (rows - whole, whole))
    assert error <= 0.05 * largest, f"{count} ranks, {tokens} tokens: off by {error} of {largest}"
    host_us = 1e6 * max(answer[1] for answer in answers)
    return {"error": error, "largest": largest, "host_us": host_us}


def _ranks_wait(scale: Scale) -> str:
    """Return whether torch sees the host wait in a dispatch and combine of few tokens."""
    if scale.device.type != "cuda":
        return "not known without a GPU"
    size = scale.layer
    dispatcher_on = first_placement("packed", size.experts, 1, 0.0)
    call = random_call(size, 4, scale.device)

    def one(exchange: ThreadExchange) -> None:
        dispatcher = DeviceDispatcher(exchange, exchange, [dispatcher_on])
        routing = Routing(call.ids, call.weights).ascending()
        torch.cuda.set_sync_debug_mode("error")
        try:
            arrived = dispatcher.dispatch(0, call.hidden, routing)
            dispatcher.combine(arrived, arrived.hidden_states.float(), {})
        finally:
            torch.cuda.set_sync_debug_mode("default")

    (error,) = on_ranks(1, one, scale.device)
    return "never" if error is None else str(error)


def experts(scale: Scale) -> dict[str, Any]:
    """One layer's experts beside other implementations, and the tiles that were chosen."""
    points = kernels_gpu.run(scale.layer, scale.device, scale.tokens, scale.seconds)
    from kernels.triton import tiles

    return {"points": points, "tiles": {str(key): str(tile) for key, tile in tiles._chosen.items()}}


def tiles(scale: Scale) -> dict[str, Any]:
    """Return what the kernels' tiles take, the fastest first (`benchmarks.gpu_tiles`)."""
    if scale.device.type != "cuda":
        return {"measured": "not without a GPU"}
    found = gpu_tiles.measure(TILES_SECONDS)
    return {
        what: [f"{how}: {us:.1f} us, {gbps:.0f} GB/s" for how, us, gbps in own[:4]]
        for what, own in found.items()
    }


TILES_SECONDS = 75.0


def model_of(bits: Literal[4, 8, 16]) -> Callable[[Scale], dict[str, Any]]:
    """Measures a model with all experts on the device."""

    def run(scale: Scale) -> dict[str, Any]:
        began = time.perf_counter()
        store = scale.store(bits)
        wrote = time.perf_counter() - began
        model = MoE.from_pretrained(store, scale.settings())
        loaded = time.perf_counter() - began - wrote
        found: dict[str, Any] = {
            "write_s": wrote, "load_s": loaded, "fused": model.status().get("fused"),
            "notices": list(model.notices), "step_bytes": step_bytes(scale, bits),
        }  # fmt: skip
        for tokens in scale.prompts:
            found[f"prompt of {tokens}"] = _prompt(scale, model, tokens)
        for batch in scale.batches:
            engine = _decoding(model, batch, scale.steps)
            each = _step_seconds(scale, engine)
            found[f"decode {batch}"] = {"ms": 1e3 * each, "tokens_per_second": batch / each}
        one = found[f"decode {scale.batches[0]}"]["ms"] / 1e3
        found["batch_1_gbps"] = found["step_bytes"] / one / 1e9
        if scale.device.type == "cuda":
            for batch in (scale.batches[0], scale.batches[-1]):
                engine = _decoding(model, batch, scale.steps)
                engine.step()
                found[f"kernels, decode {batch}"] = _profile(engine.step, WARM_UP)
            for tokens in scale.prompts:
                prompt = partial(_prompt, scale, model, tokens)
                found[f"kernels, prompt of {tokens}, twice"] = _profile(prompt, 1)
        return found

    return run


def step_bytes(scale: Scale, bits: int) -> int:
    """Bytes of weights that a token reads: its experts, attention, router and head."""
    shape = scale.shape
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
    kv = shape["num_key_value_heads"] * shape["head_dim"]
    attention = 2 * hidden * heads + 2 * hidden * kv
    each = 3 * hidden * shape["moe_intermediate_size"] * shape["num_experts_per_tok"]
    quantised = shape["num_hidden_layers"] * (attention + each) + hidden * shape["vocab_size"]
    router = 2 * shape["num_hidden_layers"] * hidden * shape["num_experts"]
    return int(quantised * (bits + (0.25 if bits < 16 else 0)) / 8 + router)


WARM_UP = 5
"""Steps before those that are timed."""


def _prompt(scale: Scale, model: MoE, tokens: int) -> dict[str, float]:
    """Two prompts, of which the second is timed."""
    params, seconds = SamplingParams(max_new_tokens=1, temperature=0.0), 0.0
    for _ in range(2):
        ids = torch.randint(0, scale.shape["vocab_size"], (tokens,)).tolist()
        began = time.perf_counter()
        model.generate([ids], params)
        seconds = time.perf_counter() - began
    return {"tokens_per_second": tokens / seconds}


def _decoding(model: MoE, batch: int, steps: int, prompt: int = 5, **params: Any) -> Engine:
    """An engine whose sequences have all been read, and can make this many steps."""
    engine = model.engine()
    more = {"temperature": 0.0, "ignore_eos": True} | params
    for index in range(batch):
        ids = [(index + at) % 500 for at in range(prompt)]
        given = SamplingParams(max_new_tokens=steps + 2 * WARM_UP + batch, **more)
        engine.submit(model.request(ids, given))
    while len(engine.scheduler.running) < batch:
        engine.step()
    return engine


def _step_seconds(scale: Scale, engine: Engine) -> float:
    for _ in range(WARM_UP):
        engine.step()
    return seconds_of(lambda: [engine.step() for _ in range(scale.steps)], scale) / scale.steps


def _profile(run: Callable[[], object], calls: int) -> list[dict[str, Any]]:
    """The operations of a call that take the device longest, what all of them take, and how long
    the device is busy: kernels overlap."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    found = [
        {"name": row.key[:80], "calls": row.count / calls, "us": row.self_device_time_total / calls}
        for row in rows
    ]
    whole = {key: sum(row[key] for row in found) for key in ("calls", "us")}
    own = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    busy = covered((event.time_range.start, event.time_range.end) for event in own) / calls
    return [{"name": "all", **whole, "busy_us": busy}, *found[:16]]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans, each a begin and an end."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return length


@torch.inference_mode()
def transformers(scale: Scale) -> dict[str, Any]:
    """The same shape in transformers' own code: a token after a short prompt."""
    config = Qwen3MoeConfig(**scale.shape, dtype=torch.bfloat16)
    with torch.device(scale.device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen3MoeForCausalLM(config).eval()
        torch.set_default_dtype(before)
    ids = torch.arange(5, device=scale.device)[None]
    answer = model(ids, use_cache=True)
    cache, token, times = answer.past_key_values, ids[:, :1], []
    for _ in range(max(4, scale.steps // 2)):
        times.append(seconds_of(lambda: model(token, past_key_values=cache, use_cache=True), scale))
    return {"decode 1": {"ms": 1e3 * median(times), "tokens_per_second": 1 / median(times)}}


def offload(scale: Scale) -> dict[str, Any]:
    """A quarter of the experts on the device, the others in host memory: a plain cache that copies
    on a miss, ours, and the CPU computing what is missing, on whole activations and on 8 bits of
    them."""
    found: dict[str, Any] = {}
    store = scale.store(4)
    size = sum(file.stat().st_size for file in store.glob("*.safetensors"))
    memory = {"device_gib": 0.45 * size / GIB + (4 if scale.device.type == "cuda" else 0.02)}
    ways: dict[str, dict[str, Any]] = {
        "copy on miss": {"policy": "lru", "predictor": "off", "late": "wait"},
        "ours": {"late": "wait"},
        "hybrid": {"late": "host"},
        "hybrid, 8-bit rows": {"late": "host_int8"},
    }
    for name, how in ways.items():
        if scale.device.type != "cuda" and how["late"] != "wait":
            continue  # a CPU beside a CPU is refused
        settings = scale.settings(memory=memory, offload=how)
        model = MoE.from_pretrained(store, settings | {"lossless": how["late"] != "host_int8"})
        _step_seconds(scale, _decoding(model, 1, scale.steps))  # what is asked for is learned
        each = _step_seconds(scale, _decoding(model, 1, scale.steps))
        found[name] = {
            "tokens_per_second": 1 / each, "slots": model.memory_plan.expert_slots,
            "hit_ratio": (model.stats()["offload"] or {}).get("hit_ratio"),
        }  # fmt: skip
        print(name, found[name], flush=True)
        del model
    return found


def drafts(scale: Scale) -> dict[str, Any]:
    """Greedy answers without drafts and with elastic ones, with all experts on the device and with
    a quarter of them. The weights are random, so few drafts are right: look at what they take."""
    found: dict[str, Any] = {}
    count = 2 * scale.steps
    params = SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)
    store = scale.store(4)
    size = sum(file.stat().st_size for file in store.glob("*.safetensors"))
    few = {"device_gib": 0.45 * size / GIB + (4 if scale.device.type == "cuda" else 0.02)}
    for where, room in {"all": {}, "a quarter": {"memory": few}}.items():
        for mode in ("off", "elastic"):
            drafted = {"mode": mode, "bits": 2, "max_depth": 3}
            model = MoE.from_pretrained(store, scale.settings(speculation=drafted, **room))
            answer = partial(model.generate, [5, 6, 7], params)
            answer()  # records
            model.reset_stats()
            each = seconds_of(answer, scale)
            told = model.stats().get("speculation") or {}
            found[f"{where}, {mode}"] = {
                "tokens_per_second": count / each,
                "tokens_per_verification": told.get("tokens_per_verification"),
                "draft_seconds": told.get("draft_seconds"), "seconds": each,
            }  # fmt: skip
            print(where, mode, found[f"{where}, {mode}"], flush=True)
            del model, answer
    return found


def sampler(scale: Scale) -> dict[str, Any]:
    """Return what drawing costs beside taking the likeliest, a step. Random weights give each token
    about the same chance: top-p alone then keeps most of the vocabulary, which no trained model
    does."""
    found: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {
        "greedy": {},
        "top-k": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "seed": 1},
        "all tokens": {"temperature": 1.0, "seed": 1},
        "top-p alone": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
    }
    model = MoE.from_pretrained(scale.store(4), scale.settings())
    for batch in (scale.batches[0], scale.batches[-1]):
        each = {
            name: 1e3 * _step_seconds(scale, _decoding(model, batch, scale.steps, **how))
            for name, how in ways.items()
        }
        share = {name: (ms - each["greedy"]) / ms for name, ms in each.items()}
        found[f"batch {batch}"] = {"ms": each, "share_of_step": share}
    return found


def ahead(scale: Scale) -> dict[str, Any]:
    """Milliseconds a decode step: each launched before the tokens of the one before are read, and
    in order."""
    ways: dict[str, dict[str, Any]] = {
        "greedy": {},
        "top-k": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "seed": 1},
    }
    model = MoE.from_pretrained(scale.store(16), scale.settings())
    found: dict[str, Any] = {"runs_ahead": model.backbone.runs_ahead}
    for order in ("ahead", "in order"):
        if order == "in order":
            model.backbone.decode_by(model.backbone.decode_forward)
        for batch, (name, how) in product(scale.batches, ways.items()):
            each = 1e3 * _step_seconds(scale, _decoding(model, batch, scale.steps, **how))
            found.setdefault(f"batch {batch}, {name}", {})[order] = each
    return found


def long_context(scale: Scale) -> dict[str, Any]:
    """A prompt as long as the context, and steps behind it."""
    model = MoE.from_pretrained(scale.store(4), scale.settings())
    began = time.perf_counter()
    engine = _decoding(model, 1, scale.steps, prompt=scale.long)
    scale.wait()
    read = time.perf_counter() - began
    return {
        "tokens": scale.long, "read_s": read, "decode_ms": 1e3 * _step_seconds(scale, engine)
    }  # fmt: skip


_STEPS: dict[str, Callable[[Scale], dict[str, Any]]] = {
    "machine": machine,
    "kernel_tests": tests_of("tests/kernels"),
    "decode_tests": tests_of("tests/moe/decode"),
    "offload_tests": tests_of("tests/moe/test_offload_gpu.py"),
    "ranks": ranks,
    "experts": experts,
    "tiles": tiles,
    "model_16": model_of(16),
    "model_4": model_of(4),
    "model_8": model_of(8),
    "transformers": transformers,
    "offload": offload,
    "drafts": drafts,
    "sampler": sampler,
    "ahead": ahead,
    "long_context": long_context,
}
