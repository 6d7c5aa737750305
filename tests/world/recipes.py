"""What to paste so that a client asks this server: shown in docs/server.md, run by `make world`.

    python -m tests.world.recipes --write       puts the blocks into docs/server.md

A block is written for `http://127.0.0.1:8000` and a model called MODEL. `at` puts the address and
the name of a running server in their place, so that what is run is what is shown.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
ADDRESS = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Block:
    """Text to paste.

    Attributes:
        language: of the fence in Markdown; what is not written to a file is `sh` and is run.
        text: without the fence.
        file: where it belongs; `~/` is the home directory, else the working directory. Empty: it is
            run.
    """

    language: str
    text: str
    file: str = ""


@dataclass(frozen=True)
class Recipe:
    """How one client is pointed at the server.

    Attributes:
        name: of the client.
        about: a sentence or two above the blocks.
        blocks: the last one starts the client.
    """

    name: str
    about: str
    blocks: tuple[Block, ...]


CLAUDE_CODE = Recipe(
    "Claude Code",
    "It sends 75 KB of instructions and tools before your first word, so give the model a context "
    "of 64,000 tokens or more; where it is smaller, `CLAUDE_CODE_MAX_OUTPUT_TOKENS` makes room for "
    "the prompt. `CLAUDE_CODE_ATTRIBUTION_HEADER=0` keeps the beginning of prompts the same, so "
    "that the prefix cache has it; the variable below stops telemetry and updates.",
    (
        Block(
            "sh",
            f"""\
export ANTHROPIC_BASE_URL={ADDRESS}
export ANTHROPIC_API_KEY=none
export ANTHROPIC_MODEL=MODEL
export ANTHROPIC_DEFAULT_HAIKU_MODEL=MODEL
export CLAUDE_CODE_ATTRIBUTION_HEADER=0
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
claude""",
        ),
    ),
)

CODEX = Recipe(
    "Codex",
    "`model_context_window` is the `max_model_len` of `/v1/models`: Codex compacts its history "
    "before that.",
    (
        Block(
            "toml",
            f"""\
model = "MODEL"
model_provider = "moe"
model_context_window = 65536
web_search = "disabled"
check_for_update_on_startup = false

[model_providers.moe]
name = "moe"
base_url = "{ADDRESS}/v1"
wire_api = "responses"

[analytics]
enabled = false""",
            "~/.codex/config.toml",
        ),
        Block("sh", "codex"),
    ),
)

OPENCODE = Recipe(
    "opencode",
    "",
    (
        Block(
            "json",
            f"""\
{{
  "$schema": "https://opencode.ai/config.json",
  "model": "moe/MODEL",
  "small_model": "moe/MODEL",
  "autoupdate": false,
  "share": "disabled",
  "provider": {{
    "moe": {{
      "npm": "@ai-sdk/openai-compatible",
      "options": {{"baseURL": "{ADDRESS}/v1", "apiKey": "none"}},
      "models": {{"MODEL": {{"limit": {{"context": 65536, "output": 8192}}}}}}
    }}
  }}
}}""",
            "opencode.json",
        ),
        Block("sh", "opencode"),
    ),
)

AIDER = Recipe(
    "aider",
    "",
    (
        Block(
            "sh",
            f"""\
export OPENAI_API_BASE={ADDRESS}/v1
export OPENAI_API_KEY=none
aider --model openai/MODEL --analytics-disable --no-check-update --no-show-model-warnings""",
        ),
    ),
)

OPEN_WEBUI = Recipe(
    "Open WebUI",
    "",
    (
        Block(
            "sh",
            f"""\
export DATA_DIR=~/.open-webui
export OPENAI_API_BASE_URL={ADDRESS}/v1
export OPENAI_API_KEY=none
export ENABLE_OLLAMA_API=false
open-webui serve --host 127.0.0.1 --port 8080""",
        ),
    ),
)

CONTINUE = Recipe(
    "Continue",
    "The same file serves its editor extensions and its command line.",
    (
        Block(
            "yaml",
            f"""\
name: moe
version: 0.0.1
schema: v1
models:
  - name: moe
    provider: openai
    model: MODEL
    apiBase: {ADDRESS}/v1
    apiKey: none
    roles: [chat, edit, apply]
    capabilities: [tool_use]""",
            "~/.continue/config.yaml",
        ),
        Block("sh", "cn --config ~/.continue/config.yaml"),
    ),
)

LANGCHAIN = Recipe(
    "LangChain",
    "",
    (
        Block(
            "python",
            f"""\
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def read_file(path: str) -> str:
    \"\"\"Read a text file.\"\"\"
    with open(path) as file:
        return file.read()


model = ChatOpenAI(model="MODEL", base_url="{ADDRESS}/v1", api_key="none")
model = model.bind_tools([read_file])
messages = [("user", "Read notes/word.txt and tell me the word in it.")]
answer = model.invoke(messages)
while answer.tool_calls:
    messages += [answer, *(read_file.invoke(call) for call in answer.tool_calls)]
    answer = model.invoke(messages)
print(answer.content)""",
            "langchain_chat.py",
        ),
        Block("sh", "python langchain_chat.py"),
    ),
)

LM_EVAL = Recipe(
    "lm-eval",
    "`tokenizer` is the model's directory; loglikelihoods come from `echo` and `logprobs`.",
    (
        Block(
            "sh",
            f"""\
lm_eval --model local-completions --tasks TASK \\
  --model_args model=MODEL,base_url={ADDRESS}/v1/completions,tokenizer=DIRECTORY""",
        ),
    ),
)

GUIDELLM = Recipe(
    "guidellm",
    "",
    (
        Block(
            "sh",
            f"""\
guidellm run --backend kind=openai_http,target={ADDRESS} \\
  --tokenizer kind=hf_auto,model=DIRECTORY --profile kind=concurrent,streams=2 \\
  --data kind=synthetic_text,prompt_tokens=128,output_tokens=32 \\
  --constraint kind=max_requests,count=8""",
        ),
    ),
)

LLAMA_BENCHY = Recipe(
    "llama-benchy",
    "",
    (
        Block(
            "sh",
            f"llama-benchy --base-url {ADDRESS}/v1 --model MODEL --tokenizer DIRECTORY",
        ),
    ),
)

RECIPES = (
    *(CLAUDE_CODE, CODEX, OPENCODE, AIDER, OPEN_WEBUI, CONTINUE, LANGCHAIN),
    *(LM_EVAL, GUIDELLM, LLAMA_BENCHY),
)


def at(text: str, address: str, **words: str) -> str:
    """The text for a server at another address, with words in the place of those in capitals."""
    text = text.replace(ADDRESS, address)
    for name, word in words.items():
        text = re.sub(rf"\b{name}\b", word, text)
    return text


_BEGIN = "<!-- python -m tests.world.recipes --write -->\n"
_END = "<!-- the end of tests/world/recipes.py -->\n"


def section() -> str:
    """The recipes in Markdown."""
    parts = []
    for recipe in RECIPES:
        parts.append(f"### {recipe.name}\n")
        if recipe.about:
            parts.append(recipe.about + "\n")
        for block in recipe.blocks:
            where = f"`{block.file}`:\n\n" if block.file else ""
            parts.append(f"{where}```{block.language}\n{block.text}\n```\n")
    return "\n".join(parts)


def in_page(page: str) -> str:
    """The page with today's recipes."""
    head, begin, rest = page.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    assert begin, "docs/server.md has no place for the recipes"
    assert end, "docs/server.md has no place for the recipes"
    return f"{head}{begin}\n{section()}\n{end}{tail}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(in_page(PAGE.read_text()))
    else:
        print(section())
