"""Lanes: forward passes that sleep at MoE layers and meet there.

A lane runs a model's own ``forward`` inside a greenlet. When the forward reaches an MoE layer, it
calls `call_experts`, which hands an `ExpertCall` to `run_lanes` and sleeps until the rows come
back. `run_lanes` always serves the lowest layer at which a lane waits, so lanes that started late
catch up with those ahead, and all lanes waiting at one layer share one run of its experts.

A lane may stay asleep across calls of `run_lanes` (layered prefill), rest between two passes of its
forward until the next call (`Lane.rest`), be cancelled (its stack is unwound and everything on it
freed), or fail (its exception reaches `Lane.result`, the other lanes run on). Lanes belong to the
thread that made them. Only a lane that may sleep needs the package greenlet: one that runs alone
stays on its caller's stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from experts.dispatch import Failure, FailureCodes
from experts.dispatch.rows import failure
from moe.errors import MoEError, RankError
from offload.errors import OffloadError
from routing import Phase, Routing

if TYPE_CHECKING:
    from greenlet import greenlet


@dataclass(eq=False)
class ExpertCall:
    """Tokens at an MoE layer.

    Attributes:
        layer: index of the MoE layer, counted over MoE layers only.
        hidden_states: ``(T, H)``, the rows to run through experts.
        routing: T rows of expert ids and weights.
        phase: what the tokens are read for; `call_experts` takes it from the running lane.
        scores: ``(T, E)`` that the router ranked experts by, where a policy asked for them and
            they do not follow from the rows.
        beside: computes what the lane will need behind the layer, once; for a caller that waits.
        lost: rows that are zeros because an expert could not be read or run, and why.
        codes: the same of rows on a device, which is not yet known on the host.
    """

    layer: int
    hidden_states: Tensor
    routing: Routing
    phase: Phase = "prefill"
    scores: Tensor | None = None
    beside: Callable[[], object] | None = None
    lost: dict[int, Failure] = field(default_factory=dict)
    codes: FailureCodes | None = None


ExpertsRunner = Callable[[int, Sequence[ExpertCall]], Sequence[Tensor | Exception]]
"""Runs one MoE layer: ``(layer, calls) -> rows of each call, (T_i, H)``, or why a call of several
has none."""


class GradMode(NamedTuple):
    """torch's thread-local modes, which a sleeping lane must not leak to others."""

    grad: bool
    inference: bool

    @classmethod
    def current(cls) -> GradMode:
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled())

    @contextmanager
    def active(self) -> Iterator[None]:
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
            yield


class LaneRandom:
    """Random numbers of one lane: those of torch's own generators if it ran by itself.

    Args:
        seed: as ``torch.manual_seed`` takes it.
        device: on which the lane draws.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generators.append(torch.cuda.default_generators[index])
        self._states = [
            (generator, torch.Generator(generator.device).manual_seed(seed).get_state())
            for generator in generators
        ]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let torch draw from them; its own numbers go on afterwards as if nothing had been."""
        before = [generator.get_state() for generator, _ in self._states]
        for generator, state in self._states:
            generator.set_state(state)
        try:
            yield
        finally:
            self._states = [(generator, generator.get_state()) for generator, _ in self._states]
            for (generator, _), state in zip(self._states, before, strict=True):
                generator.set_state(state)


Result = TypeVar("Result")


class LaneCancelled(RuntimeError):
    """The result of a cancelled lane was requested."""


class LaneState(Enum):
    READY = "ready"  # not started
    WAITING = "waiting"  # asleep at an MoE layer
    RESTING = "resting"  # asleep between two passes
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ASLEEP = (LaneState.READY, LaneState.WAITING, LaneState.RESTING)


