"""``moe plan``: predict a model's memory and decode speed before it is loaded.

- `command`: the command for one process; `rank_command` and `ranks`: for several ranks.
- `decode_speed`: the estimate, from `DecodeSizes`, `Bandwidths` and a `Locality`.
- `speeds`: measures bandwidths; `traced_routing`: the `Locality` of a calibration's trace.
"""
