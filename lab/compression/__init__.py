"""Bits shared out among experts (PMQ), and routers fitted anew (EAC-MoE)."""
