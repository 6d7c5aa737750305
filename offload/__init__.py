"""Where experts live and how they come near: tiers, cache, transfer, prefetch.

Above `experts`. Empty so far: every expert is resident.
"""
