"""Others that decode the same random weights: transformers, llama.cpp and its forks.

llama.cpp runs through the ``llama-cpp-python`` package, or as a checkout that somebody has built
(`BuiltLlamaCpp`), on files of `benchmarks.gguf_files`.

Every contender reads given tokens into fresh sequences and then decodes: the next tokens are given
too, different ones for each sequence, so that all contenders do the same work.
"""

from __future__ import annotations

import ctypes
import subprocess
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from kernels.cpu.compiler import find_compiler, run
from moe.network.own_cache import CACHE_ARGUMENT

Tokens = list[list[int]]
"""Token ids of each sequence."""


class Contender(Protocol):
    """Reads prompts and decodes."""

    name: str

    def prefill(self, prompt: list[int]) -> float:
        """Seconds to the logits after a prompt."""

    def decode(self, prompts: Tokens, following: Tokens) -> list[float]:
        """Seconds of each step in which every sequence reads one of its following tokens."""

    def close(self) -> None:
        """Give the memory back."""


class Transformers:
    """transformers' own forward with one of its implementations of experts."""

    def __init__(self, path: Path, dtype: torch.dtype, implementation: str) -> None:
        from transformers import AutoModelForCausalLM

        short = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
        self.name = f"transformers {short} {implementation}"
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, experts_implementation=implementation
        ).eval()

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        start = time.perf_counter()
        self.model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        return time.perf_counter() - start

    @torch.inference_mode()
    def decode(self, prompts: Tokens, following: Tokens) -> list[float]:
        cache = self.model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)[CACHE_ARGUMENT]
        times = []
        for step in zip(*following, strict=True):
            start = time.perf_counter()
            output = self.model(
                torch.tensor(step)[:, None],
                **{CACHE_ARGUMENT: cache},
                use_cache=True,
                logits_to_keep=1,
            )
            output.logits.argmax(-1)
            times.append(time.perf_counter() - start)
        return times

    def close(self) -> None:
        del self.model


class LlamaCpp:
    """llama.cpp's C interface, called as its own benchmarks do."""

    def __init__(self, path: Path, kind: str, threads: int, *, mapped: bool = False) -> None:
        import llama_cpp as c

        self.name = f"llama.cpp {kind}"
        self._c = c
        log = c.llama_log_callback(lambda *_: None)
        c.llama_log_set(log, ctypes.c_void_p())
        self._keep = log
        options = c.llama_model_default_params()
        options.use_mmap = mapped
        self._model = c.llama_model_load_from_file(str(path).encode(), options)
        self._threads = threads

    def _context(self, sequences: int, tokens: int) -> Any:
        options = self._c.llama_context_default_params()
        options.n_ctx = sequences * (-(-tokens // 256) * 256)
        options.n_batch = 2048
        options.n_ubatch = 512
        options.n_seq_max = sequences
        options.n_threads = options.n_threads_batch = self._threads
        return self._c.llama_init_from_model(self._model, options)

    def _read(self, context: Any, rows: Tokens, position: int) -> None:
        """Every sequence reads its row, from ``position`` on; logits after the last tokens only."""
        total = sum(map(len, rows))
        batch = self._c.llama_batch_init(total, 0, 1)
        batch.n_tokens = total
        index = 0
        for sequence, row in enumerate(rows):
            for offset, token in enumerate(row):
                batch.token[index] = token
                batch.pos[index] = position + offset
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = sequence
                batch.logits[index] = offset == len(row) - 1
                index += 1
        if self._c.llama_decode(context, batch) != 0:
            raise RuntimeError("llama.cpp could not run this batch")
        self._c.llama_synchronize(context)
        self._c.llama_batch_free(batch)

    def prefill(self, prompt: list[int]) -> float:
        context = self._context(1, len(prompt) + 1)
        try:
            start = time.perf_counter()
            self._read(context, [prompt], 0)
            return time.perf_counter() - start
        finally:
            self._c.llama_free(context)

    def decode(self, prompts: Tokens, following: Tokens) -> list[float]:
        context = self._context(len(prompts), len(prompts[0]) + len(following[0]))
        times = []
        try:
            self._read(context, prompts, 0)
            for index, step in enumerate(zip(*following, strict=True)):
                start = time.perf_counter()
                self._read(context, [[token] for token in step], len(prompts[0]) + index)
                times.append(time.perf_counter() - start)
        finally:
            self._c.llama_free(context)
        return times

    def close(self) -> None:
        self._c.llama_model_free(self._model)


class BuiltLlamaCpp:
    """A checkout of llama.cpp or of a fork, built, as a process that runs ``benchmarks/peer.cpp``.

    ik_llama.cpp repacks the weights when it loads them (its ``-rtr``).

    Raises:
        ValueError: there is no ``libllama.so`` below the folder, or no compiler.
    """

    def __init__(self, checkout: Path, path: Path, kind: str, threads: int) -> None:
        self.name = f"{checkout.resolve().name} {kind}"
        libraries = sorted(checkout.resolve().rglob("libllama.so"))
        if not libraries:
            raise ValueError(f"{checkout} holds no libllama.so; build it with cmake first")
        program = path.parent / f"peer-{checkout.resolve().name}"
        folders = {str(each.parent) for each in checkout.resolve().rglob("lib*.so")}
        includes = [f"-I{checkout / each}" for each in ("include", "ggml/include")]
        linked = [f"-L{libraries[0].parent}", "-lllama"]
        linked += [f"-Wl,{flag},{each}" for each in folders for flag in ("-rpath", "-rpath-link")]
        source = str(Path(__file__).with_name("peer.cpp"))
        run([*find_compiler(), "-std=c++17", "-O2", *includes, source, "-o", str(program), *linked])
        self._process = subprocess.Popen(
            [program, path, str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _ask(self, prompts: Tokens, following: Tokens) -> list[float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        words = [len(prompts), len(prompts[0]), len(following[0])]
        for prompt, tokens in zip(prompts, following, strict=True):
            words += [*prompt, *tokens]
        print(*words, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}")
        return [float(word) for word in answer.split()]

    def prefill(self, prompt: list[int]) -> float:
        return self._ask([prompt], [[]])[0]

    def decode(self, prompts: Tokens, following: Tokens) -> list[float]:
        return self._ask(prompts, following)[1:]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
