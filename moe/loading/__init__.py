"""From a name to a model in memory: hub, configuration, files, tensors, tokenizer."""
