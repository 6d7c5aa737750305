"""Experts, attention and recurrent layers on NVIDIA GPUs, in Triton, which these modules import.

docs/gpu.md says what has run on one. Tests run all of them in Triton's interpreter, and compile
them for sm_80 to sm_120.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

_OLDEST_CAPABILITY = (8, 0)  # bf16 matrix instructions


def triton_status() -> dict[str, str]:
    """`name` ("triton" or "reference") and `reason` of what CUDA tensors run on."""
    if find_spec("triton") is None:
        return _reference("the package triton is not installed")
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        return {"name": "triton", "reason": "interpreted on the CPU (TRITON_INTERPRET=1)"}
    if not torch.cuda.is_available():
        return _reference("torch finds no CUDA device")
    if torch.version.hip is not None:
        return _reference("the kernels are for NVIDIA GPUs, and torch is built for ROCm")
    capability = torch.cuda.get_device_capability()
    if capability < _OLDEST_CAPABILITY:
        return _reference(f"compute capability {capability[0]}.{capability[1]} is below 8.0")
    return {"name": "triton", "reason": f"compiled for {torch.cuda.get_device_name()}"}


def _reference(reason: str) -> dict[str, str]:
    return {"name": "reference", "reason": reason}
