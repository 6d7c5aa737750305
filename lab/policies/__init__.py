"""Lossy routing policies: the experts they leave out, and the quality they cost."""
