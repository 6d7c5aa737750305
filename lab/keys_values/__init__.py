"""Lossy policies and codes of keys and values, tried on the shipped model."""
