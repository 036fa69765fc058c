"""The score of SmolLM2 on held-out calls while it is trained: seeds, and what should not learn.

    python examples/bfcl/measure.py --base work

Runs one after the other; a finished run is read, not repeated. Prints a table, and writes
`runs/bfcl/scores.png` and `scores.json`. `--only` makes these kinds of runs and
reads the others where they are done.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this file may be started from anywhere

from examples.tiny_model.measure import Kind, Measured, main  # noqa: E402

SHUFFLED = "trainer.algorithm.advantage_estimator=examples.shuffled_rewards:shuffled"
KINDS = (
    Kind("trained", "LoRA", (42, 7, 1)),
    Kind(
        "supervised",
        "the demonstrations again, supervised",
        (42, 7, 1),
        script=HERE / "supervised.py",
    ),
    Kind("lr_0", "LoRA, learning rate 0", (42,), ("trainer.policy.optimizer_config.lr=0",)),
    Kind("shuffled", "LoRA, shuffled rewards", (42,), (SHUFFLED,)),
    Kind("weights", "all weights", (42,), (str(HERE / "weights.yaml"),)),
    Kind("gateway", "LoRA, through the gateway", (42,), ("--variant=gateway",)),
)

if __name__ == "__main__":
    main(Measured(HERE / "run.py", Path("runs/bfcl"), KINDS), __doc__)
