"""Where profiles are read from, and the message of every refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe.errors import MoEError, ProfileError
from moe.settings import Profile
from moe.settings.profile import MAX_FILE_BYTES, load_profile, parse_assignments, profile_names

NO_ENVIRONMENT: dict[str, str] = {}


def write(folder: Path, text: str) -> Path:
    file = folder / "x.yaml"
    file.write_text(text)
    return file


def refusal(source: Any = None, overrides: Any = None, environ: Any = NO_ENVIRONMENT) -> str:
    with pytest.raises(ProfileError) as caught:
        load_profile(source, overrides, environ)
    return str(caught.value)


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_loads(name: str) -> None:
    assert f"configs/{name}.yaml" in load_profile(name, environ=NO_ENVIRONMENT).origins.values()


@pytest.mark.parametrize("text", ["", "# nothing\n", "model:\n", "model: {}\n"])
def test_empty_files_and_sections_are_the_defaults(tmp_path: Path, text: str) -> None:
    assert load_profile(write(tmp_path, text), environ=NO_ENVIRONMENT).profile == Profile()


@pytest.mark.parametrize("off", ["off", "'off'", "Off"])
def test_off_is_a_word(tmp_path: Path, off: str) -> None:
    text = (
        f"engine: {{fused: {off}}}\noffload: {{predictor: {off}}}\nspeculation: {{mode: {off}}}\n"
    )
    profile = load_profile(write(tmp_path, text), environ=NO_ENVIRONMENT).profile
    assert (profile.engine.fused, profile.offload.predictor) == ("off", "off")
    assert profile.speculation.mode == "off"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "routing: {polices: []}",
            "unknown key 'routing.polices'; did you mean 'routing.policies'?",
        ),
        ("routng: {}", "unknown key 'routng'; did you mean 'routing'?"),
        ("device_gib: 4", "unknown key 'device_gib'; did you mean 'memory.device_gib'?"),
        ("mode: off", "'mode'; did you mean 'prefill.mode' or 'speculation.mode'?"),
        # a section would be no answer here
        ("engine: {engin: 1}", "unknown key 'engine.engin'; did you mean 'engine.fused'?"),
        ("zzz: 1", "unknown key 'zzz'"),
        ("routing: 3", "routing is a section: write its keys below it"),
        ("device: tpu", "device must be 'auto', 'cpu', 'cuda' or 'cuda:N'; got 'tpu'"),
        ("threads: 0", "threads must be greater than or equal to 1; got 0"),
        (
            "memory: {reserve_gib: 1e+300}",
            "memory.reserve_gib must be less than or equal to 1048576; got 1e+300",
        ),
        (
            "parallel: {timeout_s: 1e300}",
            "parallel.timeout_s must be less than or equal to 86400; got 1e+300",
        ),
        (
            f"memory: {{kv_tokens: 1{'0' * 400}}}",
            "memory.kv_tokens must be less than 9223372036854775808; got 1",
        ),
        ("threads: two", "threads must be a valid integer; got 'two'"),
        ("lossless: 1", "lossless must be a valid boolean; got 1"),
        ("generation: {top_p: 1.5}", "generation.top_p must be less than or equal to 1; got 1.5"),
        ("generation: {temperature: .nan}", "generation.temperature must be a finite number; got"),
        (
            "generation: {max_new_tokens: 0}",
            "generation.max_new_tokens must be greater than or equal to 1 or must be 'auto'; got 0",
        ),
        (
            "routing: {policies: foo}",
            "routing.policies must be a list, as in [one, two]; got 'foo'",
        ),
        ("routing: {policies: [1]}", "routing.policies.0 must be a valid string; got 1"),
        (
            "model: {dtype: int8}",
            "model.dtype must be 'auto', 'float32', 'bfloat16' or 'float16'; got 'int8'",
        ),
        ("[]", "the top level must be a mapping of keys to values"),
        ("lossless: true\nlossless: true", "line 2: key 'lossless' is given twice"),
        ("model: {dtype: auto}\nmodel.dtype: auto", "key 'model.dtype' is given twice"),
        ("a: [", "line 1: expected the node content, but found '<stream end>'"),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("a: 2024-99-99", "not valid YAML: month must be in 1..12"),
        ("a: " + "[" * 1000, "not valid YAML: nested too deeply"),
        *(
            (f"a: {tagged}", "its tag does not suit a value")
            for tagged in ("!!bool x", "!!int ''", "!!timestamp x")
        ),
        ("#" * MAX_FILE_BYTES + "#", "a profile has at most 65536 bytes; this one has more"),
    ],
)
def test_refused_files(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    found = refusal(file)
    assert found.startswith(f"{file}: ")
    assert message in found


def test_all_wrong_values_are_listed_at_once() -> None:
    assert refusal({"threads": -1}, {"lossless": "maybe"}).splitlines() == [
        "mapping: threads must be greater than or equal to 1; got -1",
        "command line: lossless must be a valid boolean; got 'maybe'",
    ]


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        (
            "MOE_ROUTING__POLICES",
            "environment: unknown variable 'MOE_ROUTING__POLICES'; "
            "did you mean 'MOE_ROUTING__POLICIES'?",
        ),
        ("MOE_ENGINE__MAX_BATCH_SIZE", "environment MOE_ENGINE__MAX_BATCH_SIZE: "),
        ("MOE_DEVICE", "environment MOE_DEVICE: line 1: "),
    ],
)
def test_refused_variables(variable: str, message: str) -> None:
    assert message in refusal(environ={variable: "["})


def test_refused_names(tmp_path: Path) -> None:
    message = "unknown profile 'defalt'; did you mean 'default'? (profiles: "
    files = "; a file's name ends in .yaml or has a /)"
    assert refusal("defalt") == message + ", ".join(profile_names()) + files
    assert refusal("./none.yaml") == "profile file './none.yaml' does not exist"
    assert refusal(tmp_path) == f"profile file '{tmp_path}' cannot be read: Is a directory"
    for name in ("/" + "x" * 5000, "./a\0b", "~no-such-user/x"):
        assert " cannot be read: " in refusal(name)[-60:]
    assert issubclass(ProfileError, MoEError)


@pytest.mark.parametrize("assignment", ["device", "=cpu", ""])
def test_refused_assignments(assignment: str) -> None:
    with pytest.raises(ProfileError, match=f"--set: expected KEY=VALUE; got '{assignment}'"):
        parse_assignments([assignment])


def test_the_last_assignment_wins_and_values_are_yaml() -> None:
    assert parse_assignments(["a=1", "a=1e-3", "b=[x:2]", "c=", "d=k=v"]) == {
        "a": 1e-3,
        "b": ["x:2"],
        "c": None,
        "d": "k=v",
    }
