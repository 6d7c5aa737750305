"""The transformers model with its seam taken over: lanes, packed attention, the KV cache, MoE
layers."""
