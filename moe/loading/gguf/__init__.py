"""GGUF files, the format of llama.cpp, as checkpoints: header, configuration, directory, tensors."""
