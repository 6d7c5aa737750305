"""The step loop, who takes part in a step, and what it is computed on."""
