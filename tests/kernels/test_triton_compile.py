"""The kernels compile for real GPUs, without one: down to machine code, in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import triton

from kernels.triton.tiles import PREFILL, TALL
from tests.amounts import DEEP

_BUILD = """
import re, subprocess, tempfile
import triton, triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {name: "*bf16" for name in ("x", "weight", "bias", "output", "rows")}
POINTERS |= {name: "*i32" for name in ("order", "offsets", "block_expert", "block_first")}
POINTERS |= {"block_place": "*i32", "experts_P": "*i32"}
POINTERS |= {name: "*fp32" for name in ("weights", "sums")}
POINTERS |= {f"begin{index}": "i64" for index in range(5)}
POINTERS |= {"table": "*i64", "ids": "*i64"}
FLOATS = {name: "fp32" for name in ("slope", "limit", "offset", "scale")}
# Sizes of real layers are multiples of 16, and so are addresses.
DIVISIBLE = {"N", "K", "H", "width", "weight_row", "part_stride", "slots_in_all", "block_bytes"}
DIVISIBLE |= {f"begin{index}" for index in range(5)}

def build(architecture, kernel, options, **constants):
    if "PDL" in kernel.arg_names:
        constants["PDL"] = overlaps = architecture >= 90
        options = options | {"launch_pdl": overlaps}
    types = POINTERS | FLOATS
    names = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    attributes = {
        (index,): [["tt.divisibility", 16]] for index, name in enumerate(kernel.arg_names)
        if name not in constants and (names[name].startswith("*") or name in DIVISIBLE)
    }
    target = GPUTarget("cuda", architecture, 32)
    source = ASTSource(kernel, names, constants, attributes)
    built = triton.compile(source, target=target, options=options)
    if constants.get("PDL"):
        before, _ = built.asm["ptx"].split("griddepcontrol.wait", 1)
        assert not re.search(r"\\b(ld|st|atom|red)\\.global|cp\\.async", before)
    return built

def usage(built, *more):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, *more, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

def resources(built):
    text = usage(built, "--dump-resource-usage")
    return re.search(r"REG:(\\d+) STACK:(\\d+).* LOCAL:(\\d+)", text).groups()
"""

_PROGRAM = (
    _BUILD
    + """
import torch
from kernels.scales import SCALES
from kernels.triton.draw import CHUNK as DRAWN, MOST, OPTIONS, PEAK_CHUNK, draw_kernel, keys_kernel
from kernels.triton.draw import peaks_kernel
from kernels.triton.experts import combine_kernel
from kernels.triton.grouped import described_kernel, whole_kernel
from kernels.triton.router import LOGITS_OPTIONS, LOGITS_TILE, PROMPT_OPTIONS, PROMPT_TILE
from kernels.triton.router import decide_kernel, logits_kernel, options, prompt_logits_kernel
from kernels.triton.routing import CHUNK, MOST_COUNTED, MOST_SLOTS, SORT_OPTIONS, align_kernel
from kernels.triton.routing import align_options, count_kernel, sort_kernel, sort_tile
from kernels.triton.arrange import arrange_kernel
from kernels.triton.dequantize import dequantize_kernel
from kernels.triton.planes import planes_kernel
from kernels.triton.tall import tall_kernel, turn_kernel
from kernels.triton.tiles import DECODE, PLANES, PREFILL, TALL

def show(architecture, kernel, options, **constants):
    built = build(architecture, kernel, options, **constants)
    exact = constants.get("COMPUTE") == tl.float32  # no matrix instructions
    multiplies = "HAS_BIAS" in constants and "COMPUTE" in constants or "PLANES" in constants
    assert "mma" in built.asm["ptx"] or exact or not multiplies
    kind = ("_float32" if exact else "") + ("_mixed" if constants.get("PLANES") == 0 else "")
    print(kernel.__name__ + kind, *resources(built)[1:], built.metadata.shared)
    return built

