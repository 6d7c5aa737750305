"""Hundreds of ranks that share the experts of a model, simulated."""
