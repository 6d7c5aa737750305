"""The clients of `make world`: what each is started with, and what must have come of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.world import recipes
from tests.world.recipes import Block, Recipe
from tests.world.scripted import Exchange

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
WORD = "albatross"
FILE = "notes/word.txt"
QUESTION = f"Read {FILE} and tell me the word in it."
EDIT = f"Write heron into {FILE} instead."
_HELD_OUT = """\
task: heldout
dataset_path: json
dataset_kwargs: {data_files: {test: heldout.jsonl}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""


@dataclass
class Run:
    """What one client did.

    Attributes:
        output: of its standard output and error.
        exit_code: None: it did not end in time.
        folder: where it ran.
        exchanges: what it asked the server.
    """

    output: str
    exit_code: int | None
    folder: Path
    exchanges: list[Exchange]


class Failure(Exception):
    """The client did not get what it was to get."""


@dataclass(frozen=True)
class Client:
    """One row of the table.

    Attributes:
        name: of the row.
        folder: in `tests.world.install.FOLDERS`.
        package: whose version is shown.
        starts: a recipe of docs/server.md, or a program of tests/world/programs.
        check: says what came of the run, or raises `Failure`.
        arguments: what the command is given beside, so that it asks one question and ends.
        files: what its folder has beside `FILE`.
        scripted: the model's text is scripted; else the shipped model writes by itself.
    """

    name: str
    folder: str
    package: str
    starts: Recipe | str
    check: Callable[[Run], str]
    arguments: str = ""
    files: dict[str, str] = field(default_factory=dict)
    scripted: bool = True

    def blocks(self) -> tuple[Block, ...]:
        """What is written and run, for the address and the model of recipes."""
        if isinstance(self.starts, Recipe):
            return self.starts.blocks
        program = PROGRAMS / self.starts
        runner = "node" if program.suffix == ".mjs" else "python"
        # Node looks for packages from the program's own folder upwards.
        shown = f"export ADDRESS={recipes.ADDRESS} MODEL=MODEL\n"
        return (
            Block(runner, program.read_text(), program.name),
            Block("sh", f"{shown}{runner} {program.name}"),
        )


def script(prompt: str) -> str:
    """What the scripted model writes, in the notation that Hermes and Qwen3 have for calls.

    It says the word if the prompt has it, and calls a tool that reads the file if the prompt offers
    one that it knows.
    """
    if EDIT in prompt:
        return f"{FILE}\n```\nThe word is heron\n```"
    if found := re.findall(r"The word is (\w+)", prompt):
        return f"It is {found[-1]}."
    if FILE not in prompt:
        return "Nothing to do."
    if prompt.count("<tool_response>") > 2:
        return "The tools give no word."
    path = re.search(rf"/[\w./-]+(?=/{re.escape(FILE)})|(?<=<cwd>)[^<]+", prompt)
    here = f"{path[0]}/{FILE}" if path else FILE
    for line in re.findall(r'^\{"type": "function".*\}$', prompt, re.MULTILINE):
        tool = json.loads(line)["function"]
        if tool["name"] in _READERS:
            given = {
                name: here if "path" in name.lower() else f"cat {here}"
                for name in tool["parameters"]["required"]
            }
            call = json.dumps({"name": tool["name"], "arguments": given})
            return f"<tool_call>\n{call}\n</tool_call>"
    return "No tool that I know."


_READERS = {"read_file", "Read", "read", "exec_command", "shell_command"}
"""Tools whose required arguments are a path, or a command."""


def refused(run: Run) -> None:
    """Raises `Failure` with what the server said to a request that it refused."""
    for exchange in run.exchanges:
        if exchange.method == "POST" and exchange.status >= 400:
            said = exchange.answer.decode(errors="replace")
            raise Failure(f"{exchange.path} {exchange.status}: {said[:300]}")


def ended(run: Run) -> None:
    """Raises `Failure` if it was refused, or did not end well."""
    refused(run)
    if run.exit_code != 0:
        state = "did not end" if run.exit_code is None else f"exit code {run.exit_code}"
        raise Failure(f"{state}: {run.output.strip()[-300:]}")


def round_of_a_tool(run: Run) -> str:
    """The model called a tool, got the file's text, and the client shows the answer to that."""
    ended(run)
    if f"It is {WORD}" not in run.output:
        raise Failure(f"no word in its output: {run.output.strip()[-300:]}")
    results = [e for e in run.exchanges if f"The word is {WORD}".encode() in e.body]
    asked = [e for e in run.exchanges if e.method == "POST" and e not in results]
    if not results or not asked:
        raise Failure("the word did not come from a tool")
    return f"a round of a tool in {len(asked) + len(results)} requests"


def edited(run: Run) -> str:
    """The file is what the model wrote."""
    ended(run)
    text = (run.folder / FILE).read_text()
    if text != "The word is heron\n":
        raise Failure(f"the file is {text!r}: {run.output.strip()[-300:]}")
    return "edits a file"


def bits_per_byte(run: Run) -> str:
    """lm-eval prints a figure that the shipped model can have."""
    ended(run)
    found = re.search(r"bits_per_byte\s*\|[^|]*\|\s*([\d.]+)", run.output)
    if not found or not 0.5 < float(found[1]) < 3:
        raise Failure(f"no figure: {run.output.strip()[-300:]}")
    return f"{float(found[1]):.3f} bits per byte of held-out prose"


def guidellm_figures(run: Run) -> str:
    """Its report counts the requests, and the tokens that were asked for."""
    ended(run)
    (report,) = json.loads((run.folder / "benchmarks.json").read_text())["benchmarks"]
    metrics = report["metrics"]
    done = metrics["request_totals"]
    tokens = metrics["output_token_count"]["successful"]["mean"]
    if not 0 < done["successful"] == done["total"] or tokens != 32:
        raise Failure(f"{done}, {tokens} of 32 tokens each")
    first = metrics["time_to_first_token_ms"]["successful"]["median"]
    speed = metrics["output_tokens_per_second"]["successful"]["mean"]
    return f"{done['total']} requests, first token after {first:.0f} ms, {speed:.0f} t/s"


def benchy_figures(run: Run) -> str:
    """Its table has a speed of prompts and one of tokens."""
    ended(run)
    for result in json.loads((run.folder / "benchy.json").read_text())["benchmarks"]:
        prompt, tokens = result["pp_throughput"]["mean"], result["tg_throughput"]["mean"]
        if prompt > 0 and tokens > 0:
            return f"prompts {prompt:.0f} t/s, decoding {tokens:.0f} t/s"
    raise Failure(f"no figure: {run.output.strip()[-300:]}")


def _held_out() -> dict[str, str]:
    text = (ROOT / "tests" / "data" / "heldout_prose.txt").read_text()[:4000]
    return {"heldout.yaml": _HELD_OUT, "heldout.jsonl": json.dumps({"text": text}) + "\n"}


CLIENTS = (
    Client(
        *("Claude Code", "claude-code", "@anthropic-ai/claude-code", recipes.CLAUDE_CODE),
        check=round_of_a_tool,
        arguments=f"--print '{QUESTION}' --allowedTools Read",
    ),
    Client(
        *("Codex", "codex", "@openai/codex", recipes.CODEX),
        check=round_of_a_tool,
        # A container may not allow the sandbox; the only command that is run is the script's.
        arguments=f"exec --skip-git-repo-check --sandbox danger-full-access '{QUESTION}'",
    ),
    Client(
        *("opencode", "opencode", "opencode-ai", recipes.OPENCODE),
        check=round_of_a_tool,
        arguments=f"run '{QUESTION}'",
    ),
    Client(
        *("Continue", "continue", "@continuedev/cli", recipes.CONTINUE),
        check=round_of_a_tool,
        arguments=f"--print '{QUESTION}'",
    ),
    Client(
        *("aider", "aider", "aider-chat", recipes.AIDER),
        check=edited,
        arguments=f"--message '{EDIT}' --yes-always --no-git --edit-format whole {FILE}",
    ),
    Client(
        *("Open WebUI", "open-webui", "open-webui", recipes.OPEN_WEBUI),
        check=round_of_a_tool,
        arguments=(
            f"--port $PORT & python open_webui.py MODEL '{QUESTION}'; code=$?; kill $!; wait; "
            "exit $code"
        ),
        files={"open_webui.py": (PROGRAMS / "open_webui.py").read_text()},
    ),
    Client(*("LangChain", "python", "langchain-openai", recipes.LANGCHAIN), check=round_of_a_tool),
    Client("openai (Python)", "python", "openai", "openai_sdk.py", round_of_a_tool),
    Client("anthropic (Python)", "python", "anthropic", "anthropic_sdk.py", round_of_a_tool),
    Client("litellm", "python", "litellm", "litellm_sdk.py", round_of_a_tool),
    Client("openai (Node)", "node", "openai", "openai_sdk.mjs", round_of_a_tool),
    Client("anthropic (Node)", "node", "@anthropic-ai/sdk", "anthropic_sdk.mjs", round_of_a_tool),
    Client(
        *("lm-eval", "lm-eval", "lm-eval", recipes.LM_EVAL),
        check=bits_per_byte,
        arguments="--include_path .",
        files=_held_out(),
        scripted=False,
    ),
    Client(
        *("guidellm", "loads", "guidellm", recipes.GUIDELLM),
        check=guidellm_figures,
        arguments=("--output kind=json,path=benchmarks.json --disable-console-interactive"),
        scripted=False,
    ),
    Client(
        *("llama-benchy", "loads", "llama-benchy", recipes.LLAMA_BENCHY),
        check=benchy_figures,
        arguments=(
            "--pp 64 --tg 16 --runs 2 --exact-tg --skip-coherence --exit-on-first-fail"
            " --book-url $FILES/book.txt --format json --save-result benchy.json"
        ),
        files={"book.txt": (ROOT / "tests" / "data" / "heldout_prose.txt").read_text()},
        scripted=False,
    ),
)
