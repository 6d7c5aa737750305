"""What a prompt gets does not depend on who else is in the batch: shipped model, float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from moe import MoE, SamplingParams
from tests.amounts import amount

ROOT = Path(__file__).parents[3]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
DOMAINS = ("prose", "python", "cpp")


@pytest.fixture(scope="module")
def model() -> MoE:
    return MoE.from_pretrained(ROOT / "examples/demo-model", model={"expert_dtype": "float32"})


@pytest.fixture(scope="module")
def prompts(model: MoE) -> list[list[int]]:
    """Excerpts of held-out text of all domains, 1 to 60 tokens long."""
    choose = random.Random(0)
    excerpts = []
    for domain in DOMAINS:
        text = (ROOT / f"tests/data/heldout_{domain}.txt").read_text()
        for _ in range(6):
            start = choose.randrange(len(text) - 500)
            ids = model.codec.encode(text[start : start + 400])
            excerpts.append(ids[: choose.randint(1, 60)])
    return excerpts


def test_greedy_tokens_alone_equal_those_in_random_batches(
    model: MoE, prompts: list[list[int]]
) -> None:
    alone = [model.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]
    choose = random.Random(1)
    for _ in range(amount(64, quick=16)):
        batch = choose.choices(range(len(prompts)), k=choose.randint(2, 8))
        together = model.generate([prompts[index] for index in batch], GREEDY)
        assert [c.token_ids for c in together] == [alone[index] for index in batch]
