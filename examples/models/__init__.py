"""Tiny and random models of real architectures, for tests, benchmarks and first tries.

- `tiny`: a tiny random model of every architecture that the installed transformers knows.
- `random_models`: a random checkpoint of 1.7 billion parameters.
- `random_store`: a random store of Qwen3-30B-A3B's shape, 17 GB.
- `gguf_files`: GGUF files of small models, as llama.cpp's converter writes them.
- `loopback`: logical ranks in one process, for what tests and benchmarks try of several.
"""
