"""The secret that the ranks of a launch prove to each other, kept from whoever only reaches a port.

On one machine it is in a file that nobody else may read, and rank 0 says which. On several machines
it is in MOE_LAUNCH_SECRET, set alike by whoever starts them; without that it is in the store of
the launch, which torch serves to everybody who reaches its port.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from moe.errors import LaunchError
from moe.parallel.wire import Message

SECRET = "MOE_LAUNCH_SECRET"
_BYTES = 32


@contextmanager
def new_secret(*, on_one_machine: bool) -> Iterator[tuple[bytes, Message]]:
    """The secret of a launch, and what rank 0 says of it; to be heard within the block."""
    if given := os.environ.get(SECRET):
        yield given.encode(), {}
        return
    secret = secrets.token_bytes(_BYTES)
    if not on_one_machine:
        yield secret, {"secret": secret.hex()}
        return
    with tempfile.NamedTemporaryFile(prefix="moe-launch-") as file:  # mode 0600
        file.write(secret)
        file.flush()
        yield secret, {"secret_file": file.name}


def heard_secret(said: Message) -> bytes:
    """The secret, from what rank 0 has said.

    Raises:
        LaunchError: this process cannot know it.
    """
    if given := os.environ.get(SECRET):
        return given.encode()
    if "secret" in said:
        return bytes.fromhex(said["secret"])
    path = str(said.get("secret_file", ""))
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                raise PermissionError(f"{path} is somebody else's")
            return file.read(_BYTES)
    except OSError as error:
        raise LaunchError(
            f"the secret of this launch cannot be read ({error}); set {SECRET} to the same text "
            "for all ranks"
        ) from error
