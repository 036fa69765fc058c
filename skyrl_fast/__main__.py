"""Entry point of `python -m skyrl_fast`, the command `skyrl-fast`."""

from __future__ import annotations

import sys

from skyrl_fast.cli import main

if __name__ == "__main__":
    sys.exit(main())
