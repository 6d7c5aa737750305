"""Processes of tests: the ``moe`` command, or a script, with a fault if the environment asks.

This program has imported what ranks import, and forks one for each that it is asked for: so a rank
costs what it does and not what its imports do. Ranks that a launcher starts are in `test_launcher`.

``TEST_FAULT`` is JSON: ``{"rank": 1, "kind": "raise", "step": 40}``; rank "01" is both. Steps of a
rank that raises, stalls or is "slow" take so long that requests of a test are still under way.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import sys
import time
from importlib import import_module
from typing import Any

from moe.cli import command
from moe.cli import main as moe

MODULES = (
    *("moe.server.serve", "moe.parallel.coordinator", "moe.parallel.worker"),
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)

FAULT: dict[str, Any] = {}
STALL_S, SLOW_S = 1000.0, 0.05


def break_steps() -> None:
    """All take a while, and one raises or never ends."""
    from moe.parallel.remote import EngineMirror

    steps, run = 0, EngineMirror.run

    def broken(self: EngineMirror, *arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        time.sleep(SLOW_S)
        if steps == FAULT.get("step"):
            assert FAULT["kind"] != "raise", "broken on purpose"
            time.sleep(STALL_S)
        return run(self, *arguments)

    EngineMirror.run = broken  # type: ignore[assignment, method-assign]


def run_out_of_memory() -> None:
    """When experts are run on a row in one step of this rank, once: a layer without rows on this
    rank would cost no request."""
    from moe.network import moe_layer
    from moe.parallel.remote import EngineMirror

    steps, run, run_experts = 0, EngineMirror.run, moe_layer.run_experts

    def counted(self: EngineMirror, *arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        return run(self, *arguments)

    def broken(*arguments: Any) -> Any:
        if steps < FAULT["step"] or not len(arguments[0]):
            return run_experts(*arguments)
        moe_layer.run_experts = run_experts
        raise MemoryError("no memory, on purpose")

    EngineMirror.run = counted  # type: ignore[assignment, method-assign]
    moe_layer.run_experts = broken  # type: ignore[assignment]


def stay_in_loading() -> None:
    from moe.parallel.ranks import Ranks

    def share(*_: Any) -> Any:
        print("loading", flush=True)
        time.sleep(STALL_S)

    Ranks.share = share  # type: ignore[assignment, method-assign]


def dispatch_as_on_gpus() -> None:
    """Rows travel by `DeviceDispatcher`, over gloo in place of NCCL; steps take a while."""
    from experts.dispatch import GroupExchange
    from moe.parallel import worker
    from moe.parallel.group import RankExchanges, WatchedExchange

    new_dispatcher = worker.new_dispatcher

    def on_device(exchanges: RankExchanges, *arguments: Any) -> Any:
        rows = WatchedExchange(GroupExchange(None, "cpu"), exchanges.host._heartbeat)
        made, why = new_dispatcher(exchanges._replace(device=rows), *arguments)
        print(type(made).__name__, flush=True)
        return made, why

    worker.new_dispatcher = on_device  # type: ignore[assignment]
    break_steps()


BREAK = {"memory": run_out_of_memory, "load": stay_in_loading, "device": dispatch_as_on_gpus}


def nursery() -> None:
    """Fork a rank, or tell what has become of one, for each line on stdin; returns in ranks."""
    for module in MODULES:
        import_module(module)
    gc.freeze()  # ranks neither look through all this nor copy its pages
    atexit.register(gc.unfreeze)
    with open(0, closefd=False) as requests:  # stdin itself stays as new for ranks
        for line in requests:
            asked = json.loads(line)
            if "pid" in asked:
                pid, status = os.waitpid(asked["pid"], os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if pid else None
            else:
                answer = os.fork()
                if answer == 0:
                    return become(**asked)
            print(json.dumps(answer), flush=True)
    os._exit(0)  # a second sooner than by taking down all that was imported


def become(folder: str, argv: list[str], environ: dict[str, str]) -> None:
    """A process with this command line, whose output is in files of its folder."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[1:] = argv
    rank = environ["RANK"]
    for number, name in enumerate((os.devnull, f"out{rank}", f"err{rank}")):
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)


def main() -> int:
    nursery()
    FAULT.update(json.loads(os.environ.get("TEST_FAULT", "{}")))
    # A shell that runs the tests in the background has SIGINT ignored in all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("RANK", "none") in str(FAULT.get("rank", "")):
        BREAK.get(FAULT["kind"], break_steps)()
    if sys.argv[1].endswith(".py"):
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return 0
    return moe(sys.argv[1:])


if __name__ == "__main__":
    command(main)
