"""Run a module of SkyRL with the replacements: `python -m skyrl_fast.integrations.skyrl`.

python -m skyrl_fast.integrations.skyrl [--mode compat] MODULE [ARGUMENTS ...]
"""

from __future__ import annotations

import argparse
import runpy
import sys

from skyrl_fast.integrations.skyrl.switch import MODES, install


def main() -> None:
    """Install, then run the module as `python -m MODULE` would."""
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_fast.integrations.skyrl",
        description="Run a module with skyrl_fast installed in SkyRL.",
    )
    parser.add_argument("--mode", choices=MODES, default="compat", help="mode of `install`")
    parser.add_argument("module", help="module to run, such as skyrl.train.entrypoints.main_base")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the module")
    args = parser.parse_args()
    try:
        print(install(args.mode), file=sys.stderr)
    except ImportError as error:
        parser.exit(1, f"{error}\n")
    sys.argv = [args.module, *args.arguments]
    runpy.run_module(args.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
