"""One file a question: `python -m benchmarks.NAME [--quick]` prints a table, then one JSON line."""
