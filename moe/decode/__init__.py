"""Decode steps by a description: compiled on a CPU, recorded as CUDA graphs on a GPU, proven equal
or not used."""
