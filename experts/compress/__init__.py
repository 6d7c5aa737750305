"""Compression: which experts keep how many bits, and codes that lose little at those bits.

`gptq` compensates rounding on calibration inputs, prefix by prefix; `damage` predicts what each
choice of bits costs; `allocation` chooses within a budget, exactly; `calibrated` puts a layer of
experts together.
"""
