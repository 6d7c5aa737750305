"""A hub that lies, or somebody between on plain HTTP, writes nothing but the model it announced."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from hypothesis import given
from hypothesis import strategies as st

from moe.cli import main
from moe.errors import CheckpointError
from moe.loading.hub import reach_model, resolve_model
from moe.loading.remote import answers
from moe.loading.remote import download as downloading
from moe.loading.remote.names import HubName
from moe.loading.remote.repository import HubFile, Repository
from tests.fake_hub import CHUNK, FakeHub, commit_of

NAME = "org/small"
FILES = {
    "model.safetensors": os.urandom(300_000),
    "config.json": b'{"model_type": "qwen3_moe"}',
    "tokenizer.json": b"{}" * 1000,
}
Tree = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PAUSE_S", 0)


@pytest.fixture
def cache(hub: FakeHub) -> Path:
    """The cache, beside which a download may write nothing; the repository is there."""
    for name, content in FILES.items():
        (hub.repository(NAME) / name).write_bytes(content)
    return hub.root.parent / "cache"


def lie_of_the_tree(hub: FakeHub, change: Callable[[Tree], object]) -> None:
    def lie(kind: str, headers: dict[str, str], body: Any) -> tuple[dict[str, str], Any]:
        if kind == "tree":
            change(body)
        return headers, body

    hub.lie = lie


def entry_of(tree: Tree, file: str) -> dict[str, Any]:
    return next(one for one in tree if one["path"] == file)


def downloaded() -> None:
    resolve_model(NAME)


def read_in_place() -> None:
    with reach_model(NAME, whole=True):
        pass


def files_below(path: Path) -> set[Path]:
    return {file for file in path.rglob("*") if not file.is_dir()}


def refused(hub: FakeHub, way: Callable[[], None], message: str) -> None:
    """The way ends with this message; new files are unfinished, or of the hash that names them."""
    root = hub.root.parent
    before = files_below(root)
    with pytest.raises(CheckpointError, match=message):
        way()
    for file in files_below(root) - before:
        content = file.read_bytes()
        hashes = hashlib.sha256(content), hashlib.sha1(b"blob %d\0%b" % (len(content), content))
        assert file.suffix == ".part" or file.name in {one.hexdigest() for one in hashes}


PATHS = (
    *("../x/{}", "/tmp/{}", "a/../../../{}", "a//{}", "./{}", "{}/", "..", "", "{}/.."),
    *("\x1b[2J{}", "a\n{}", "a\0{}", "x" * 256 + "/{}", "xy/" * 400 + "{}"),
)
NO_HASHES = (
    *("../../evil", "/tmp/evil", "main", "", "A" * 64, "a" * 63, "a" * 64 + "\n", None, 7),
)


def test_a_path_is_plain(hub: FakeHub, cache: Path) -> None:
    def change(file: str, path: str, tree: Tree) -> None:
        entry_of(tree, file)["path"] = path.format(file)

    for file, path in zip(itertools.cycle(FILES), PATHS, strict=False):
        lie_of_the_tree(hub, partial(change, file, path))
        refused(
            hub, downloaded, r"gives \d\.path as .* plain path; try again, and .*HF_ENDPOINT\)$"
        )


def test_hashes_are_hashes(hub: FakeHub, cache: Path) -> None:
    def change(file: str, value: object, tree: Tree) -> None:
        entry = entry_of(tree, file)
        entry.get("lfs", entry)["oid"] = value

    for file, value in itertools.product(list(FILES)[:2], NO_HASHES):
        lie_of_the_tree(hub, partial(change, file, value))
        refused(hub, downloaded, r"gives \d\.(lfs\.)?oid as ")


@pytest.mark.parametrize("way", [downloaded, read_in_place])
def test_a_commit_is_a_commit(hub: FakeHub, cache: Path, way: Any) -> None:
    def lie(sha: object, kind: str, headers: dict[str, str], body: Any) -> Any:
        return headers, {"sha": sha} if kind == "model" else body

    for commit in ("../../x", "main", "/etc", "", None, "0" * 39):
        hub.lie = partial(lie, commit)
        refused(hub, way, "gives sha as ")


def test_a_size_is_a_size(hub: FakeHub, cache: Path) -> None:
    def change(size: object, tree: Tree) -> None:
        tree[0]["size"] = size

    for size in (-1, 1 << 51, "many", 1.5, None):
        lie_of_the_tree(hub, partial(change, size))
        refused(hub, downloaded, r"gives 0\.size as ")


def test_a_size_that_no_memory_has_is_no_reason_to_take_it(hub: FakeHub, cache: Path) -> None:
    lie_of_the_tree(hub, lambda tree: entry_of(tree, "config.json").update(size=1 << 40))
    refused(hub, downloaded, r"needs .* more, and .* free; make room")
    refused(hub, read_in_place, r"config.json has 1099511627776 bytes, 67108864 is the most")


@pytest.mark.parametrize("file", FILES)
def test_what_comes_has_the_hash_that_was_announced(hub: FakeHub, cache: Path, file: str) -> None:
    """And what a liar sent is not gone on from."""

    def lie(kind: str, headers: dict[str, str], body: Any) -> tuple[dict[str, str], Any]:
        if kind != "file" or headers["ETag"].strip('"') != etag:
            return headers, body
        content = bytearray(b"".join(body))
        content[len(content) // 2] ^= 1
        return headers, iter([bytes(content)])

    etag = Repository.find(HubName(NAME)).files[file].etag
    hub.lie = lie
    refused(hub, downloaded, rf"/{file} sent what has the hash \w+, not {etag} as anno")
    if file != "model.safetensors":
        refused(hub, read_in_place, rf"/{file} sent what has the hash")
    assert not files_below(cache / "models--org--small" / "snapshots")
    hub.lie = None
    path = resolve_model(NAME)
    assert {name: (path / name).read_bytes() for name in FILES} == FILES


def test_the_rest_of_a_file_is_checked_together_with_its_beginning(
    hub: FakeHub, cache: Path
) -> None:
    """Which another hub may have sent."""
    file = Repository.find(HubName(NAME)).files["model.safetensors"]
    blobs = cache / "models--org--small" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{file.etag}.part").write_bytes(b"x" * 1000)
    refused(hub, downloaded, "sent what has the hash")
    assert (resolve_model(NAME) / file.path).read_bytes() == FILES[file.path]


@pytest.mark.parametrize("way", [downloaded, read_in_place])
@pytest.mark.parametrize("kind", ["model", "tree", "file"])
def test_compressed_answers_are_refused(hub: FakeHub, cache: Path, way: Any, kind: str) -> None:
    bomb = gzip.compress(bytes(1 << 24))

    def lie(of: str, headers: dict[str, str], body: Any) -> tuple[dict[str, str], Any]:
        if of != kind:
            return headers, body
        sent = {"Content-Encoding": "gzip", "Content-Length": str(len(bomb))}
        return headers | sent, iter([bomb])

    hub.lie = lie
    refused(hub, way, "answers in the encoding 'gzip', which was not asked for")


def pieces(body: bytes = bytes(CHUNK), times: int = 100) -> Iterator[bytes]:
    """More than any limit here; it ends, for whoever reads on."""
    yield from itertools.repeat(b"%x\r\n%b\r\n" % (len(body), body), times)
    yield b"0\r\n\r\n"


@pytest.mark.parametrize("way", [downloaded, read_in_place])
def test_a_file_ends_where_it_was_announced_to(hub: FakeHub, cache: Path, way: Any) -> None:
    def lie(kind: str, headers: dict[str, str], body: Any) -> tuple[dict[str, str], Any]:
        if kind != "file":
            return headers, body
        headers.pop("Content-Length")
        return headers | {"Transfer-Encoding": "chunked"}, pieces()

    hub.lie = lie
    refused(hub, way, r"sends more than the \d+ bytes it announced")
    held = sum(file.stat().st_size for file in files_below(cache))
    assert held <= sum(map(len, FILES.values()))


def test_an_answer_is_of_the_bytes_that_were_asked_for(hub: FakeHub, cache: Path) -> None:
    def lie(kind: str, headers: dict[str, str], body: Any) -> tuple[dict[str, str], Any]:
        if "Content-Range" in headers:
            headers["Content-Range"] = headers["Content-Range"].replace("bytes 7-", "bytes 0-")
        return headers, body

    hub.lie = lie
    file = Repository.find(HubName(NAME)).files["model.safetensors"]
    with pytest.raises(CheckpointError, match=r"answers 'bytes 0-9/300000' to bytes 7 to 9"):
        list(file.stream(7, 10))


def redirect(hub: FakeHub, kind: str, to: str) -> None:
    def lie(of: str, headers: dict[str, str], body: Any) -> tuple[dict[str, str], Any]:
        if of != kind:
            return headers, body
        return {"status": "302", "Location": to, "Content-Length": "0"}, iter([])

    hub.lie = lie


@pytest.mark.parametrize("kind", ["model", "tree", "file"])
def test_redirects_lead_to_no_file_and_not_into_our_network(
    hub: FakeHub, cache: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "_is_local", lambda host: host in ("127.0.0.2", "inside"))
    for to in ("file:///etc/passwd", "ftp://other/x"):
        redirect(hub, kind, to)
        refused(hub, downloaded, r"redirects to '(file|ftp)://.*', which is no http address; try")
    for to in ("http://127.0.0.2:1/x", "http://inside/x"):
        redirect(hub, kind, to)
        refused(hub, downloaded, r"redirects to '(127\.0\.0\.2|inside)', in the network of this")


def test_redirects_end(hub: FakeHub, cache: Path) -> None:
    redirect(hub, "model", f"/api/models/{NAME}")
    refused(hub, downloaded, "redirects more than 10 times")


def test_hosts_of_our_network_are_known() -> None:
    local = ("127.0.0.1", "localhost", "10.0.0.1", "169.254.169.254", "::1", "fe80::1", "0.0.0.0")
    assert all(map(answers._is_local, local))
    assert not any(
        map(answers._is_local, ("1.1.1.1", "2606:4700::1111", "no.such.host.invalid", ""))
    )
    answers._check_redirect("http://127.0.0.1/a", "http://127.0.0.1/a", "http://10.0.0.1/b")
    answers._check_redirect("http://1.1.1.1/a", "http://1.1.1.1/a", "https://1.0.0.1/b")
    with pytest.raises(CheckpointError, match="which is no https address"):
        answers._check_redirect("https://1.1.1.1/a", "https://1.1.1.1/a", "http://1.1.1.1/a")
    with pytest.raises(CheckpointError, match=r"'10\.0\.0\.1', in the network of this machine"):
        answers._check_redirect("http://1.1.1.1/a", "http://1.1.1.1/a", "http://10.0.0.1/b")


def test_answers_without_a_byte_end(hub: FakeHub, cache: Path) -> None:
    def lie(kind: str, headers: dict[str, str], body: Any) -> tuple[dict[str, str], Any]:
        return (headers | {"Content-Length": "0"}, iter([])) if kind == "file" else (headers, body)

    hub.lie = lie
    with pytest.raises(HTTPError, match="without a byte"):
        Repository.find(HubName(NAME)).files["model.safetensors"].content()
    asked = [one for one in hub.log if one.path.endswith("model.safetensors")]
    assert 5 <= len(asked) <= 6  # the last is noted when it was sent
    refused(hub, downloaded, "gave no answer for org/small: .*without a byte")


def test_lists_end(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes, in pages, and at the server that was asked."""

    def lie(kind: str, headers: dict[str, str], body: Any) -> tuple[dict[str, str], Any]:
        return (headers | {"Link": f'<{link}>; rel="next"'} if kind == "tree" else headers), body

    hub.lie, link = lie, "/api/models/org/small/tree/main?recursive=true"
    monkeypatch.setattr(answers, "MAX_PAGES", 3)
    refused(hub, downloaded, "has more than 3 pages")
    link = "http://127.0.0.1:1/api"
    refused(hub, downloaded, "goes on at another server")
    hub.lie = lambda kind, headers, body: ({"Transfer-Encoding": "chunked"}, pieces(b" " * CHUNK))
    monkeypatch.setattr(answers, "MAX_ANSWER_BYTES", 10 * CHUNK)
    refused(hub, downloaded, "answers more than 655360 bytes")


