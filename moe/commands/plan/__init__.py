"""``moe plan``: predict a model's memory and decode speed before it is loaded.

- `command`: the command for one process; `rank_command` and `ranks`: for several ranks.
- `contexts`: context against experts, and what policies on keys and values would save.
- `decode_speed`: the estimate, from `DecodeSizes`, `Bandwidths` and a `Locality`.
- `speeds`: measures bandwidths; `traced_routing`: the `Locality` of a calibration's trace.
"""
