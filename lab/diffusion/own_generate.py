"""Runs transformers' own generation in a process of its own: neither engine warms the other."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion


def serve_transformers(pipe: Any, path: Path, settings: dict[str, Any], threads: int) -> None:
    """Load a model, and continue the batches that come until the pipe ends."""
    torch.set_num_threads(threads)
    model: Any = DiffusionGemmaForBlockDiffusion.from_pretrained(path, dtype=torch.float32).eval()
    pipe.send("loaded")
    with suppress(EOFError):
        while batches := pipe.recv():
            found = []
            for seed, batch in enumerate(batches):
                torch.manual_seed(seed)
                sequences: Tensor = model.generate(torch.tensor(batch), **settings).sequences
                found += sequences[:, len(batch[0]) :].tolist()
            pipe.send(found)
