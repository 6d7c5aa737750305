"""``moe top``: the experts of a server at work, in a terminal, from ``/v1/experts/stream``.

`read_events` reads the stream, `TopScreen` keeps the last two snapshots and draws them. The heat
map puts two layers into a row of characters; where experts outnumber columns, one column stands for
the busiest of several.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from http.client import HTTPException
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.style import Style
from rich.table import Table
from rich.text import Text

from moe.commands.console import stdout_console
from moe.errors import MoEError

Event = dict[str, Any]
TIMEOUT_S = 30
"""A server that says nothing for so long is taken for gone: snapshots come each second."""
RETRY_S = 2
HOT = 8
"""Times the mean that have the strongest colour."""
GROUND = (32, 38, 42)
PLACES = {
    "memory": ("in memory", (45, 212, 191)),
    "prefix": ("first bits in memory", (180, 227, 77)),
    "host": ("in host memory", (110, 168, 255)),
    "loading": ("on the way", (255, 178, 36)),
    "disk": ("on disk", (167, 139, 250)),
    "rank": ("on another rank", (139, 154, 161)),
}
"""The name of each place in the stream's layout, and the colour of a busy expert there."""


def top(url: str, api_key: str | None, *, once: bool) -> int:
    """Show a server until Ctrl-C; returns the exit code. Without a terminal, one screen.

    Raises:
        MoEError: there is no such server, or it refuses the key.
    """
    url = url if "://" in url else f"http://{url}"
    key = api_key or os.environ.get("MOE_API_KEY")
    screen, console = TopScreen(url), stdout_console()
    if once or not sys.stdout.isatty():
        for event in read_events(url, key):
            screen.take(event)
            if screen.complete:
                break
        console.print(screen)
        return 0
    _check_reachable(url, key)
    with Live(screen, console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                for event in read_events(url, key):
                    screen.take(event)
                    live.refresh()
                screen.problem = "the server has stopped"
            except MoEError as error:
                screen.problem = str(error)
            live.refresh()
            time.sleep(RETRY_S)


def _check_reachable(url: str, key: str | None) -> None:
    """Raise what a reader should see as an error at once, not on a screen."""
    with closing(read_events(url, key)) as events:
        next(events, None)


def read_events(url: str, key: str | None) -> Generator[Event, None, None]:
    """Events of the stream, until the server ends it.

    Raises:
        MoEError: the server cannot be reached, refuses the key, or has no such stream.
    """
    if not url.startswith(("http://", "https://")):
        raise MoEError(f"{url} is no address of a server; it begins with http:// or https://")
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/experts/stream", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            for line in response:
                if line.startswith(b"data: "):
                    event = json.loads(line[len(b"data: ") :])
                    if "error" in event:
                        raise MoEError(f"the server at {url} fails: {event['error']['message']}")
                    yield event
    except urllib.error.HTTPError as error:
        raise MoEError(_refusal(url, error)) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise MoEError(
            f"cannot reach a server at {url}: {reason}; start one with moe serve, or give its "
            "address"
        ) from None


def _refusal(url: str, error: urllib.error.HTTPError) -> str:
    if error.code == 401:
        return f"the server at {url} wants another key; give it by --api-key or MOE_API_KEY"
    if error.code == 404:
        return f"the server at {url} has no /v1/experts/stream; it is not moe, or an older one"
    return f"the server at {url} answers with status {error.code}"


class TopScreen:
    """The content of the screen.

    Attributes:
        problem: why there is nothing new; empty while snapshots come.
    """

    def __init__(self, url: str) -> None:
        self.problem = ""
        self._url = url
        self._layout: Event | None = None
        self._before: Event | None = None
        self._now: Event | None = None

    @property
    def complete(self) -> bool:
        """Return whether there are two snapshots of a loaded model, to compute rates from."""
        return self._layout is not None and self._before is not None

    def take(self, event: Event) -> None:
        self.problem = ""
        if event["type"] == "layout":
            self._layout = event
            return
        last = self._now
        begun_again = last is None or event["number"] <= last["number"]
        alike = last is not None and len(last["layers"]) == len(event["layers"])
        self._before = None if begun_again or not alike else last
        self._now = event

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        now = self._now
        if now is None or self._layout is None:
            state = now["state"] if now is not None else "connecting"
            progress = now["progress"] if now is not None else None
            share = f" {progress['fraction']:.0%}" if progress else ""
            yield Text(f"moe  {self._url}  {self.problem or state + share}")
            return
        room = max((options.height or 60) - 14, 4)
        yield Group(
            self._head(now),
            Text(),
            _figures(figures(self._before or now, now)),
            Text(),
            *self._heat_map(self._layout, now, options.max_width, room),
            Text(),
            *_tables(now, self._layout),
        )

    def _head(self, now: Event) -> Text:
        plan, status = self._layout["memory_plan"], self._layout["status"]  # type: ignore[index]
        head = Text.assemble(
            ("moe", "bold"), f"  {self._url}  {status['architecture']} on {status['device']}  "
        )
        kind = "bold red" if self.problem else "green" if now["state"] == "ready" else "yellow"
        head.append(self.problem or now["state"], kind)
        planned = " · ".join(f"{line['name']} {size(line['bytes'])}" for line in plan["lines"])
        return head.append(f"\nmemory: {planned}", "dim")

    def _heat_map(
        self, layout: Event, now: Event, width: int, rows: int
    ) -> Iterator[RenderableType]:
        heat = [
            _times_mean(after["tokens"], before["tokens"])
            for after, before in zip(now["layers"], (self._before or now)["layers"], strict=True)
        ]
        where = [[layout["places"][int(digit)] for digit in own["where"]] for own in now["layers"]]
        cells = [_binned(own, places, width - 5) for own, places in zip(heat, where, strict=True)]
        widest = max(map(len, cells), default=1)
        wide = "▀" * max(1, min(4, (width - 5) // widest))
        every = max(1, -(-len(cells) // (2 * rows)))  # more layers than lines: one of several
        shown = range(0, len(cells), every)
        for upper in shown[::2]:
            lower = upper + every
            line = Text(f"{upper:>3}  ", "dim")
            for column, cell in enumerate(cells[upper]):
                below = cells[lower] if lower < len(cells) else []
                under = below[column] if column < len(below) else GROUND
                line.append(wide, _style(cell, under))
            yield line
        seen = {place for own in where for place in own}
        legend = Text("     ")
        for place, (name, colour) in PLACES.items():
            if place in seen:
                legend.append("■ ", Style(color="rgb({},{},{})".format(*colour)))
                legend.append(f"{name}   ", "dim")
        yield legend.append(f"bright: {HOT} times the mean", "dim")


def figures(before: Event, now: Event) -> dict[str, str]:
    """Return what happened between two snapshots, by name. The same ones twice: nothing has."""
    past = now["time"] - before["time"]

    def rate(*path: str) -> float:
        change = _at(now, path) - _at(before, path)
        return change / past if past > 0 else 0.0

    held, limit = now["occupancy"].get("kv_tokens", 0), now["kv_tokens_limit"]
    said = {
        "tokens/s": f"{rate('generated_tokens'):.1f}",
        "prompt tokens/s": f"{rate('prompt_tokens'):.1f}",
        "first token": _mean_wait(before, now),
        "running, waiting": f"{now['occupancy']['running_requests']}, "
        f"{now['occupancy']['waiting_requests']}",
        "KV tokens": f"{held:,}" + (f" of {limit:,}" if limit else ""),
    }
    if now["cache"] and before["cache"]:
        hits, misses = rate("cache", "hits"), rate("cache", "misses")
        said |= {
            "cache hits": f"{hits / (hits + misses):.0%}" if hits + misses else "-",
            "from disk/s": size(rate("cache", "disk_bytes")),
            "waiting for disk": f"{min(rate('cache', 'stall_seconds'), 1):.0%}",
        }
    return said


def _at(event: Event, path: Sequence[str]) -> float:
    value: Any = event
    for name in path:
        value = value[name]
    return float(value)


def _mean_wait(before: Event, now: Event) -> str:
    """Mean wait for a first token among those that came between, else since the start."""
    after, since = now["first_token"], before["first_token"]
    count = after["count"] - since["count"]
    if count:
        return f"{(after['seconds'] - since['seconds']) / count:.2f} s"
    return f"{after['seconds'] / after['count']:.2f} s" if after["count"] else "-"


def size(number: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def _figures(said: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_row(*(Text(name, "dim") for name in said))
    table.add_row(*(Text(value, "bold") for value in said.values()))
    return table


def _tables(now: Event, layout: Event) -> Iterator[RenderableType]:
    status = layout["status"]
    if now["drafts"]:
        table = Table("draft", "drafts", "verified", "accepted", box=None, padding=(0, 3, 0, 0))
        for mode, own in now["drafts"].items():
            accepted = f"{own['accepted']:,} ({own['accepted'] / max(own['verified'], 1):.0%})"
            table.add_row(mode, f"{own['drafts']:,}", f"{own['verified']:,}", accepted)
        yield table
    elif not status["speculation"]["enabled"]:
        yield Text(f"no drafts: {status['speculation']['why']}", "dim")
    if now["ranks"]:
        table = Table("rank", "brought", "served", "waited", box=None, padding=(0, 3, 0, 0))
        for own in filter(None, now["ranks"]):
            counts = (f"{own['tokens']:,}", f"{own['served']:,}", f"{own['seconds']:.1f} s")
            table.add_row(str(own["rank"]), *counts)
        yield table
    for name in ("packing", "fused"):
        if not status[name]["enabled"]:
            yield Text(f"{name} is off: {status[name]['why']}", "yellow")
    for notice in status["notices"]:
        yield Text(notice, "yellow")


def _times_mean(after: Sequence[int], before: Sequence[int]) -> list[float]:
    """New tokens of each expert over the mean of its layer."""
    added = [max(0, new - old) for new, old in zip(after, before, strict=True)]
    mean = sum(added) / len(added)
    return [count / mean if mean else 0.0 for count in added]


def _binned(heat: Sequence[float], places: Sequence[str], width: int) -> list[tuple[int, int, int]]:
    """A colour for each column: of the busiest expert, where one stands for several."""
    many = -(-len(heat) // max(width, 1))
    columns = []
    for start in range(0, len(heat), many):
        busiest = max(range(start, min(start + many, len(heat))), key=heat.__getitem__)
        strength = min(1.0, (heat[busiest] / HOT) ** 0.5)
        columns.append(_colour(places[busiest], round(strength * 20)))
    return columns


@lru_cache
def _colour(place: str, strength: int) -> tuple[int, int, int]:
    """The colour of an expert at a place, by its load from 0 to 20."""
    least = 0.08 if place in ("disk", "rank") else 0.25
    share = least + (1 - least) * strength / 20
    red, green, blue = (
        round(dark + (bright - dark) * share)
        for dark, bright in zip(GROUND, PLACES[place][1], strict=True)
    )
    return red, green, blue


@lru_cache(4096)
def _style(upper: tuple[int, int, int], lower: tuple[int, int, int]) -> Style:
    return Style(color="rgb({},{},{})".format(*upper), bgcolor="rgb({},{},{})".format(*lower))
