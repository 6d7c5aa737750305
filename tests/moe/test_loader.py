"""What loading says about itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moe import MoE
from moe.decode.enable import FUSED_OFF
from moe.describe.probe import Packing
from moe.errors import CheckpointError
from moe.loading.load import LoadReport
from moe.loading.progress import LoadProgress
from moe.notices import pass_notices, prompt_notices, tensor_notices
from moe.text.tokenizer import TextCodec


@pytest.mark.parametrize(
    ("ignored", "computed", "expected"),
    [
        (("mtp.0.w", "mtp.1.w"), (), "2 tensors in the checkpoint are not used"),
        ((), ("rotary.scale",), "1 tensors are not in the checkpoint and were filled"),
    ],
)
def test_tensors_left_out_or_filled_in_are_said(
    ignored: tuple[str, ...], computed: tuple[str, ...], expected: str
) -> None:
    (tensors,) = tensor_notices(LoadReport(ignored, computed))
    assert tensors.startswith(expected)
    assert tensors.endswith(f"(the first: {(ignored + computed)[0]})")


def test_a_model_that_is_replaced_while_it_is_loaded_is_refused(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Weights of one model never meet the small files, or the saved prefixes, of another."""
    path = Path(shutil.copytree(tiny_checkpoint("qwen3_moe"), tmp_path / "model"))

    def replace(progress: LoadProgress) -> None:
        if progress.phase == "preparing":
            (path / "generation_config.json").write_text('{"eos_token_id": 7}')

    with pytest.raises(CheckpointError, match=r"was changed while it was loaded \(generation_conf"):
        MoE.from_pretrained(path, progress=replace)
    (path / "config.json").touch()
    MoE.from_pretrained(path).close()  # nothing changes meanwhile


def test_passes_that_fall_back_are_said() -> None:
    codec = TextCodec(None, vocab_size=10, no_tokenizer_reason="none was given")
    (packing,) = pass_notices(Packing(False, "a reason"), FUSED_OFF)
    assert packing.endswith(
        "prompts are neither cut nor kept for others that begin alike: a reason"
    )
    assert prompt_notices(codec) == ["prompts can only be token ids: none was given"]
