"""Deferred modules: they run when they are used, and then nobody can tell."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe import deferred

ROOT = Path(__file__).parents[2]
PACKAGE = {
    "__init__.py": "count = 0\nfrom later.base import Base\n",
    "base.py": (
        "ran = True\n"
        "class Base:\n"
        "    made = 'by base'\n"
        "    def __init__(self, number=0): self.number = number\n"
        "    def __eq__(self, other): return self.number == other.number\n"
        "    def __hash__(self): return hash(self.number)\n"
        "def double(number): return 2 * number\n"
        "Replicate = Base\n"
    ),
    "compiler.py": (
        "marked = []\n"
        "def allow_in_graph(function): marked.append(function); return function\n"
        "def disable(function, recursive, reason=None): return lambda: ('disabled', function())\n"
    ),
}


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package ``later``, of which two modules are deferred."""
    folder = tmp_path / "later"
    folder.mkdir()
    for name, source in PACKAGE.items():
        (folder / name).write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = {"later.base": ("Base", "double", "Replicate"), "later.compiler": ()}
    monkeypatch.setattr(deferred, "DEFERRED", names)
    monkeypatch.setattr(deferred, "COMPILER", "later.compiler")
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    deferred.defer()
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "later"]:
        del sys.modules[name]


def base() -> Any:
    return importlib.import_module("later.base")


def waits() -> bool:
    return isinstance(base(), deferred.DeferredModule)


@pytest.mark.usefixtures("later")
def test_names_that_are_taken_do_not_run_the_module() -> None:
    taken = importlib.import_module("later").Base
    assert not isinstance(3, taken)
    assert taken | None
    assert waits()


@pytest.mark.usefixtures("later")
def test_what_is_not_listed_runs_it_in_its_place() -> None:
    module = base()
    assert module.ran
    assert not waits()
    assert base() is module
    assert module.Base.__module__ == "later.base"


@pytest.mark.usefixtures("later")
def test_a_stand_in_is_called_asked_and_derived_from() -> None:
    taken, double = base().Base, base().double
    assert double(4) == 8
    assert isinstance(taken(1), base().Base)
    assert isinstance(base().Base(1), taken)
    assert issubclass(base().Base, taken)
    assert taken.made == "by base"
    derived = type("Derived", (taken,), {})
    assert issubclass(derived, base().Base)


@pytest.mark.usefixtures("later")
def test_a_class_may_be_derived_from_a_stand_in() -> None:
    class Derived(base().Base):  # type: ignore[misc]
        pass

    assert not waits()
    assert type(Derived) is type
    assert isinstance(Derived(), base().Base)


@pytest.mark.usefixtures("later")
def test_constants_are_made_when_they_are_looked_at() -> None:
    first, second = base().Replicate(1), base().Replicate(1)
    assert waits()
    assert first == second
    assert not waits()
    assert isinstance(first, base().Base)
    assert {first: 1}[base().Base(1)] == 1
    assert first.number == 1


@pytest.mark.usefixtures("later")
def test_the_compiler_learns_of_functions_when_it_comes() -> None:
    compiler = importlib.import_module("later.compiler")

    @compiler.allow_in_graph
    def marked() -> int:
        return 1

    @compiler.disable(recursive=False)
    def own() -> int:
        return 2

    assert isinstance(compiler, deferred.DeferredModule)
    assert (marked(), own()) == (1, 2)
    assert compiler.marked == [marked]
    assert own() == ("disabled", 2)


@pytest.mark.usefixtures("later")
def test_a_module_that_is_absent_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "DEFERRED", {"later.absent": ()})
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("later.absent")


GENERATE = """
import sys
from moe.cli import command, main

def run():
    code = main(sys.argv[1:])
    print(*sys.modules, file=sys.stderr)
    return code

command(run)
"""


def test_generate_imports_no_compiler_and_no_training() -> None:
    """In transformers' place; a new release that uses another of their names shows here."""
    command = ["generate", "examples/demo-model", "--prompt", "def ", "--max-new-tokens", "2"]
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, *command],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    modules = set(done.stderr.splitlines()[-1].split())
    assert "transformers.modeling_utils" in modules
    ran = {"torch._dynamo.eval_frame", "torch._inductor", "torch.distributed.tensor._api"}
    ran |= {"scipy.optimize._optimize", "torch.distributed.fsdp.fully_sharded_data_parallel"}
    ran |= {"torch.distributed.checkpoint.state_dict_saver", "fastapi"}
    ran |= {"sympy.core", "torch.utils._sympy.functions"}
    assert not modules & ran


def test_deferred_modules_work_when_they_are_used() -> None:
    """torch's compiler and sharded tensors, behind transformers' stand-ins."""
    code = """
from moe.deferred import defer, DeferredModule
defer()
import sys, torch
from transformers.distributed.tensor_parallel import DTensor, Replicate, Shard
from transformers.distributed.sharding_utils import Shard as Other
import transformers.modeling_utils
meta = torch.ones(2, 1, device="meta") * torch.arange(3, device="meta")
assert meta.shape == torch.stack([meta, meta])[0].shape == (2, 3)
try:
    torch.ones(2, device="meta") * torch.ones(3, device="meta")
except RuntimeError as error:
    assert "broadcast" in str(error) or "must match" in str(error), error
else:
    raise AssertionError("sizes that do not go together were taken")
for name in ("sympy", "torch.fx.experimental.symbolic_shapes"):
    assert isinstance(sys.modules[name], DeferredModule), name
assert isinstance(sys.modules["torch.distributed.tensor"], DeferredModule)
assert isinstance(sys.modules["torch._dynamo"], DeferredModule)
made = Shard(0)
from torch.distributed.tensor.placement_types import Shard as Real, _StridedShard
assert made == Real(0) and isinstance(made, Real) and hash(made) == hash(Real(0))
assert not isinstance(torch.zeros(1), DTensor)
assert isinstance(Other(1), Real)
import torch._dynamo
assert torch._dynamo.config.cache_size_limit > 0
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
grown = torch.compile(lambda x: x.new_ones(x.shape[0] * 2, 1) * x, backend="eager", dynamic=True)
assert [grown(torch.ones(size)).shape for size in (3, 5)] == [(6, 3), (10, 5)]
assert isinstance(sys.modules["sympy"].Symbol("s"), sys.modules["sympy"].Basic)
import transformers
assert transformers.models.llama.LlamaConfig().model_type == "llama"
assert transformers.LlamaForCausalLM.__module__.endswith("modeling_llama")
import scipy.optimize
print(scipy.optimize.linear_sum_assignment([[1, 2], [2, 1]])[1].tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[0, 1]"


PLAIN_VALUES: dict[type, list[Any]] = {bool: [False, True], int: [-1, 0, 1, 7]}


@pytest.mark.parametrize("name", deferred.PLAIN)
def test_plain_sizes_are_answered_as_torch_does(name: str) -> None:
    from torch.fx.experimental import symbolic_shapes

    real = getattr(symbolic_shapes, name)
    kind, answer = deferred.PLAIN[name]
    values = PLAIN_VALUES[kind]
    pairs = [(one, other) for one in values for other in values]
    if name == "sym_eq":
        pairs += [((1, 2), [1, 2]), ((1, 2), (1, 3)), ((1,), (1, 2)), ((), ())]
    several = name in ("sym_eq", "sym_and", "sym_or")
    for each in pairs if several else [(value,) for value in values]:
        found, expected = answer(*each), real(*each)
        assert (type(found), found) == (type(expected), expected)
