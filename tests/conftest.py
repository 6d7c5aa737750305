"""What holds for every test: no network, no settings from the caller's environment, no deadlines."""

from __future__ import annotations

import os

from hypothesis import settings

from moe.profile_sources import ENVIRONMENT_PREFIX, OTHER_VARIABLES

# Before any test imports transformers or huggingface_hub, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
for name in list(os.environ):
    if name.startswith(ENVIRONMENT_PREFIX) and name not in OTHER_VARIABLES:
        del os.environ[name]

# A shared machine makes the time of a single example meaningless. In CI the examples are the same
# each time, so that a failure there is about the change.
settings.register_profile("moe", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("moe")
