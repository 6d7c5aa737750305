"""The kernels compile for real GPUs, without one: down to machine code, in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys

_PROGRAM = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.triton.attention import OPTIONS
from kernels.triton.attention import attend_kernel, join_kernel, store_kernel
from kernels.triton.experts import combine_kernel
from kernels.triton.grouped import planes_kernel
from kernels.triton.tiles import DECODE, PREFILL
from kernels.triton.grouped import whole_kernel

POINTERS = {name: "*bf16" for name in ("x", "weight", "bias", "output", "rows")}
POINTERS |= {name: "*i32" for name in ("order", "offsets", "block_expert", "block_first")}
POINTERS |= {name: "*bf16" for name in ("query", "second", "keys", "values")}
POINTERS |= {name: "*fp32" for name in ("weights", "peaks", "totals", "sums", "sinks")}
POINTERS |= {"table": "*i64", "ids": "*i64", "places": "*i64"}
FLOATS = {name: "fp32" for name in ("slope", "limit", "offset", "scale", "softcap")}

def build(architecture, kernel, options, **constants):
    names = {n: "constexpr" if n in constants else (POINTERS | FLOATS).get(n, "i32")
             for n in kernel.arg_names}
    target = GPUTarget("cuda", architecture, 32)
    built = triton.compile(ASTSource(kernel, names, constants), target=target, options=options)
    exact = constants.get("COMPUTE") == tl.float32  # no matrix instructions
    assert "mma" in built.asm["ptx"] or exact or "COMPUTE" not in constants
    print(kernel.__name__, len(built.asm["cubin"]), built.metadata.shared)

# Triton makes constants of arguments that are 1.
ONES = {"share": 1, "part_stride": 1}
SHAPE = {"HAS_BIAS": True, "COMPUTE": tl.bfloat16}
for architecture, tile in ((80, DECODE[0]), (90, PREFILL[0])):
    shape = SHAPE | {"ROWS": tile.rows, "COLUMNS": tile.columns}
    build(architecture, whole_kernel, tile.options, CURVE=0, GATED=True, DEPTH=64, **shape,
          **(ONES if architecture == 80 else {}))
    build(architecture, combine_kernel, {"enable_fp_fusion": True}, COLUMNS=256, ADD=False)
POINTERS["output"] = "*fp32"
build(80, combine_kernel, {"enable_fp_fusion": True}, COLUMNS=256, ADD=True)
POINTERS["output"] = POINTERS["rows"]
build(80, planes_kernel, DECODE[0].options, CURVE=2 + 8, GATED=True, GROUP=32,
      ROWS=16, COLUMNS=64, **SHAPE)
build(90, planes_kernel, PREFILL[0].options, CURVE=-1, GATED=False, GROUP=64,
      ROWS=64, COLUMNS=64, **SHAPE, **ONES)
# Heads of 80, and latents of 512 beside keys of 64.
ATTEND = {"COMPUTE": tl.bfloat16, "HEADS": 16}
for architecture in (80, 90):
    build(architecture, attend_kernel, OPTIONS, LATENT=False, CAPPED=True, SPLITS=16, KEYS=32,
          WIDTH_D=128, WIDTH_R=128, WIDTH_V=128, **ATTEND)
    build(architecture, attend_kernel, OPTIONS, LATENT=True, CAPPED=False, SPLITS=32, KEYS=16,
          WIDTH_D=512, WIDTH_R=64, WIDTH_V=512, **ATTEND)
    build(architecture, store_kernel, OPTIONS, WIDTH_D=128, WIDTH_V=128)
POINTERS["output"] = "*fp32"
build(90, join_kernel, OPTIONS, SUNK=True, SPLITS=16, KEYS=64, WIDTH_V=128)
for pointer, compute in (("*fp32", tl.float32), ("*fp16", tl.float16)):
    POINTERS |= dict.fromkeys(("x", "weight", "output", "query", "second"), pointer)
    shape = {"HAS_BIAS": False, "COMPUTE": compute, "ROWS": 16, "COLUMNS": 64}
    build(80, whole_kernel, DECODE[0].options, CURVE=1, GATED=True, DEPTH=64, **shape)
    build(80, planes_kernel, DECODE[0].options, CURVE=4, GATED=False, GROUP=64, **shape)
    build(90, attend_kernel, OPTIONS, LATENT=False, CAPPED=False, SPLITS=16, KEYS=16,
          WIDTH_D=256, WIDTH_R=256, WIDTH_V=256, COMPUTE=compute, HEADS=16)
"""

