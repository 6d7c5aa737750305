"""What the turns of a chat read: tokens and time to first token, with and without a prefix cache.

    python -m benchmarks.turns [--quick] [--model hybrid|2b|demo|PATH] [--prompt 1024] [--turns 4]
    python -m benchmarks.turns --residency 0.5 [--quick] [--model demo|PATH] [--turns 10]
    python -m benchmarks.turns --http [--model demo|PATH] [--turns 10]

A chat of several turns: a long first prompt, and in each further turn the answer before it and a
short message. Another chat then begins with the same first half of the prompt, and a third one.
Both models, with experts of 4 bits, read the same chats in turn, and must give the same answers.
`--quick` takes a tiny random hybrid model. The last line is one JSON object.

`--residency`: both models have memory for this share of their experts and read the others from a
store of 8 bits; chats are of held-out text. Each row says how many experts had been read from disk
until the first token, and how many distinct ones the tokens that were read are routed to.

`--http`: the openai client chats with `moe serve`, which keeps answers too
(`memory.reuse_answers`); each turn has a message of as many words.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import environment, print_header, print_json, print_table
from benchmarks.decode_contenders import model_folder
from benchmarks.offload_models import Target, stored
from benchmarks.servers import moe_serve
from benchmarks.texts import heldout
from examples.models.random_models import random_hybrid
from examples.models.tiny import tiny_model
from experts.manifest import is_store
from moe import MoE, SamplingParams
from moe.commands.convert.convert import convert
from moe.engine.engine import StepLoop
from moe.settings import ModelSettings

KEPT = "prefix cache"
CONTENDERS: dict[str, dict[str, Any]] = {
    "none": {"prefix_tokens": 0},
    KEPT: {"prefix_tokens": 16384},
}
ANSWER, MESSAGE = 16, 24
CHATS = 3
"""That begin alike."""
WORDS = ["a", "small", "dog", "and", "the", "old", "cat", "went", "to", "see", "red", "boats"]


@dataclass(frozen=True)
class Reading:
    """What an answer took.

    Attributes:
        tokens: of the prompt that were read.
        first: seconds to the first token.
        needed: distinct experts, over all layers, that these tokens are routed to.
        experts, nbytes: read from disk until the first token.
    """

    answer: list[int]
    tokens: int
    first: float
    needed: int
    experts: int
    nbytes: int

    def figures(self, *, from_disk: bool) -> dict[str, Any]:
        found = {"read": self.tokens, "TTFT ms": round(1e3 * self.first, 1)}
        if not from_disk:
            return found
        share = round(self.experts / self.needed, 3)
        counts = {"needed": self.needed, "from disk": self.experts}
        return found | counts | {"of needed": share, "MB": round(self.nbytes / 1e6, 2)}


def read(model: MoE, loop: StepLoop, prompt: list[int]) -> Reading:
    """Let a model answer."""
    params = SamplingParams(temperature=0.0, max_new_tokens=ANSWER, ignore_eos=True)
    loaded = model._loaded
    loaded.reset_stats()
    group, start, first = model.request(prompt, params), time.perf_counter(), 0.0
    sequence = group.sequences[0]
    needed = experts = nbytes = 0
    loop.submit(group)
    while not loop.idle:
        if loop.step() and not first:
            first = time.perf_counter() - start
            needed = int((loaded.experts.statistics.tokens_of_all() > 0).sum())
            if loaded.offloaded is not None:
                nbytes = loaded.offloaded.statistics()["bytes_read"]
                experts = nbytes // loaded.offloaded.cache.expert_bytes
    tokens = len(prompt) - sequence.num_cached_tokens
    return Reading(list(sequence.token_ids), tokens, first, needed, experts, nbytes)


def measure(
    path: Path, length: int, turns: int, residency: float | None = None
) -> list[dict[str, Any]]:
    """A row for each prompt and contender.

    Args:
        path: a store, with a residency.
        residency: share of the experts in memory; None: all, made of 4 bits while loading.
    """
    longest = CHATS * length + turns * (ANSWER + MESSAGE)

    def settings(memory: dict[str, Any]) -> dict[str, Any]:
        if residency is None:
            prefill = {"wave_tokens": 2 * length}
            return {"model": {"expert_bits": 4}, "prefill": prefill, "memory": memory}
        found = Target.of(path).settings(residency, longest, memory)
        return found | {"offload": {"hot_set": False}}

    models = {
        name: MoE.from_pretrained(path, settings(memory)) for name, memory in CONTENDERS.items()
    }
    loops = {name: model.loop() for name, model in models.items()}
    any_model = next(iter(models.values()))
    vocabulary = any_model.backbone.model.get_input_embeddings().num_embeddings
    tokens, text = random.Random(1), list[int]()
    if residency is not None and any_model.codec.tokenizer is not None:
        text = any_model.codec.encode(heldout("prose"))

    def message(size: int) -> list[int]:
        if not text:
            return [tokens.randrange(3, vocabulary) for _ in range(size)]
        own, text[:] = text[:size], text[size:] + text[:size]
        return own

    first = message(length)
    for name, model in models.items():
        read(model, loops[name], message(64))
    said, rows = list(first), []

    def row(name: str, prompt: list[int]) -> list[int]:
        answers = []
        for contender, model in models.items():
            reading = read(model, loops[contender], prompt)
            answers.append(reading.answer)
            figures = reading.figures(from_disk=residency is not None)
            rows.append({"prompt": name, "cache": contender, "tokens": len(prompt)} | figures)
            rows[-1]["same answer"] = answers[0] == answers[-1]
        return answers[0]

    for turn in range(1, turns + 1):
        answer = row(f"turn {turn}", said)
        said += [*answer, *message(MESSAGE)]
    for chat in ("second", "third"):
        row(f"{chat} chat", [*first[: length // 2], *message(length // 2)])
    return rows


def over_http(path: Path, turns: int, chats: int) -> list[dict[str, Any]]:
    """A row for each turn: medians of some chats, which differ from their first word on."""
    import openai

    words, found = random.Random(2), list[list[tuple[int, int, float]]]()
    settings = "memory.reuse_answers=true", "memory.prefix_tokens=16384"
    with moe_serve(path, *settings) as server:
        endpoint = server.endpoint
        client = openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0)
        for _ in range(chats + 1):  # the first one warms up
            messages: Any = []
            found.append([])
            for _ in range(turns):
                said = " ".join(words.choices(WORDS, k=100))
                messages.append({"role": "user", "content": said})
                answer, usage, begin, first = "", None, time.perf_counter(), 0.0
                for part in client.chat.completions.create(
                    model=endpoint.model, messages=messages, max_tokens=ANSWER, temperature=0,
                    stream=True, stream_options={"include_usage": True},
                ):  # fmt: skip
                    usage = part.usage or usage
                    if part.choices and (text := part.choices[0].delta.content):
                        first, answer = first or time.perf_counter() - begin, answer + text
                assert usage is not None
                details = usage.prompt_tokens_details
                cached = (details.cached_tokens if details else 0) or 0
                found[-1].append((usage.prompt_tokens, usage.prompt_tokens - cached, first))
                messages.append({"role": "assistant", "content": answer})
    rows = []
    for turn in range(turns):
        tokens, read, first = (median(each[turn][i] for each in found[1:]) for i in range(3))
        rows.append(
            {"turn": turn + 1, "tokens": tokens, "read": read, "TTFT ms": round(1e3 * first, 1)}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, shorter prompts")
    parser.add_argument(
        "--model", help="hybrid (the default with all in memory), demo (otherwise), 2b or a folder"
    )
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the first prompt")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--residency", type=float, help="share of the experts in memory")
    parser.add_argument("--http", action="store_true", help="the openai client and a server")
    options = parser.parse_args()
    if options.http:
        path = model_folder(options.model or "demo")
        assert path is not None
        print_header(environment() | {"model": path.name})
        rows = over_http(path, options.turns, 5)
        print_table("over HTTP", list(rows[0]), [list(row.values()) for row in rows])
        print_json({"environment": environment(), "rows": rows})
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.quick:
            tiny_model("qwen3_5_moe_text").save_pretrained(folder)
            path, options.prompt = Path(folder), 96
        else:
            name = options.model or ("hybrid" if options.residency is None else "demo")
            found = random_hybrid() if name == "hybrid" else model_folder(name)
            if found is None:
                return
            path = found
        print_header(environment() | {"model": "tiny" if options.quick else path.name})
        if options.residency is not None and not is_store(path):
            bits = ModelSettings(expert_bits=8)
            path = convert(path, path / "store", bits) if options.quick else stored(path)
        rows = measure(path, options.prompt, options.turns, options.residency)
    print_table("chats", list(rows[0]), [list(row.values()) for row in rows])
    print_json({"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
