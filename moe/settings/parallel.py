"""How several ranks share a model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moe.settings.base import DAY_S, Off, Settings


class ParallelSettings(Settings):
    """How the processes of one launch (its ranks) share the experts of a model."""

    enabled: bool = False
    """Be one of the ranks that a launcher has started (``deepspeed --module moe ...``). Without a
    launcher there is one rank, and nothing changes."""

    timeout_s: float = Field(default=10.0, ge=1.0, le=DAY_S)
    """Seconds after which a rank is lost that is not heard of, or gets nowhere in a step. More than
    the longest layer takes, reading its experts from disk included."""

    start_timeout_s: float = Field(default=300.0, gt=0.0, le=DAY_S)
    """Seconds in which all ranks must have been started. Loading may take any time."""

    on_rank_loss: Literal["stop", "continue"] = "stop"
    """stop: every waiting request is told, and all ranks end with an error. continue: the others go
    on without the lost rank and read all sequences again; without rank 0 nobody goes on."""

    placement: Literal["packed", "eplb", "linear"] = "packed"
    """Which rank holds which experts at first. packed: even loads, few copies on the way; eplb: as
    DeepSeek's load balancer; linear: in order of their ids."""

    replicas: float = Field(default=0.25, ge=0.0, le=1.0)
    """Further copies of experts, as a share of all experts: the busiest get them."""

    rebalance: Literal["auto", "off"] = "auto"
    """auto: change the placement between steps wherever the time saved pays for what is moved."""

    rebalance_horizon_s: float = Field(default=60.0, gt=0.0)
    """Seconds in which a change of placement has to pay for itself."""

    combine: Literal["exact", "summed"] = "exact"
    """What comes back from ranks that served a token. exact: each expert's row, summed where the
    token came from in the order of one rank alone, so that ranks and placements change no bit;
    summed: one row a rank, the least there is to send, equal up to the order of sums."""

    payload: Literal["plain", "int8"] = "plain"
    """Hidden states on their way to other ranks. int8: in 8 bits with a scale for each token, which
    ``lossless: true`` refuses."""

    buffer_rows: int | None = Field(default=None, ge=0)
    """Static buffers: rows of so many tokens a rank go to all ranks in a layer's first message,
    which saves an exchange where they suffice and sends more bytes. 0: exact sizes. None: rows of
    decode steps go along where 15 of 16 or more are needed on all ranks anyway; half of them
    between processes of one machine."""

    overlap: Annotated[Literal["auto", "on", "off"], Off] = "auto"
    """Steps in two halves, of which one computes while rows of the other travel. auto: where that
    was measured to be faster."""