# Triton makes constants of arguments that are 1.
UNFUSED = {"enable_fp_fusion": False}
SYMMETRIC = {"BITS": 8, "KIND": 0}
Q6_K = {"BITS": 6, "KIND": SCALES.index("super"), "GROUP": 16}
FP8 = {"BITS": 8, "KIND": SCALES.index("fp8"), "GROUP": 128}
ONES = {"share": 1, "part_stride": 1}
SHAPE = {"HAS_BIAS": True, "COMPUTE": tl.bfloat16}
for architecture, tile in ((80, DECODE[0]), (90, PREFILL[0])):
    shape = SHAPE | {"ROWS": tile.rows, "COLUMNS": tile.columns}
    show(architecture, whole_kernel, tile.options, CURVE=0, GATED=True, DEPTH=64, **shape,
         **(ONES if architecture == 80 else {}))
    show(architecture, combine_kernel, {"enable_fp_fusion": True}, COLUMNS=256, ADD=False)
for parts in (1, 2):
    for tile in (tile for tile in PREFILL if tile.fits(parts)):
        block = f"1,{parts},{tile.columns},{tile.depth}"
        POINTERS["weight"] = f"tensordesc<bf16[{block}]>"
        show(90, described_kernel, tile.options, CURVE=0, PARTS=parts, **SHAPE, ROWS=tile.rows,
             COLUMNS=tile.columns, DEPTH=tile.depth, HALVES=tile.halves)
POINTERS["weight"] = POINTERS["x"]
POINTERS["output"] = "*fp32"
show(80, combine_kernel, {"enable_fp_fusion": True}, COLUMNS=256, ADD=True)
POINTERS["output"] = POINTERS["rows"]
tile = PLANES[0]
HALF = torch.bfloat16, False
show(80, planes_kernel, tile.options(4, *HALF), **SYMMETRIC, **tile.constants(4), PLANES=0,
     COMPUTE=tl.bfloat16, GROUP=32, TWO=True, CURVE=2 + 8, GATED=True, HAS_BIAS=True,
     DENSE=False, EVEN=False, TAIL=True)  # experts of mixed bits, any number of columns
asks = next(own for own in PLANES if own.fetch)
built = show(90, planes_kernel, asks.options(4, torch.bfloat16, True), **SYMMETRIC,
             **asks.constants(4), PLANES=3, COMPUTE=tl.bfloat16, GROUP=64, TWO=True, CURVE=0,
             GATED=True, HAS_BIAS=False, DENSE=False, EVEN=True, TAIL=False)
assert "cp.async.bulk.prefetch" in built.asm["ptx"]
for tall, parts in ((tall, parts) for tall in TALL for parts in (1, 2) if tall.fits(parts)):
    built = show(90, tall_kernel, tall.options, **tall.constants, PLANES=3, COMPUTE=tl.bfloat16,
                 GROUP=64, CURVE=parts - 2, GATED=parts == 2, HAS_BIAS=False, TURNED=parts == 2)
    # Codes reach large matrix instructions from the registers where they are decoded.
    assert "wgmma" in built.asm["ptx"] and "SHFL" not in usage(built, "-sass")
POINTERS["x"] = "*i32"
show(80, turn_kernel, UNFUSED, PAIRS=1024)
POINTERS["x"] = "*bf16"
for widths in ((1,), (8,), (4, 2), (2, 1, 1, 4)):
    built = show(80, arrange_kernel, UNFUSED, WIDTHS=widths, UNITS=4)
    # Units are arranged where they lie: all threads load before any of them stores.
    order = re.findall(r"\\b(ld\\.global|bar\\.sync|st\\.global)", built.asm["ptx"])
    before = re.fullmatch("(l+[lb]*bs+)+", "".join(name[0] for name in order))
    assert before, order
POINTERS["experts"] = "*i32"
for own in (SYMMETRIC | {"GROUP": 64}, Q6_K, FP8):
    show(90, dequantize_kernel, UNFUSED, **own, COMPUTE=tl.bfloat16, MATRICES=2, PARTS=4)
del POINTERS["experts"]
POINTERS |= {"places": "*i64", "logits": "*fp32", "correction": "*fp32", "expert_scale": "*fp32"}
FLOATS["threshold"] = "fp32"
for groups, score, size in ((8, 1, 256), (1, 0, 512)):
    show(90, decide_kernel, options(size), SCORE=score, K=8, GROUPS=groups, KEPT=1, BY_TWO=True,
         RENORMALISE=True, HAS_CORRECTION=score == 1, HAS_SCALE=False, HAS_PLACES=True,
         EXPERTS=size)
