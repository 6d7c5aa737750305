"""Whatever thread loads or steps a model, its kernels go to the model's GPU. Without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experts.layer_file import WHOLE
from moe import MoE, SamplingParams
from moe.images.reader import ImageReader
from moe.loading.store import READERS, read_layers
from moe.model_lock import ModelLock, on_device
from moe.settings import Profile
from moe.settings.device import use_device


class Gpus(threading.local):
    """Four GPUs. Each thread has a current one, 0 at first."""

    current = 0

    def set_device(self, device: torch.device) -> None:
        self.current = device.index

    def device(self, device: torch.device) -> Chosen:
        return Chosen(self, device)


class Chosen:
    """As `torch.cuda.device`."""

    def __init__(self, gpus: Gpus, device: torch.device) -> None:
        self.gpus, self.device = gpus, device

    def __enter__(self) -> None:
        self.before = self.gpus.current
        self.gpus.set_device(self.device)

    def __exit__(self, *_: object) -> None:
        self.gpus.current = self.before


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    made = Gpus()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.current)
    monkeypatch.setattr(torch.cuda, "set_device", made.set_device)
    monkeypatch.setattr(torch.cuda, "device", made.device)
    return made


@pytest.mark.parametrize(
    ("asked", "current", "chosen"),
    [("cuda", 2, "cuda:2"), ("auto", 2, "cuda:2"), ("cuda:1", 2, "cuda:1"), ("cpu", 2, "cpu")],
)
def test_a_device_has_a_number(gpus: Gpus, asked: str, current: int, chosen: str) -> None:
    """A rank makes its GPU current before it loads; its other threads must find the same."""
    gpus.current = current
    assert use_device(Profile(device=asked)) == torch.device(chosen)
    assert gpus.current == (torch.device(chosen).index or current)


def test_threads_read_layers_to_the_gpu_of_the_model(gpus: Gpus) -> None:
    met = threading.Barrier(READERS)  # each thread of the pool reads a layer
    ran: dict[str, set[int]] = {"load": set(), "keep": set()}

    def load_layer(*_: object) -> int:
        met.wait(60)
        ran["load"].add(gpus.current)
        return 0

    def keep(layer: Any) -> Any:
        ran["keep"].add(gpus.current)
        return layer

    records = [SimpleNamespace(parts=1)] * READERS
    store: Any = SimpleNamespace(manifest=SimpleNamespace(layers=records), load_layer=load_layer)
    like: Sequence[Any] = [None] * READERS
    read_layers(store, like, WHOLE, keep, torch.device("cuda:3"), lambda _: None)
    assert ran == {"load": {3}, "keep": {3}}
    assert gpus.current == 0


def test_each_model_steps_on_its_own_gpu_in_any_thread(gpus: Gpus) -> None:
    locks = [ModelLock(torch.device(name)) for name in ("cuda:1", "cuda:3", "cpu")]

    def step(lock: ModelLock) -> tuple[int, int]:
        with lock():
            inside = gpus.current
        return inside, gpus.current

    gpus.current = 2  # as another model has left it
    assert [step(lock) for lock in locks] == [(1, 2), (3, 2), (2, 2)]
    with ThreadPoolExecutor(1) as other:
        assert list(other.map(step, locks)) == [(1, 0), (3, 0), (0, 0)]


def test_whatever_computes_holds_the_lock(
    gpus: Gpus, tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), device="cpu")
    seen = list[int]()
    run = model.experts.run

    def noted(*arguments: Any) -> Any:
        seen.append(gpus.current)
        return run(*arguments)

    monkeypatch.setattr(model.experts, "run", noted)
    model._lock._device = torch.device("cuda:3")
    for work in (
        lambda: model.logits([5, 6]),
        lambda: list(model.expert_choices([5, 6])),
        lambda: model.generate([5, 6], SamplingParams(max_new_tokens=1)),
    ):
        seen.clear()
        work()
        assert set(seen) == {3}


def test_images_are_read_on_the_gpu_of_the_model(gpus: Gpus) -> None:
    reader: Any = ImageReader.__new__(ImageReader)
    reader._model = SimpleNamespace(device=torch.device("cuda:2"))
    reader.inputs = lambda text, images: {}
    reader.rows = lambda inputs: gpus.current
    assert reader._read("", []) == 2
    with on_device(torch.device("cpu")):
        assert gpus.current == 0
