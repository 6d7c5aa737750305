"""`MoE`: load a Mixture-of-Experts language model and generate with it.

from moe import MoE, SamplingParams

model = MoE.from_pretrained("examples/demo-model")
print(model.generate("def main():", SamplingParams(max_new_tokens=40))[0].text)
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from experts.placement import Placement
from moe.completion import Completion, StreamEvent, collect, stream_events
from moe.engine.borrowing import kv_borrowing
from moe.engine.engine import Engine, StepLoop, StepRunner
from moe.engine.prefill_batch import SequenceGroup
from moe.engine.prefill_mode import LayerWork, RereadCost
from moe.engine.writer import Writer
from moe.errors import RankLostError, RequestError
from moe.expert_map import cache_counters, expert_activity, expert_choices, expert_layout
from moe.hooks import readings
from moe.kv.prefix_cache import PrefixCache
from moe.kv.prefix_store import PrefixStore
from moe.loaded import LoadedModel
from moe.loader import load_model
from moe.loading.memory_plan import GIB, MemoryPlan
from moe.loading.progress import Report
from moe.model_lock import ModelLock, plain_torch
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work
from moe.parallel.coordinator import Coordinator
from moe.parallel.engine import ParallelEngine
from moe.parallel.ranks import load_with_ranks
from moe.parallel.remote import RemoteRunner
from moe.parallel.worker import WorkerLoop
from moe.requests import Defaults, as_batch, check_length, make_group
from moe.sampling.params import SamplingParams
from moe.settings import MemorySettings, Profile
from moe.settings.profile import LoadedProfile, load_profile
from moe.speculate import Speculator
from moe.text.tokenizer import Prompt, is_chat

Session = Coordinator | WorkerLoop | None
"""The ranks of a launch, if this process is one of them."""
ProfileSource = str | Path | Mapping[str, Any] | Profile | LoadedProfile | None


class MoE:
    """A loaded model, made by `from_pretrained`. Threads may share it: one runs a step at a time.

    Each open stream, batch or `loop` takes keys and values up to the planned `memory.kv_tokens` by
    itself: for many requests at once, submit them to one `loop`, as the server does.

    Attributes:
        profile: the settings in force, with the origin of each.
        codec: the model's tokenizer and vocabulary rules.
        defaults: parameters that a request does not give.
        notices: what fell back or was turned off while loading, and why; one sentence each.
        backbone, experts: the model without its experts, and its MoE layers.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        profile: LoadedProfile,
        session: Session = None,
    ) -> None:
        self.profile = profile
        self.codec = loaded.codec
        self.defaults = Defaults(profile.profile.generation, loaded.sampling)
        self.notices = loaded.notices
        self.backbone = loaded.backbone
        self.experts = loaded.experts
        self._loaded = loaded
        self._session = session
        self._process = os.getpid()
        self._lock = ModelLock(loaded.backbone.device)
        memory = profile.profile.memory
        self._prefixes = _prefix_cache(loaded, loaded.memory_plan.prefix_tokens, memory)
        closing = ExitStack()
        self._close = weakref.finalize(self, closing.close)
        for part in (loaded.offloaded, session):
            if part is not None:
                closing.callback(part.close)
        if self._prefixes is not None:
            closing.callback(self._prefixes.close)

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
        load = partial(load_model, path_or_hub_id, progress=progress, on_plan=on_plan)
        with plain_torch():
            loaded, session = load_with_ranks(path_or_hub_id, loaded_profile.profile, load)
        return cls(loaded, loaded_profile, session)

    @property
    def config(self) -> Any:
        """The transformers configuration of the model."""
        return self.backbone.model.config

    @property
    def context_length(self) -> int | None:
        """Most tokens a sequence may have, prompt and new ones; None where nothing limits it."""
        return self._loaded.context_length

    @property
    def memory_plan(self) -> MemoryPlan:
        """The plan that was made before loading."""
        return self._loaded.memory_plan

    def expert_choices(self, token_ids: Sequence[int]) -> Iterator[list[list[list[int]]]]:
        """Read a text part by part; of each part, for each MoE layer and token the experts that the
        token goes to.

        Ask for a part between steps.

        Raises:
            RequestError: several ranks share the model.
        """
        if isinstance(self._session, Coordinator):
            raise RequestError("a text's experts are not shown where ranks share the model")
        return expert_choices(self.backbone, self.experts, token_ids, self._lock)

    @property
    def expert_wait_seconds(self) -> float:
        """Time for which steps on this rank have waited for experts on disk, since loading."""
        offloaded = self._loaded.offloaded
        return 0.0 if offloaded is None else offloaded.cache.statistics.stall_seconds

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Continue one prompt or a batch of prompts of any lengths.

        Args:
            prompts: a string, a list of token ids or a list of chat messages; or a list of those.
            params: one for all prompts or one each; they replace the profile's ``generation``
                as a whole. None takes the defaults (`params`).

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
        shown: Collection[int] = (),
    ) -> Generator[StreamEvent, None, None]:
        """Like `generate`, one event for each new token of each sequence as it comes.

        Prompts are checked before this returns. Closing the iterator cancels what still runs.

        Args:
            shown: special tokens that stay in the text (see `TextCodec.decoder`).
        """
        engine = self.loop()
        batch = as_batch(prompts, SamplingParams() if params is None else params)
        with plain_torch():
            groups = []
            for prompt, one in batch:
                ids, chat = self.codec.encode(prompt), is_chat(prompt)
                if params is None:
                    one = self.params(len(ids), chat=chat)
                groups.append(self.request(ids if chat else prompt, one, shown=shown, chat=chat))
        for group in groups:
            engine.submit(group)
        return stream_events(engine, groups, self._lock, self._check_open)

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits of every position of a sequence: ``(T, vocab_size)`` float32."""
        return self.batch_logits([token_ids])[0]

    @torch.inference_mode()
    def batch_logits(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits of sequences of any lengths, read together: ``(T_i, vocab_size)`` float32 each."""
        self._check_open()
        self._check_autoregressive("no logits of a next token exist")
        batch = [self.codec.encode(token_ids) for token_ids in sequences]
        for ids in batch:
            check_length(self._loaded, len(ids), 0)
        with self._lock():
            lanes = self.backbone.lanes(
                [Work(ids, self.backbone.new_cache(len(ids)), all_logits=True) for ids in batch]
            )
            run_lanes(lanes, self.experts.run)
        return [rows for lane in lanes for rows in lane.result()]

    @property
    def writer(self) -> Writer | None:
        """Writes the model's sequences in place of the sampler; None: it is autoregressive."""
        return self._loaded.writer

    def _check_autoregressive(self, why: str) -> None:
        """Raise `RequestError` if the model is not autoregressive."""
        if self.writer is not None:
            raise RequestError(
                f"{type(self.backbone.model).__name__} is not autoregressive, so {why}; it can "
                "generate (MoE.generate, moe generate, moe serve)"
            )

    def _check_open(self) -> None:
        if not self._close.alive:
            raise RequestError("the model is closed; load it again")
        if os.getpid() != self._process:
            raise RequestError(
                f"the model was loaded by process {self._process}, and process {os.getpid()} is a "
                "fork without its threads; load it there, or share it among threads"
            )

    def params(self, num_prompt: int, *, chat: bool, **said: Any) -> SamplingParams:
        """The parameters of a request: ``said``, and the defaults for the rest.

        Args:
            num_prompt: tokens of the prompt.
            chat: the prompt is a conversation.
            **said: fields of `SamplingParams`; None: take the default.
        """
        return self.defaults.params(chat=chat, room=self.room_for(num_prompt), **said)

    def room_for(self, num_prompt: int) -> int:
        """New tokens that context and memory have room for after a prompt, at least 1."""
        profile, plan = self.profile.profile, self.memory_plan
        kv_tokens = plan.kv_tokens
        if isinstance(self._session, Coordinator):
            kv_tokens = max(self._session.kv_tokens.values())
        longest = plan.longest_sequence(_pool(profile, kv_tokens), num_prompt)
        limits = [longest, self.context_length]
        room = min(limit for limit in limits if limit is not None) - num_prompt
        if self.writer is not None:
            room -= room % self.writer.unit
        return max(room, 1)

    def loop(self) -> StepLoop:
        """A new step loop over this model and all its ranks, for callers that drive it."""
        self._check_open()
        if isinstance(self._session, Coordinator):
            return ParallelEngine(
                self._session,
                self._planning_engine,
                continue_on_loss=self.profile.profile.parallel.on_rank_loss == "continue",
            )
        if self.writer is None:
            return self.engine()
        return self._engine(self.writer.runner(self.backbone, self.experts))

    def engine(self, *, drafts: bool = True) -> Engine:
        """A step loop over this rank only.

        Args:
            drafts: False: without speculation, whatever the profile says.
        """
        self._check_open()
        self._check_autoregressive("its tokens do not follow one by one")
        return self._engine(speculator=self._loaded.speculation.speculator if drafts else None)

    def _engine(
        self, runner: StepRunner | None = None, speculator: Speculator | None = None
    ) -> Engine:
        profile = self.profile.profile
        borrowed = kv_borrowing(self._loaded.offloaded, self.memory_plan, profile.offload)
        return Engine(
            self.backbone,
            self.experts,
            self._as_planned(self.memory_plan.kv_tokens),
            borrowed,
            self._loaded.make_order,
            speculator,
            runner,
            self._prefixes,
        )

    def _planning_engine(self, kv_tokens: int) -> Engine:
        """An engine that only plans, for another rank or this one (`RankScheduler`)."""
        return Engine(
            self.backbone,
            self.experts,
            self._as_planned(kv_tokens),
            make_order=self._loaded.make_order,
            runner=RemoteRunner(),
            prefixes=_prefix_cache(self._loaded, min(self.memory_plan.prefix_tokens, kv_tokens)),
        )

    def _as_planned(self, kv_tokens: int) -> Profile:
        """The profile, with what the memory plan has decided."""
        profile, plan = self.profile.profile, self.memory_plan
        pool = {"kv_tokens": _pool(profile, kv_tokens), "kv_gib": None}
        memory = profile.memory.model_copy(update=pool)
        prefill = profile.prefill.model_copy(update={"wave_tokens": plan.wave_tokens})
        return profile.model_copy(update={"memory": memory, "prefill": prefill})

    @property
    def rank(self) -> int:
        """This process among those of its launch that share the model; the user talks to rank 0."""
        return self._session.link.rank if isinstance(self._session, WorkerLoop) else 0

    def serve_rank(self) -> None:
        """Unless `rank` is 0: do what rank 0 orders, until it closes its model.

        Raises:
            RankLostError: rank 0 is lost.
        """
        assert isinstance(self._session, WorkerLoop), "only ranks other than 0 are workers"
        self._session.serve()

    def on_rank_loss(self, tell: Callable[[RankLostError], object]) -> None:
        """Call ``tell``, in another thread, if a lost rank ends the launch.

        The process exits a few seconds later.
        """
        if isinstance(self._session, Coordinator):
            self._session.links.on_loss(tell)

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        salt: str = "",
        priority: int = 0,
        shown: Collection[int] = (),
        *,
        chat: bool = False,
        ending: Callable[[], Callable[[str], bool]] | None = None,
    ) -> SequenceGroup:
        """Check one prompt and its parameters and make the sequences for an `engine`.

        Args:
            salt: requests with different salts never share known prefixes
                (``memory.prefix_tokens``).
            priority: in [-100, 100]; lower numbers go first, and a waiting request moves forward
                (``engine.priority_steps``).
            shown: special tokens that stay in the text (see `TextCodec.decoder`).
            chat: the prompt is a conversation, and the text is an answer that does not continue its
                last message: it may lose its first space.
            ending: makes a function for each sequence that is told each new text, in the thread of
                the `engine`, and says whether the sequence ends with it.

        Raises:
            RequestError: the prompt or a parameter does not suit this model.
        """
        return make_group(
            *(self._loaded, prompt, params, self.room_for, salt, priority, shown),
            chat=chat,
            ending=ending,
        )

    def stats(self) -> dict[str, Any]:
        """Counters since loading or `reset_stats`, ready for JSON: bytes, and routing by layer.

        An expert that a step reads is counted once a layer, and ``..._by`` says for what: for
        ``prefill`` (tokens of prompts), for ``decode`` (running sequences) or for ``both``.
        ``offload``: what the cache of experts did; null if all of them are in memory.
        ``speculation``: how many drafts were accepted; null without drafts. ``images``: pictures
        that towers encoded, and those whose rows were kept; null if the model reads none.
        ``parallel``: what every rank has sent; null on one rank. The rest is of this rank.
        """
        session = self._session
        parallel = session.statistics() if isinstance(session, Coordinator) else None
        return self._loaded.stats() | {"parallel": parallel}

    def expert_layout(self) -> dict[str, Any]:
        """Bits of each expert and the ranks that hold it, by layer; see `moe.expert_map`."""
        return expert_layout(self.experts.layers, self._loaded.offloaded, self._placements)

    def expert_activity(self) -> dict[str, Any]:
        """Tokens that each expert of each layer got, and where it is (see `moe.expert_map`);
        counters of the cache, of drafts by their source, and of ranks, null where there are none.
        """
        offloaded, speculator = self._loaded.offloaded, self._loaded.speculation.speculator
        placements, ranks = self._placements, None
        if placements and isinstance(self._session, Coordinator):
            ranks = self._session.statistics()["ranks"]
        return {
            "layers": expert_activity(self.experts.statistics, offloaded, placements),
            "cache": None if offloaded is None else cache_counters(offloaded),
            "drafts": None if speculator is None else speculator.report.by_mode(),
            "ranks": ranks,
        }

    @property
    def _placements(self) -> Sequence[Placement]:
        """The placement of each MoE layer on ranks; empty on one rank."""
        if not isinstance(self._session, Coordinator) or len(self._session.links.ranks) < 2:
            return ()
        return self._session.worker.placements

    def reset_stats(self) -> None:
        self._loaded.reset_stats()
        if isinstance(self._session, Coordinator):
            self._session.reset_statistics()

    def close(self) -> None:
        """Close the files of experts on disk, and save the hot set (``offload.hot_set``).

        Also done at the end of a ``with`` block, when the model is garbage, and at the end of the
        program. A closed model cannot run.
        """
        self._close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a loaded model cannot be pickled or copied: it has open files, threads and compiled "
            "code; call MoE.from_pretrained where it is needed, or share it among threads"
        )

    def __enter__(self) -> MoE:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def status(self) -> dict[str, Any]:
        """Return what runs how, what is off and why; ready for JSON."""
        session = self._session
        parallel = session.status() if isinstance(session, Coordinator) else None
        return self._loaded.status() | {"parallel": parallel, "sampling": self.defaults.origins}


def _pool(profile: Profile, kv_tokens: int) -> int:
    """Tokens of sequences that fit, where each reading of a token has keys and values."""
    return max(kv_tokens // readings(profile), 1)


def _prefix_cache(
    loaded: LoadedModel, most_tokens: int, memory: MemorySettings | None = None
) -> PrefixCache | None:
    """None if the profile wants none, or prompts cannot be cut.

    Args:
        memory: says where prefixes are kept on disk; None: nowhere.
    """
    backbone, offloaded = loaded.backbone, loaded.offloaded
    if not most_tokens or not backbone.can_cut:
        return None
    miss_ratio = None if offloaded is None else offloaded.miss_ratio
    work = LayerWork.of(backbone.model, loaded.experts.layers)
    cost = RereadCost(work, loaded.experts, miss_ratio)
    store = None
    if memory is not None and memory.prefix_dir is not None and loaded.prefix_key:
        root, most = Path(memory.prefix_dir).expanduser(), int(memory.prefix_dir_gib * GIB)
        store = PrefixStore(root, loaded.prefix_key, most)
    return PrefixCache(
        most_tokens,
        recurrent=backbone.recurrent,
        reread=cost,
        store=store,
        new_cache=backbone.new_cache,
    )
