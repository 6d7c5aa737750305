"""The ``moe`` command on the shipped model, run in this process."""

from __future__ import annotations

import argparse
import errno
import gc
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moe.cli import EXAMPLES, build_parser, main
from moe.commands.subcommands import importing
from moe.commands.usage import COMMANDS, OPTIONS
from moe.settings import GenerationSettings
from moe.settings.profile import KEYS

DEMO = str(Path(__file__).parents[2] / "examples" / "demo-model")
SHORT = ["--max-new-tokens", "8"]
NOTICE = (
    "moe: the model's card says: 21 M parameters, made for tests. It continues Python and C++; "
    "it does not answer questions.\n"
)
PARSERS: dict[str, argparse.ArgumentParser] = build_parser()._subparsers._group_actions[0].choices  # type: ignore


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_output_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "generate", DEMO, "--prompt", "import os", "--json", *SHORT)
    result = json.loads(out)
    assert code == 0
    assert set(result) == {
        "text",
        "token_ids",
        "prompt_token_ids",
        "finish_reason",
        "stats",
    }
    assert set(result["stats"]) == {
        "ttft_s",
        "tokens_per_second",
        "new_tokens",
        "expert_bytes_read",
        "hit_ratio",
        "disk_bytes_read",
        "speculation",
    }
    assert result["stats"]["hit_ratio"] is None  # all experts are in memory
    assert result["stats"]["new_tokens"] == len(result["token_ids"]) == 8
    assert result["finish_reason"] == "length"


def test_json_of_a_schema(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shape = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}
    schema = json.dumps(shape)
    (tmp_path / "schema.json").write_text(schema)
    for given in (schema, f"@{tmp_path / 'schema.json'}"):
        asked = ("generate", DEMO, "--prompt", "x = ", "--json-schema", given)
        code, out, _ = run(capsys, *asked, "--max-new-tokens", "100", "--seed", "3")
        assert (code, {type(item) for item in json.loads(out)}) == (0, {bool})
    for given, message in (("{", "a JSON schema must be JSON"), ("@/nowhere", "the schema file")):
        code, _, err = run(capsys, "generate", DEMO, "--prompt", "x", "--json-schema", given)
        assert code == 2
        assert message in err


def test_stop_strings_end_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("generate", DEMO, "--prompt", "import os", "--max-new-tokens", "40", "--json")
    text = json.loads(run(capsys, *asked)[1])["text"]
    first, second = text[4:7], text[12:15]
    code, out, _ = run(capsys, *asked, "--stop", second, "--stop", first)
    assert (code, json.loads(out)["finish_reason"]) == (0, "stop")
    assert json.loads(out)["text"] == text[: min(text.index(first), text.index(second))]
    batch = ("--batch-file", "in.jsonl", "--out", "out.jsonl", "--stop", "x")
    code, _, err = run(capsys, "generate", DEMO, *batch)
    assert code == 2
    assert "leave out --prompt, --json, --json-schema and --stop" in err


def test_text_goes_to_stdout_and_the_summary_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "generate", DEMO, "--prompt", "import os", "--json", *SHORT)
    text = json.loads(out)["text"]
    code, out, err = run(capsys, "generate", DEMO, "--prompt", "import os", *SHORT)
    assert (code, out) == (0, text + "\n")
    assert " prompt tokens, 8 new tokens, first after " in err
    assert "MB of experts read a token" in err


def test_the_summary_follows_the_text_where_both_go_to_one_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    both = tmp_path / "both"
    with both.open("a") as out, both.open("a", buffering=1) as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        main(["generate", DEMO, "--prompt", "import os", *SHORT])
    assert "\n2 prompt tokens, 8 new tokens" in both.read_text()


def test_the_prompt_from_stdin_and_from_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, text = tmp_path / "prompt.txt", "def main():\r\n\tpass\r"
    file.write_bytes(text.encode())
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    outputs = [
        json.loads(run(capsys, "generate", DEMO, "--prompt", prompt, "--json", *SHORT)[1])
        for prompt in (text, "-", f"@{file}")
    ]
    assert len({tuple(output["prompt_token_ids"]) for output in outputs}) == 1
    assert len({output["text"] for output in outputs}) == 1


