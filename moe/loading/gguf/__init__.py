"""GGUF files, llama.cpp's, as checkpoints."""