def test_several_pages_are_one_list(hub: FakeHub, cache: Path) -> None:
    pages = 0

    def lie(kind: str, headers: dict[str, str], body: Any) -> tuple[dict[str, str], Any]:
        nonlocal pages
        if kind == "tree":
            pages += 1
            body = [body[pages - 1]]
            following = f"/api/models/org/small/tree/{commit_of(hub.root / NAME)}?cursor={pages}"
            headers |= {"Link": f'<{following}>; rel="next"'} if pages < len(FILES) else {}
        return headers, body

    hub.lie = lie
    assert Repository.find(HubName(NAME)).files.keys() == FILES.keys()


@pytest.mark.parametrize("status", [404, 500])
def test_errors_are_read_to_a_limit_and_shown_without_control_characters(
    hub: FakeHub, cache: Path, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    def lie(kind: str, headers: dict[str, str], body: Any) -> tuple[dict[str, str], Any]:
        hub.log.clear()
        told = {"status": str(status), "X-Error-Message": "\x1b[2Jgone\x9b"}
        return told | {"Transfer-Encoding": "chunked"}, pieces(b"e" * CHUNK, 1 << 40)

    hub.lie = lie
    assert main(["plan", NAME]) == 2
    said = capsys.readouterr().err
    assert "org/small" in said
    assert not {"\x1b", "\x9b"} & set(said)
    assert len(said) < 2000


def test_an_error_that_passes_is_tried_again(hub: FakeHub, cache: Path) -> None:
    left = {"model": 2, "tree": 1, "file": 3}

    def lie(kind: str, headers: dict[str, str], body: Any) -> tuple[dict[str, str], Any]:
        if left[kind]:
            left[kind] -= 1
            headers = {"status": "503", "Content-Length": "0", "Retry-After": "0"}
            body = iter([])
        return headers, body

    hub.lie = lie
    path = resolve_model(NAME)
    assert {name: (path / name).read_bytes() for name in FILES} == FILES


@pytest.mark.parametrize(("status", "failures"), [(404, 1), (503, answers.RETRIES + 1)])
def test_an_error_that_stays_is_raised(status: int, failures: int) -> None:
    request = httpx.Request("GET", "http://hub/x")
    response: Any = httpx.Response(status, request=request)  # releases differ in its package
    error = HfHubHTTPError("no", response=response)
    with pytest.raises(HfHubHTTPError, match=r"^no$"):
        answers.pause(error, failures)


def test_where_one_file_fails_the_others_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = []

    def fetch(file: HubFile, _folder: Path, advance: Callable[[int], object]) -> None:
        if file.path == "bad":
            raise CheckpointError("this one")
        try:
            for _ in range(200):
                advance(1)
                time.sleep(0.01)
        except downloading._Stopped:
            stopped.append(file.path)
            raise

    monkeypatch.setattr(downloading, "fetch", fetch)
    files = [HubFile(name, 5, "0" * 40, "http://hub/x") for name in ("good", "bad")]
    with pytest.raises(CheckpointError, match=r"^this one$"):
        downloading._fetch_all(files, tmp_path, HubName(NAME), lambda _: None)
    assert stopped == ["good"]


WORDS = st.text() | st.sampled_from(["..", "/", ".", "a", "../a", "\0", "a/", "~"])


@given(st.lists(st.lists(WORDS, max_size=4), max_size=3), st.data())
def test_any_list_is_refused_or_stays_below(parts: list[list[str]], data: st.DataObject) -> None:
    tree = [
        {"type": "file", "path": "/".join(path), "size": 1, "oid": data.draw(WORDS | HASHES)}
        for path in parts
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "_content", lambda _: (json.dumps(tree).encode(), None))
        try:
            found = list(answers.list_files(HubName(NAME), "0" * 40))
        except CheckpointError:
            return
    root = Path("/root/of/it")
    for path, _, etag in found:
        assert Path(os.path.normpath(root / path)).is_relative_to(root)
        assert os.path.normpath(root / path) != str(root)
        assert (root / etag).parent == root


HASHES = st.from_regex(r"[0-9a-f]{40}", fullmatch=True)


def test_where_there_are_no_links_files_are_moved(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    (hub.repository(NAME) / "special_tokens.json").write_bytes(FILES["tokenizer.json"])
    monkeypatch.setattr(Path, "symlink_to", no_links)
    monkeypatch.setattr(downloading, "MAX_SMALL_BYTES", 100_000)
    path = resolve_model(NAME)
    assert {name: (path / name).read_bytes() for name in FILES} == FILES
    assert not any(file.is_symlink() for file in files_below(path))
    before = hub.bytes_sent("/resolve/")
    assert resolve_model(NAME) == path
    assert hub.bytes_sent("/resolve/") == before


def test_a_blob_that_was_cut_is_fetched_again(hub: FakeHub, cache: Path) -> None:
    weights = resolve_model(NAME) / "model.safetensors"
    weights.resolve().write_bytes(b"cut")
    assert (resolve_model(NAME) / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_cache_that_cannot_be_written_is_no_fault_of_the_hub(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/proc/nowhere")
    with pytest.raises(CheckpointError, match=r"cannot write /proc/nowhere.*HF_HOME names another"):
        resolve_model(NAME)


def test_huggingface_hub_finds_what_was_downloaded(hub: FakeHub, cache: Path) -> None:
    from huggingface_hub import scan_cache_dir, try_to_load_from_cache

    path = resolve_model(f"{NAME}@v1")
    found = try_to_load_from_cache(NAME, "model.safetensors", revision="v1")
    assert found == str(path / "model.safetensors")
    scanned = scan_cache_dir(cache)
    assert not scanned.warnings
    (repo,) = scanned.repos
    assert repo.size_on_disk == sum(map(len, FILES.values()))
    assert {ref for revision in repo.revisions for ref in revision.refs} == {"v1"}


def test_two_hash_kinds() -> None:
    file = HubFile("x", 5, "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0", "http://hub/x")
    digest = file.new_digest()
    digest.update(b"hello")
    file.check(digest.hexdigest())  # git hash-object
