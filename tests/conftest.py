"""What holds for every test: no network, no caller's settings, no deadlines, the same chances."""

from __future__ import annotations

import atexit
import gc
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

if not find_spec("hypothesis"):  # a machine with few packages, for tests of GPU kernels
    sys.path.append(str(Path(__file__).parent / "without_hypothesis"))
from hypothesis import HealthCheck, register_random, settings

from moe.settings.profile import ENVIRONMENT_PREFIX, OTHER_VARIABLES
from tests.amounts import IN_CI, amount
from tests.launched import Launch, Launched, Nursery, free_port
from tests.replaced import Originals

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moe import MoE
    from tests.fake_hub import FakeHub

pytest_plugins = ["tests.cpu_seconds"]

gc.disable()  # until tests are imported: it would look through all of that again and again
# Before any test imports transformers or huggingface_hub, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
# A process that a test starts compiles nothing that others have compiled: three seconds of it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Triton's kernels run in its interpreter, which Triton decides when a kernel is defined. For a GPU:
# TRITON_INTERPRET=0 python -m pytest -m gpu
os.environ.setdefault("TRITON_INTERPRET", "1")
for name in list(os.environ):
    if name.startswith(ENVIRONMENT_PREFIX) and name not in OTHER_VARIABLES:
        del os.environ[name]
# Tests replace code while they run, which the key of proofs cannot know (`moe.cache_dir`).
os.environ.setdefault("MOE_PROOF_CACHE", "")

# A shared machine makes the time of a single example meaningless. In CI the examples are the same
# each time, so that a failure there is about the change.
# `--hypothesis-profile hostile` is for tests of anything that a client may send.
for profile, examples in {"moe": amount(50, quick=12), "hostile": 4500}.items():
    settings.register_profile(
        profile,
        deadline=None,
        max_examples=examples,
        derandomize=IN_CI,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("moe")
if IN_CI and find_spec("hypothesis.internal"):
    from hypothesis.internal.conjecture import providers

    # Constants of whatever has been imported so far are examples, too: they would depend on the
    # tests that ran before in the same process.
    providers._get_local_constants = lambda: providers._local_constants


class TorchRandom:
    """Torch's own generator, for hypothesis to begin each example with it in the same state."""

    seed = staticmethod(torch.default_generator.manual_seed)
    getstate = staticmethod(torch.default_generator.get_state)
    setstate = staticmethod(torch.default_generator.set_state)


TORCH_RANDOM = TorchRandom()
register_random(TORCH_RANDOM)


def begin_chances() -> None:
    """What is drawn without a seed depends on no test that ran before in this process."""
    random.seed(0)
    np.random.seed(0)
    TORCH_RANDOM.seed(0)


def pytest_collection_finish() -> None:
    """Collections of garbage leave alone what was imported: a third of a second each."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # extension modules report what is alive at the end


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    begin_chances()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    begin_chances()


@pytest.fixture(scope="session")
def originals() -> Originals:
    return Originals()


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_replaced(originals: Originals) -> Iterator[None]:
    """In the product, behind the tests of a file."""
    yield
    if replaced := originals.put_back():
        pytest.fail(f"this file has replaced and not put back: {', '.join(replaced)}")


@pytest.fixture(scope="session", autouse=True)
def footprints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured once for each configuration, by whichever process of this run needs it first: of
    loading a tiny model it is more than half."""
    from kernels import backend_status
    from moe.kv.layout import Shape
    from moe.memory import planning
    from moe.memory.footprint import Footprint

    known: dict[Any, Footprint] = {}
    measure = planning.measure_footprint
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "footprints"
    folder.mkdir(exist_ok=True)

    def measure_once(network: PreTrainedModel, *sizes: int, **how: Any) -> Footprint:
        config = network.config.to_json_string(use_diff=False)
        key = type(network), config, backend_status()["name"], *sizes, *how.values()
        if key not in known:
            file = folder / hashlib.sha256(repr(key).encode()).hexdigest()
            if file.exists():
                read = json.loads(file.read_text())
                windows = {int(window): size for window, size in read.pop("windows").items()}
                shapes = {int(layer): Shape(*own) for layer, own in read.pop("shapes").items()}
                known[key] = Footprint(**read, windows=windows, shapes=shapes)
            else:
                known[key] = measure(network, *sizes, **how)
                fresh = file.with_suffix(f".{os.getpid()}")
                fresh.write_text(json.dumps(asdict(known[key])))
                fresh.replace(file)  # whole, or not there
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "measure_footprint", measure_once)
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a saved tiny random model of an architecture; made once a session."""

    @cache
    def make(model_type: str) -> Path:
        from examples.models.tiny import tiny_model

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


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    """A hub on localhost, which this process uses instead of the real one."""
    from tests.fake_hub import fake_hub

    with fake_hub(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


@pytest.fixture(scope="session")
def wait_for() -> Callable[[Callable[[], object], str], None]:
    def wait(condition: Callable[[], object], what: str) -> None:
        for _ in range(2000):
            if condition():
                return
            time.sleep(0.01)
        pytest.fail(f"waited in vain for {what}")

    return wait


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def launch(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Starts so many ranks of a command line of ``moe``, or of a script; one is a plain process."""

    @contextmanager
    def start(
        ranks: int, argv: Sequence[object], fault: Any = None, **environ: str
    ) -> Iterator[Launched]:
        common = {
            **os.environ,
            **{"OMP_NUM_THREADS": "1", "TEST_FAULT": json.dumps(fault or {})},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
            **{"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)},
            **environ,
        }
        environs = [common | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)]
        launched = Launched(nursery, tmp_path_factory.mktemp("launch"), argv, environs)
        try:
            yield launched
        finally:
            launched.end()

    return start
