"""What do models that write canvases cost, with all, half and a quarter of the experts?

    python -m lab.diffusion [--quick] [--model DIR] [--sequences 4]
        [--parts speed memory policies sharing chances]

speed: prompts of held-out text are continued by the model's own generation code in transformers,
one after the other and as one batch, and by this engine, the same two ways, in turns, all in
memory; medians. "same": tokens equal to transformers' own, one by one. transformers has a process
of its own: this engine lets its process keep freed memory (`memory.keep_freed`), which would make
transformers' batch 1.2 times faster than it is.

memory: with all, half and a quarter of the experts in memory, one by one, together, and with
experts shared. "experts a step": distinct experts of a layer in a pass of all sequences that are
there. "bytes a token": of those experts, as a machine without a cache reads them; "read a token":
what was really read from disk; "x fewer read": than one by one. Both fall with `--sequences 8`.

policies: together, with rules that refine a canvas in fewer passes, or fewer rows of a pass. "steps
a token": passes over a canvas, and tokens of final canvases. "rows": share of a canvas that a pass
computes. "same tokens": as the own schedule's at their place; what other seeds have is chance.
"nats" a token: what the shipped next-token model says of the text that came out (of the true
continuation in the first row), so a tokenizer like its own is needed; little for text that repeats
itself, which "distinct", of tokens written, shows.

sharing: what sharing experts over a canvas costs in predicting held-out text (`moe eval`), and how
many distinct experts of a layer a canvas needs then.

chances: what rules that are not built could give, read off the own schedule
(`lab.diffusion.fewer_passes`).

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import environment, print_header, print_json, print_table, take_turns
from lab.diffusion import fewer_passes as chance
from lab.diffusion.own_generate import serve_transformers
from moe import MoE, SamplingParams
from moe.commands.convert.convert import convert
from moe.loading.memory_plan import GIB
from moe.methods.diffusion.evaluate import driver_of, evaluate_canvases
from moe.settings import ModelSettings

ROOT = Path(__file__).resolve().parents[2]
MODEL, JUDGE = ROOT / "examples/diffusion-model", ROOT / "examples/demo-model"
DOMAINS = ("prose", "python", "cpp")
SHARES = (1.0, 0.5, 0.25)
PARTS = ("speed", "memory", "policies", "sharing", "chances")
BEFORE = 48  # tokens of a prompt
APART = 331  # tokens between two prompts of a domain
OTHER = "own schedule, other seeds"
REFRESHES = ("elastic:0.99:4", "elastic:0.4:4", "elastic:0.3:4", "elastic:0.2:4")
POLICIES: dict[str, dict[str, Any]] = {
    "own schedule": {},
    OTHER: {},
    "max_steps 24": {"methods.diffusion.max_steps": 24},
    "max_steps 12": {"methods.diffusion.max_steps": 12},
    **{f"refresh {rule}": {"methods.diffusion.refresh": rule} for rule in REFRESHES},
}
Row = dict[str, Any]


class Bench:
    """A model, prompts for it, and what follows them in the text."""

    def __init__(self, path: Path, work: Path, sequences: int, *, quick: bool) -> None:
        self.path, self.sequences, self.quick = path, sequences, quick
        self.store = convert(
            path, work / "store", ModelSettings(expert_bits=16, trunk_bits=16, head_bits=16)
        )
        self.profile: dict[str, Any] = {
            "lossless": False,
            "memory.kv_tokens": 4096,
            "memory.reserve_gib": 0.0,
            "prefill.wave_tokens": 256,  # else it shrinks, and leaves room for experts
        }
        if quick:
            self.profile["methods.diffusion.max_steps"] = 4
        with MoE.from_pretrained(self.store, self.profile) as model:
            self.experts = model.stats()["expert_bytes"]
            self.canvas = driver_of(model).canvas_length
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.text = {
            domain: (ROOT / f"tests/data/heldout_{domain}.txt").read_text("utf-8")[:60_000]
            for domain in DOMAINS
        }
        self.ids = {domain: tokenizer.encode(text) for domain, text in self.text.items()}

    def prompts(self, count: int) -> list[list[int]]:
        """The first tokens of pieces of text, the domains in turn."""
        return [piece[:BEFORE] for piece in self._pieces(count)]

    def true(self, count: int, num_new: int) -> list[list[int]]:
        """Return what follows them."""
        return [piece[BEFORE : BEFORE + num_new] for piece in self._pieces(count)]

    def _pieces(self, count: int) -> list[list[int]]:
        places = [divmod(number, len(DOMAINS)) for number in range(count)]
        return [self.ids[DOMAINS[domain]][turn * APART :] for turn, domain in places]

    def load(self, share: float = 1.0, changes: dict[str, Any] | None = None) -> MoE:
        """The store with a share of its experts in memory."""
        own = self.profile | (changes or {})
        if share < 1:
            with MoE.from_pretrained(self.store, own) as model:
                needed = model.memory_plan.needed_bytes
            limit = needed - (1 - share) * self.experts + 65536
            own |= {"memory.device_gib": limit / GIB}
        return MoE.from_pretrained(self.store, own)


def write(model: MoE, prompts: list[list[int]], num_new: int, *, together: bool) -> list[list[int]]:
    """Continue prompts, each with its number as the seed."""
    pairs = list(zip(prompts, sampling(num_new, len(prompts)), strict=True))
    written: list[list[int]] = []
    for batch in [pairs] if together else [[pair] for pair in pairs]:
        done = model.generate([prompt for prompt, _ in batch], [one for _, one in batch])
        written += [completion.token_ids for completion in done]
    return written


def sampling(num_new: int, count: int, first: int = 0) -> list[SamplingParams]:
    """Of so many prompts, each with its number as the seed."""
    return [
        SamplingParams(max_new_tokens=num_new, ignore_eos=True, seed=first + seed)
        for seed in range(count)
    ]


class Transformers:
    """transformers' own generation in a process of its own."""

    def __init__(self, bench: Bench) -> None:
        settings = {"max_new_tokens": bench.canvas, "eos_token_id": -1}
        if bench.quick:
            settings["max_denoising_steps"] = bench.profile["methods.diffusion.max_steps"]
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        arguments = there, bench.path, settings, torch.get_num_threads()
        self._process = context.Process(target=serve_transformers, args=arguments, daemon=True)
        self._process.start()
        self._here.recv()  # it has loaded

    def write(self, batches: list[list[list[int]]]) -> list[list[int]]:
        """Continue batches of prompts, each with its number as the seed."""
        self._here.send(batches)
        written: list[list[int]] = self._here.recv()
        return written

    def close(self) -> None:
        self._here.close()  # it ends then
        self._process.join()


