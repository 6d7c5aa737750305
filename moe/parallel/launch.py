"""Reads what a launcher says about this process, keeps the launch's secret, and ends the process
with the launch.

`Launch` reads the variables of DeepSpeed's launcher and torchrun: rank, number of ranks, and where
rank 0 listens. If all ranks are on one machine, they use its loopback addresses only.

The ranks prove a secret to each other, so that no stranger who reaches a port can join. On one
machine the secret is in a file that only the user can read, and rank 0 names the file. On several
machines it is ``MOE_LAUNCH_SECRET``, the same text for all ranks; without that variable it is in
the store of the launch, which torch serves to everybody who reaches its port.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from moe.errors import LaunchError, ProfileError
from moe.parallel.transport import Message, readable
from moe.settings import Profile

LOOPBACK = "127.0.0.1"
_NUMBERS = ("RANK", "WORLD_SIZE", "MASTER_PORT")
_PDEATHSIG = 1
SECRET = "MOE_LAUNCH_SECRET"
_BYTES = 32


@dataclass(frozen=True)
class Launch:
    """One rank of a launch.

    Attributes:
        rank: its number; 0 talks to the user.
        size: how many ranks there are.
        address, port: where rank 0 listens.
        on_one_machine: all ranks are on this machine.
    """

    rank: int
    size: int
    address: str
    port: int
    on_one_machine: bool

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Launch | None:
        """None unless a launcher has started several ranks. Raises `ProfileError` on nonsense."""
        if not {"RANK", "WORLD_SIZE"} <= environ.keys():
            return None
        address = environ.get("MASTER_ADDR", LOOPBACK)
        rank, size, port = (_number(environ, name) for name in _NUMBERS)
        if size < 1 or not 0 <= rank < size:
            raise ProfileError(
                f"RANK is {rank} and WORLD_SIZE is {size}; ranks are counted from 0 and less than "
                "WORLD_SIZE: start the ranks with a launcher, or unset both"
            )
        if size == 1:
            return None
        local = int(environ.get("LOCAL_SIZE") or environ.get("LOCAL_WORLD_SIZE") or 0)
        return cls(rank, size, _numeric(address), port, local == size or _is_loopback(address))

    @property
    def warnings(self) -> list[str]:
        """Return warnings of how exposed the ranks are; often empty."""
        found = []
        if ipaddress.ip_address(self.address).is_global:
            found.append(
                f"MASTER_ADDR {self.address} is a public address: traffic between ranks is neither "
                "encrypted nor authenticated; use a private network or a firewall"
            )
        if not self.on_one_machine and SECRET not in os.environ:
            found.append(
                f"everybody who reaches {self.address}:{self.port} can read this launch's secret; "
                f"set {SECRET} to the same text for all ranks"
            )
        return found


def required_launch(profile: Profile) -> Launch | None:
    """This process as one of several ranks; None if it is alone.

    Raises:
        ProfileError: a launcher has started ranks that the profile does not want.
    """
    launch = Launch.from_environment(os.environ)
    if launch is not None and not profile.parallel.enabled:
        raise ProfileError(
            f"this is rank {launch.rank} of {launch.size} that a launcher has started, and "
            "parallel.enabled is false: add --profile expert-parallel, or leave the launcher out"
        )
    return launch


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "29500" if name == "MASTER_PORT" else "")
    if not text.isdecimal():
        raise ProfileError(f"{name} must be a whole number, got {text!r}; it is for launchers")
    return int(text)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(_numeric(address)).is_loopback


def _numeric(address: str) -> str:
    """The IP address of a name, so that rank 0 listens on one interface only."""
    try:
        return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ProfileError(f"MASTER_ADDR {address!r} is not known here: {error}") from None


@contextmanager
def offer_secret(*, on_one_machine: bool) -> Iterator[tuple[bytes, Message]]:
    """The secret of a launch, and what rank 0 tells the others about it.

    They must have read it (`read_secret`) before the block ends. Raises `LaunchError` where it can
    be put nowhere.
    """
    if given := os.environ.get(SECRET):
        yield given.encode(), {}
        return
    secret = secrets.token_bytes(_BYTES)
    if not on_one_machine:
        yield secret, {"secret": secret.hex()}
        return
    with ExitStack() as closing:
        try:  # mode 0600
            file = closing.enter_context(tempfile.NamedTemporaryFile(prefix="moe-launch-"))
            file.write(secret)
            file.flush()
        except OSError as error:
            raise LaunchError(
                f"the secret of this launch cannot be written ({error}); set TMPDIR to a folder "
                f"that can, or {SECRET} to the same text for all ranks"
            ) from error
        yield secret, {"secret_file": file.name}


def read_secret(said: Message) -> bytes:
    """The secret, from what rank 0 says about it.

    Raises:
        LaunchError: this process cannot read it.
    """
    if given := os.environ.get(SECRET):
        return given.encode()
    if "secret" in said:
        return bytes.fromhex(said["secret"])
    path = str(said.get("secret_file", ""))
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                raise PermissionError(f"{path} belongs to another user")
            return file.read(_BYTES)
    except OSError as error:
        raise LaunchError(
            f"the secret of this launch cannot be read ({error}); set {SECRET} to the same text "
            "for all ranks"
        ) from error


def end_with_parent() -> None:
    """Let Linux kill this process when the launcher dies; elsewhere launchers do it.

    Linux means the thread of the launcher that started this process: one that ends while its ranks
    run must not start them.
    """
    parent = os.getppid()
    try:
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    except (AttributeError, OSError):
        return
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def stop_with_launcher() -> None:
    """Send this process SIGTERM, which drains, when the command that the user started is gone.

    ``deepspeed`` starts a second process, which starts the ranks and does not notice that the first
    one has ended. Call it in every rank. Other launchers start ranks themselves.
    """
    command = _deepspeed_command(os.getppid())
    if command is None:
        return
    try:
        watched = os.pidfd_open(command)
    except (AttributeError, OSError):  # not Linux, or it is gone already
        if not Path(f"/proc/{command}").exists():
            os.kill(os.getpid(), signal.SIGTERM)
        return

    def watch() -> None:
        readable([watched])
        print("moe: the launcher has ended; stopping", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="moe-launcher", daemon=True).start()


def _deepspeed_command(parent: int) -> int | None:
    """The process that started DeepSpeed's second one, if that is the parent."""
    try:
        if b"deepspeed.launcher.launch" not in Path(f"/proc/{parent}/cmdline").read_bytes():
            return None
        fields = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1])


def shield_from_launcher(launch: Launch) -> None:
    """Continue in a child, so that the launcher does not end all ranks when this one is lost.

    DeepSpeed's launcher (and others) ends every process when one of its own fails. This process
    waits for the child; if the child fails, it waits for rank 0 too, and then reports success.
    Call it before any thread is started.
    """
    child = os.fork()
    if child == 0:
        end_with_parent()
        return
    for number in (signal.SIGTERM, signal.SIGINT):  # launchers send them to the child, too
        signal.signal(number, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != 0 and _outlived(launch):
        code = 0
    os._exit(code if code >= 0 else 128 - code)


def _outlived(launch: Launch) -> bool:
    """Return whether rank 0 outlived the child; returns when rank 0 is gone."""
    try:
        with socket.create_connection((launch.address, launch.port)) as rank_0:
            while rank_0.recv(1):
                pass
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True
