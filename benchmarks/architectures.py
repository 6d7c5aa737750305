"""What every MoE architecture of the installed transformers can do here, and what a step costs.

    python -m benchmarks.architectures [--quick] [--only TYPE ...]

For every MoE causal LM of the installed transformers, and every multimodal model whose text part
has experts, a tiny random model is saved and loaded through `MoE.from_pretrained`. Its float32
logits and 24 greedy tokens of two prompts in one batch are compared with transformers' own eager
forward (and with float64, where they differ by more than 2e-4). The table also says whether
sequences share passes, whether prompts are cut into chunks and reused as prefixes, whether drafts
are taken, how a decode step runs, whether prompts are compiled and why not, whether a multi-token-
prediction layer could draft, in how many MoE layers the router's rule is found, and the
milliseconds that a decode step takes a layer at batch 1, 4 and 16 on one thread, beside
transformers' at batch 1, and a prompt of 512 tokens, beside the same through transformers' layers
where it is compiled. `--quick` takes every fifth architecture. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from copy import deepcopy
from statistics import median
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from examples.models.tiny import composite_architectures, moe_architectures, tiny_model
from moe import MoE, SamplingParams
from moe.describe.routers import find_selectors
from moe.errors import UnsupportedModelError
from moe.network.lanes import run_lanes
from moe.network.own_cache import CACHE_ARGUMENT, OwnCache
from moe.network.packed_pass import Work

PROMPT_LENGTHS = (23, 9)
NEW_TOKENS = 24
TOLERANCE = 2e-4
"""Of a logit. Recurrences make much of last bits, so what differs by more is compared with float64:
it passes if it is no further from that than transformers' own float32."""
BATCHES, STEPS, CONTEXT = (1, 4, 16), 12, 24
"""Of the timed decode steps: sequences, steps, and tokens before them."""
PROMPT, PROMPT_TRIES = 512, 4
"""Tokens of the timed prompt, and how often it is read each way, in turns."""
SETTINGS = {"prefill": {"wave_tokens": 128}}
"""Some architectures read whole prompts with memory that grows with their square."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every fifth architecture")
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="only these model types")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    known = [*moe_architectures(), *composite_architectures()]
    names = arguments.only or known[:: 5 if arguments.quick else 1]
    results = {}
    for name in names:
        results[name] = check(name)
        Console(stderr=True).print(f"{name}: {results[name]}", highlight=False)
    show(results)


def check(model_type: str) -> dict[str, Any]:
    """One architecture: the differences, why it was refused, or what went wrong."""
    try:
        reference = tiny_model(model_type)
    except Exception as error:
        return {"refused": f"transformers cannot build it: {type(error).__name__}: {error}"}
    reference.config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 128, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    with tempfile.TemporaryDirectory() as directory:
        reference.save_pretrained(directory)
        try:
            model = MoE.from_pretrained(directory, SETTINGS)
        except UnsupportedModelError as error:
            return {"refused": str(error)}
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"}
    try:
        return compare(model, reference, prompts)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def compare(model: MoE, reference: PreTrainedModel, prompts: list[list[int]]) -> dict[str, Any]:
    ours = model.batch_logits(prompts)
    theirs = [full_logits(reference, prompt) for prompt in prompts]
    difference = furthest(ours, theirs)
    far = from_float64(reference, prompts, ours, theirs) if difference > TOLERANCE else None
    params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    routers = find_selectors(model.backbone)
    generated = [completion.token_ids for completion in model.generate(prompts, params)]
    status = model.status()
    return {
        "max_abs_diff": difference,
        "from_float64": far,
        "tokens_equal": generated == [greedy(reference, prompt) for prompt in prompts],
        "packed": status["packing"],
        "fused": status["fused"],
        "cut": model.backbone.can_cut,
        "drafts": model.backbone.packed,
        "compiled_prompts": model.backbone.prompt_forward is not None,
        "mtp": takes_mtp(model),
        "layer_ms": {batch: round(step_ms(model, batch), 3) for batch in BATCHES},
        "prompt_layer_ms": prompt_ms(model),
        "transformers_layer_ms": round(reference_step_ms(reference), 3),
        "routers": [len(routers), sum(found.selector is not None for found in routers)],
        "router_unknown": sorted({found.reason for found in routers if found.selector is None}),
    }


def furthest(some: list[Tensor], others: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))


def from_float64(
    reference: PreTrainedModel, prompts: list[list[int]], ours: list[Tensor], theirs: list[Tensor]
) -> dict[str, float]:
    """The largest error of a logit, ours and transformers', by transformers' forward in float64."""
    double = deepcopy(reference).double()
    for module in double.modules():
        if isinstance(module, PreTrainedModel):  # its products of groups take no float64
            module.config._experts_implementation = "eager"
    exact = [full_logits(double, prompt) for prompt in prompts]
    return {"ours": furthest(ours, exact), "transformers": furthest(theirs, exact)}


def is_near(result: dict[str, Any]) -> bool:
    """Return whether logits differ from transformers' by no more than rounding explains."""
    far = result["from_float64"]
    return result["max_abs_diff"] <= TOLERANCE or far["ours"] <= far["transformers"]


def takes_mtp(model: MoE) -> bool:
    """A multi-token-prediction layer would find the hidden states that it reads."""
    forward = model.backbone.decode_forward
    fused = model._loaded.fused
    return model.backbone.packed and (forward is None or fused.keeps_hidden)


