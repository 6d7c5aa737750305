"""The group's backend and the place of its rows follow the profile, not the machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from experts.dispatch import AllToAllDispatcher, DeviceDispatcher
from experts.placement import linear
from moe.errors import LaunchError
from moe.parallel import group
from moe.parallel.ranks import _on_cuda
from moe.parallel.watchdog import Heartbeat
from moe.parallel.worker import new_dispatcher
from moe.settings import ParallelSettings, Profile


class Accelerator:
    """What DeepSpeed finds on a machine with a GPU."""

    @staticmethod
    def communication_backend_name() -> str:
        return "nccl"

    @staticmethod
    def current_device_name() -> str:
        return "cuda:0"

    @staticmethod
    def is_available() -> bool:
        return True


class Comm:
    __compatible_ops__: ClassVar[dict[str, bool]] = {}

    @staticmethod
    def init_distributed(verbose: bool) -> None:
        pass


@pytest.mark.parametrize("deepspeed", [True, False])
@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("auto", "nccl")])
def test_ranks_of_a_cpu_profile_use_gloo_on_a_machine_with_gpus(
    device: str, backend: str, deepspeed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With DeepSpeed, and by torch alone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("DS_ACCELERATOR", "")  # to be absent again behind this test, too
    monkeypatch.delenv("DS_ACCELERATOR")
    asked: dict[str, Any] = {}
    modules = {
        "deepspeed.comm": Comm,
        "deepspeed.accelerator": type("", (), {"get_accelerator": lambda: Accelerator}),
    }

    def import_module(name: str) -> Any:
        if name.startswith("deepspeed") and not deepspeed:
            raise ImportError(name)
        return modules.get(name, Comm)

    monkeypatch.setattr(group, "importlib", SimpleNamespace(import_module=import_module))
    monkeypatch.setattr(group, "PrefixStore", lambda *_: None)
    monkeypatch.setattr(group, "prefer_local_sockets", lambda exchange, _: exchange)

    class Exchange:
        rank, size, same_machine, sockets = 0, 2, False, None

        def __init__(self, group: object, device: str, timeout_s: float = 0.0) -> None:
            self.group, self.device, self.settle = group, device, None

    monkeypatch.setattr(group, "GroupExchange", Exchange)

    def init(backend: str, **_: object) -> None:
        asked["backend"] = backend

    monkeypatch.setattr(torch.distributed, "init_process_group", init)
    monkeypatch.setattr(torch.distributed, "new_group", lambda **how: how["backend"])
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    on_cuda = _on_cuda(Profile(device=device))
    made = group.form_group(None, 0, [0, 1], 0, 1.0, Heartbeat(), on_cuda=on_cuda)  # type: ignore[arg-type]
    assert asked["backend"] == backend
    assert str(made.host.device) == "cpu"
    assert (made.device and str(made.device.device)) == (None if device == "cpu" else "cuda:0")
    ours = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    assert ours == (None if device == "cpu" else "0")
    if made.device is not None:  # for tensors, as there is no GPU
        made.device.device = torch.device("cpu")
    dispatcher, _ = new_dispatcher(made, [linear(4, 4, 2)], ParallelSettings())
    assert isinstance(dispatcher, AllToAllDispatcher if device == "cpu" else DeviceDispatcher)
    assert dispatcher._exact == (device == "cpu")
    assert os.environ.get("DS_ACCELERATOR") == ("cpu" if device == "cpu" else None)


@pytest.mark.parametrize("absent", ["psutil", "scipy"])
def test_what_ranks_need_is_said_with_the_command_that_installs_it(
    absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    needs: dict[str, Callable[[], object]] = {
        "psutil": lambda: group.use_interface("127.0.0.1"),
        "scipy": lambda: group.form_group(None, 0, [0, 1], 0, 1.0, Heartbeat()),  # type: ignore[arg-type]
    }
    with pytest.raises(LaunchError, match=rf"several ranks need {absent} .*pip install"):
        needs[absent]()
