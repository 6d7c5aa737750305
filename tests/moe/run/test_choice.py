"""How a model is run: a table of memory, disk and model, and what holds for all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.commands.run.choice import (
    SHORT_WAVE,
    WAVE,
    RunChoice,
    RunMachine,
    RunModel,
    choose_run,
)
from moe.errors import DoesNotFitError
from moe.loading.memory_plan import GIB
from moe.memory.footprint import Footprint
from moe.settings.profile import load_profile


def model(billions: float, kind: Any = "checkpoint", **changed: Any) -> RunModel:
    """A model of so many parameters in bfloat16, a tenth of them outside experts."""
    trunk, experts = int(0.1e9 * billions), int(0.9e9 * billions)
    sizes = {8: 1.03, 4: 0.53, 3: 0.41, 2: 0.28}
    made = RunModel(
        kind=kind,
        weight_bytes=2 * (trunk + experts),
        remote=False,
        whole={"trunk": 4 * trunk, "experts": 2 * experts},
        trunk_bytes=int(1.2 * trunk),
        expert_bytes={bits: int(experts * each) for bits, each in sizes.items()},
        num_experts=1000,
        alike=True,
        footprints={
            WAVE: Footprint(50_000, 50_000, 0, int(1.2 * GIB), "by hand"),
            SHORT_WAVE: Footprint(50_000, 50_000, 0, int(0.15 * GIB), "by hand"),
        },
        logits_size=100_000,
        context=32_768,
    )
    return replace(made, **changed)


def chosen(model: RunModel, memory: float, disk: float, **changed: Any) -> str:
    """In a few words."""
    try:
        made = choose_run(model, RunMachine(int(memory * GIB), int(disk * GIB), **changed))
    except DoesNotFitError:
        return "nothing"
    bits = "as it is" if made.bits is None else f"{made.bits} bits"
    where = "disk" if made.offload else "memory"
    how = "convert" if made.convert else "store" if made.from_store else "load"
    short = ", short" if made.settings.get("prefill.wave_tokens") == SHORT_WAVE else ""
    return f"{how}, {bits}, {where}{short}"


SMALL, TWO, THIRTY = model(0.02), model(2), model(30)
STORE_8 = replace(THIRTY, kind="store", store_bits=8)
STORE_4 = replace(THIRTY, kind="store", store_bits=4)
STORE_16 = replace(THIRTY, kind="store", store_bits=16)
ON_HUB = replace(THIRTY, remote=True)
GGUF = model(2, "GGUF file")
Q4_0 = replace(GGUF, whole={"trunk": int(0.12e9), "experts": int(1.02e9)})


@pytest.mark.parametrize(
    ("model", "memory", "disk", "expected"),
    [
        (SMALL, 16, 100, "load, as it is, memory"),
        (SMALL, 16, 0, "load, as it is, memory"),
        (replace(SMALL, remote=True), 16, 0, "nothing"),
        (Q4_0, 64, 100, "load, as it is, memory"),
        (Q4_0, 2.4, 100, "convert, 4 bits, memory, short"),
        (TWO, 64, 100, "convert, 8 bits, memory"),
        (TWO, 16, 100, "convert, 8 bits, memory"),
        (TWO, 3.2, 100, "convert, 4 bits, memory"),
        (TWO, 2.4, 100, "convert, 4 bits, memory, short"),
        (TWO, 1, 100, "convert, 4 bits, disk, short"),
        (TWO, 0.2, 100, "nothing"),
        (TWO, 16, 0, "load, 8 bits, memory"),
        (TWO, 3.2, 0, "load, 4 bits, memory"),
        (TWO, 1, 0, "nothing"),
        (TWO, 16, 1.5, "load, 8 bits, memory"),
        (GGUF, 16, 100, "convert, 8 bits, memory"),
        (model(0.1, "GGUF file"), 16, 100, "load, as it is, memory"),
        (THIRTY, 64, 100, "convert, 8 bits, memory"),
        (THIRTY, 24, 100, "convert, 4 bits, memory"),
        (THIRTY, 8, 100, "convert, 4 bits, disk"),
        (THIRTY, 8, 10, "nothing"),
        (THIRTY, 64, 20, "load, 8 bits, memory"),
        (replace(THIRTY, alike=False), 8, 100, "nothing"),
        (ON_HUB, 24, 20, "convert, 4 bits, memory"),
        (ON_HUB, 64, 20, "convert, 4 bits, memory"),
        (ON_HUB, 64, 10, "nothing"),
        (STORE_8, 64, 0, "load, 8 bits, memory"),
        (STORE_8, 24, 0, "load, 4 bits, memory"),
        (STORE_8, 8, 0, "load, 4 bits, disk"),
        (STORE_4, 64, 0, "load, 4 bits, memory"),
        (STORE_16, 128, 0, "load, as it is, memory"),
        (STORE_16, 32, 0, "load, as it is, disk"),
    ],
)
def test_what_is_chosen(model: RunModel, memory: float, disk: float, expected: str) -> None:
    assert chosen(model, memory, disk) == expected


def test_a_store_that_is_there_needs_no_disk() -> None:
    assert chosen(THIRTY, 24, 0, stores=frozenset({4})) == "store, 4 bits, memory"
    assert chosen(THIRTY, 64, 100, stores=frozenset({4})) == "convert, 8 bits, memory"


def test_a_gpu_keeps_weights_as_they_are_where_they_fit() -> None:
    gpu: dict[str, Any] = {"place": "cuda:0", "host": 64 * GIB}
    assert chosen(TWO, 16, 100, **gpu) == "load, as it is, memory"
    assert chosen(THIRTY, 8, 100, **gpu) == "convert, 4 bits, disk"


@settings(max_examples=25)
@given(
    billions=st.floats(0.01, 300),
    memory=st.floats(0.1, 500),
    disk=st.floats(0, 500),
    remote=st.booleans(),
    stores=st.frozensets(st.sampled_from([4, 8])),
)
def test_a_choice_fits_and_more_memory_never_makes_it_worse(
    billions: float, memory: float, disk: float, remote: bool, stores: frozenset[int]
) -> None:
    made_of = replace(model(billions), remote=remote)
    machine = RunMachine(int(memory * GIB), int(disk * GIB), stores)

    def worth(choice: RunChoice | None) -> tuple[bool, bool, int]:
        if choice is None:
            return False, False, 0
        return True, not choice.offload, choice.bits or 16

    def choose(machine: RunMachine) -> RunChoice | None:
        try:
            return choose_run(made_of, machine)
        except DoesNotFitError:
            return None

    made = choose(machine)
    assert machine.memory is not None
    assert worth(choose(replace(machine, memory=2 * machine.memory))) >= worth(made)
    if made is not None:
        assert made.plan.fits
        assert made.plan.needed_bytes <= machine.memory
        assert made.convert <= made.from_store
        if made.convert:
            assert made_of.store_bytes(made.bits or 0) <= machine.disk
        assert load_profile(made.profile, made.settings, {})
        assert made.context == made_of.context or made.context == made.plan.kv_tokens


def test_what_is_refused_says_why() -> None:
    with pytest.raises(DoesNotFitError) as refused:
        choose_run(THIRTY, RunMachine(8 * GIB, 10 * GIB))
    said = str(refused.value)
    assert said.startswith("the model does not fit on this machine:\n")
    assert "at 8 bits, all in memory, it needs 31." in said
    assert "a store of 4 bits takes 16.68 GiB of disk, and 10.00 GiB are free" in said
