"""Turns a structure into a grammar of llguidance; as a program, checks that it can be compiled.

A schema of a few kilobytes can keep the compiler busy for hours, a grammar of many rules overflows
its stack, and ``a{900000}`` compiles at once but takes a second for each token. So `fault` first
compiles each structure and writes some text by it in a process of its own, with less time, memory
and stack than this process has. This module imports no other module of ours, so that
the process starts fast.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from functools import lru_cache
from typing import Any, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

CPU_SECONDS = 2
WALL_SECONDS = 30  # for a busy machine
MEMORY = 2**31
STEPS = 48
STEP_SECONDS = 0.02
STACK = 2**21  # threads here have four times as much
LIMITS = LLParserLimits(
    max_lexer_states=50_000,  # up to 2 KB each
    max_grammar_size=100_000,
    precompute_large_lexemes=False,  # unlike a step, this has no time limit
    verbose_errors=False,
)
# As in llama.cpp: enough for pretty printing, and a model cannot write white space for ever.
WHITESPACE = r"( |\n{1,2}[ \t]{0,20})"


def grammar_of(kind: str, source: str) -> str:
    """The grammar of a structure. Raises `ValueError` if it is not valid."""
    if kind == "json_schema":
        # Keywords that cannot be enforced are errors, even if the schema asks for leniency.
        return LLMatcher.grammar_from_json_schema(
            source, defaults={"whitespace_pattern": WHITESPACE}, overrides={"lenient": False}
        )
    return grammar_from(cast(Any, kind), source)


@lru_cache(maxsize=256)
def fault(kind: str, source: str) -> str:
    """Why a structure cannot be compiled, or "" if it can; tried in another process.

    Raises:
        TimeoutError: the process got too little of the processor to say, or something else on
            this machine killed it (as Linux does where memory runs out); nothing is remembered.
    """
    try:
        done = subprocess.run(
            [sys.executable, __file__],
            input=json.dumps([kind, source]),
            capture_output=True,
            text=True,
            timeout=WALL_SECONDS,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"not compiled within {WALL_SECONDS} s") from error
    if done.returncode == -signal.SIGKILL:
        raise TimeoutError("not compiled: something killed the process")
    if done.returncode < 0:  # by its own limits
        return _TOO_COMPLEX
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout))


_TOO_COMPLEX = (
    f"it takes more than {CPU_SECONDS} s of a processor to compile, or is nested too deeply"
)
_TOO_SLOW = (
    f"a step takes more than {STEP_SECONDS:g} s of a processor; repetitions of a fixed text have "
    "to be shorter"
)


def _fault(kind: str, source: str) -> str:
    """`fault` in this process, which its limits may kill."""
    try:
        grammar = grammar_of(kind, source)
    except ValueError as error:
        return str(error)
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    why = str(matcher.get_error())
    if why:
        return "no text is like that" if why.startswith("NoExtension") else why
    return "" if _is_quick(matcher) else _TOO_SLOW


def _is_quick(matcher: LLMatcher) -> bool:
    """Write a text of random bytes; False if three of its steps take too long, or it does."""
    noise, slow, start = random.Random(0), 0, time.thread_time()
    for _ in range(STEPS):
        begun = time.thread_time()
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        slow += time.thread_time() - begun > STEP_SECONDS
        if slow == 3 or time.thread_time() - start > STEPS * STEP_SECONDS / 4:
            return False
        allowed = [byte for byte in range(256) if bits >> byte & 1]
        if not allowed or matcher.is_error() or not matcher.consume_token(noise.choice(allowed)):
            break  # complete, or for a request to find out
    return True


def limited_fault(kind: str, source: str) -> str:
    """`fault` in a thread of this process, whose limits hold from now on."""
    # Behind the first limit the process gets SIGXCPU, behind the second SIGKILL.
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(_fault(kind, source)))
    thread.start()
    thread.join()
    return found[0]


if __name__ == "__main__":
    print(json.dumps(limited_fault(*json.load(sys.stdin))))