class Lane(Generic[Result]):
    """One forward pass that can sleep. It starts in the grad and inference mode it was made in.

    Args:
        forward: takes no arguments; its return value is the lane's result.
        phase: what its tokens are read for.
        pieces: how many pieces of work it reads.
        random: its own random numbers; None: it draws none.

    Attributes:
        lost: rows whose numbers mean nothing because an expert could not be read or run, and why.
        can_rest: it may call `rest`.
    """

    can_rest: ClassVar[bool] = False

    def __init__(
        self,
        forward: Callable[[], Result],
        phase: Phase = "prefill",
        pieces: int = 1,
        random: LaneRandom | None = None,
    ) -> None:
        self.phase, self.pieces = phase, pieces
        self._random = random
        self.state = LaneState.READY
        self.call: ExpertCall | None = None
        self.mode = GradMode.current()
        self._lost: dict[int, Failure] = {}
        self._codes: list[FailureCodes] = []
        self._forward: Callable[[], Result] | None = forward
        self._stack: greenlet | None = None  # while it may sleep
        self._result: Result | None = None
        self._error: Exception | None = None

    @property
    def finished(self) -> bool:
        return self.state not in _ASLEEP

    def start(self) -> None:
        """Run up to the first MoE layer, or to the end.

        Raises:
            MoEError: greenlet is not installed.
        """
        assert self.state is LaneState.READY, self.state
        try:
            from greenlet import greenlet
        except ModuleNotFoundError as error:
            raise MoEError(
                "several forward passes at once need greenlet, which is not installed: "
                "pip install 'greenlet>=3'"
            ) from error
        self._stack = greenlet(self._run_asleep)
        self._enter(self._stack.switch)

    def run_alone(self, run_experts: ExpertsRunner) -> None:
        """Run to the end on the caller's stack, if no other lane will wait at an MoE layer."""
        assert self.state is LaneState.READY, self.state
        token = _alone.set((self, run_experts))
        try:
            with self.mode.active():
                self._run()
        finally:
            _alone.reset(token)

    def resume(self, rows: Tensor) -> None:
        """Wake with the rows that it waits for; run up to the next MoE layer or to the end."""
        assert self.state is LaneState.WAITING, self.state
        assert self.call is not None
        self.note_lost(self.call)
        self.call = None
        self._enter(lambda: self._own_stack.switch(rows))

    def note_lost(self, call: ExpertCall) -> None:
        """Remember what a call says about its rows."""
        self._lost = call.lost | self._lost
        if call.codes is not None:
            self._codes.append(call.codes)

    def lost(self) -> dict[int, Failure]:
        """Rows that lacked an expert of another rank at some layer, and why.

        Waits for the device if rows are there.

        Raises:
            ExchangeError: the other ranks have not done their part.
        """
        if codes := self._codes:
            self._codes = []
            codes[-1].settle()
            known = torch.cat([one.codes_T for one in codes]).tolist()
            rows = chain.from_iterable(range(len(one.codes_T)) for one in codes)
            for row, code in zip(rows, known, strict=True):
                if code:
                    self._lost.setdefault(row, failure(code))
        return self._lost

    def lost_error(self, rows: range | None = None) -> Exception | None:
        """Why the lane lacked an expert for one of these rows, or for any; None: for none.

        Waits as `lost` does, and raises what it raises.
        """
        lost = self.lost()
        for row in sorted(lost):
            if rows is None or row in rows:
                return (OffloadError if lost[row].unreadable else RankError)(lost[row].reason)
        return None

    def lost_there(self) -> Tensor | None:
        """``(T,)`` bool on the device: the rows of `lost` if only the device knows them, else None.

        The host waits until they are known, and reads nothing back.

        Raises:
            ExchangeError: the other ranks have not done their part.
        """
        codes = self._codes
        if not codes or self._lost or len({len(one.codes_T) for one in codes}) > 1:
            return None
        codes[-1].settle()
        return torch.stack([one.codes_T for one in codes]).amax(0) > 0

    def rest(self) -> None:
        """Called by the lane's own forward: sleep until the next `run_lanes`."""
        assert current_lane() is self
        self._sleep(LaneState.RESTING)

    def wake(self) -> None:
        """Go on after a rest, up to the first MoE layer, the next rest or the end."""
        assert self.state is LaneState.RESTING, self.state
        self._enter(self._own_stack.switch)

    def fail(self, error: Exception) -> None:
        """Raise ``error`` inside the lane at the layer it waits for."""
        assert self.state is LaneState.WAITING, self.state
        self.call = None
        self._enter(lambda: self._own_stack.throw(error))

    def cancel(self) -> None:
        """Unwind the sleeping forward and free all it holds; no effect once finished."""
        if self.finished:
            return
        self.call = None
        if self.state is not LaneState.READY:
            from greenlet import GreenletExit

            self._enter(lambda: self._own_stack.throw(GreenletExit))
        else:
            self._forward, self.state = None, LaneState.CANCELLED

    def result(self) -> Result:
        """Return the result of the forward. Raises what it raised, or `LaneCancelled`."""
        assert self.finished, f"the lane is still {self.state.value}"
        if self._error is not None:
            raise self._error
        if self.state is LaneState.CANCELLED:
            raise LaneCancelled("this lane was cancelled before it had a result")
        return cast(Result, self._result)

    @property
    def _own_stack(self) -> greenlet:
        assert self._stack is not None
        return self._stack

    def _enter(self, switch: Callable[[], object]) -> None:
        from greenlet import getcurrent

        # The lane's modes are restored on the way in and ours on the way out, so a `no_grad` block
        # that spans an MoE layer neither leaks to other lanes nor is lost over the sleep.
        self._own_stack.parent = getcurrent()
        with self.mode.active(), self._random.active() if self._random else nullcontext():
            switch()

    def _sleep(self, state: LaneState) -> Any:
        """Go on with whoever entered the lane. Returns what the lane is woken with."""
        parent = self._own_stack.parent
        assert parent is not None
        self.state, self.mode = state, GradMode.current()
        return parent.switch()

    def _run_asleep(self) -> None:
        """All of the lane's stack; its context variables are its own."""
        token = _running.set(self)
        try:
            self._run()
        finally:
            # Lane and stack refer to each other. They would keep all tensors of the pass until
            # Python's garbage collector runs, which counts objects and not bytes.
            _running.reset(token)
            self._stack = None

    def _run(self) -> None:
        forward, self._forward = self._forward, None
        assert forward is not None
        try:
            self._result = forward()
        except Exception as error:
            self._error, self.state = error, LaneState.FAILED
        except BaseException:  # cancelled, or all of the program interrupted
            self.state = LaneState.CANCELLED
            raise
        else:
            self.state = LaneState.DONE


