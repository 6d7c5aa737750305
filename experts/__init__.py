"""What an expert is, how small it is, and on which rank it lives.

Above `kernels` and `routing`. Empty so far: whole experts need no more than
`kernels.ExpertWeights`.
"""