def test_stdin_and_stdout_of_any_encoding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def moe(*arguments: str, read: bytes = b"") -> tuple[int, bytes, str]:
        shown = io.BytesIO()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(read), "utf-8"))
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii", write_through=True))
        code = main(arguments)
        return code, shown.getvalue(), capsys.readouterr().err

    code, out, err = moe("generate", DEMO, "--prompt", "-", *SHORT, read=b"f\xfcr")
    assert (code, out) == (2, b"")
    assert "the lone surrogate '\\udcfc' at position 1; remove it" in err
    code, out, err = moe("chat", DEMO, *SHORT, read=b"\xff\nhello\n/stats\n")
    assert (code, err.count("lone surrogate")) == (0, 1)
    assert b"8 new tokens" in out
    schema = ("--json-schema", '{"const": "\u00fcber"}', "--max-new-tokens", "40")
    code, out, _ = moe("generate", DEMO, "--prompt", "x", *schema)
    assert (code, out) == (0, b'"\\xfcber"\n')


def test_a_seed_repeats_and_another_differs(capsys: pytest.CaptureFixture[str]) -> None:
    def text(seed: str) -> str:
        sampling = ["--temperature", "1.5", "--seed", seed, *SHORT]
        return run(capsys, "generate", DEMO, "--prompt", "import os", *sampling)[1]

    assert text("1") == text("1")
    assert text("1") != text("2")


