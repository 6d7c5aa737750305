"""The GPU's benchmark: it says so where there is none, and its layers are ones the kernels take."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.kernels_gpu import Size, main, run


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to run it on")
def test_says_that_there_is_no_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["kernels_gpu"])
    main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last) == {"skipped": "torch finds no CUDA device"}


def test_points_of_a_tiny_layer() -> None:
    size = Size(hidden=64, experts=4, width=32, top_k=2, layers=2)
    (point,) = run(size, torch.device("cpu"), (3,), seconds=0.01)
    assert point["tokens"] == 3
    bits = {f"{bits} bits" for bits in (8, 4, 3, 2)}
    assert set(point["us"]) == {"bf16", "FP8", "MXFP4", "plain torch"} | bits
    assert all(value > 0 for value in (*point["us"].values(), *point["gbps"].values()))