def speed(bench: Bench) -> list[Row]:
    """This engine and transformers in turns, all in memory."""
    prompts = bench.prompts(bench.sequences)
    written: dict[str, list[list[int]]] = {}

    def keep(way: str, run: Callable[[], list[list[int]]]) -> Callable[[int], None]:
        return lambda _: written.__setitem__(way, run())

    with closing(Transformers(bench)) as theirs, bench.load() as own:
        ways: dict[str, Callable[[], list[list[int]]]] = {
            "transformers, one by one": lambda: theirs.write([[prompt] for prompt in prompts]),
            "transformers, one batch": lambda: theirs.write([prompts]),
            "one by one": lambda: write(own, prompts, bench.canvas, together=False),
            "together": lambda: write(own, prompts, bench.canvas, together=True),
        }
        times = take_turns({way: keep(way, run) for way, run in ways.items()}, 0.0)
    tokens = bench.canvas * len(prompts)
    return [
        {
            "way": way,
            "rate": tokens / seconds,
            "times": seconds / times["together"],
            "same": written[way] == written["transformers, one by one"],
        }
        for way, seconds in times.items()
    ]


def shared(tokens: int) -> dict[str, Any]:
    return {"routing.policies": [f"des_vote:0.5:{tokens}"]}


def memory(bench: Bench) -> list[Row]:
    """Bytes and experts with fewer experts in memory."""
    prompts, everything = bench.prompts(bench.sequences), bench.sequences * bench.canvas
    ways: dict[str, tuple[bool, dict[str, Any]]] = {
        "one by one": (False, {}),
        "together": (True, {}),
        "together, half for each canvas": (True, shared(bench.canvas)),
        "together, half for all canvases": (True, shared(everything)),
        **{
            f"together, {rule}": (True, {"methods.diffusion.refresh": rule})
            for rule in REFRESHES[1:3]
        },
    }
    rows: list[Row] = []
    for share in SHARES:
        alone = len(rows)
        for way, (together, changes) in ways.items():
            with bench.load(share, changes) as model:
                start = perf_counter()
                write(model, prompts, bench.canvas, together=together)
                spent, stats = perf_counter() - start, model.stats()
            total, layers = bench.canvas * len(prompts), stats["layers"]
            read = stats["offload"]["bytes_read"] if stats["offload"] else 0
            rows.append({
                "way": way,
                "held": share,
                "rate": total / spent,
                "experts": sum(layer["expert_loads"] for layer in layers)
                / sum(layer["steps"] for layer in layers),
                "bytes": stats["expert_bytes_read"] / total,
                "read": read / total,
                "less": rows[alone]["read"] / (read / total) if read and rows[alone:] else "",
            })  # fmt: skip
    return rows


