"""The profile's choice of who runs the experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels import Backend, BackendError
from kernels.reference import experts_forward
from moe import MoE
from moe.errors import ProfileError

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def load(path: Path, backend: str) -> MoE:
    return MoE.from_pretrained(path, device="cpu", kernels={"backend": backend})


def test_the_reference_can_be_chosen(
    tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load(tiny_checkpoint("qwen3_moe"), "reference")
    assert plain.status()["expert_kernel"] == {
        "name": "reference",
        "reason": "chosen in the profile",
    }
    usual = load(tiny_checkpoint("qwen3_moe"), "auto")
    torch.testing.assert_close(plain.logits(PROMPT), usual.logits(PROMPT), rtol=1e-3, atol=1e-3)
    for name in ("experts_forward", "layer_call"):
        monkeypatch.setattr(
            f"kernels.cpu.NativeKernels.{name}",
            lambda *_: pytest.fail("the native kernel was asked for"),
        )
    plain.logits(PROMPT)


def test_a_gpu_backend_is_refused_on_a_cpu(tiny_checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(
        ProfileError,
        match=r"^kernels.backend: triton needs a CUDA device.*'cpu'; or set it to auto",
    ):
        load(tiny_checkpoint("qwen3_moe"), "triton")


def test_weights_that_do_not_suit_the_backend_are_refused(
    tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Picky(Backend):
        def check(self, layers: object) -> None:
            raise BackendError("bfloat16 weights only")

    picky = Picky("picky", "", experts_forward)
    monkeypatch.setattr("moe.loader.choose_backend", lambda *_: picky)
    with pytest.raises(ProfileError, match=r"^kernels.backend: bfloat16 weights only"):
        load(tiny_checkpoint("qwen3_moe"), "auto")