POINTERS |= {"rows": "*fp32", "bias": "*fp32"}
for hidden in (2048, 7168, 2880):
    show(90, logits_kernel, LOGITS_OPTIONS, H=hidden, HAS_BIAS=hidden == 2880, **LOGITS_TILE)
for architecture in (80, 90):
    show(architecture, prompt_logits_kernel, PROMPT_OPTIONS, HAS_BIAS=True, COMPUTE=tl.bfloat16,
         **PROMPT_TILE)
POINTERS |= {"rows": "*bf16", "bias": "*bf16"}
for slots, experts in ((32, 256), (512, 256), (MOST_SLOTS, 2 * MOST_COUNTED)):
    show(90, align_kernel, align_options(slots), SLOTS=slots, EXPERTS=experts, BLOCKS=512)
POINTERS["counts"] = "*i32"
for architecture, experts in ((80, 256), (90, 2 * MOST_COUNTED)):
    sizes = {"CHUNK": CHUNK, "EXPERTS": experts}
    show(architecture, count_kernel, SORT_OPTIONS, **sizes)
    show(architecture, sort_kernel, SORT_OPTIONS, **sizes, **sort_tile(experts))
for pointer, compute, dtype in (("*fp32", tl.float32, torch.float32),
                                ("*fp16", tl.float16, torch.float16)):
    POINTERS |= dict.fromkeys(("x", "weight", "output"), pointer)
    shape = {"COMPUTE": compute, "ROWS": 16, "COLUMNS": 64, "DEPTH": DECODE[0].depth_of(dtype)}
    show(80, whole_kernel, DECODE[0].options, CURVE=1, GATED=True, HAS_BIAS=False, **shape)
    show(80, planes_kernel, tile.options(4, dtype, False), **SYMMETRIC, **tile.constants(4),
         PLANES=3, GROUP=64, TWO=False, CURVE=-1, GATED=False, HAS_BIAS=False, DENSE=True,
         EVEN=True, TAIL=False, COMPUTE=compute)
POINTERS |= dict.fromkeys(("scores", "peak"), "*fp32") | {"enough": "*i1"}
POINTERS |= dict.fromkeys(("temperature", "numbers", "sums", "totals"), "*fp64")
POINTERS |= dict.fromkeys(("keys", "top_k", "ids"), "*i64")
show(90, keys_kernel, OPTIONS, CHUNK=DRAWN)
show(90, draw_kernel, OPTIONS, BOUNDED=False, WHOLE=False, WIDTH=MOST)
POINTERS |= {"logits": "*bf16", "arrived": "*i32", "peaks": "*i64"}
show(90, peaks_kernel, OPTIONS, CHUNK=PEAK_CHUNK, CHUNKS=64)
"""
)

_PLANES = (
    _BUILD
    + """
import sys, torch
from kernels.planes import PlaneFormat
from kernels.scales import SCALES
from kernels.triton.planes import planes_kernel
from kernels.triton.tiles import PLANES, PREFILL_PLANES

POINTERS["output"] = "*fp32"

def innermost(built):
    \"\"\"Instructions, matrix instructions and shared loads of the loop that multiplies; and
    of all, those on local memory.\"\"\"
    text = usage(built, "-sass")
    found = re.findall(r"/\\*([0-9a-f]{4,5})\\*/\\s+(.*?);", text)
    lines = [(int(address, 16), line) for address, line in found]
    loops = []
    for address, line in lines:
        back = re.search(r"\\bBRA\\b.*?(0x[0-9a-f]+)", line)
        if back and int(back[1], 16) <= address:
            body = [own for at, own in lines if int(back[1], 16) <= at <= address]
            multiplied = sum("HMMA" in own for own in body)
            if multiplied:
                loads = sum("LDS" in own.split(".")[0] for own in body)
                loops.append((len(body), multiplied, loads))
    return *min(loops), sum("LDL" in line or "STL" in line for _, line in lines)

