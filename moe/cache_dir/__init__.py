"""The cache directory: what processes of this user find out once, for later ones.

- `files`: small JSON files, read only if they are whole, this user's, and of the key asked for.
- `recall` (`proofs`): verdicts of a load, for loads of the same model by the same code.
- `Trials` (`trials`): how fast this machine was found to be, for a day.
- `keep_names` (`exported_names`): what transformers exports.

``MOE_PROOF_CACHE=DIRECTORY`` names another directory; empty, nothing is kept.
"""