def policies(bench: Bench) -> list[Row]:
    """Passes and text of each rule, all in memory."""
    count, num_new = (4, bench.canvas) if bench.quick else (12, 2 * bench.canvas)
    prompts = bench.prompts(count)
    judge: Any = AutoModelForCausalLM.from_pretrained(JUDGE, dtype=torch.float32).eval()
    rows: list[Row] = [
        {"way": "the text itself"} | said_of(judge, prompts, bench.true(count, num_new))
    ]
    chosen = dict(list(POLICIES.items())[:2]) if bench.quick else POLICIES
    own: list[list[int]] = []
    for way, changes in chosen.items():
        with bench.load(1.0, changes) as model:
            start = perf_counter()
            written, passes = write_counted(model, prompts, num_new, other=way == OTHER)
            spent, layers = perf_counter() - start, model.stats()["layers"]
        own = own or written
        canvas = sum(layer["tokens_by"]["decode"] for layer in layers) / len(layers)
        total = num_new * count
        row = {"way": way, "rate": total / spent, "steps": passes / total}
        row |= {"computed": canvas / bench.canvas / passes, "equal": alike(written, own)}
        rows.append(row | said_of(judge, prompts, written))
    return rows


def write_counted(
    model: MoE, prompts: list[list[int]], num_new: int, *, other: bool
) -> tuple[list[list[int]], int]:
    """Continue prompts together; also how many passes over canvases there were.

    Args:
        other: with other seeds than `write`.
    """
    engine, params = model.loop(), sampling(num_new, len(prompts), 1000 * other)
    groups = [model.request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    for group in groups:
        engine.submit(group)
    while not engine.idle:
        engine.step()
    written = [group.sequences[0].token_ids for group in groups]
    return written, engine.status()["canvases"]["passes"]["decode"]


def alike(texts: list[list[int]], others: list[list[int]]) -> float:
    """The share of tokens that are the same at their place."""
    pairs = zip(chain.from_iterable(texts), chain.from_iterable(others), strict=True)
    same = [token == other for token, other in pairs]
    return sum(same) / len(same)


@torch.inference_mode()
def said_of(judge: Any, prompts: list[list[int]], written: list[list[int]]) -> Row:
    """Nats a token of texts behind their prompts, and the share of distinct tokens in a text."""
    nats = []
    for prompt, text in zip(prompts, written, strict=True):
        ids = torch.tensor([prompt + text])
        logits = judge(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        nats.append(torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :]).item())
    distinct = sum(len(set(text)) / len(text) for text in written) / len(written)
    return {"nats": sum(nats) / len(nats), "distinct": distinct}


