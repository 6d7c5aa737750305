"""Weights from a checkpoint or a store, whole or as planes, into the model."""
