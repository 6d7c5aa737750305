"""Several processes (ranks) run one model: each its own sequences, and each a share of the experts.

Rank 0 plans every step for all ranks (`engine`), tells them (`wire`) and gathers their tokens; rows
travel to experts by the dispatcher's own exchanges (`group`). A watchdog (`watch`) notices within
bounded time who is lost.
"""
