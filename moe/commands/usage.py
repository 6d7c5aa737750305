"""Usage errors of ``moe`` that say what to write instead.

`Parser` shows the usage of the subcommand at hand, names the nearest command or option, and knows
what other programs call what is here: `OPTIONS` has the options of llama.cpp, vLLM and Ollama,
`COMMANDS` their commands. docs/from-llama-cpp.md explains more of them; a test compares the two.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

_SETTING = "write --set {}"
_MODEL = "the model is the argument MODEL: a directory, a GGUF file, or org/name on a hub"
_EXPERTS = "experts are placed by use, not layers by number; --memory GIB bounds the device"
_ALWAYS = "it is always on; leave it out"
_OWN = "the model's own chat template shows the format; leave it out"

_GROUPS: tuple[tuple[str, str], ...] = (
    # The model.
    ("-m -hf --hf-repo --hf-file -mu --model --model-path", _MODEL),
    ("-hft --hf-token", "set the variable HF_TOKEN"),
    ("--tokenizer --tokenizer-path", "the tokenizer is read from MODEL"),
    ("--trust-remote-code", "code of a model repository never runs; leave it out"),
    ("-a --alias", "write --served-model-name NAME"),
    ("--download-dir", "set the variable HF_HOME"),
    ("--dtype", _SETTING.format("model.dtype=bfloat16")),
    ("-q --quantization", "files that are quantised load as they are; --bits N quantises others"),
    ("--mmproj", "write --set model.images=true; images need a Hugging Face checkpoint"),
    ("--lora --lora-base --enable-lora --lora-modules", "merge the adapter into the model first"),
    ("--embedding --embeddings --rerank --reranking", "there are no embeddings"),
    # Memory and places.
    ("-c --ctx-size --max-model-len --context-length --num-ctx", "write --context TOKENS"),
    ("-np --parallel --max-num-seqs --max-running-requests", "write --batch N"),
    ("-t -tb --threads-batch", "write --threads N"),
    ("-ngl --gpu-layers --n-gpu-layers -ot --override-tensor", _EXPERTS),
    ("-cmoe --cpu-moe -ncmoe --n-cpu-moe --cpu-offload-gb --mem-fraction-static", _EXPERTS),
    ("--gpu-memory-utilization --swap-space", "write --memory GIB"),
    ("-ts --tensor-split -sm --split-mode --rpc -mg --main-gpu", "see docs/scale.md for ranks"),
    (
        "-tp --tensor-parallel-size -ep --enable-expert-parallel -dp --data-parallel-size",
        "start ranks by a launcher: deepspeed --num_gpus N --module moe serve MODEL "
        "--profile expert-parallel",
    ),
    ("--mmap --no-mmap --mlock", "nothing is mapped; --profile offload leaves experts on disk"),
    ("--numa --cpu-mask --cpu-strict -C", _SETTING.format("engine.pin_threads=true")),
    (
        "-ctk --cache-type-k -ctv --cache-type-v --kv-cache-dtype",
        _SETTING.format("memory.kv_bits=8"),
    ),
    ("-b --batch-size --max-num-batched-tokens", _SETTING.format("prefill.wave_tokens=N")),
    ("-ub --ubatch-size --chunked-prefill-size", _SETTING.format("prefill.chunk_tokens=N")),
    ("-fa --flash-attn --enforce-eager --enable-chunked-prefill", _ALWAYS),
    ("--enable-prefix-caching --cache-ram --cache-reuse", _ALWAYS),
    ("--slot-save-path", _SETTING.format("memory.prefix_dir=DIRECTORY")),
    # Drafts.
    ("-md --model-draft --speculative-config", "drafts come from the model itself or the text"),
    ("--draft --draft-max", _SETTING.format("speculation.max_depth=N")),
    # Answers.
    ("-p --prompt-file -f --file", 'write moe generate MODEL --prompt "TEXT", or --prompt @FILE'),
    ("-sys --system-prompt", 'write moe chat MODEL --system "TEXT"'),
    ("-cnv --conversation", "write moe chat MODEL"),
    ("-n --predict --n-predict --max-tokens", "write --max-new-tokens N"),
    ("--temp", "write --temperature T"),
    ("-s", "write --seed S"),
    ("--min-p", _SETTING.format("generation.min_p=P")),
    ("--repeat-penalty", _SETTING.format("generation.repetition_penalty=R")),
    ("--grammar --grammar-file", "requests have structured_outputs.grammar"),
    ("--jinja --no-jinja --chat-template --chat-template-file", "the model's own is used"),
    ("--chat-template-kwargs", "requests have chat_template_kwargs"),
    ("--reasoning-format --reasoning-parser --reasoning-budget", _OWN),
    ("--tool-call-parser --enable-auto-tool-choice", _OWN),
    # The server.
    ("--metrics --slots --props", "GET /metrics and GET /v1/status are always there"),
    ("--disable-log-requests --log-disable", "no text of a request is ever logged"),
    ("--no-webui --no-ui", _SETTING.format("server.page=false")),
    ("--print-config", "write moe settings"),
)

OPTIONS = {name: hint for names, hint in _GROUPS for name in names.split()}
"""Hints for options of llama.cpp, vLLM, SGLang or Ollama, and for one that we had."""

COMMANDS = {
    "pull": "the first command that names a model downloads it: moe run org/name",
    "download": "the first command that names a model downloads it: moe run org/name",
    "show": "write moe plan MODEL, or moe inspect STORE",
    "ps": "write moe top, or ask a server for /v1/status",
    "list": "models lie in the hub's cache (HF_HOME); stores of moe run in the cache directory",
    "create": "write a profile (YAML) and --profile FILE",
    "stop": "end the server's process by Ctrl-C or SIGTERM",
    "complete": 'write moe generate MODEL --prompt "TEXT"',
    "server": "write moe serve MODEL",
    "cli": "write moe chat MODEL",
    "quantize": "write moe convert MODEL STORE --bits 4",
    "perplexity": "write moe eval MODEL --text FILE",
    "imatrix": "write moe calibrate MODEL --text FILE --compression",
    "benchmark": "write moe bench MODEL",
    "config": "write moe settings",
    "help": "write moe --help, or moe COMMAND --help",
}
"""Hints for commands of other programs."""


class Parser(argparse.ArgumentParser):
    """An ``argparse`` parser whose errors help; its subparsers are of this class, too."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As in ``argparse``, but what a subcommand does not know is an error of that subcommand,
        with its usage."""
        words = list(args) if args is not None else []
        for word in words[: words.index("--") if "--" in words else None]:
            name = word.partition("=")[0]
            if name in OPTIONS and not self._knows(name):
                self.error(f"there is no {name} here: {OPTIONS[name]}")
        namespace, left = super().parse_known_args(args, namespace)
        if left and args is not None:
            self._refuse(left, words)
        return namespace, left

    def _knows(self, name: str) -> bool:
        return name in self._option_string_actions or self._has_commands()

    def _has_commands(self) -> bool:
        return self._subparsers is not None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action.choices, dict) and value not in action.choices:
            hint = COMMANDS.get(value) or nearest(value, action.choices)
            known = ", ".join(action.choices)
            self.error(f"there is no command {value!r}; {hint or f'there are {known}'}")
        super()._check_value(action, value)

    def _refuse(self, left: Sequence[str], words: Sequence[str]) -> NoReturn:
        first = left[0].partition("=")[0]
        if not first.startswith("-"):
            if "--prompt" in self._option_string_actions and words:
                kept = [word for word in words if word not in left]
                line = shlex.join(["moe", self.prog.split()[-1], *kept, "--prompt", " ".join(left)])
                self.error(f"a prompt has an option of its own: write {line}")
            self.error(f"one argument too many: {left[0]!r}; quote a text with spaces")
        self.error(f"there is no option {first}; {_meant(first, self._option_string_actions)}")

    def error(self, message: str) -> NoReturn:
        """Print how the command is used, what is wrong, and where its options are listed."""
        self.exit(
            2, f"{self.format_usage()}moe: {message}\n{self.prog} --help lists what there is\n"
        )

    def format_usage(self) -> str:
        """One line: what a command needs. Its help lists the options."""
        return f"usage: {self.prog} {self._needs()}\n"

    def format_help(self) -> str:
        self.usage = f"%(prog)s {self._needs()}"
        return super().format_help()

    def _needs(self) -> str:
        words = []
        for action in self._actions:
            name = str(action.metavar or action.dest.upper())
            if action.option_strings and action.required:
                words.append(f"{action.option_strings[0]} {name}")
            elif not action.option_strings:
                words.append(f"[{name}]" if action.nargs == "?" else name)
        return " ".join([*words, "..." if self._has_commands() else "[options]"])


def nearest(word: str, known: Any) -> str:
    """``"did you mean 'x'?"``, or "" if nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"did you mean {near[0]!r}?" if near else ""


def _meant(option: str, known: Collection[str]) -> str:
    """Guess the meaning of an unknown option: another option, or a setting of the profile."""
    from moe.settings.profile import KEYS  # takes .2 s, and only an error needs it

    settings: dict[str, list[str]] = {}
    for key in KEYS.leaves:
        name = key.rpartition(".")[2].replace("_", "-")
        settings.setdefault(f"--{name}", []).append(key)
    option = option.replace("_", "-").replace(".", "-")
    dotted = {f"--{key}".replace("_", "-").replace(".", "-"): [key] for key in KEYS.leaves}
    every = dotted | settings
    if option in every:
        near = [option]
    else:
        near = difflib.get_close_matches(option, [*known, *every], n=1, cutoff=0.7)
    if near and near[0] in known:
        return f"did you mean {near[0]!r}?"
    keys = every[near[0]] if near else []
    return " or ".join(_SETTING.format(f"{key}=VALUE") for key in keys) or (
        "moe settings lists what --set takes"
    )