def test_settings_show_meanings_values_and_origins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_GENERATION__TOP_K", "7")
    code, out, _ = run(
        capsys,
        *("settings", "--profile", "demo", "--bits", "4"),
        *("--set", "engine.max_batch_size=2", "--context", "32k"),
    )
    lines = [line for line in out.splitlines() if line and not line.startswith("#")]
    shown = dict(line.split(" = ") for line in lines)
    shown = {key: " ".join(value.split()) for key, value in shown.items()}
    assert code == 0
    assert sorted(shown) == sorted(KEYS.leaves)
    assert shown["engine.max_batch_size"] == "2 # command line; default: 64"
    assert shown["model.context_length"] == "32768 # command line; default: null"
    assert shown["model.expert_bits"] == "4 # command line; default: null"
    origin = "environment MOE_GENERATION__TOP_K; default: null"
    assert shown["generation.top_k"] == f"7 # {origin}"
    assert "demo.yaml; default: auto" in shown["generation.max_new_tokens"]
    assert shown["lossless"] == "true # default"
    code, out, _ = run(capsys, "settings", "SEQUENCES that are decoded")
    assert out.splitlines()[0] == "# Most sequences that are decoded together."
    assert [line for line in out.splitlines() if not line.startswith("#")] == [
        "engine.max_batch_size = 64  # default"
    ]
    code, _, err = run(capsys, "settings", "max_batchsize")
    assert (code, err) == (
        2,
        "moe: no setting has 'max_batchsize' in its name or meaning; "
        "did you mean 'engine.max_batch_size'?\n",
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("serv", "there is no command 'serv'; did you mean 'serve'?"),
        ("ps", "there is no command 'ps'; write moe top, or ask a server for /v1/status"),
        ("serve x -c 4096", "there is no -c here: write --context TOKENS"),
        ("serve x --ctx-size=4096", "there is no --ctx-size here: write --context TOKENS"),
        ("generate x --promt y", "there is no option --promt; did you mean '--prompt'?"),
        (
            "generate x 'hello you'",
            "a prompt has an option of its own: write moe generate x --prompt 'hello you'",
        ),
        ("serve x y", "one argument too many: 'y'; quote a text with spaces"),
        (
            "serve x --max-batch-size 3",
            "there is no option --max-batch-size; write --set engine.max_batch_size=VALUE",
        ),
        (
            "serve x --engine.fused off",
            "there is no option --engine.fused; write --set engine.fused=VALUE",
        ),
        ("serve x --kvbits 8", "there is no option --kvbits; write --set memory.kv_bits=VALUE"),
        ("serve x --zz", "there is no option --zz; moe settings lists what --set takes"),
        ("generate --prompt x", "the following arguments are required: MODEL"),
    ],
)
def test_usage_errors_say_what_to_write(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(shlex.split(line))
    usage, said, where = capsys.readouterr().err.splitlines()
    command = f"moe {line.split()[0]}" if " " in line else "moe"
    assert stop.value.code == 2
    assert usage.startswith(f"usage: {command} ")
    assert (said, where) == (f"moe: {message}", f"{command} --help lists what there is")


def test_what_follows_two_dashes_is_no_option() -> None:
    assert build_parser().parse_args(["serve", "--", "-m"]).model == "-m"


def test_the_page_for_users_of_llama_cpp_and_the_hints_agree() -> None:
    page = (Path(__file__).parents[2] / "docs" / "from-llama-cpp.md").read_text()
    table = page.partition("flag by flag")[2].partition("\n## ")[0]
    flags = re.findall(r"`(--?[a-zA-Z][a-z-]*)`", "".join(re.findall(r"^\|([^|]*)\|", table, re.M)))
    options = {o for p in PARSERS.values() for a in p._actions for o in a.option_strings}
    assert len(flags) > 50
    assert [flag for flag in flags if flag not in OPTIONS and flag not in options] == []
    for hint in (*OPTIONS.values(), *COMMANDS.values()):
        for command, rest in re.findall(r"moe ([a-z]+)([^;:]*)", hint):
            known = {o for a in PARSERS[command]._actions for o in a.option_strings}
            assert set(re.findall(r"--[a-z-]+", rest)) <= known, hint
        for key in re.findall(r"--set ([a-z_.]+)=", hint):
            assert key in KEYS.leaves


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "/no/such/model", "--prompt", "x"], "moe: no model directory '/no/such/mod"),
        (["generate", DEMO], "moe: no prompt was given"),
        (["generate", DEMO, "--batch-file", "x"], "moe: --batch-file and --out belong together"),
        (
            ["generate", DEMO, "--batch-file", "x", "--out", "y", "--prompt", "z"],
            "leave out --prompt",
        ),
        (
            ["generate", DEMO, "--batch-file", "/no/x", "--out", "y"],
            "moe: cannot use /no/x: No such",
        ),
        (["generate", DEMO, "--prompt", ""], "moe: the prompt is empty"),
        (["generate", DEMO, "--prompt", "@/no/file"], "moe: cannot read the prompt file /no/file"),
        (["generate", DEMO, "--prompt", "x", "--temperature", "-1"], "generation.temperature"),
        (["generate", DEMO, "--prompt", "x", "--set", "engine.max=1"], "'engine.max_batch_size'?"),
        (["generate", DEMO, "--prompt", "x", "--profile", "defalt"], "'default'"),
        (["generate", DEMO, "--prompt", "x y" * 3000], "and the context is 2048"),
        (["plan", DEMO, "--set", "threads=4096"], "threads is 4096, and this process may use"),
    ],
)
def test_mistakes_exit_with_2_and_one_clear_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("moe: ")
    assert message in err
    assert "Traceback" not in err


def test_chat_keeps_history_and_obeys_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "hello\n/stats\nagain\n/stats\n/reset\nhello\n/stats\n/exit\nignored"
    read: list[list[int]] = []
    for system in ([], ["--system", "Be brief."]):
        monkeypatch.setattr(sys, "stdin", io.StringIO(said))
        code, out, _ = run(capsys, "chat", DEMO, *SHORT, *system)
        assert code == 0
        assert out.count("(conversation forgotten)") == 1
        assert "Ctrl-D" not in out  # which is for terminals
        read.append([int(count) for count in re.findall(r"(\d+) prompt tokens", out)])
    (first, longer, again), told = read
    assert first == again < longer
    assert told[0] == told[2] > first


