"""Which files of a conversion are finished: what a conversion that was stopped goes on from."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from experts.blobs import FileRecord, read_record
from experts.manifest import JOURNAL_NAME, MANIFEST_NAME, LayerRecord
from moe.errors import CheckpointError


class Journal:
    """A text file in the working directory: a line for the job, then one for each finished file.

    Lines of another job (another model, other settings) are forgotten, and its files removed. A
    file counts only while its bytes have the checksum that was noted.

    Attributes:
        finished: by file name, the layer in it and its record.

    Raises:
        CheckpointError: another process is converting into this directory.
        OSError: the directory cannot be read or written.
    """

    def __init__(self, directory: Path, job: dict[str, Any]) -> None:
        self._directory = directory
        self._path = directory / JOURNAL_NAME
        self._file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise CheckpointError(
                f"another process is converting into {directory}; wait for it, or stop it"
            ) from error
        self.finished: dict[str, tuple[LayerRecord, FileRecord]] = {}
        for file in directory.glob("*.unfinished"):  # of a process that was killed
            file.unlink(missing_ok=True)
        lines, end = self._lines()
        if lines[:1] == [job]:
            for line in lines[1:]:
                self._recall(line)
            self._file.truncate(end)
        else:
            for file in (*directory.glob("*.safetensors"), directory / MANIFEST_NAME):
                file.unlink(missing_ok=True)
            self._file.truncate(0)
            self._append(job)

    def add(self, layer: LayerRecord, record: FileRecord) -> None:
        """Note that the file of `layer` is finished and on the disk."""
        self.finished[layer.file] = layer, record
        self._append({"layer": layer.model_dump(), "file": record.model_dump()})

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _append(self, content: object) -> None:
        self._file.write(json.dumps(content) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _lines(self) -> tuple[list[Any], int]:
        """What can be read, and how many bytes that is: not the line that was being written when
        the process was killed."""
        found, end = [], 0
        for line in self._path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                found.append(json.loads(line))
            except ValueError:
                break
            end += len(line)
        return found, end

    def _recall(self, line: Any) -> None:
        try:
            layer = LayerRecord.model_validate_json(json.dumps(line["layer"]))
            record = FileRecord.model_validate_json(json.dumps(line["file"]))
            fd = os.open(self._directory / layer.file, os.O_RDONLY | os.O_CLOEXEC)
        except (ValueError, KeyError, TypeError, OSError):
            return
        try:
            if read_record(fd) == record:
                self.finished[layer.file] = layer, record
        except ValueError:
            return
        finally:
            os.close(fd)
