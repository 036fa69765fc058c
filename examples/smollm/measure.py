"""The reward of SmolLM2 before and after training, over seeds, and with a learning rate of 0.

    python examples/smollm/measure.py --base work

Runs one after the other; a finished run is read, not repeated. Prints a table, and writes
`runs/smollm/scores.png` and `scores.json`. `--only` makes these kinds of runs and reads the others
where they are done.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this file may be started from anywhere

from examples.tiny_model.measure import Kind, Measured, main  # noqa: E402

KINDS = (
    Kind("trained", "all weights", (42, 7)),
    Kind("lr_0", "learning rate 0", (42, 7), ("trainer.policy.optimizer_config.lr=0",)),
)

if __name__ == "__main__":
    main(Measured(HERE / "run.py", Path("runs/smollm"), KINDS), __doc__)