@torch.inference_mode()
def step_ms(model: MoE, batch: int) -> float:
    """Milliseconds of a decode step of so many sequences, a layer."""
    backbone, seconds = model.backbone, []
    caches = [backbone.new_cache(CONTEXT + STEPS) for _ in range(batch)]
    for step in range(STEPS + 1):
        ids = [5 + step] if step else list(range(3, 3 + CONTEXT))
        began = time.perf_counter()
        work = [Work(ids, cache) for cache in caches]
        lanes = backbone.lanes(work, "decode" if step else "prefill")
        run_lanes(lanes, model.experts.run)
        for lane in lanes:
            lane.result()
        seconds.append(time.perf_counter() - began)
    return 1e3 * median(seconds[1:]) / num_layers(backbone.model)


@torch.inference_mode()
def prompt_ms(model: MoE) -> dict[str, float]:
    """Milliseconds of a prompt a layer: compiled, if it is, and through transformers' layers."""
    backbone, ids = model.backbone, [3 + 7 * at % 90 for at in range(PROMPT)]
    compiled, best = backbone.prompt_forward, dict[str, float]()
    ways = {"compiled": compiled, "transformers": None} if compiled else {"transformers": None}
    for _ in range(PROMPT_TRIES):
        for way, forward in ways.items():
            backbone.prompt_forward = forward
            lanes = backbone.lanes([Work(ids, backbone.new_cache(PROMPT))])
            began = time.perf_counter()
            run_lanes(lanes, model.experts.run)
            lanes[0].result()
            best[way] = min(time.perf_counter() - began, best.get(way, float("inf")))
    backbone.prompt_forward = compiled
    return {way: round(1e3 * each / num_layers(backbone.model), 3) for way, each in best.items()}


@torch.inference_mode()
def reference_step_ms(reference: PreTrainedModel) -> float:
    """The same of transformers' own forward at batch 1."""
    cache, seconds = None, []
    for step in range(STEPS + 1):
        ids = [5 + step] if step else list(range(3, 3 + CONTEXT))
        began = time.perf_counter()
        inputs = {CACHE_ARGUMENT: cache, "use_cache": True}
        cache = reference(torch.tensor([ids]), **inputs)[CACHE_ARGUMENT]
        seconds.append(time.perf_counter() - began)
    return 1e3 * median(seconds[1:]) / num_layers(reference)


def num_layers(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


@torch.no_grad()
def full_logits(reference: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """``(T, V)`` of one whole forward pass, without any cache."""
    logits: Tensor = reference(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


@torch.no_grad()
def greedy(reference: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Greedy tokens, every one from a whole forward pass over everything before it; of a model that
    sees a window of what it writes, by transformers' own cache, as only that knows the prompt."""
    token_ids, cached = list(prompt), OwnCache.of(reference).policy is not None
    cache: Any = None
    for _ in range(NEW_TOKENS):
        if cached:
            new = token_ids if cache is None else token_ids[-1:]
            inputs = {CACHE_ARGUMENT: cache, "use_cache": True}
            output = reference(torch.tensor([new]), **inputs)
            cache, logits = output[CACHE_ARGUMENT], output.logits[0]
        else:
            logits = full_logits(reference, token_ids)
        token_ids.append(int(logits[-1].argmax()))
    return token_ids[len(prompt) :]


def why_no_prompts(fused: str) -> str:
    """Of what a status says about fused steps, why prompts are not compiled."""
    _, known, why = fused.partition("prompts left to transformers: ")
    if not known:
        _, known, why = fused.partition("norms and positions (")
    return f"no: {why.partition(';')[0].rstrip(')')}" if known else "no"


def show(results: dict[str, dict[str, Any]]) -> None:
    columns = (
        "difference", "tokens", "passes", "prompts", "drafts", "decode step", "compiled prompts",
        "MTP", "routers",
    )  # fmt: skip
    times = [f"ms, batch {batch}" for batch in BATCHES]
    prompts = f"ms, prompt of {PROMPT}"
    table = Table("architecture", *columns, *times, "transformers", prompts, title="architectures")
    states = ("passed", "refused", "failed", "packed", "cut", "fused", "compiled_prompts", "mtp")
    counts = dict.fromkeys(states, 0)
    for name, result in results.items():
        state = next((state for state in ("refused", "failed") if state in result), "")
        if state:
            counts[state] += 1
            table.add_row(name, state, *[""] * (len(columns) - 1), result[state][:60])
            continue
        good = is_near(result) and result["tokens_equal"]
        counts["passed" if good else "failed"] += 1
        packed, fused = result["packed"]["enabled"], result["fused"]["enabled"]
        counts["packed"] += packed
        counts["fused"] += fused
        for what in ("cut", "compiled_prompts", "mtp"):
            counts[what] += result[what]
        table.add_row(
            name,
            f"{result['max_abs_diff']:.1e}",
            "equal" if result["tokens_equal"] else "DIFFERENT",
            "shared" if packed else "one each",
            "cut" if result["cut"] else "whole",
            "yes" if result["drafts"] else "no",
            "fused" if fused else result["fused"]["why"],
            "yes" if result["compiled_prompts"] else why_no_prompts(result["fused"]["why"]),
            "yes" if result["mtp"] else "no",
            "all" if not result["router_unknown"] else "; ".join(result["router_unknown"]),
            *(f"{result['layer_ms'][batch]:.2f}" for batch in BATCHES),
            f"{result['transformers_layer_ms']:.2f}",
            " beside ".join(f"{each:.2f}" for each in result["prompt_layer_ms"].values()),
        )
    Console(width=200).print(table)
    print(json.dumps({"architectures": results, **counts}))


if __name__ == "__main__":
    main()
