"""From a launch and a profile to ranks that have loaded one model.

They meet before they load, because they share the machine's memory and cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from experts.dispatch import RowKind
from moe.engine.borrowing import kv_borrowing
from moe.engine.pinning import pinned_cpus
from moe.engine.runner import HALVES, ModelRunner
from moe.loaded import LoadedModel
from moe.loading.hub import experts_per_token, resolve_model
from moe.loading.memory_plan import GIB
from moe.machine import memory_available, memory_nodes, physical_cores, stay_on
from moe.network.stored_embedding import backbone_dtype
from moe.parallel.coordinator import Coordinator, WorkerLinks
from moe.parallel.expected_load import expected_load_of
from moe.parallel.group import own_address, use_interface
from moe.parallel.launch import LOOPBACK, Launch
from moe.parallel.membership import WATCH, Membership, identity, rendezvous
from moe.parallel.remote import EngineMirror
from moe.parallel.watchdog import COMPILE_S
from moe.parallel.worker import DISPATCHER, CoordinatorLink, RankWorker, WorkerLoop
from moe.settings import Profile

WHOLE = (
    "every rank holds all experts, and only shares the work: moe convert writes a store, of which "
    "each rank holds its part"
)


def load_with_ranks(
    model: str | Path, profile: Profile, load: Callable[[Profile, int], LoadedModel]
) -> tuple[LoadedModel, Coordinator | WorkerLoop | None]:
    """Load a model as one of the ranks of this launch; None if there is no other rank.

    Args:
        load: loads, given the profile of one rank and the number of ranks.

    Raises:
        LaunchError: ranks are missing or differ.
        RankLostError: a rank was lost while loading.
        ProfileError: the launcher's variables make no sense.
    """
    ranks = meet(model, profile)
    if ranks is None:
        return load(profile, 1), None
    try:
        loaded = load(ranks.share(profile), ranks.size)
        whole = [] if loaded.offloaded is not None else [WHOLE]
        loaded = replace(loaded, notices=[*loaded.notices, *ranks.launch.warnings, *whole])
        return loaded, ranks.session(loaded, profile, resolve_model(model))
    except BaseException as error:
        ranks.fail(error)
        raise


def parts_of(nodes: Sequence[frozenset[int]], count: int) -> list[frozenset[int]]:
    """The CPUs of each of ``count`` ranks that share memory nodes: whole nodes, or, with more ranks
    than nodes, one that it shares with others."""
    starts = [index * len(nodes) // count for index in range(count + 1)]
    return [
        frozenset().union(*nodes[start : max(end, start + 1)]) for start, end in pairwise(starts)
    ]


def meet(model: str | Path, profile: Profile) -> Ranks | None:
    """The ranks of this launch; None if there is one, or ``parallel.enabled`` is false.

    Raises:
        LaunchError: ranks are missing or differ.
        ProfileError: the launcher's variables make no sense.
    """
    settings = profile.parallel
    launch = Launch.from_environment(os.environ) if settings.enabled else None
    if launch is None:
        return None
    members = rendezvous(launch, identity(profile, resolve_model(model)), settings.start_timeout_s)
    if launch.on_one_machine:
        use_interface(LOOPBACK)
    else:
        use_interface(own_address(next(iter(members.connections[WATCH].values())).socket))
    if _on_cuda(profile):
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    links: WorkerLinks | CoordinatorLink
    timeout_s = settings.timeout_s
    progress_s = max(timeout_s, COMPILE_S) if _on_cuda(profile) else timeout_s
    if launch.rank == 0:
        links = WorkerLinks(members, timeout_s, progress_s)
    else:
        links = CoordinatorLink(members, launch.rank, timeout_s, progress_s)
    return Ranks(launch, members, links)


@dataclass(frozen=True)
class Ranks:
    """The ranks of this launch, before and while they load.

    Attributes:
        launch: of this process.
        membership: who the ranks are.
        links: of this process to the others.
    """

    launch: Launch
    membership: Membership
    links: WorkerLinks | CoordinatorLink

    @property
    def size(self) -> int:
        return self.launch.size

    def share(self, profile: Profile) -> Profile:
        """The profile of one rank: its part of the machine's cores and memory. On a machine with
        several memory nodes, this process then stays on its own, so its weights are near; with
        ``engine.pin_threads`` it stays on its share of the physical cores."""
        threads = self.membership.threads(self.launch.rank)
        sharers = self.membership.sharers(self.launch.rank)
        nodes = physical_cores() if profile.engine.pin_threads else memory_nodes()
        if not _on_cuda(profile) and len(sharers) > 1 and len(nodes) > 1:
            parts = parts_of(nodes, len(sharers))
            stay_on(cpus := parts[sharers.index(self.launch.rank)])
            threads = max(1, len(cpus) // parts.count(cpus))
            if profile.engine.pin_threads:
                threads = sum(core <= cpus for core in nodes)
        threads = min(threads, profile.threads or torch.get_num_threads())
        own = profile.offload.model_copy(update={"hot_set": False})  # its share says what is hot
        changed: dict[str, object] = {"threads": threads, "offload": own}
        if not _on_cuda(profile):
            neighbours = self.membership.neighbours(self.launch.rank)
            given, free = profile.memory.device_gib, memory_available()
            if given is None and free is not None:
                memory = {"device_gib": free / neighbours / GIB}
                changed["memory"] = profile.memory.model_copy(update=memory)
        return profile.model_copy(update=changed)

    def session(
        self, loaded: LoadedModel, profile: Profile, path: Path
    ) -> Coordinator | WorkerLoop:
        """This rank with its model of a path; rank 0 waits until all others have theirs."""
        worker, kv_tokens = self._worker(loaded, profile), loaded.memory_plan.kv_tokens
        if isinstance(self.links, CoordinatorLink):
            return WorkerLoop(self.links, worker, kv_tokens)
        counts = [layer.num_experts for layer in loaded.experts.layers]
        expected = expected_load_of(path, loaded.backbone.model.config, counts)
        return Coordinator(self.links, worker, profile.parallel, kv_tokens, expected)

    def fail(self, error: BaseException) -> None:
        """This rank cannot load its model: tell rank 0."""
        if isinstance(self.links, CoordinatorLink):
            self.links.fail(error)

    def _worker(self, loaded: LoadedModel, profile: Profile) -> RankWorker:
        speculator, offloaded = loaded.speculation.speculator, loaded.offloaded

        def new_mirror() -> EngineMirror:
            borrowing = kv_borrowing(offloaded, loaded.memory_plan, profile.offload)
            cpus, _ = pinned_cpus(profile, loaded.backbone.device)
            halves = next(iter(HALVES.filled(profile)), None)
            runner = ModelRunner(loaded.backbone, loaded.experts, speculator, cpus, halves)
            if loaded.writer is not None:
                runner = loaded.writer.runner(loaded.backbone, loaded.experts)
            return EngineMirror(runner, loaded.logits_size, loaded.structures, borrowing)

        return RankWorker(
            self.launch.rank,
            self.membership.store,
            loaded.experts,
            new_mirror,
            profile.parallel,
            self.links.heartbeat,
            offloaded,
            on_cuda=_on_cuda(profile),
            rows=_rows_of(loaded) if _on_cuda(profile) and loaded.experts.layers else None,
            carry=next(iter(DISPATCHER.filled(profile)), None),
        )


def _rows_of(loaded: LoadedModel) -> RowKind:
    model = loaded.backbone.model
    hidden = loaded.experts.layers[0].hidden_size
    return RowKind(hidden, experts_per_token(model.config), backbone_dtype(model))


def _on_cuda(profile: Profile) -> bool:
    return profile.device != "cpu" and torch.cuda.is_available()
