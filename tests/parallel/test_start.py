"""Ranks come together within bounded time, or everybody there is told who or what is missing."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from moe.errors import LaunchError, ProfileError
from moe.machine import code_digest
from moe.parallel.launch import SECRET, Launch, required_launch
from moe.parallel.membership import (
    CONTROL,
    WATCH,
    Member,
    Membership,
    identity,
    rendezvous,
)
from moe.parallel.ranks import Ranks
from moe.settings.profile import load_profile
from tests.launched import free_port

SAME = {"moe": "1", "setting lossless": "True"}


def launch(rank: int, size: int, port: int) -> Launch:
    return Launch(rank, size, "127.0.0.1", port, True)


def meet(identities: list[dict[str, str]], size: int | None = None) -> list[Membership | Exception]:
    """What becomes of ranks with these identities; of a launch of more, if ``size`` says so."""
    port = free_port()

    def one(rank: int) -> Membership | Exception:
        timeout_s = 3.0 if size else 60.0  # by when all are there that come
        try:
            return rendezvous(
                launch(rank, size or len(identities), port), identities[rank], timeout_s
            )
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(identities)) as pool:
        return list(pool.map(one, range(len(identities))))


def test_ranks_that_fit_are_connected() -> None:
    memberships = meet([SAME] * 3)
    assert all(isinstance(membership, Membership) for membership in memberships), memberships
    first, second, third = memberships
    assert isinstance(first, Membership)
    assert isinstance(second, Membership)
    assert isinstance(third, Membership)
    assert first.connections[CONTROL].keys() == first.connections[WATCH].keys() == {1, 2}
    second.connections[CONTROL][0].send({"from": 1})
    third.connections[CONTROL][0].send({"from": 2})
    assert [first.connections[CONTROL][rank].receive()["from"] for rank in (1, 2)] == [1, 2]
    assert first.neighbours(0) == 3
    assert first.threads(0) == max(1, len(first.members[0].cores) // 3)


def test_every_difference_is_named_on_every_rank() -> None:
    other = {"moe": "2", "setting lossless": "True", "model file x.json": "abc"}
    for error in meet([SAME, SAME, other]):
        assert isinstance(error, LaunchError)
        assert "moe: 1 on rank 0, 2 on rank 2" in str(error)
        assert "model file x.json: absent on rank 0, abc on rank 2" in str(error)
        assert "lossless" not in str(error)
        assert "rank 1" not in str(error)


def test_ranks_that_do_not_come_are_named() -> None:
    for error in meet([SAME, SAME], size=4):
        assert isinstance(error, LaunchError)
        assert "rank 2, rank 3 did not come up within 3 s" in str(error)


def test_without_rank_0_nobody_waits_for_ever() -> None:
    with pytest.raises(LaunchError, match=r"rank 0 did not come up at 127\.0\.0\.1 port"):
        rendezvous(launch(1, 2, free_port()), SAME, 1.0)


def test_a_port_that_is_taken_is_an_error() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(LaunchError, match=r"cannot listen on 127\.0\.0\.1 port .* --master_port"),
    ):
        rendezvous(launch(0, 2, taken.getsockname()[1]), SAME, 1.0)


def test_rank_0_listens_on_its_own_address_only() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(rendezvous, launch(0, 2, port), SAME, 1.0)
        while not (listening := _listening(port)) and not future.done():
            pass
        assert listening == {"0100007F"}  # 127.0.0.1
        with pytest.raises(LaunchError):
            future.result()


def _listening(port: int) -> set[str]:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {
        row[1].split(":")[0] for row in rows if row[3] == "0A" and row[1].endswith(f"{port:04X}")
    }


def test_settings_versions_code_and_files_are_compared(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"123")
    profile = load_profile(None, {"parallel.timeout_s": 3.0}, {}).profile
    one = identity(profile, tmp_path)
    assert one["setting parallel.timeout_s"] == "3.0"
    assert one["model file model.safetensors"] == "3 bytes"
    assert {"torch", "deepspeed", "code", "python"} <= one.keys()
    assert "setting threads" not in one
    (tmp_path / "config.json").write_text("[]")
    changed = {key for key, value in identity(profile, tmp_path).items() if one[key] != value}
    assert changed == {"model file config.json"}


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("moe/model.py", True),
        ("kernels/cpu/linear.h", True),
        ("kernels/cpu/experts.cpp", True),
        ("kernels/__pycache__/planes.pyc", False),
        ("tests/test_house.py", False),
    ],
)
def test_code_is_all_that_can_change_an_answer(tmp_path: Path, file: str, counts: bool) -> None:
    assert code_digest(tmp_path) != code_digest()
    before, new = code_digest(tmp_path), tmp_path / file
    new.parent.mkdir(parents=True)
    new.write_text("1")
    first = code_digest(tmp_path)
    new.write_text("2")
    assert (before != first, first != code_digest(tmp_path)) == (counts, counts)


RANKED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5"}


def test_one_rank_or_no_launcher_is_nobody_else() -> None:
    assert Launch.from_environment({}) is None
    assert Launch.from_environment(RANKED | {"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert Launch.from_environment(RANKED) == Launch(1, 2, "127.0.0.1", 5, True)
    spread = Launch.from_environment(RANKED | {"MASTER_ADDR": "10.0.0.1", "LOCAL_SIZE": "1"})
    assert spread is not None
    assert not spread.on_one_machine


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "two"}, "RANK must be a whole number, got 'two'"),
        ({"RANK": "2"}, "RANK is 2 and WORLD_SIZE is 2"),
        ({"MASTER_ADDR": "no such host."}, "MASTER_ADDR 'no such host.' is not known here"),
    ],
)
def test_nonsense_of_a_launcher_is_refused(changed: dict[str, str], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        Launch.from_environment(RANKED | changed)


def test_exposed_ranks_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    public, readable = Launch(0, 2, "8.8.8.8", 1, False).warnings
    assert "8.8.8.8 is a public address" in public
    assert Launch(0, 2, "10.1.2.3", 1, False).warnings == [readable.replace("8.8.8.8", "10.1.2.3")]
    assert f"set {SECRET} to the same text" in readable
    assert Launch(0, 2, "127.0.0.1", 1, True).warnings == []
    monkeypatch.setenv(SECRET, "known to all ranks")
    assert Launch(0, 2, "10.1.2.3", 1, False).warnings == []


def test_ranks_that_the_profile_does_not_want_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RANKED.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ProfileError, match=r"rank 1 of 2 .* add --profile expert-parallel"):
        required_launch(load_profile(None, environ={}).profile)
    wanted = load_profile("expert-parallel", environ={}).profile
    assert required_launch(wanted) == Launch(1, 2, "127.0.0.1", 5, True)


@pytest.mark.parametrize(
    ("ranks", "threads", "cpus"),
    [
        (2, [4, 4], [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (3, [2, 2, 4], [{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5, 6, 7}]),
        (4, [2, 2, 2, 2], [{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5, 6, 7}, {4, 5, 6, 7}]),
    ],
)
def test_ranks_of_a_machine_stay_on_memory_nodes_of_their_own(
    monkeypatch: pytest.MonkeyPatch, ranks: int, threads: list[int], cpus: list[set[int]]
) -> None:
    """Not one of another machine, nor one whose launcher gave it cores of its own."""
    nodes = [frozenset(range(4)), frozenset(range(4, 8))]
    members = [Member({}, "here", rank, "", tuple(range(8))) for rank in range(ranks)]
    others = [Member({}, "there", 0, "", tuple(range(8))), Member({}, "here", 9, "", (8, 9))]
    seen: list[frozenset[int]] = []
    monkeypatch.setattr("moe.parallel.ranks.memory_nodes", lambda: nodes)
    monkeypatch.setattr("moe.parallel.ranks.stay_on", seen.append)
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    profile, anything = load_profile({"device": "cpu"}, environ={}).profile, cast(Any, None)
    membership = Membership(anything, [*members, *others], {})
    shares = [
        Ranks(launch(rank, ranks + 2, 1), membership, anything).share(profile)
        for rank in range(ranks + 2)
    ]
    assert seen == cpus
    assert [share.threads for share in shares] == [*threads, 8, 2]


@pytest.mark.parametrize(
    ("ranks", "threads", "cpus"),
    [
        (2, [2, 2], [{0, 1, 4, 5}, {2, 3, 6, 7}]),
        (3, [1, 1, 2], [{0, 4}, {1, 5}, {2, 3, 6, 7}]),
    ],
)
def test_ranks_that_pin_threads_have_physical_cores_of_their_own(
    monkeypatch: pytest.MonkeyPatch, ranks: int, threads: list[int], cpus: list[set[int]]
) -> None:
    members = [Member({}, "here", rank, "", tuple(range(8))) for rank in range(ranks)]
    seen: list[frozenset[int]] = []
    cores = [frozenset({core, core + 4}) for core in range(4)]
    monkeypatch.setattr("moe.parallel.ranks.physical_cores", lambda: cores)
    monkeypatch.setattr("moe.parallel.ranks.stay_on", seen.append)
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    overrides = {"device": "cpu", "engine": {"pin_threads": True}}
    profile, anything = load_profile(overrides, environ={}).profile, cast(Any, None)
    shares = [
        Ranks(launch(rank, ranks, 1), Membership(anything, members, {}), anything).share(profile)
        for rank in range(ranks)
    ]
    assert seen == cpus
    assert [share.threads for share in shares] == threads
