"""Experiments that are no part of the product: papers' claims, and questions that are settled.

`python -m lab.NAME` prints a table, then one JSON line, as `python -m benchmarks.NAME` does. Pages
of what they found are in `lab/results`. The product and `benchmarks/` import nothing from here.
"""
