"""Drafts by parts of a model: which part drafts best, and at the size of 30 billion."""