def fits(tile, name):
    bits, scales, group, planes = name.split("/")
    return tile.fits(PlaneFormat(int(group), int(bits), scales), int(planes), torch.bfloat16)

# Linear layers of few and of many rows, and the first projections of experts.
uses = [(tile, gated) for gated in (False, True) for tile in PLANES + PREFILL_PLANES]
begin, end = map(int, sys.argv[3].split(":"))
parts = int(sys.argv[4])  # of K, a warp each (`parts_of`)
in_turn = sys.argv[5:] == ["in turn"]  # one of the codes for each tile
for architecture in map(int, sys.argv[1].split()):
    for index, (tile, gated) in enumerate(uses[begin:end]):
        names = sys.argv[2].split()
        fitting = [name for name in names if fits(tile, name)]
        for name in fitting[index % len(fitting)::len(fitting)] if in_turn else fitting:
            bits, scales, group, planes = name.split("/")
            two = gated or tile.two
            constants = tile.constants(parts)
            constants["FETCH"] &= architecture >= 90
            options = tile.options(parts, torch.bfloat16, architecture >= 90)
            built = build(architecture, planes_kernel, options, **constants,
                          BITS=int(bits), KIND=SCALES.index(scales), PLANES=int(planes),
                          COMPUTE=tl.bfloat16, GROUP=int(group), TWO=two, GATED=gated,
                          CURVE=0 if gated else -1, HAS_BIAS=False, DENSE=not gated, EVEN=True,
                          TAIL=False, share=1, unit_stride=1)
            assert ".ftz" not in built.asm["ptx"]  # FP8 begins below the least exponent
            count, multiplied, loads, spilled = innermost(built)
            # A product with ones for all blocks; groups of 16 are multiplied apart.
            pieces = 2 if planes == "4" or scales != "symmetric" and planes == "2" else 1
            ones = scales not in ("fp8", "mxfp4")
            products = pieces * (1 + two) + ones << (group == "16")
            codes = multiplied / products / (tile.rows / 8) * 256 / 32 * (1 + two)  # of a thread
            print(architecture, tile.rows, 1 + two, int(gated), tile.unroll, int(tile.fetch), name,
                  resources(built)[0], spilled, round(count / codes, 2), round(loads / codes, 3))
"""
)

_ATTENTION = (
    _BUILD
    + """
import sys, torch
from kernels.triton import attention as own, rows
from kernels.triton.attention import JOIN_OPTIONS, attend_kernel, decode_tile, join_kernel

FLOATS = {name: "fp32" for name in ("scale", "softcap", "eps", "post_eps")}
FLOATS |= {f"{part}_eps": "fp32" for part in ("query", "key", "value")}
FLOAT32 = ("peaks", "totals", "sums", "sinks", "cos", "sin", "x", "exact")
FLOAT32 += tuple(f"{part}{kind}bias" for part in ("", "query_", "key_", "value_", "post_")
                 for kind in ("", "norm_"))
FLOAT32 += tuple(f"{part}weight" for part in ("", "query_", "key_", "value_", "post_"))
POINTERS = {name: "*fp32" for name in FLOAT32}
POINTERS |= {name: "*i32" for name in ("tables", "spans", "firsts")} | {"slots": "*i64"}
MATRICES = ("query", "second", "keys", "seconds", "values", "output", "key", "value", "rows",
            "rounded", "first", "up", "routed", "shared", "gate")
DIVISIBLE = {f"{part}_{step}" for part in "qskrv" for step in ("token", "head", "block")}
DIVISIBLE |= {"columns", "angle_row", "width", "first_row", "up_row"}

def show(architecture, kernel, options, dtype, **constants):
    types = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
    POINTERS.update(dict.fromkeys(MATRICES, types[dtype]))
    built = build(architecture, kernel, options, **constants)
    multiplied = next((word for word in ("wgmma", "mma") if word in built.asm["ptx"]), "-")
    names = "D", "R", "V", "ROWS", "KEYS", "SPLITS", "SEGMENT"
    sizes = [constants.get(name, 0) for name in names]
    print(architecture, kernel.__name__, str(dtype)[6:], *sizes, *resources(built),
          built.metadata.shared, multiplied)

