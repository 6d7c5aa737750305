"""A transformers model whose experts have been taken over, and its MoE layers.

- `seam`: takes the weights out of the experts modules and sends their tokens to us instead.
- `backbone.Backbone`: the model without its experts. It makes lanes of `packed_pass.Work`, new
  tokens of sequences.
- `lanes.Lane`: one forward pass that sleeps at MoE layers; `lanes.run_lanes` drives several of them
  so that they meet there. What a lane waits with is an `lanes.ExpertCall`.
- `moe_layer.MoELayers`: policies, dispatch, experts and combination for all calls at a layer.
- `packed_pass.PackedCache`: what transformers' modules see of several of them in one pass, packed
  into one row; `attention` reads it for them.
"""
