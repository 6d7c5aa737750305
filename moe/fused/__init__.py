"""Fused decode steps: transformers' layers run by a few compiled calls, where that is proven right.

A decoder layer is described from its modules and one observed pass, the description is run by
compiled code on a CPU and recorded on a GPU, and this is used only for models for which a probe at
load time reproduces transformers' own forward.
"""
