"""Several processes (ranks) run one model: each has its own sequences and a share of the experts.

- `Launch` (launch): what a launcher says about this process. `rendezvous` (membership) turns it
  into a `Membership`: who the ranks are, and connections to them (transport).
- `Coordinator` (coordinator), on rank 0: leads all ranks through steps and into new groups. It
  talks over `WorkerLinks`, and the others over a `CoordinatorLink`.
- `RankWorker` (worker): what each rank computes: its sequences, and experts for all. The ranks meet
  at every MoE layer over a `WatchedExchange` (group). `WorkerLoop` obeys the coordinator.
- `ParallelEngine` (engine): the step loop of rank 0. For each rank it has a `RankScheduler`, whose
  orders that rank's `EngineMirror` executes (remote).
- `Watchdog` (watchdog): notices within bounded time which rank is lost.
- `ExpectedLoad` (expected_load): what planned tokens say about the experts' load, for rebalancing.

`load_with_ranks` (ranks) puts all this together.
"""
