"""Readers: bytes of files in the background, past the page cache."""

from offload.readers.choice import choose_reader
from offload.readers.threads import ThreadedReader

__all__ = ["ThreadedReader", "choose_reader"]
