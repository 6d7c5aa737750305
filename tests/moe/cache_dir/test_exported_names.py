"""Names that transformers exports: as it finds them, and found anew when a file has changed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import module_from_spec
from pathlib import Path

import pytest
import transformers
from transformers.utils.import_utils import create_import_structure_from_path

from moe.cache_dir import files
from moe.cache_dir.exported_names import FUNCTION, MODULE, _Finder, recalling

MODEL = (
    '__all__ = ["FakeModel"]\n\n\n@requires(backends=("vision", "torch"))\nclass Shown:\n    pass\n'
)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(files.ENVIRONMENT, str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Two models in a folder as transformers' is."""
    root = tmp_path / "transformers"
    for name in ("fake", "other"):
        (root / "models" / name).mkdir(parents=True)
        (root / "models" / name / "__init__.py").touch()
        (root / "models" / name / f"modeling_{name}.py").write_text(MODEL)
    (root / "utils").mkdir()
    (root / "utils" / "import_utils.py").touch()
    return root


class Search:
    """transformers' own search, counted."""

    def __init__(self, library: Path) -> None:
        self.count, self.find = 0, recalling(self.search, library)
        self.models = library / "models"

    def search(self, path: object) -> dict[object, object]:
        self.count += 1
        found: dict[object, object] = create_import_structure_from_path(path)
        return found

    def searches(self) -> int:
        """How many searches one call makes; its names are those that a search finds."""
        before = self.count
        assert self.find(str(self.models)) == create_import_structure_from_path(str(self.models))
        return self.count - before


def test_all_names_of_transformers_come_back(directory: Path) -> None:
    models = Path(transformers.__file__).parent / "models"
    found = create_import_structure_from_path(str(models))
    first, second = (recalling(lambda _: found, models.parent) for _ in range(2))
    assert first(str(models)) is found
    (file,) = directory.iterdir()
    again = second(str(models))
    assert again == found
    assert again is not found
    assert list(again) == list(found)
    assert file.stat().st_size < files.MOST_BYTES / 2


def _edit(library: Path) -> None:
    """Another name of the same length, at the same time."""
    file = library / "models/fake/modeling_fake.py"
    before = file.stat()
    file.write_text(MODEL.replace("FakeModel", "FakeOther"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "edited": _edit,
    "added": lambda library: (library / "models/other/configuration_other.py").write_text(MODEL),
    "removed": lambda library: (library / "models/fake/modeling_fake.py").unlink(),
    "renamed": lambda library: (library / "models/fake").rename(library / "models/fame"),
    "rules": lambda library: (library / "utils/import_utils.py").write_text("# other"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_each_change_is_looked_for(what: str, library: Path) -> None:
    search = Search(library)
    assert [search.searches(), search.searches()] == [1, 0]
    CHANGES[what](library)
    assert [search.searches(), search.searches()] == [1, 0]


@pytest.mark.parametrize("damage", [b"", b"{}", b"\x00" * 100], ids=["empty", "other", "zeros"])
def test_damaged_names_are_looked_for(damage: bytes, library: Path, directory: Path) -> None:
    search = Search(library)
    assert search.searches() == 1
    (file,) = directory.iterdir()
    file.write_bytes(damage)
    assert [search.searches(), search.searches()] == [1, 0]
    content = file.read_bytes()
    file.write_bytes(content.replace(b"FakeModel", b"FakeMadel"))
    assert search.searches() == 1


def test_other_folders_and_no_directory_are_left_to_transformers(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = Search(library)
    assert search.searches() == 1
    part = str(search.models / "fake")
    assert search.find(part) == create_import_structure_from_path(part)
    assert search.count == 2
    monkeypatch.setenv(files.ENVIRONMENT, "")
    assert [search.searches(), search.searches()] == [1, 1]


@pytest.mark.parametrize(
    "names", [{"a": ["B"]}, {"a": None}, {frozenset(): {"a": {"B": 1}}}], ids=str
)
def test_names_in_another_form_are_not_kept(
    names: dict[object, object], library: Path, directory: Path
) -> None:
    find = recalling(lambda _: names, library)
    assert find(str(library / "models")) is names
    assert not [*directory.iterdir()]


def test_the_module_is_found_as_ever_but_for_one_function() -> None:
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    assert finder.find_spec("transformers.utils.other") is None
    spec = finder.find_spec(MODULE, transformers.utils.__path__)
    assert finder not in sys.meta_path
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    own = sys.modules[MODULE]
    assert type(module.__loader__) is type(own.__loader__)
    assert module.__file__ == own.__file__
    assert getattr(module, FUNCTION).__module__ == recalling.__module__
