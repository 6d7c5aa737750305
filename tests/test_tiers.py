"""The guard against slow tests, and the choice of deep tests for a change."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests import changed, cpu_budget, floors
from tests.changed import Chosen, base, changed_rooms, plan, rooms_of_test, steps_above
from tests.cpu_budget import exceeded, written
from tests.cpu_seconds import closing_line, cpu_seconds

BUDGET = {"machine": {"calibration": 0.5}, "tests/a.py": {"quick": 10.0, "deep": 50.0}}


def test_a_file_may_take_twice_its_budget_and_a_new_one_little() -> None:
    assert exceeded({"quick": {"tests/a.py": 19.9, "tests/new.py": 11.9}}, BUDGET, 1.0) == []
    (line,) = exceeded({"quick": {"tests/a.py": 20.1}}, BUDGET, 1.0)
    assert line.startswith("tests/a.py takes 20.1 CPU seconds in the quick tier, and may take 20.0")
    (line,) = exceeded({"quick": {"tests/new.py": 12.1}}, BUDGET, 1.0)
    assert line.startswith("tests/new.py takes 12.1 CPU seconds")
    (line,) = exceeded({"deep": {"tests/a.py": 100.1}}, BUDGET, 1.0)
    assert "in the deep tier" in line
    assert exceeded({"deep": {"tests/unknown.py": 29.0}}, BUDGET, 1.0) == []


def test_a_slow_machine_may_take_more() -> None:
    assert exceeded({"quick": {"tests/a.py": 59.0}}, BUDGET, 3.0) == []
    assert exceeded({"quick": {"tests/a.py": 61.0}}, BUDGET, 3.0)


def test_the_quick_tier_has_a_bound_as_a_whole() -> None:
    files = {f"tests/{n}.py": 5.0 for n in range(100)}
    assert exceeded({"quick": files}, BUDGET, 1.0) == []
    files |= {f"tests/more{n}.py": 5.0 for n in range(200)}
    (line,) = exceeded({"quick": files}, BUDGET, 1.0)
    assert line.startswith("the quick tier takes 1500 CPU seconds, and may take 1200 here")
    # Everything at once has another amount of examples, and no budget.
    assert exceeded({"all": files}, BUDGET, 1.0) == []


def test_a_budget_written_elsewhere_stays_in_seconds_of_its_machine() -> None:
    here = Path(__file__).relative_to(cpu_budget.BUDGET.parents[1]).as_posix()
    before = {"machine": {"calibration": 0.5}, here: {"deep": 7.0}, "tests/gone.py": {"quick": 1.0}}
    after = written(before, {"quick": {here: 3.0}, "all": {here: 99.0}}, 1.5)
    assert after == {"machine": {"calibration": 0.5}, here: {"deep": 7.0, "quick": 1.0}}
    assert written({}, {"quick": {here: 3.0}}, 1.5) == {
        "machine": {"calibration": 1.5},
        here: {"quick": 3.0},
    }


def test_main_fails_for_what_is_too_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_budget, "BUDGET", tmp_path / "budget.json")
    monkeypatch.setattr(cpu_budget, "calibration", lambda: 1.0)
    (tmp_path / "budget.json").write_text(json.dumps(BUDGET))
    run = tmp_path / "quick.json"
    run.write_text(json.dumps({"tier": "quick", "files": {"tests/a.py": 39.0}}))
    assert cpu_budget.main([str(run)]) == 0
    run.write_text(json.dumps({"tier": "quick", "files": {"tests/a.py": 41.0}}))
    monkeypatch.setattr(cpu_budget, "alone", lambda _file, _tier: 40.5)
    assert cpu_budget.main([str(run)]) == 1
    assert "tests/a.py takes 40.5 CPU seconds" in capsys.readouterr().out


def test_a_file_above_its_budget_is_measured_again_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def alone(file: str, tier: str) -> float:
        asked.append((file, tier))
        return 12.0

    monkeypatch.setattr(cpu_budget, "alone", alone)
    measured = {"quick": {"tests/a.py": 21.0, "tests/b.py": 1.0}, "all": {"tests/a.py": 99.0}}
    fresh = cpu_budget.measure_again(measured, BUDGET, 1.0)
    assert asked == [("tests/a.py", "quick")]
    assert fresh == measured | {"quick": {"tests/a.py": 12.0, "tests/b.py": 1.0}}
    # Where everything takes longer, nothing is measured again.
    measured = {"quick": {f"tests/{n}.py": 20.0 for n in range(20)}}
    assert cpu_budget.measure_again(measured, BUDGET, 1.0) == measured
    assert len(asked) == 1


def test_a_run_of_its_own_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun = []

    def run(command: list[str], **_options: object) -> None:
        begun.append(command)
        (written,) = [word.partition("=")[2] for word in command if "--cpu-seconds" in word]
        Path(written).write_text(json.dumps({"files": {"tests/a.py": 3.5}}))

    monkeypatch.setattr(subprocess, "run", run)
    assert cpu_budget.alone("tests/a.py", "quick") == 3.5
    assert cpu_budget.alone("tests/a.py", "deep") == 3.5
    assert ["-m" in command[3:] for command in begun] == [False, True]


def test_make_names_the_file_of_seconds_in_one_word() -> None:
    # pytest takes a word of its own for a folder of tests as soon as the file exists.
    assert "--cpu-seconds " not in (cpu_budget.BUDGET.parents[1] / "Makefile").read_text()


def test_cpu_seconds_of_processes_below_count() -> None:
    begin = cpu_seconds()
    work = "import time\nwhile time.process_time() < 0.3: pass\nprint()\ninput()"
    with subprocess.Popen(
        ["python3", "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert cpu_seconds() - begin > 0.25  # it still runs
        process.communicate(b"\n")
    assert cpu_seconds() - begin > 0.25


def test_the_closing_line_is_that_of_pytest() -> None:
    none = dict.fromkeys(["failed", "skipped", "deselected", "xfailed", "xpassed", "error"], 0)
    runs = [
        {"outcomes": none | {"passed": 5, "skipped": 1}, "wall_seconds": 2.5},
        {"outcomes": none | {"passed": 7, "failed": 2}, "wall_seconds": 1.0},
    ]
    line = closing_line(runs)
    assert line.strip("=") == " 2 failed, 12 passed, 1 skipped in 3.50s "
    assert len(line) == 80


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three modules: the engine stands on the network, and that on kernels."""
    sources = {
        "kernels.planes": "",
        "moe.network.lanes": "import kernels.planes",
        "moe.engine.engine": "from moe.network import lanes",
        "moe.text.chat": "",
    }
    known = {name: tmp_path / f"{name}.py" for name in sources}
    for name, source in sources.items():
        known[name].write_text(source)
    monkeypatch.setattr(floors, "modules", lambda: known)
    return tmp_path


