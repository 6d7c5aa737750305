"""One file a question: `python -m benchmarks.NAME [--quick]` prints a table, then one JSON line."""

import moe as moe  # before any of them imports torch: it says how long torch's threads spin
