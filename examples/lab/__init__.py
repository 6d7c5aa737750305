"""A small configurable MoE model for experiments with routers; ``examples/lab`` trains it.

Importing registers it with transformers' Auto classes, so that a checkpoint of it loads like any
other, without code of its own.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from examples.lab.configuration import LabConfig
from examples.lab.modeling import LabForCausalLM

__all__ = ["LabConfig", "LabForCausalLM"]

AutoConfig.register(LabConfig.model_type, LabConfig)
AutoModelForCausalLM.register(LabConfig, LabForCausalLM)


# ---- A laboratory for routers: the same small model, text and seeds, with one router after
# another.
