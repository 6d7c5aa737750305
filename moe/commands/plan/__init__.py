"""``moe plan``: what a model takes and how fast it decodes, before it is read.

- `command`: the command for one process; `rank_command` and `ranks`: for several ranks.
- `decode_speed`: the estimate, from `DecodeSizes`, `Bandwidths` and a `Locality`.
- `speeds`: measures bandwidths; `traced_routing`: the `Locality` of a calibration's trace.
"""
