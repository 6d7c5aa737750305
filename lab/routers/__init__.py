"""A laboratory for routers: the same small model, text and seeds, with one router after another.

`LabForCausalLM` is a Qwen3-MoE-like decoder whose router is a choice of its configuration
(`variants.VARIANTS` names them); ``python -m lab.routers.train`` trains one. Importing this
package registers the model with transformers' Auto classes, so import it before loading one::

    import lab.routers
    from moe import MoE

    model = MoE.from_pretrained("DIR")

It also shows that an architecture of one's own needs nothing in `moe`: experts that dispatch
through transformers' registry are enough.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from lab.routers.configuration import LabConfig
from lab.routers.modeling import LabForCausalLM

__all__ = ["LabConfig", "LabForCausalLM"]

AutoConfig.register(LabConfig.model_type, LabConfig)
AutoModelForCausalLM.register(LabConfig, LabForCausalLM)
