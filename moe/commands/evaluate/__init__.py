"""`moe eval`: what a model and each policy costs in bits per byte."""