def attend(architecture, dtype, tile, sizes, **flags):
    D, R, V = sizes
    plain = {"PAGED": True, "SECOND": R != D, "LATENT": False, "CAPPED": True, "SUNK": True,
             "SEGMENT": 0, "k_token": D, "r_token": R, "v_token": V}
    compute = tl.bfloat16 if dtype == torch.bfloat16 else tl.float32
    show(architecture, attend_kernel, tile.options, dtype, COMPUTE=compute, GROUP=8, D=D, R=R, V=V,
         ROWS=tile.rows, KEYS=tile.keys, WIDTH_D=own._width(D), WIDTH_R=own._width(R),
         WIDTH_V=own._width(V), **(plain | flags))

half, whole = torch.bfloat16, torch.float32
LONG = {"SPLITS": 1, "SEGMENT": own.SEGMENT}  # prompts of several segments
for architecture in map(int, sys.argv[1].split()):
    def prompt_tile(widest, dtype):
        return own.prompt_tile(widest, dtype, architecture == 90)

    # Heads of 64, 128, 192 (DeepSeek's prompts), 80 and 256; latents of 512 beside keys of 64.
    for sizes in ((64, 64, 64), (128, 128, 128), (128, 64, 128), (64, 16, 80), (256, 256, 256)):
        widest = max(sizes[0], sizes[2])
        attend(architecture, half, prompt_tile(widest, half), sizes, **LONG)
        attend(architecture, half, decode_tile(widest, half), sizes, SPLITS=16)
    attend(architecture, half, prompt_tile(128, half), (128, 64, 128), PAGED=False, **LONG)
    for flags in ({"SPLITS": 1}, {"SPLITS": 2, "SEGMENT": own.SEGMENT}):
        attend(architecture, half, prompt_tile(128, half), (128, 128, 128), **flags)
    attend(architecture, half, decode_tile(512, half), (512, 64, 512), SPLITS=32, LATENT=True)
    for widest in (128, 256):
        for tile, flags in ((prompt_tile(widest, whole), LONG),
                            (decode_tile(widest, whole), {"SPLITS": 16})):
            attend(architecture, whole, tile, (widest,) * 3, **flags)
    for segment in (0, own.SEGMENT):
        show(architecture, join_kernel, JOIN_OPTIONS, half, SUNK=True, SPLITS=16, SEGMENT=segment,
             KEYS=64, V=128, WIDTH_V=128)
    show(architecture, rows.add_norm_kernel, rows.OPTIONS | {"num_warps": rows._warps(7168)}, half,
         H=7168, ADD=True, POST=2, NORM=1, HAS_POST_BIAS=True, HAS_BIAS=False, WIDTH=8192)
    for count in (1, rows.PLACED):
        plain = {"LATE": (False,) * 3, "BIASES": (False,) * 3, "NORM_BIASES": (False,) * 3}
        for heads in (
            {"Q": 32, "N": 4, "QD": 128, "D": 128, "V": 128, "NORMS": (1, 1, 0),
             "STYLES": (1, 1, 0), "BEGINS": (0, 0, 0), "SIZE": 128, **plain},
            {"Q": 32, "N": 4, "QD": 128, "D": 128, "V": 128, "NORMS": (1, 2, 0),
             "STYLES": (1, 3, 0), "BEGINS": (0, 64, 0), "SIZE": 64, "BIASES": (True,) * 3,
             "NORM_BIASES": (False, True, False), "LATE": (False, True, False)},
            {"Q": 16, "N": 1, "QD": 64, "D": 512, "V": 64, "NORMS": (0, 1, 0),
             "STYLES": (2, 0, 2), "BEGINS": (0, 0, 0), "SIZE": 64, **plain},  # latents
        ):
            widths = {f"WIDTH_{part[0]}": heads[part] for part in ("QD", "D", "V")}
            show(architecture, rows.place_kernel, rows.OPTIONS | {"num_warps": 1}, half,
                 BLOCK=64, ROWS=count, **heads, **widths)
    show(architecture, rows.store_kernel, rows.OPTIONS | {"num_warps": 4}, half, N=4, D=192, V=128,
         ROWS=16, WIDTH_D=256, WIDTH_V=128, BLOCK=64)
    small = rows.OPTIONS | {"num_warps": 4}, half
    show(architecture, rows.gated_kernel, *small, CURVE=0, COLUMNS=1024)
    show(architecture, rows.add_shared_kernel, *small, H=2048, GATED=True, COLUMNS=1024)
