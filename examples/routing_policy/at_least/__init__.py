"""Tokens leave out experts that weigh less than a share of all their weight, except the heaviest.

    moe eval MODEL --text FILE --set lossless=false --set 'routing.policies=["at_least:0.1"]'

This module is imported whenever a profile is read, so it imports no torch.
"""

from moe.hooks import Method

METHOD = Method(
    about="tokens leave out experts below a share of their weight",
    price="fewer experts; moe eval says what it costs your model",
    choices={"routing.policies": {"at_least": "at_least.policy:LeastShare.parse"}},
    changes_answers="leaves out experts",
)
