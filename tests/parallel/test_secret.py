"""Only ranks know the secret of a launch: a file of the user's, or what all were started with."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from moe.errors import LaunchError
from moe.parallel.launch import SECRET, offer_secret, read_secret
from moe.settings.profile import load_profile


def test_on_one_machine_it_is_in_a_file_that_nobody_else_may_read() -> None:
    with offer_secret(on_one_machine=True) as (secret, said):
        file = Path(said["secret_file"])
        assert file.stat().st_mode & 0o777 == 0o600
        assert secret.hex() not in str(said)
        assert read_secret(said) == secret
    assert not file.exists()


def test_without_a_temporary_folder_it_is_said_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with (
        pytest.raises(LaunchError, match=rf"cannot be written \(.*nowhere.*set TMPDIR .*{SECRET}"),
        offer_secret(on_one_machine=True),
    ):
        pass


def test_who_starts_the_ranks_may_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "known to all ranks")
    load_profile()  # which knows that it is no setting
    with offer_secret(on_one_machine=False) as (secret, said):
        assert said == {}
        assert read_secret(said) == secret == b"known to all ranks"


def test_on_several_machines_the_store_has_it_otherwise() -> None:
    with offer_secret(on_one_machine=False) as (secret, said):
        assert read_secret(said) == secret


def test_a_file_that_cannot_be_trusted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_bytes(b"x")
    for said in ({}, {"secret_file": str(tmp_path / "link")}):
        with pytest.raises(LaunchError, match=f"cannot be read .* set {SECRET}"):
            read_secret(said)
    monkeypatch.setattr(os, "getuid", lambda: -1)
    with pytest.raises(LaunchError, match="belongs to another user"):
        read_secret({"secret_file": str(tmp_path / "secret")})