def test_a_batch_counts_what_failed_and_goes_on_where_it_was(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    body = {"model": "demo-model", "prompt": "import os", "max_tokens": 4}
    good = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(f"{json.dumps(good)}\n")
    command = ["generate", DEMO, "--batch-file", str(source), "--out", str(target)]
    assert run(capsys, *command) == (0, "", f"{NOTICE}moe: 1 answered; see {target}\n")
    with source.open("a") as lines:
        lines.write("{wrong\n")
    code, out, err = run(capsys, *command)
    assert (code, out) == (1, "")
    assert "moe: 1 answered, 1 failed: their lines say why" in err
    assert len(target.read_text().splitlines()) == 2


def test_a_full_disk_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("moe.commands.terminal.write_out", write)
    code, _, err = run(capsys, "generate", DEMO, "--prompt", "x", *SHORT)
    assert (code, err) == (1, f"{NOTICE}moe: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("command", ["generate MODEL --prompt x", "convert MODEL OUT"])
def test_interrupting_the_imports_ends_the_process(command: str, tmp_path: Path) -> None:
    """Where an extension module is imported, a KeyboardInterrupt would be lost."""
    names = {"MODEL": DEMO, "OUT": str(tmp_path / "store")}
    arguments = [names.get(word, word) for word in command.split()]
    program = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'numpy':\n"
        "            try: os.kill(os.getpid(), signal.SIGINT)\n"
        "            except KeyboardInterrupt: pass\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from moe.cli import main\n"
        f"main({arguments})"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_the_help_of_sampling_tells_the_defaults() -> None:
    helps = build_parser()._subparsers._group_actions[0].choices["chat"].format_help()  # type: ignore[union-attr, index]
    defaults = GenerationSettings()
    neutral = {"max_new_tokens": "(auto:", "seed": "a new one each", "temperature": "else 0)"}
    neutral |= {"top_p": "else 1)", "top_k": "else 0)"}
    for name, shown in neutral.items():
        assert getattr(defaults, name) == ("auto" if name == "max_new_tokens" else None)
        option = " ".join(helps.split(f"--{name.replace('_', '-')} ")[-1].split())
        assert shown in option[:90], (name, option)


def test_the_help_of_each_command_tells_defaults_in_groups() -> None:
    commands = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    for name, parser in dict(commands or {}).items():
        for option in parser._actions:
            if option.default not in (None, [], False, argparse.SUPPRESS):
                shown = (option.help or "") % {"default": option.default, "const": option.const}
                assert f"default: {option.default}" in shown, (name, option)
        usual = {group.title: group._group_actions for group in parser._action_groups[:2]}
        assert len(usual["options"]) <= 7, f"moe {name}: put options into named groups"


@pytest.mark.parametrize("how", ["return 3", "sys.exit(3)", "broken pipe"])
def test_the_process_ends_at_once_and_orderly(how: str) -> None:
    """Threads, exit functions and output come first; nothing is taken apart after them."""
    program = (
        "import atexit, gc, sys, threading, time\n"
        "from moe.cli import command\n"
        "from moe.commands.subcommands import importing\n"
        "class Kept:\n"
        "    def __del__(self): print('taken apart', flush=True)\n"
        "kept = Kept()\n"
        "def run():\n"
        "    with importing(): pass\n"
        "    assert gc.isenabled() and gc.get_freeze_count() > 0\n"
        "    atexit.register(print, 'exit functions')\n"
        "    late = lambda: (time.sleep(0.1), print('threads'))\n"
        "    threading.Thread(target=late).start()\n"
        "    print('text')\n"
        f"    {'return 3' if how == 'broken pipe' else how}\n"
        "command(run)"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert started.stdout is not None
    if how == "broken pipe":
        started.stdout.close()
        assert started.wait() == 120  # the interpreter's own code
        return
    out, _ = started.communicate()
    last = "" if how == "return 3" else "taken apart\n"
    assert (started.returncode, out.decode()) == (3, "text\nthreads\nexit functions\n" + last)


def test_the_example_of_each_help_is_a_command_line() -> None:
    commands = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    for name, parser in commands.items():  # type: ignore[union-attr]
        words = shlex.split(EXAMPLES[name])
        assert words[:2] == ["moe", name]
        build_parser().parse_args(words[1:])
        assert " ".join(parser.format_help().split()).endswith(f" Example: {EXAMPLES[name]}")


def test_imports_freeze_nothing_in_a_process_that_has_been_at_work() -> None:
    frozen = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, frozen)


def test_module_and_version() -> None:
    command = [sys.executable, "-m", "moe", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("moe ")


def test_the_command_line_is_frozen() -> None:
    """A new command or option is a decision: change this list with it."""
    commands = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    options = {
        name: sorted(o for action in parser._actions for o in action.option_strings)
        for name, parser in commands.items()  # type: ignore[union-attr]
    }
    short = ["--batch", "--bits", "--context", "--device", "--memory", "--threads"]
    model = ["--no-proof-cache", "--profile", "--revision", "--set", *short]
    sampling = ["--max-new-tokens", "--seed", "--temperature", "--top-k", "--top-p"]
    usual, log = ["--help", "-h"], ["--log-file", "--log-format", "--log-level"]
    assert options == {
        "run": sorted(
            [*usual, "--api-key", "--dry-run", "--host", "--port", "--revision", "--set", "--yes"]
            + ["--api-key-file", "--ssl-certfile", "--ssl-keyfile", *short, *log]
        ),
        "generate": sorted(
            [*model, *sampling, *usual, "--batch-file", "--json", "--json-schema", "--out"]
            + ["--prompt", "--stop"]
        ),
        "chat": sorted([*model, *sampling, *usual, "--image", "--system"]),
        "serve": sorted(
            [*model, *sampling, *usual, "--api-key", "--host", "--port"]
            + ["--allowed-origins", "--api-key-file", "--served-model-name"]
            + ["--ssl-certfile", "--ssl-keyfile", *log]
        ),
        "top": sorted([*usual, "--api-key", "--once"]),
        "convert": sorted(
            [*usual, "--bits", "--group-size", "--head-bits", "--revision", "--trunk-bits"]
            + ["--calibration", "--repair-routers", "--target-bits", "--target-gib", "--verify"]
        ),
        "trace": sorted([*model, *usual, "--json", "--out", "--text", "--tokens"]),
        "eval": sorted([*model, *usual, "--against", "--json", "--text", "--tokens"]),
        "inspect": sorted([*usual, "--image"]),
        "calibrate": sorted([*model, *usual, "--compression", "--out", "--text", "--tokens"]),
        "plan": sorted([*model, *usual, "--json", "--link", "--network", "--nodes", "--ranks"]),
        "bench": sorted([*model, *usual, "--json", "--new-tokens", "--prompt-tokens", "--stages"]),
        "settings": sorted([*usual, "--profile", "--set", *short]),
        "methods": sorted([*usual, "--profile", "--set", *short]),
        "doctor": sorted([*usual, "--compile", "--forget"]),
    }


def test_output_that_cannot_be_written_is_said() -> None:
    """Also where all of it waited in a buffer until the end."""
    code = "from moe.cli import command; command()"
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", code, "settings", "kv_bits"]
        told = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert told.returncode == 1
    assert told.stderr == "moe: [Errno 28] No space left on device: 'standard output'\n"


def test_a_log_that_cannot_be_written_changes_no_exit_code() -> None:
    """Such as that of a rank that ends itself, whatever its threads wait for."""
    run = "print('x', file=sys.stderr, flush=True) or 7"
    code = f"import sys; from moe.cli import command; command(lambda: {run})"
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", code], stderr=full).returncode == 7
    read, end = os.pipe()
    os.close(read)
    with open(end, "w") as gone:
        assert subprocess.run([sys.executable, "-c", code], stderr=gone).returncode == 7
    told = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert (told.returncode, told.stderr) == (7, "x\n")
