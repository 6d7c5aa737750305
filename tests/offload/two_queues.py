"""A device that is as late as the rules allow: two queues of work, run step by step at random.

What is launched is only written down. A step of either queue runs whenever somebody looks at the
device, if chance wants it and the event that it waits for is reached: kernels long after the host
has gone on, copies after whatever was launched behind them. A missing event makes a wrong result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

import torch
from torch import Tensor

from offload.streams import Delay, Event, Later, packed, unpacked


class QueueEvent:
    """Reached when its queue has come to it."""

    def __init__(self, device: TwoQueues) -> None:
        self.passed = False
        self._device = device

    def query(self) -> bool:
        self._device.drift()
        return self.passed

    def synchronize(self) -> None:
        self._device.run_until(self)


def one_second(end: QueueEvent) -> Delay:
    """Every delay takes a second."""
    return lambda: 1.0 if end.passed else None


Step = Callable[[], object] | QueueEvent
"""Something to do; or, in the queue `waits` says, to be reached before the next."""


class TwoQueues:
    """See `offload.streams.Streams`.

    Args:
        pins: pieces of memory that may be locked before the system refuses.
    """

    def __init__(self, random: Random, pins: int = 1 << 30) -> None:
        self.random, self.pins = random, pins
        self.locked: list[Tensor] = []
        self.reads: list[int] = []  # tensors of each
        self.copied_bytes = 0
        self.batches = 0
        self._kernels: deque[tuple[str, Step]] = deque()
        self._copies: deque[tuple[str, Step]] = deque()

    def launch(self, kernel: Callable[[], object]) -> None:
        """A kernel, that reads memory when it runs."""
        self._kernels.append(("run", kernel))
        self.drift()

    def record_event(self) -> QueueEvent:
        event = QueueEvent(self)
        self._kernels.append(("event", event))
        return event

    def copy(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        after: Event,
        then: Callable[[], None] | None = None,
    ) -> QueueEvent:
        assert isinstance(after, QueueEvent)
        event = QueueEvent(self)
        self._copies.append(("wait", after))
        for source, target in pairs:
            assert source.shape == target.shape
            # In the middle of a copy there is neither the old nor the new.
            self._copies.append(("run", partial(target.view(torch.uint8).fill_, 0x5A)))
            self._copies.append(("run", partial(target.copy_, source)))
            self.copied_bytes += source.nbytes
        if then is not None:
            self._copies.append(("run", then))
        self._copies.append(("event", event))
        self.batches += 1
        self.drift()
        return event

    def wait_event(self, event: Event) -> Delay:
        assert isinstance(event, QueueEvent)
        self._kernels.append(("wait", event))
        return one_second(self.record_event())

    def to_gpu(self, small: Tensor) -> Tensor:
        return small.clone()

    def to_host(self, small: Tensor) -> Later:
        copy = torch.empty_like(small)
        self._kernels.append(("run", partial(copy.copy_, small)))
        event = self.record_event()
        return lambda: copy if event.passed else None

    def read(self, small: Sequence[Tensor]) -> list[Tensor]:
        self.reads.append(len(small))
        return unpacked(packed(small), small)

    def pin(self, memory: Tensor) -> bool:
        if self.pins <= 0:
            return False
        self.pins -= 1
        self.locked.append(memory)
        return True

    def unpin(self, memory: Tensor) -> None:
        self.locked = [piece for piece in self.locked if piece is not memory]

    def drift(self) -> None:
        """Time goes by: some steps run, or none."""
        for _ in range(self.random.choice((0, 0, 1, 3, 10))):
            self._step(self.random.choice((self._kernels, self._copies)))

    def run_until(self, event: QueueEvent) -> None:
        while not event.passed:
            queues = [self._kernels, self._copies]
            self.random.shuffle(queues)
            assert self._step(queues[0]) or self._step(queues[1]), "a device that waits for ever"

    def finish(self) -> None:
        """The host waits for all kernels."""
        self.run_until(self.record_event())

    @staticmethod
    def _step(queue: deque[tuple[str, Step]]) -> bool:
        """Run the next step of a queue; whether it could."""
        if not queue:
            return False
        kind, step = queue[0]
        if isinstance(step, QueueEvent):
            if kind == "wait" and not step.passed:
                return False
            step.passed = True
        else:
            step()
        queue.popleft()
        return True


class LateCopies(TwoQueues):
    """The same where kernels run at once, on a CPU: only copies are late."""

    def record_event(self) -> QueueEvent:
        event = QueueEvent(self)
        event.passed = True
        return event

    def to_host(self, small: Tensor) -> Later:
        copy = small.clone()
        return lambda: copy

    def wait_event(self, event: Event) -> Delay:
        event.synchronize()
        return one_second(self.record_event())
