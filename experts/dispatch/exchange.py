"""One collective is all that dispatch needs: every rank sends rows to every other.

`deepspeed.comm` carries it where DeepSpeed has set up the process groups, else torch.distributed.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class ExchangeError(RuntimeError):
    """The ranks have lost each other; the message says how. No later exchange can succeed."""


@dataclass(frozen=True)
class Line:
    """Sockets to the other ranks.

    Attributes:
        files: to all ranks in order, -1 for the own one.
        timeout_s: most seconds without a byte from a rank that is waited for.
        run: calls what uses them.
    """

    files: Sequence[int]
    timeout_s: float
    run: Callable[[Callable[[], int]], int] = lambda act: act()

    def lost(self, rank: int, error: int) -> ExchangeError:
        """What to raise where a rank's socket has failed, with an error's number or, 0, its end."""
        own = self.files.index(-1)
        if error == errno.EAGAIN:
            return ExchangeError(
                f"rank {own} has heard nothing from rank {rank} for {self.timeout_s:g} s"
            )
        reason = OSError(error, os.strerror(error)) if error else "the connection was closed"
        return ExchangeError(f"rank {own} has lost rank {rank}: {reason}")


class Exchange(Protocol):
    """Ranks that send rows of bytes to each other.

    Attributes:
        rank: of this process among them.
        size: how many they are.
        device: where the rows must be.
        near: all ranks are processes of one machine and do without a process group.
        line: what carries it, where compiled code may use that while nothing else is on its way.
    """

    rank: int
    size: int
    device: torch.device
    near: bool
    line: Line | None

    def start(
        self, sent: Tensor, received: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]
    ) -> Callable[[], None]:
        """Begin to send rows to all ranks; collective.

        Args:
            sent: uint8, contiguous, rows for rank 0 first; left alone until the wait is over.
            received: uint8, contiguous, filled in the same order.
            send_rows: how many are for each rank, none for the own.
            receive_rows: how many come from each rank.

        Returns:
            What waits for the end.

        Raises:
            ExchangeError: the other ranks cannot be reached; also when waiting.
        """
        ...


class GroupExchange:
    """An `Exchange` over a process group.

    Args:
        group: of torch.distributed; None for the default one. Its timeout bounds every wait.
        device: of the rows; the CPU for gloo, a CUDA device for NCCL.
    """

    near = False
    line: Line | None = None

    def __init__(self, group: Any = None, device: torch.device | str = "cpu") -> None:
        self._comm, self._group = _comm(), group
        self.rank = self._comm.get_rank(group)
        self.size = self._comm.get_world_size(group)
        self.device = torch.device(device)

    def start(
        self, sent: Tensor, received: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]
    ) -> Callable[[], None]:
        try:
            work = self._comm.all_to_all_single(
                received, sent, list(receive_rows), list(send_rows), self._group, True
            )
        except RuntimeError as error:
            raise self._lost(error) from error

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(error) from error

        return wait

    def _lost(self, error: RuntimeError) -> ExchangeError:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return ExchangeError(
            f"rank {self.rank} has lost the other {self.size - 1} ranks: {reason[0]}"
        )


def _comm() -> Any:
    deepspeed = sys.modules.get("deepspeed.comm")
    ready = deepspeed is not None and deepspeed.is_initialized()
    return deepspeed if ready else torch.distributed
