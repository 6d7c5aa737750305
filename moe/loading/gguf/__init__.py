"""GGUF files, llama.cpp's format, as checkpoints: header, configuration, directory, tensors."""
