"""What a profile or a request asks for that canvases cannot do, refused by name."""

from __future__ import annotations

import random
from dataclasses import replace

from transformers import PreTrainedModel

from moe.errors import ProfileError, RequestError
from moe.hooks import methods_on
from moe.methods.diffusion import DiffusionSettings
from moe.sampling.params import SamplingParams
from moe.settings import Profile

_ONE_BY_ONE = (
    *("structure", "min_tokens", "thinking", "prompt_logprobs", "logit_bias"),
    *("top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Fields of `SamplingParams` that choose tokens one after the other."""


def refuse(network: PreTrainedModel, profile: Profile) -> None:
    """Raise `ProfileError` for a setting that models which write canvases cannot follow."""
    name, drafts = type(network).__name__, profile.speculation.mode
    wrong = [
        ("speculation.mode", drafts, "off") if drafts not in ("off", "auto") else None,
        ("memory.kv_policy", policy, "null") if (policy := profile.memory.kv_policy) else None,
    ]
    for method in methods_on(profile):
        if method.readings > 1:
            key = method.on_by(profile)
            wrong.append((key, f"on ({method.name})", "its default"))
    for key, value, instead in filter(None, wrong):
        raise ProfileError(
            f"{key} is {value}, and {name} writes canvases, for which that does not exist; "
            f"set {key}: {instead}"
        )


def refuse_rules(settings: DiffusionSettings, only_own: str) -> None:
    """Raise `ProfileError` for rules of refinement that this model cannot follow.

    Args:
        only_own: why nothing but the model's own procedure can be had; empty if more can.
    """
    own = DiffusionSettings().refresh
    if settings.refresh != own and only_own:
        raise ProfileError(
            f"methods.diffusion.refresh is {settings.refresh}, and {only_own}; set "
            f"methods.diffusion.refresh: {own}"
        )


def checked(params: SamplingParams, only_own: str) -> SamplingParams:
    """The parameters of a request, with a seed: a rank that takes over writes the same again.

    Args:
        only_own: as for `refuse_rules`.

    Raises:
        RequestError: a parameter chooses tokens one after the other, or is not possible here.
    """
    changed = {"temperature": params.temperature == 0, "logprobs": params.logprobs is not None}
    for name in (name for name, asked in changed.items() if asked and only_own):
        raise RequestError(
            f"{name} is not possible with this model (got {getattr(params, name)!r}): {only_own}; "
            "leave it out"
        )
    neutral = SamplingParams()
    for name in _ONE_BY_ONE:
        value = getattr(params, name)
        if value != getattr(neutral, name):
            raise RequestError(
                f"{name} is not possible with this model, which writes canvases of tokens at "
                f"once; leave it out (got {value!r:.80})"
            )
    return params if params.seed is not None else replace(params, seed=random.getrandbits(63))
