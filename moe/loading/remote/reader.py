"""Read bytes of files on a hub as if they were here, ahead of their use where it is announced."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from experts.safetensors_io import OpenFile
from moe.loading.checkpoint import Span
from moe.loading.remote.names import HubName
from moe.loading.remote.repository import HubFile, hub_errors

BLOCK = 32 << 20
"""Bytes of one request at most: large beside the time that a request takes by itself."""
AHEAD = 4
"""Blocks that are fetched or waiting at a time, which take `BLOCK` of memory each."""
GAP = 64 << 10
"""Bytes between two spans that are fetched with them, and not by another request."""


@dataclass
class _Block:
    file: Path
    start: int
    stop: int
    content: Future[bytearray] | None = None


class HubBytes:
    """Reads the weight files that an outline stands for: a `ByteSource`. Close it.

    Spans that were announced are fetched in their order, a few blocks ahead; others on demand.
    Nothing is written to disk.

    Args:
        name: in messages.
        files: what each file of the outline stands for.
    """

    def __init__(self, name: HubName, files: Mapping[Path, HubFile]) -> None:
        self._name, self._files = name, files
        self._pool = ThreadPoolExecutor(AHEAD, thread_name_prefix="hub")
        self._blocks: deque[_Block] = deque()

    def identity(self, file: OpenFile) -> list[object]:
        remote = self._files[file.path]
        return [remote.path, remote.size, remote.etag]

    def announce(self, spans: Iterable[Span]) -> None:
        self._drop(len(self._blocks))
        self._blocks = deque(_blocks(spans))

    def read(self, file: OpenFile, view: memoryview, offset: int) -> int:
        done = 0
        with hub_errors(self._name):
            while done < len(view):
                place = offset + done
                block = self._block_at(file.path, place)
                if block is None:
                    return done + self._files[file.path].read(view[done:], place)
                assert block.content is not None
                content = memoryview(block.content.result())
                piece = content[place - block.start :][: len(view) - done]
                view[done : done + len(piece)] = piece
                done += len(piece)
        return done

    def close(self) -> None:
        self._drop(len(self._blocks))
        self._pool.shutdown(cancel_futures=True)

    def _block_at(self, file: Path, place: int) -> _Block | None:
        """The announced block of a byte, requested, and the next ones with it."""
        for index in range(min(AHEAD, len(self._blocks))):
            block = self._blocks[index]
            if block.file == file and block.start <= place < block.stop:
                self._drop(index)
                for soon in list(self._blocks)[:AHEAD]:
                    if soon.content is None:
                        soon.content = self._pool.submit(self._fetch, soon)
                return block
        return None

    def _drop(self, count: int) -> None:
        for _ in range(count):
            content = self._blocks.popleft().content
            if content is not None:
                content.cancel()

    def _fetch(self, block: _Block) -> bytearray:
        content = bytearray(block.stop - block.start)
        self._files[block.file].read(memoryview(content), block.start)
        return content


def _blocks(spans: Iterable[Span]) -> Iterator[_Block]:
    """Requests for spans in their order: near ones together, large ones in parts."""
    whole: _Block | None = None
    for file, start, stop in spans:
        if start == stop:
            continue
        near = whole is not None and whole.file == file and 0 <= start - whole.stop <= GAP
        if whole is not None and near and stop - whole.start <= BLOCK:
            whole.stop = stop
            continue
        if whole is not None:
            yield from _parts(whole)
        whole = _Block(file, start, stop)
    if whole is not None:
        yield from _parts(whole)


def _parts(block: _Block) -> Iterator[_Block]:
    for start in range(block.start, block.stop, BLOCK):
        yield _Block(block.file, start, min(start + BLOCK, block.stop))
