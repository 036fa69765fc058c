"""The score of SmolLM2 on held-out questions while it is trained: seeds, and what should not learn.

    python examples/reasoning_gym/measure.py --base work

Runs one after the other; a finished run is read, not repeated. Prints a table, and writes
`runs/reasoning_gym/scores.png` and `scores.json`. `--only` makes these kinds of runs and
reads the others where they are done.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this file may be started from anywhere

from examples.tiny_model.measure import Kind, Measured, main  # noqa: E402

KINDS = (
    Kind("trained", "LoRA", (42, 7, 1)),
    Kind("lr_0", "LoRA, learning rate 0", (42,), ("trainer.policy.optimizer_config.lr=0",)),
    Kind("others", "LoRA, rewards of another question", (42,), ("--variant=others",)),
    Kind("weights", "all weights", (42,), (str(HERE / "weights.yaml"),)),
    Kind("tries", "LoRA, two tries", (42,), ("--variant=tries",)),
)

if __name__ == "__main__":
    main(Measured(HERE / "run.py", Path("runs/reasoning_gym"), KINDS), __doc__)