@pytest.mark.usefixtures("house")
def test_rooms_above_a_change_are_counted_in_steps() -> None:
    assert steps_above(["kernels"]) == {"kernels": 0, "network": 1, "engine": 2}
    assert steps_above(["engine"]) == {"engine": 0}
    assert steps_above(["network", "text"]) == {"network": 0, "text": 0, "engine": 1}


def test_files_belong_to_rooms() -> None:
    assert changed_rooms(["moe/engine/engine.py", "README.md", "tests/x.py"]) == {"engine"}
    assert changed_rooms(["moe/model.py", "kernels/cpu/experts.cpp"]) == {"model", "kernels"}
    assert changed_rooms(["benchmarks/decode.py"]) == {"benchmarks"}
    assert changed_rooms(["requirements.lock"]) == {*floors.FLOORS, *floors.ROOMS}


def test_tests_belong_to_the_room_of_their_folder_or_of_their_imports() -> None:
    assert rooms_of_test("tests/moe/decode/test_graphs.py") == {"decode"}
    assert rooms_of_test("tests/kernels/test_kv.py") == {"kernels"}
    assert rooms_of_test("tests/benchmarks/test_gpu.py") == {"benchmarks"}
    assert rooms_of_test("tests/moe/test_fair_pool.py") == {"fair_pool"}


def test_files_with_deep_tests_are_found() -> None:
    found = changed.deep_files()
    assert {"tests/moe/decode/test_graphs.py", "tests/kernels/test_kv.py"} <= set(found)
    assert "tests/test_house.py" not in found


@pytest.mark.usefixtures("house")
def test_the_most_valuable_tests_come_first_and_what_does_not_fit_is_named() -> None:
    deep = {
        "tests/moe/engine/test_engine.py": 10.0,  # two steps above
        "tests/moe/network/test_lanes.py": 30.0,
        "tests/kernels/test_kv.py": 20.0,
        "tests/kernels/test_planes.py": 5.0,
        "tests/kernels/test_native.py": 90.0,  # changed itself
        "tests/moe/text/test_prompts.py": 1.0,  # does not stand on it
        "tests/benchmarks/test_gpu.py": 1.0,
    }
    files = ["kernels/planes.py", "tests/kernels/test_native.py"]
    found = plan(files, deep, 1000.0)
    assert [own.file.rpartition("/")[2] for own in found.chosen] == [
        "test_native.py", "test_planes.py", "test_kv.py", "test_lanes.py", "test_engine.py",
    ]  # fmt: skip
    assert found.left_out == []
    found = plan(files, deep, 126.0)
    assert found.left_out == [Chosen("tests/moe/network/test_lanes.py", 30.0)]
    assert len(found.chosen) == 4


def commit(folder: Path, hours: int) -> str:
    when = f"{1_800_000_000 + 3600 * hours} +0000"
    (folder / f"{hours}").touch()
    own = {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when, "PATH": "/usr/bin:/bin"}
    own |= {
        f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    for command in (["add", "-A"], ["commit", "-q", "-m", f"{hours}"]):
        subprocess.run(["git", *command], cwd=folder, env=own, check=True)
    return changed.git("rev-parse", "HEAD")


def test_the_base_is_named_or_the_newest_commit_that_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    monkeypatch.delenv("BASE", raising=False)
    assert base() == ("", "")  # no repository
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    first = commit(tmp_path, 0)
    assert base()[0] == ""  # nothing is older
    second, third, _ = (commit(tmp_path, hours) for hours in (8, 19, 22))
    found, how = base()
    assert found == second
    assert how == "the newest commit 12 hours older than the last"
    monkeypatch.setenv("BASE", third[:10])
    assert base() == (third, "$BASE")
    monkeypatch.setenv("BASE", first)
    assert base()[0] == first


def test_a_branch_is_compared_with_its_upstream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    monkeypatch.delenv("BASE", raising=False)
    subprocess.run(["git", "init", "-q", "-b", "main"], cwd=tmp_path, check=True)
    first = commit(tmp_path, 0)
    subprocess.run(
        ["git", "checkout", "-q", "-b", "own", "--track", "main"], cwd=tmp_path, check=True
    )
    commit(tmp_path, 1)
    assert base() == (first, "where this branch left its upstream")
