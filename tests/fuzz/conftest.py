"""The profile of long runs."""

import os

from hypothesis import settings

settings.register_profile("fuzz", max_examples=int(os.environ.get("FUZZ_EXAMPLES", "2000")), deadline=None)
if os.environ.get("FUZZ") == "1":
    settings.load_profile("fuzz")
