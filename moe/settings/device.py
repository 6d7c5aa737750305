"""The device that a profile asks for, and copies to it for which the host does not wait."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moe.errors import ProfileError
from moe.machine import usable_cpus
from moe.settings import Profile


def use_device(profile: Profile) -> torch.device:
    """The device that a profile asks for, a GPU by its number. Makes it the current device of this
    thread, and sets torch's number of threads.

    Raises:
        ProfileError: the device does not exist, or the profile asks for more threads than this
            process may use CPUs: they would wait for each other.
    """
    device = _chosen(profile)
    if device.type == "cuda":
        # Without a number it would be GPU 0 to other threads.
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)  # kernels are launched on the current device
    if profile.threads is not None:
        if profile.threads > (most := usable_cpus()):
            raise ProfileError(
                f"threads is {profile.threads}, and this process may use {most} CPUs; set it to "
                f"{most} or less, or to null"
            )
        torch.set_num_threads(profile.threads)
    return device


def to_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Copy an array, or a tensor in main memory, to a device without waiting for it; on the CPU,
    both share their memory."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if device.type == "cuda":  # torch keeps pinned memory until the device has read it
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _chosen(profile: Profile) -> torch.device:
    if profile.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if profile.device.startswith("cuda") and not torch.cuda.is_available():
        raise ProfileError(
            f"device is '{profile.device}', and torch finds no CUDA device on this machine; "
            "set device to cpu or auto"
        )
    device = torch.device(profile.device)
    if device.index is not None and device.index >= (count := torch.cuda.device_count()):
        raise ProfileError(
            f"device is '{device}', and torch finds {count} on this machine; set device to "
            f"cuda:{count - 1} or less, or to auto"
        )
    return device
