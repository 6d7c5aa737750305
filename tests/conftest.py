"""What holds for every test: no network, no caller's settings, no deadlines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from moe.profile_sources import ENVIRONMENT_PREFIX, OTHER_VARIABLES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moe import MoE
    from moe.plan.footprint import Footprint

# Before any test imports transformers or huggingface_hub, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
# Triton's kernels run in its interpreter, which Triton decides when a kernel is defined. For a GPU:
# TRITON_INTERPRET=0 python -m pytest -m gpu
os.environ.setdefault("TRITON_INTERPRET", "1")
for name in list(os.environ):
    if name.startswith(ENVIRONMENT_PREFIX) and name not in OTHER_VARIABLES:
        del os.environ[name]

# A shared machine makes the time of a single example meaningless. In CI the examples are the same
# each time, so that a failure there is about the change.
settings.register_profile("moe", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("moe")


@pytest.fixture(scope="session", autouse=True)
def footprints() -> Iterator[None]:
    """Measured once for each configuration: of loading a tiny model it is more than half."""
    from kernels import backend_status
    from moe.plan import planning

    known: dict[Any, Footprint] = {}
    measure = planning.measure_footprint

    def measure_once(network: PreTrainedModel, *sizes: int, on_cuda: bool) -> Footprint:
        config = network.config.to_json_string(use_diff=False)
        key = type(network), config, backend_status()["name"], *sizes, on_cuda
        if key not in known:
            known[key] = measure(network, *sizes, on_cuda=on_cuda)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "measure_footprint", measure_once)
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a saved tiny random model of an architecture; made once a session."""

    @cache
    def make(model_type: str) -> Path:
        from benchmarks.architectures import tiny_model

        path = tmp_path_factory.mktemp(model_type)
        tiny_model(model_type).save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session")
def tiny_moe(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str], MoE]:
    """That model, loaded; tests share it and leave it as it is."""

    @cache
    def load(model_type: str) -> MoE:
        from moe import MoE

        return MoE.from_pretrained(tiny_checkpoint(model_type))

    return load