def sharing(bench: Bench) -> list[Row]:
    """Return what sharing experts over a canvas costs, as `moe eval` says."""
    own = bench.canvas
    shares = [0.5] if bench.quick else [0.25, 0.375, 0.5, 0.625, 0.75]
    wanted = [f"des_vote:{share:g}:{own}" for share in shares]
    wanted += [f"des_vote:{share:g}:{own}:2" for share in shares]
    wanted += [f"des_seq:{top_k}:{own}" for top_k in (1, 2)]
    wanted += ["top_k:3", "top_k:2", "top_k:1"]
    text = "".join(each[: 6_000 if bench.quick else 20_000] for each in bench.text.values())
    with bench.load(1.0, {"routing.policies": wanted}) as model:
        costs = evaluate_canvases(model, text, 1280 if bench.quick else None).policies
    return [
        {
            "way": cost.policy,
            "worse": cost.worse,
            "agree": cost.top1_agreement,
            "experts": cost.distinct,
            "fewer": cost.distinct_without / cost.distinct,
        }
        for cost in costs[:-1]  # the last one: all of them together
    ]


def chances(bench: Bench) -> dict[str, list[Row]]:
    """Return what other rules could give, by rule."""
    count, num_new = (2, bench.canvas) if bench.quick else (12, 2 * bench.canvas)
    prompts = bench.prompts(count)
    judge: Any = AutoModelForCausalLM.from_pretrained(JUDGE, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(bench.path)

    def judged(texts: list[list[int]]) -> Row:
        return said_of(judge, prompts, texts)

    with bench.load() as model:
        blocks = chance.watch(model, prompts)
        return {
            "drafts over steps": chance.drafts(model, blocks),
            "anchors": chance.anchors(blocks),
            "settling": chance.settling(blocks),
            "borders": chance.borders(
                model, prompts, num_new, lambda token: tokenizer.decode([token]), judged
            ),
        }


HEADERS = {
    **{"way": "way", "held": "experts held", "rate": "tokens/s", "times": "x (together)"},
    **{"steps": "steps a token", "experts": "experts a step", "bytes": "bytes a token"},
    **{"read": "read a token", "nats": "nats", "distinct": "distinct", "worse": "worse %"},
    **{"agree": "agree", "fewer": "x fewer experts", "same": "same"},
    **{"computed": "rows", "equal": "same tokens", "less": "x fewer read"},
}


def show(part: str, rows: Sequence[Row]) -> None:
    names = dict.fromkeys(name for row in rows for name in (*HEADERS, *row) if name in row)
    cells = [
        [
            f"{row[name] * (100 if name == 'worse' else 1):.4g}"
            if isinstance(row.get(name), float)
            else str(row.get(name, ""))
            for name in names
        ]
        for row in rows
    ]
    print_table(part, [HEADERS.get(name, name) for name in names], cells)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few passes, few ways")
    parser.add_argument("--model", type=Path, default=MODEL, help="default: the shipped one")
    parser.add_argument("--sequences", type=int, default=4, help="of speed and memory")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args(argv)
    facts = environment() | {"model": str(args.model)}
    print_header(facts)
    measured: dict[str, list[Row]] = {}
    runs = {"speed": speed, "memory": memory, "policies": policies, "sharing": sharing}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.model, Path(folder), args.sequences, quick=args.quick)
        for part in args.parts:
            tables = chances(bench) if part == "chances" else {part: runs[part](bench)}
            for name, rows in tables.items():
                show(name, rows)
            measured |= tables
    print_json({"environment": facts, **measured})


if __name__ == "__main__":
    main()
