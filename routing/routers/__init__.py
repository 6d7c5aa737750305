"""From a router's numbers to a `Routing`: the rules by which MoE models choose their experts.

`RouterRule` is what nearly every released model does; one description and one implementation of it
serve probing, prediction and policies. Beside it: rules with other numbers of experts
(`relu_routing`, `size_routing`), scores that neighbours take part in, and what balances routers in
training (`bias_step`, `sinkhorn`).
"""

from routing.routers.bias import Step, bias_step, dual_rate
from routing.routers.neighbours import mixed_scores, neighbour_scores
from routing.routers.relu import relu_routing
from routing.routers.rule import GroupScore, RouterRule, Score
from routing.routers.sinkhorn import Plan, balanced_routing, sinkhorn
from routing.routers.sizes import size_routing

__all__ = [
    "GroupScore",
    "Plan",
    "RouterRule",
    "Score",
    "Step",
    "balanced_routing",
    "bias_step",
    "dual_rate",
    "mixed_scores",
    "neighbour_scores",
    "relu_routing",
    "sinkhorn",
    "size_routing",
]
