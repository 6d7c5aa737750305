"""What loading says about itself."""

from __future__ import annotations

import pytest

from moe.decode.enable import FUSED_OFF
from moe.describe.probe import Packing
from moe.loading.load import LoadReport
from moe.notices import pass_notices, tensor_notices
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


def test_passes_that_fall_back_are_said() -> None:
    codec = TextCodec(None, vocab_size=10, no_tokenizer_reason="none was given")
    packing, tokenizer = pass_notices(Packing(False, "a reason"), FUSED_OFF, codec)
    assert packing.endswith(
        "prompts are neither cut nor kept for others that begin alike: a reason"
    )
    assert tokenizer == "prompts can only be token ids: none was given"