_RECURRENT = """
import re, subprocess, tempfile
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.triton.recurrence import (
    convolution_kernel, convolution_tile, gated_kernel, gated_tile, scan_kernel, scan_tile
)

POINTERS = dict.fromkeys(("before", "after", "out", "decay", "a", "d", "bias"), "*fp32")
POINTERS |= dict.fromkeys(("q", "k", "v", "beta", "x", "dt", "b", "c", "z", "weight"), "*bf16")
FLOATS = dict.fromkeys(("scale", "least", "most"), "fp32")

def build(architecture, kernel, tile, **flags):
    # Code that depends on numbers of tokens or on strides may add in another order.
    plain = [each for each in kernel.params if not each.is_constexpr]
    assert plain and all(each.do_not_specialize for each in plain)
    assert all(each.do_not_specialize_on_alignment for each in plain)
    constants = flags | {name: value for name, value in tile.items() if name.isupper()}
    options = {name: value for name, value in tile.items() if not name.isupper()}
    names = {n: "constexpr" if n in constants else (POINTERS | FLOATS).get(n, "i32")
             for n in kernel.arg_names}
    target = GPUTarget("cuda", architecture, 32)
    built = triton.compile(ASTSource(kernel, names, constants), target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"REG:(\\d+) STACK:(\\d+).* LOCAL:(\\d+)", usage).groups()
    print(kernel.__name__, architecture, *numbers)

GATED = {"CORRECTED": True, "NORMALISED": True, "HAS_BETA": True}
SCAN = {"SOFTPLUS": True, "HAS_Z": True, "HAS_D": True, "HAS_BIAS": True}
for architecture in (80, 90):
    build(architecture, gated_kernel, gated_tile(128, 128), BY_KEY=False, **GATED)
    build(architecture, gated_kernel, gated_tile(256, 256), BY_KEY=True, **GATED)
    build(architecture, scan_kernel, scan_tile(64, 128), BY_CHANNEL=False, **SCAN)
    build(architecture, scan_kernel, scan_tile(8192, 16), BY_CHANNEL=True, **SCAN)
    build(architecture, scan_kernel, scan_tile(64, 256), BY_CHANNEL=True, **SCAN)
    for tokens in (1, 99):
        build(architecture, convolution_kernel, convolution_tile(tokens),
              TAPS=4, S=4, SILU=True, HAS_BIAS=True)
"""

_LEAST_SHARED = 99 << 10  # bytes a block may have on the smallest of the GPUs served (sm_86, sm_89)


_MOST_REGISTERS = 168  # a thread: twelve warps fit a multiprocessor


def lines_of(program: str) -> list[list[str]]:
    """The words of each line that a fresh process prints, whose kernels are compiled."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]


def test_kernels_compile() -> None:
    shared = [int(words[-1]) for words in lines_of(_PROGRAM)]
    assert len(shared) == 20
    assert max(shared) <= _LEAST_SHARED


def test_states_of_recurrent_layers_stay_in_registers() -> None:
    lines = lines_of(_RECURRENT)
    assert len(lines) == 14
    for name, architecture, registers, *spilled in lines:
        assert spilled == ["0", "0"], (name, architecture)
        assert int(registers) <= _MOST_REGISTERS, (name, architecture)
