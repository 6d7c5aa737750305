"""Training the block-diffusion model that ships, for a few steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.train_diffusion import CANVAS, masks, noise_mask
from moe import MoE, SamplingParams

ROOT = Path(__file__).parents[2]


def test_canvases_see_themselves_and_what_a_cache_would_hold_before_them() -> None:
    length, window = 3 * CANVAS, CANVAS + 1
    _, refining = masks(length, window)
    sees = refining["sliding_attention"][0, 0, 2 * CANVAS + 5]
    expected = [*range(CANVAS, 2 * CANVAS), *range(length + 2 * CANVAS, 2 * length)]
    assert sees.nonzero().flatten().tolist() == expected
    whole = refining["full_attention"][0, 0, 2 * CANVAS + 5]
    assert whole[:length].nonzero().flatten().tolist() == list(range(2 * CANVAS))
    assert torch.equal(whole[length:], sees[length:])


def test_noise_has_its_share_of_each_canvas() -> None:
    shares = torch.tensor([[0.25, 1.0]])
    for in_order in (0.0, 1.0):
        noisy = noise_mask((1, 2 * CANVAS), shares, in_order)
        assert noisy.view(2, CANVAS).sum(1).tolist() == [CANVAS // 4, CANVAS]
    assert noisy[0, :CANVAS].nonzero().flatten().tolist() == list(range(CANVAS - 8, CANVAS))


@pytest.mark.deep
def test_a_few_steps_leave_a_model_that_writes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.train_diffusion", "--quick", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    (done,) = MoE.from_pretrained(tmp_path).generate("def ", SamplingParams(max_new_tokens=CANVAS))
    assert len(done.token_ids) == CANVAS
    assert "next token" in (tmp_path / "README.md").read_text()
