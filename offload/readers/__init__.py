"""Readers: bytes of files into main memory, in background threads, past the page cache.

`choose_reader` tries the readers that a file system allows and takes the fastest. A `Reader`
(`offload.transfer`) accepts lists of `Read` and returns a `Transfer` for each. It cuts them into
`ReadPiece`, one request to the system each (`pieces`). `NativeReader` has compiled threads;
`ThreadedReader` has Python threads, which read through a `ReadBackend` each: `DirectReads`,
`BufferedReads` or `DeepSpeedReads`.
"""

from offload.readers.choice import choose_reader, sample_places
from offload.readers.threads import ThreadedReader

__all__ = ["ThreadedReader", "choose_reader", "sample_places"]
