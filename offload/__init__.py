"""Where experts live and how they come near: a cache of slots, filled from disk as layers ask.

Above `experts`. `offloaded` puts it together for a model, `experts` runs a layer.
"""
