"""Process groups over NCCL between GPUs, over gloo between hosts; by DeepSpeed's communication
where that is installed.

If a group loses a rank, the others leave it and form a new one over the same store.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from experts.dispatch import Exchange, GroupExchange, prefer_local_sockets
from moe.errors import LaunchError
from moe.extras import install_line
from moe.parallel.watchdog import COMPILE_S, Heartbeat


class WatchedExchange:
    """An exchange that tells the watchdog when this rank waits for others."""

    def __init__(self, exchange: Exchange, heartbeat: Heartbeat) -> None:
        self._exchange, self._heartbeat = exchange, heartbeat
        self.rank, self.size, self.device = exchange.rank, exchange.size, exchange.device
        self.same_machine, sockets = exchange.same_machine, exchange.sockets
        self.sockets = None if sockets is None else replace(sockets, run=self._run)

    def all_to_all(
        self, sent: Tensor, received: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]
    ) -> Callable[[], None]:
        finish = self._exchange.all_to_all(sent, received, send_rows, receive_rows)

        def wait() -> None:
            self._heartbeat.now("waiting")
            finish()
            self._heartbeat.now("computing")

        return wait

    def settle(self) -> None:
        self._heartbeat.now("waiting")
        self._exchange.settle()
        self._heartbeat.now("computing")

    def _run(self, act: Callable[[], int]) -> int:
        self._heartbeat.now("waiting")
        done = act()
        self._heartbeat.now("computing")
        return done

    def close(self) -> None:
        """Close the connections, so that no rank waits for another."""
        self._exchange.close()


class RankExchanges(NamedTuple):
    """The connections of a group's ranks.

    Attributes:
        host: their main memories.
        device: their CUDA devices; None if the model runs on CPUs.
    """

    host: WatchedExchange
    device: WatchedExchange | None = None

    def close(self) -> None:
        """Leave: see `WatchedExchange.close`."""
        self.host.close()
        if self.device is not None:
            self.device.close()


def form_group(
    store: Store,
    epoch: int,
    ranks: Sequence[int],
    rank: int,
    timeout_s: float,
    heartbeat: Heartbeat,
    *,
    on_cuda: bool = False,
) -> RankExchanges:
    """Connect these ranks; all of them call this.

    Args:
        store: shared by all.
        epoch: number of groups before this one.
        rank: of this process, as the launch counts.
        timeout_s: longest wait for another rank; on GPUs at least `COMPILE_S`.
        on_cuda: the model runs on this rank's CUDA device, so NCCL carries its rows, and gloo or
            local sockets what hosts tell each other; else these carry all, whatever devices the
            machine has.

    Raises:
        LaunchError: SciPy is not installed, or the ranks cannot reach each other.
    """
    _needed("scipy", "for placements")
    deepspeed = _deepspeed(on_cuda)
    if on_cuda:
        # NCCL's own watchdog would end the process; `GroupExchange.settle` aborts the group.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        timeout_s = max(timeout_s, COMPILE_S)
    timeout = timedelta(seconds=timeout_s)
    try:
        torch.distributed.init_process_group(
            deepspeed.backend if on_cuda else "gloo",
            store=PrefixStore(f"group{epoch}", store),
            rank=list(ranks).index(rank),
            world_size=len(ranks),
            timeout=timeout,
        )
        if deepspeed.comm is not None:
            deepspeed.comm.init_distributed(verbose=False)
        gloo, device = None, None
        if on_cuda:
            gloo = torch.distributed.new_group(backend="gloo", timeout=timeout)
            device = WatchedExchange(GroupExchange(None, deepspeed.device, timeout_s), heartbeat)
        host = prefer_local_sockets(GroupExchange(gloo, "cpu"), timeout_s)
        return RankExchanges(WatchedExchange(host, heartbeat), device)
    except RuntimeError as error:
        raise LaunchError(f"rank {rank} cannot form a group with the others: {error}") from error


def leave_group() -> None:
    """Leave the group, whole or broken."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def use_interface(address: str) -> None:
    """Let gloo and NCCL use the interface that has an address.

    By themselves they take the one that the host name stands for, which may be another.

    Raises:
        LaunchError: psutil is not installed.
    """
    psutil = _needed("psutil", "to find this machine's interfaces")
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def own_address(peer: socket.socket) -> str:
    """Address of this machine, as the other end of a connection sees it."""
    return str(peer.getsockname()[0])


class _Communication(NamedTuple):
    """The carriers of a group's rows.

    Attributes:
        comm: of DeepSpeed; None where it is not installed.
        backend: of torch.distributed between GPUs.
        device: of this rank.
    """

    comm: Any
    backend: str
    device: str


def _deepspeed(on_cuda: bool) -> _Communication:
    if not on_cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it prints a long warning
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it writes to stdout
    try:
        comm = importlib.import_module("deepspeed.comm")
        ops = importlib.import_module("deepspeed.ops")
        accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    except ImportError:
        device = f"cuda:{torch.cuda.current_device()}" if on_cuda else "cpu"
        return _Communication(None, "nccl", device)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It would compile reductions over shared memory for a minute, which nothing here uses, and
    # leave that memory behind when a rank is killed.
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = accelerator.communication_backend_name()
    return _Communication(comm, backend, accelerator.current_device_name())


def _needed(module: str, why: str) -> Any:
    """A package of the extra ``parallel``, imported; raises `LaunchError` if it is absent."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise LaunchError(
            f"several ranks need {module} {why}: {install_line('parallel')}"
        ) from error
