"""What an expert is, how small it is, and on which rank it lives.

`weights` makes nested bit planes of whole experts, `store` keeps them on disk so that any plane of
any expert can be read alone, `linear` is a linear layer made of planes.
"""