"""
)

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

_LEAST_SHARED = (
    99 << 10
)  # bytes a block may have on the smallest of the GPUs served (sm_86, sm_89, sm_120)
_MOST_SHARED = 227 << 10  # on sm_90


_SYMMETRIC = [f"8/symmetric/64/{planes}" for planes in (1, 2, 3, 4)]
_AWQ, _Q4_K = "4/offset/128/1", "4/super-offset/32/1"
_Q8_0, _Q6_K = "8/centred/32/2", "6/super/16/2"
_FP8, _MXFP4 = "8/fp8/128/1", "4/mxfp4/32/1"
_FILES = [_AWQ, _Q4_K, _Q8_0, _Q6_K, _FP8, _MXFP4]
"""Codes: their bits, scales (kernels/scales.py), columns of a scale, and planes that there are."""
VERSION = ".".join(triton.__version__.split(".")[:2])
_INSTRUCTIONS: dict[str, dict[str, float]] = {
    "3.6": {"": 5, _SYMMETRIC[3]: 6, _Q4_K: 6.5, _Q8_0: 6, _Q6_K: 15, _MXFP4: 6.5, _FP8: 5.1},
    "3.7": {"": 6, _SYMMETRIC[3]: 9, _Q4_K: 7.5, _Q8_0: 9, _Q6_K: 15, _MXFP4: 6.5, _FP8: 6},
}
_INSTRUCTIONS["3.8"] = _INSTRUCTIONS["3.9"] = _INSTRUCTIONS["3.6"]
"""Of a thread for each code, at most, by Triton's version; "" is for all other codes."""
_SHARED_LOADS = {"3.8": 1 / 16}
"""Of a thread for each code, at most; else none. 3.8 keeps the ones of `row_sums` there."""
_MOST_OF_64_ROWS = 10
"""Each code meets 64 rows there: as many matrix instructions as codes."""
_MOST_REGISTERS = 168  # a thread: twelve warps fit a multiprocessor