_alone: ContextVar[tuple[Lane, ExpertsRunner] | None] = ContextVar("_alone", default=None)
"""The lane that runs on its caller's stack, and what runs its experts."""
_running: ContextVar[Lane | None] = ContextVar("_running", default=None)
"""The lane whose stack this is; every greenlet has a context of its own."""


def current_lane() -> Lane | None:
    """The lane on whose stack the caller runs; None: on none, or on that of a lane alone."""
    return _running.get()


def alone_with(run_experts: ExpertsRunner) -> Phase | None:
    """The phase of the running lane, if no other lane waits and ``run_experts`` serves it."""
    alone = None if current_lane() is not None else _alone.get()
    return alone[0].phase if alone is not None and alone[1] == run_experts else None


def call_experts(call: ExpertCall, run_experts: ExpertsRunner) -> Tensor:
    """Called by a model that needs experts: sleep in a lane, else run them at once.

    Returns:
        ``(T, H)`` rows, weighted and summed over the experts of each token.
    """
    lane = current_lane()
    if lane is None:
        if (alone := _alone.get()) is not None:
            call.phase, run_experts = alone[0].phase, alone[1]
        rows = run_experts(call.layer, [call])[0]
        assert isinstance(rows, Tensor)
        if alone is not None:
            alone[0].note_lost(call)
        return rows
    call.phase = lane.phase
    lane.call = call
    return lane._sleep(LaneState.WAITING)


def run_lanes(
    lanes: Sequence[Lane],
    run_experts: ExpertsRunner,
    *,
    pause_at: Mapping[Lane, int] | None = None,
) -> None:
    """Drive lanes until each has finished, rests, or sleeps at its pause.

    Args:
        lanes: started here if they are new, woken if they rest; finished ones are skipped.
        run_experts: runs one layer for all lanes that wait there. What it raises is raised inside
            each of those lanes.
        pause_at: a lane named here stays asleep at its first MoE layer of this index or above.
    """
    pauses = pause_at or {}
    alone = len(lanes) == 1 and not lanes[0].can_rest and not pauses
    if alone and lanes[0].state is LaneState.READY:
        lanes[0].run_alone(run_experts)
        return
    for lane in lanes:
        if lane.state is LaneState.READY:
            lane.start()
        elif lane.state is LaneState.RESTING:
            lane.wake()
    while group := _lowest_layer(lanes, pauses):
        calls = [lane.call for lane in group if lane.call is not None]
        try:
            with group[0].mode.active():
                rows = run_experts(calls[0].layer, calls)
        except Exception as error:
            for lane in group:
                lane.fail(error)
            continue
        assert len(rows) == len(group)
        del calls
        for lane, lane_rows in zip(group, rows, strict=True):
            if isinstance(lane_rows, Exception):
                lane.fail(lane_rows)
            else:
                lane.resume(lane_rows)


def _lowest_layer(lanes: Sequence[Lane], pauses: Mapping[Lane, int]) -> list[Lane]:
    """The lanes waiting at the lowest layer, all in one grad mode."""
    awake = [
        (lane.call.layer, lane)
        for lane in lanes
        if lane.call is not None and lane.call.layer < pauses.get(lane, lane.call.layer + 1)
    ]
    if not awake:
        return []
    first_layer, first = min(awake, key=lambda pair: pair[0])
    return [lane for layer, lane in awake if layer == first_layer and lane.mode == first.mode]
