"""Whether sweeps are complete, as by `HYPOTHESIS_PROFILE=thorough`, or a part for each day."""

import os

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