def lines_of(program: str, *arguments: str) -> list[list[str]]:
    """The words of each line that a fresh process prints, whose kernels are compiled."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", program, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.deep
def test_kernels_compile() -> None:
    lines = lines_of(_PROGRAM)
    assert len(lines) == 36 + sum(tile.fits(parts) for tile in PREFILL + TALL for parts in (1, 2))
    for name, *spilled, shared in lines:
        assert max(map(int, spilled)) == 0, name
        most = _MOST_SHARED if name == "described_kernel" else _LEAST_SHARED
        assert int(shared) <= most, name


def judge(faults: list[str]) -> None:
    """Fail for faults, in the quick tier only with versions of Triton that were measured."""
    if VERSION in _INSTRUCTIONS or DEEP:
        assert not faults
    elif faults:
        warnings.warn(f"nobody has measured Triton {VERSION}: {faults}", stacklevel=2)


def check_planes(
    architectures: str, codes: list[str], tiles: str, parts: int = 4, *more: str
) -> None:
    """Print the table of tiles, and hold them to the limits.

    Spills and codes that pass through shared memory are a kernel's faults with any Triton. Counts
    of instructions are a compiler's, and held for the versions that were measured.
    """
    lines = lines_of(_PLANES, architectures, " ".join(codes), tiles, str(parts), *more)
    heads = ["sm", "rows", "blocks", "experts", "unroll", "fetch", "codes", "registers", "spilled",
             "instructions", "loads"]  # fmt: skip
    for words in (heads, *lines):
        print(*(f"{word:>12}" for word in words))
    assert lines
    faults = []
    for words in lines:
        own = dict(zip(heads, words, strict=True))
        known = _INSTRUCTIONS.get(VERSION, {"": float("inf")})
        most = known.get(own["codes"], known[""])
        if own["rows"] == "64" and VERSION in _INSTRUCTIONS:
            most = _MOST_OF_64_ROWS
        if int(own["spilled"]) > 0:
            faults.append(f"spilled: {own}")
        if float(own["loads"]) > _SHARED_LOADS.get(VERSION, 0):
            faults.append(f"loads from shared memory: {own}")
        if float(own["instructions"]) > most:
            faults.append(f"more than {most} instructions: {own}")
    judge(faults)


def test_a_version_that_nobody_has_measured_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="spilled"):
        judge(["spilled"])
    monkeypatch.setattr(sys.modules[__name__], "VERSION", "4.7")
    monkeypatch.setattr(sys.modules[__name__], "DEEP", False)
    with pytest.warns(UserWarning, match=r"nobody has measured Triton 4\.7: \['spilled'\]"):
        judge(["spilled"])


def test_codes_take_few_instructions() -> None:
    check_planes("80 90", [_SYMMETRIC[2], _AWQ, _FP8], "0:1")


def check_attention(architectures: str) -> None:
    """Print the table of kernels: none spills, and products of halves are matrix instructions."""
    lines = lines_of(_ATTENTION, architectures)
    heads = ["sm", "kernel", "dtype", "D", "R", "V", "rows", "keys", "splits", "segment",
             "registers", "stack", "local", "shared", "products"]  # fmt: skip
    for words in (heads, *lines):
        print(*(f"{word:>15}" for word in words))
    assert len(lines) == 30 * len(architectures.split())
    for words in lines:
        row = dict(zip(heads, words, strict=True))
        of_floats = row["sm"] == "120" and row["dtype"] == "float32"  # heads of 256: four registers
        assert int(row["stack"]) <= (16 if of_floats else 0), row
        assert row["local"] == "0", row
        wide = row["sm"] == "90" and int(row["rows"]) >= 64
        assert int(row["shared"]) <= (_MOST_SHARED if wide else _LEAST_SHARED), row
        if row["kernel"] == "attend_kernel" and row["dtype"] == "bfloat16":
            assert row["products"] == ("wgmma" if wide else "mma"), row


@pytest.mark.deep
def test_attention_and_small_kernels_compile() -> None:
    """For the newest of the GPUs that were run on; `-s` prints the table."""
    check_attention("90")


@pytest.mark.deep
@pytest.mark.nightly
def test_attention_and_small_kernels_compile_for_all() -> None:
    check_attention("80 89 120")


@pytest.mark.deep
@pytest.mark.parametrize("tiles", ["0:6", "6:12", "12:18"])
def test_every_tile_of_planes_has_room(tiles: str) -> None:
    """Each tile with one of the codes, on the oldest and the newest GPU: a tile that is too large
    for registers or shared memory is so with most codes."""
    check_planes("80 90", [*_SYMMETRIC, *_FILES], tiles, 4, "in turn")


@pytest.mark.deep
@pytest.mark.nightly
def test_every_tile_of_planes_takes_few_instructions() -> None:
    """With every code, which takes an hour; `-s` prints the table."""
    check_planes("80 89 90", [*_SYMMETRIC, *_FILES], "0:6")
    check_planes("80 89 90", [_SYMMETRIC[2], _AWQ, _Q4_K, _MXFP4], "6:18")
    check_planes("80 89 90", [_SYMMETRIC[3], _Q8_0, _Q6_K, _FP8], "6:18")
    check_planes("80 90", [_SYMMETRIC[2], _AWQ, _Q4_K], "0:9", parts=8)  # wide linear layers


def test_states_of_recurrent_layers_stay_in_registers() -> None:
    lines = lines_of(_RECURRENT)
    assert len(lines) == 14
    faults = []
    for name, architecture, registers, *spilled in lines:
        if spilled != ["0", "0"] or int(registers) > _MOST_REGISTERS:
            faults.append(f"{name} on sm_{architecture}: {registers} registers, {spilled} spilled")
    judge(faults)
