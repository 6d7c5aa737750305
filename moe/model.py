"""`MoE`: load a Mixture-of-Experts language model and generate with it.

from moe import MoE, SamplingParams

model = MoE.from_pretrained("examples/demo-model")
print(model.generate("def main():", SamplingParams(max_new_tokens=40))[0].text)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe.completion import Completion, StreamEvent, collect
from moe.engine import Engine
from moe.errors import RequestError
from moe.kv import Work
from moe.lanes import run_lanes
from moe.loader import LoadedModel, load_model
from moe.loading.progress import Report
from moe.plan import MemoryPlan
from moe.profile import LoadedProfile, Profile, load_profile
from moe.sampling import Sampler, SamplingParams
from moe.sequence import RunningSequence, check_priority
from moe.sharing import SharedMemory
from moe.text import Prompt, StopStrings
from moe.wave import Group
from routing import READERS

ProfileSource = str | Path | Mapping[str, Any] | Profile | LoadedProfile | None


class MoE:
    """A loaded model. Made by `from_pretrained`.

    Attributes:
        profile: the settings in force, with the origin of each.
        codec: the model's tokenizer and vocabulary rules.
        notices: what fell back or was turned off while loading, and why; one sentence each.
    """

    def __init__(self, loaded: LoadedModel, profile: LoadedProfile) -> None:
        self.profile = profile
        self.codec = loaded.codec
        self.notices = loaded.notices
        self._loaded = loaded
        self._trunk = loaded.trunk
        self._experts = loaded.experts
        self._close: Callable[[], object] = lambda: None
        if loaded.offloaded is not None:
            self._close = weakref.finalize(self, loaded.offloaded.close)

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | Path,
        profile: ProfileSource = None,
        *,
        device: str | None = None,
        progress: bool | Report = False,
        on_plan: Callable[[MemoryPlan], object] = lambda _: None,
        **overrides: Any,
    ) -> MoE:
        """Load a model from a directory or a Hugging Face hub id.

        Args:
            path_or_hub_id: directory with config.json and safetensors, or ``organisation/name``.
            profile: name of a profile, path of a YAML file, a mapping or a `Profile`.
            device: overrides ``device`` of the profile: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``.
            progress: True shows a bar on stderr; a function is called with a `LoadProgress` for
                every slice that is read.
            on_plan: called with the memory plan before anything is read.
            **overrides: keys of the profile, nested (``model={"dtype": "float32"}``).

        Raises:
            CheckpointError: files are missing, damaged or do not fit the configuration; lists all.
            UnsupportedModelError: the architecture is unknown or has nothing to take over.
            DoesNotFitError: there is not enough memory, by the memory plan; nothing was read.
            ProfileError: a setting is not valid.
        """
        settings = overrides if device is None else {**overrides, "device": device}
        loaded_profile = load_profile(profile, settings, overrides_origin="keyword")
        loaded = load_model(
            path_or_hub_id, loaded_profile.profile, progress=progress, on_plan=on_plan
        )
        return cls(loaded, loaded_profile)

    @property
    def config(self) -> Any:
        """The transformers configuration of the model."""
        return self._trunk.model.config

    @property
    def context_length(self) -> int | None:
        """Most tokens a sequence may have, prompt and new ones; None where nothing limits it."""
        return self._loaded.context_length

    @property
    def memory_plan(self) -> MemoryPlan:
        """What was planned before loading."""
        return self._loaded.memory_plan

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Continue one prompt or a batch of prompts of any lengths.

        Args:
            prompts: a string, a list of token ids or a list of chat messages; or a list of those.
            params: one for all prompts or one each; None takes the profile's ``generation``.

        Returns:
            Completions in order of the prompts, ``n`` for each.

        Raises:
            RequestError: a prompt or parameter is not valid; nothing has been run then.
        """
        return collect(self.stream(prompts, params))

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[StreamEvent, None, None]:
        """Like `generate`, one event for each new token of each sequence as it comes.

        Prompts are checked before this returns. Closing the iterator cancels what still runs.
        """
        engine = self.engine()
        groups = self._requests(prompts, params)
        for group in groups:
            engine.submit(group)
        return _events(engine, groups)

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits of every position of a sequence: ``(T, vocab_size)`` float32."""
        return self.batch_logits([token_ids])[0]

    @torch.inference_mode()
    def batch_logits(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits of sequences of any lengths, read together: ``(T_i, vocab_size)`` float32 each."""
        batch = [self.codec.encode(token_ids) for token_ids in sequences]
        for ids in batch:
            self._check_length(len(ids), 0)
        lanes = self._trunk.lanes(
            [Work(ids, self._trunk.new_cache(len(ids)), all_logits=True) for ids in batch]
        )
        run_lanes(lanes, self._experts.run)
        return [rows for lane in lanes for rows in lane.result()]

    def engine(self) -> Engine:
        """A step loop of its own over this model, for callers that drive the steps themselves."""
        profile = self.profile.profile
        pool = {"kv_tokens": self.memory_plan.kv_tokens, "kv_gib": None}
        memory = profile.memory.model_copy(update=pool)
        profile = profile.model_copy(update={"memory": memory})
        offloaded, shared = self._loaded.offloaded, None
        if offloaded is not None and profile.offload.borrow:
            shared = SharedMemory(offloaded.cache, self.memory_plan)
        return Engine(self._trunk, self._experts, profile, shared, self._loaded.expect)

    def request(
        self, prompt: Prompt, params: SamplingParams, salt: str = "", priority: int = 0
    ) -> Group:
        """Check one prompt and its parameters and make the sequences for an `engine`.

        Args:
            salt: requests with different salts never share known prefixes
                (``memory.prefix_tokens``).
            priority: in [-100, 100]; lower numbers go first, and waiting makes up for higher ones
                (``engine.priority_steps``).

        Raises:
            RequestError: the prompt or a parameter does not suit this model.
        """
        ids = self.codec.encode(prompt)
        self._check_length(len(ids), params.max_new_tokens)
        self._check_token_ids("logit_bias", params.logit_bias)
        check_priority(priority)
        if params.stop:
            self.codec.require_tokenizer("stop strings")
        stop_token_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids |= self.codec.eos_token_ids
        sequences = [
            RunningSequence(
                ids,
                Sampler(params, ids, self._loaded.logits_size, index),
                self.codec.decoder(),
                StopStrings(params.stop),
                stop_token_ids,
                params.max_new_tokens,
                salt,
                priority,
            )
            for index in range(params.n)
        ]
        return Group(sequences, prompt_logprobs=None if params.prompt_logprobs is None else [])

    def stats(self) -> dict[str, Any]:
        """Counters since loading or `reset_stats`, ready for JSON: bytes, and routing by layer.

        An expert that a step reads is counted once a layer, and ``..._by`` says for whom: for
        ``prefill`` (tokens of prompts), for ``decode`` (running sequences) or for ``both``.
        ``offload`` is what the cache of experts did, null where all of them are in memory.
        """
        bytes_by = self._experts.expert_bytes_read_by
        layers = self._experts.statistics.snapshot()
        offloaded = self._loaded.offloaded
        return {
            "weight_bytes": self._loaded.weight_bytes,
            "expert_bytes": self._experts.expert_bytes,
            "expert_bytes_read": sum(bytes_by.values()),
            "expert_bytes_read_by": bytes_by,
            "expert_loads_by": {
                reader: sum(layer["expert_loads_by"][reader] for layer in layers)
                for reader in READERS
            },
            "layers": layers,
            "offload": None if offloaded is None else offloaded.statistics(),
        }

    def reset_stats(self) -> None:
        self._experts.statistics.reset()
        if self._loaded.offloaded is not None:
            self._loaded.offloaded.cache.statistics.reset()

    def close(self) -> None:
        """Close the files of experts that are on disk, and note which ones were worth keeping.

        Also done when the model is garbage, and at the end of the program. Afterwards it cannot
        run.
        """
        self._close()

    def status(self) -> dict[str, Any]:
        """What runs how, and what does not and why, ready for JSON."""
        offloaded = self._loaded.offloaded
        return {
            "architecture": type(self._trunk.model).__name__,
            "device": str(self._trunk.device),
            "packing": {
                "enabled": self._loaded.packing.enabled,
                "why": self._loaded.packing.reason,
            },
            "fused": {
                "enabled": self._loaded.fused.enabled,
                "why": self._loaded.fused.reason,
            },
            "expert_kernel": {
                "name": self._loaded.backend.name,
                "reason": self._loaded.backend.reason,
            },
            "offload": None if offloaded is None else offloaded.status(),
            "notices": list(self.notices),
        }

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Group]:
        batch = _as_batch(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or self._default_params()] * len(batch)
        if len(params) != len(batch):
            raise RequestError(
                f"give one SamplingParams for all prompts or one each: got {len(params)} for "
                f"{len(batch)} prompts"
            )
        return [self.request(p, s) for p, s in zip(batch, params, strict=True)]

    def _check_length(self, num_prompt: int, num_new: int) -> None:
        limit = self.context_length
        if limit is not None and num_prompt + num_new > limit:
            raise RequestError(
                f"the prompt has {num_prompt} tokens and max_new_tokens is {num_new}, together "
                f"more than the context of {limit} tokens; shorten the prompt or lower "
                "max_new_tokens"
            )

    def _check_token_ids(self, name: str, token_ids: Iterable[int]) -> None:
        size = self._loaded.logits_size
        if (largest := max(token_ids, default=0)) >= size:
            raise RequestError(f"{name} names token {largest}; this model's ids end at {size - 1}")

    def _default_params(self) -> SamplingParams:
        return SamplingParams(**self.profile.profile.generation.model_dump())


def _events(engine: Engine, groups: list[Group]) -> Generator[StreamEvent, None, None]:
    places = {
        sequence: (prompt, sample)
        for prompt, group in enumerate(groups)
        for sample, sequence in enumerate(group.sequences)
    }
    while not engine.idle:
        for sequence, outcome in engine.step():
            if isinstance(outcome, Exception):
                raise outcome
            yield StreamEvent(*places[sequence], outcome, sequence.prompt_token_ids)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt becomes a batch of one; a batch is a sequence of strings or of sequences."""
    if isinstance(prompts, Sequence) and not isinstance(prompts, (str, bytes, bytearray)):
        if len(prompts) == 0:
            raise RequestError("no prompts were given; give at least one")
        if all(isinstance(prompt, Sequence) for prompt in prompts):
            return list(prompts)  # type: ignore[arg-type]
    return [prompts]  # type: ignore[list-item]
