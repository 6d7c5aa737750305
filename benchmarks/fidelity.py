"""Does every architecture give through the seam what transformers gives?

    python -m benchmarks.fidelity [--quick] [--only TYPE ...]

For every MoE causal LM of the installed transformers: a tiny random model is saved, loaded through
`MoE.from_pretrained`, and compared with transformers' own eager forward: float32 logits and 24
greedy tokens of two prompts of different lengths in one batch. And in how many MoE layers the
router's rule is found, so that policies and drafts can choose again (`moe.describe.routers`), with
the reason where it is not. `--quick` takes every fourth one. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from examples.models.tiny import moe_architectures, tiny_model
from moe import MoE, SamplingParams
from moe.describe.routers import find_selectors
from moe.errors import UnsupportedModelError

PROMPT_LENGTHS = (23, 9)
NEW_TOKENS = 24
TOLERANCE = 2e-4
"""Of a logit. Recurrences make much of last bits: with one of 13 prompts qwen3_next is 1.1e-4 from
transformers, with the others both are some 1e-5 from float64."""
SETTINGS = {"prefill": {"wave_tokens": 128}}
"""Some architectures read whole prompts with memory that grows with their square."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every fourth architecture")
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="only these model types")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    names = arguments.only or moe_architectures()[:: 4 if arguments.quick else 1]
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
    differences = [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]
    params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    routers = find_selectors(model.backbone)
    generated = [completion.token_ids for completion in model.generate(prompts, params)]
    return {
        "max_abs_diff": max(differences),
        "tokens_equal": generated == [greedy(reference, prompt) for prompt in prompts],
        "packed": model.status()["packing"]["enabled"],
        "routers": [len(routers), sum(found.selector is not None for found in routers)],
        "router_unknown": sorted({found.reason for found in routers if found.selector is None}),
    }


@torch.no_grad()
def full_logits(reference: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """``(T, V)`` of one whole forward pass, without any cache."""
    logits: Tensor = reference(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


def greedy(reference: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Greedy tokens, every one from a whole forward pass over everything before it."""
    token_ids = list(prompt)
    for _ in range(NEW_TOKENS):
        token_ids.append(int(full_logits(reference, token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]


def show(results: dict[str, dict[str, Any]]) -> None:
    columns = ("max abs diff", "24 greedy tokens", "sequences", "routers known")
    table = Table("architecture", *columns, title="fidelity")
    counts = {"passed": 0, "refused": 0, "failed": 0}
    for name, result in results.items():
        if "refused" in result:
            counts["refused"] += 1
            table.add_row(name, "refused", "", result["refused"][:60])
        elif "failed" in result:
            counts["failed"] += 1
            table.add_row(name, "FAILED", "", result["failed"][:60])
        else:
            good = result["max_abs_diff"] <= TOLERANCE and result["tokens_equal"]
            counts["passed" if good else "failed"] += 1
            table.add_row(
                name,
                f"{result['max_abs_diff']:.1e}",
                "equal" if result["tokens_equal"] else "DIFFERENT",
                "packed" if result["packed"] else "one a lane",
                "all" if not result["router_unknown"] else "; ".join(result["router_unknown"]),
            )
    Console().print(table)
    print(json.dumps({"architectures": results, **counts}))


if __name__ == "__main__":
    main()
