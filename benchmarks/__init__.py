"""One file a question: `python -m benchmarks.NAME [--quick]` prints a table and, last, one JSON line."""
