"""Tiny and random models of real architectures, for tests, benchmarks and first tries."""
