"""Experts: their weights as bit planes, the store that holds them, and the ranks that share them.

- bit planes: an expert's weights in 8 bits, so arranged that the first 2, 3 or 4 bits alone are a
  coarser version of it, a *prefix* (`weights`). Weights that were quantised before keep their
  values (`grid`). `ExpertKey` names an expert, `ExpertShape` its sizes, and `QuantizedLinear`
  (`linear`) is a linear layer made of planes.
- store: a directory with the experts of all layers (`store`), a file for each (`layer_file`). Any
  prefix of any expert is one range of bytes; the manifest says what there is (`manifest`).
- safetensors files, checked when read and written all or nothing (`safetensors_io`).
- compression: how many bits each expert keeps, and codes that lose little (`compress`).
- placement: which ranks hold which experts (`placement`).
- dispatch: tokens to the ranks that serve their experts, and results back (`dispatch`).
"""
