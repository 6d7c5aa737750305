"""Where a hot set is kept, and what is not made for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.hot_set import hot_set_file, load_hot_set, save_hot_set


def test_a_store_that_was_moved_away_is_not_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory with a hot set and nothing else would be in the way of the next conversion."""
    store = tmp_path / "store"
    store.mkdir()
    file = hot_set_file(store)
    assert file.parent == store
    store.rename(tmp_path / "moved")
    save_hot_set(file, [(0, 1)])
    assert not store.exists()
    assert "the hot set was not saved" in caplog.text


def test_that_of_a_store_that_cannot_be_written_to_is_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("os.access", lambda *_: False)
    file = hot_set_file(tmp_path)
    assert (tmp_path / "cache") in file.parents
    save_hot_set(file, [(1, 0), (0, 1)])
    assert load_hot_set(file, [2, 2]) == [(1, 0), (0, 1)]
