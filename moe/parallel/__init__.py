"""Several processes (ranks) run one model: each its own sequences, and each a share of the experts.

Ranks find each other (`launch`, `start`, `roll`) and load (`ranks`). Rank 0 plans every step for
all (`engine`, a `part` for each) and says so (`orders`); each computes its own (`mirror`,
`station`) and serves experts to all, meeting the others at every layer (`lockstep`) over exchanges
(`group`), in two halves where that pays (`halves`, `overlap`). `leader` and `follower` are the two
ends of what is said (`wire`), `leading` and `following` what is done about it. `watch` notices
within bounded time who is lost.
"""
