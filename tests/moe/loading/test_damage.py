"""Safetensors files that change under us, or that carry any random damage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moe.errors import CheckpointError
from moe.loading.checkpoint import Checkpoint
from tests.open_files import num_open


def test_file_replaced_while_open_is_still_the_one_that_was_checked(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2)}, file)
    with Checkpoint.open(tmp_path) as checkpoint:
        save_file({"a": torch.zeros(2)}, tmp_path / "new")
        (tmp_path / "new").replace(file)
        assert checkpoint.read("a").tolist() == [1, 1]
        checkpoint.verify_unchanged()


def test_file_rewritten_or_truncated_while_open(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000)}, file)
    with Checkpoint.open(tmp_path) as checkpoint:
        os.truncate(file, 1000)
        with pytest.raises(CheckpointError, match=r"ended inside tensor 'a': \d+ of 4000 bytes"):
            checkpoint.read("a")
        with pytest.raises(CheckpointError, match="was changed while it was read"):
            checkpoint.verify_unchanged()


def test_a_refused_checkpoint_leaves_no_file_open(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    (tmp_path / "y.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"y\.safetensors: is empty"):
        Checkpoint.open(tmp_path)
    assert num_open(tmp_path) == 0


@settings(max_examples=300)
@given(data=st.data())
def test_any_damage_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Random edits and cuts: a `CheckpointError`, or what safetensors' own reader reads too."""
    directory = tmp_path_factory.mktemp("damaged")
    file = directory / "model.safetensors"
    save_file({"ab": torch.arange(6.0).view(2, 3), "c": torch.arange(4).to(torch.int16)}, file)
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    file.write_bytes(content)
    try:
        checkpoint = Checkpoint.open(directory)
    except CheckpointError:
        return
    with checkpoint:
        expected = load_file(file)
        assert checkpoint.tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            got = checkpoint.read(name)
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert bytes(got.view(-1).view(torch.uint8)) == bytes(tensor.view(-1).view(torch.uint8))
