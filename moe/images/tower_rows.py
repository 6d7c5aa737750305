"""`TowerRows`: what a model's towers made of pictures, kept from one prompt to the next.

A chat sends its pictures again with every turn. The rows that a tower makes of them depend on their
pixels after the processor, and on nothing of the text: so they are kept by these.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_METHOD = "get_image_features"  # transformers' name, in every class that has towers
_KEPT = 8
"""Sets of pictures whose rows are kept."""


class TowerRows:
    """Calls the towers of a model, or gives what they made of the same pictures before.

    Not safe for several threads: `ImageReader` reads one prompt at a time.

    Attributes:
        encoded: calls for which a tower ran.
        reused: calls that were answered from what is kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self.encoded = self.reused = 0
        self._kept: OrderedDict[bytes, Any] = OrderedDict()
        for name, module in model.named_modules():
            if hasattr(module, _METHOD) and not _is_around(module):
                setattr(module, _METHOD, self._remembering(name, getattr(module, _METHOD)))

    def _remembering(self, name: str, encode: Callable[..., Any]) -> Callable[..., Any]:
        def rows(*given: Any, **named: Any) -> Any:
            digest = hashlib.blake2b(name.encode(), digest_size=16)
            for part in _parts((given, sorted(named.items()))):
                digest.update(part)
            key = digest.digest()
            if key in self._kept:
                self.reused += 1
            else:
                self.encoded += 1
                self._kept[key] = encode(*given, **named)
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]

        return rows


def _is_around(module: nn.Module) -> bool:
    """Whether a part of a module has towers, which it calls."""
    return any(hasattr(part, _METHOD) for part in module.modules() if part is not module)


def _parts(value: Any) -> Iterator[bytes]:
    """All that tells one set of arguments from another."""
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)} ".encode()
        yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, list | tuple):
        yield f"{len(value)} ".encode()
        for each in value:
            yield from _parts(each)
    else:
        yield f"{value!r} ".encode()
