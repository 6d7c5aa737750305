"""MegaBlocks (arXiv 2211.15841): its grouped matrix products for bf16 experts on CUDA.

``kernels.backend: megablocks``. Between our own gather and sum, a layer calls what MegaBlocks'
dropless experts call, ``grouped_gemm_util.ops.gmm``. The package is optional and imported when it
is chosen: it does not import without its CUDA extension, and its pins (torch 2.7.0, numpy < 2.1)
conflict with ours, so it is installed with ``--no-deps``.

Differs from the paper: our own permutation of rows, and no padding to blocks. It takes the sizes
of the groups on the host, so every layer waits for the GPU once; ``auto`` never takes it. It is a
contender to measure against; no GPU has run it here.

    python -m benchmarks.kernels_gpu
"""

from moe.hooks import Method

INSTALL = (
    "on a machine with CUDA: pip install --no-deps --no-build-isolation "
    "megablocks==0.10.0 grouped_gemm==0.3.0 stanford-stk==0.7.1"
)

METHOD = Method(
    about="grouped matrix products of MegaBlocks for bfloat16 experts on CUDA",
    price="waits for the GPU in each layer; needs packages that pin torch 2.7",
    choices={"kernels.backend": {"megablocks": "moe.methods.megablocks.backend:make"}},
    hooks={"doctor": "moe.methods.megablocks.check:check_megablocks"},
    files=("tests/methods/test_megablocks.py",),
)
