"""Search-R1 offline: create a corpus and serve it; a tiny agent learns to search it twice.

    python examples/search_r1/run.py                    short passages; the agent learns
    python examples/search_r1/run.py --variant long     passages of thousands of tokens; only
                                                        shows that no row is longer than allowed
    python examples/search_r1/run.py --resume           resumes after an interruption
    python examples/search_r1/run.py trainer.seed=7     settings, as in `skyrl-fast train`

The retrieval server is started on a free port of loopback, checked for health, and stopped at the
end, however the run ends. Existing data and models are not created again. Results are in
runs/search_r1, or runs/search_r1_long.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this file may be started from anywhere

from examples.tiny_model.recipe import Recipe, main, make_once  # noqa: E402

LONG_FILLER_WORDS = 2000  # on average: three passages can be longer than a prompt may be
LONG_MAX_LENGTH = 4096 + 512  # of the model: the longest prompt and an answer


def prepare(folder: Path, *, seed: int = 0) -> None:
    """Create `data` and `model` in the folder if they are missing."""
    from examples.search_r1.make_data import make_data
    from examples.search_r1.warm_start import warm_start

    make_once(folder / "data", lambda path: make_data(path, seed=seed))
    make_once(folder / "model", lambda path: warm_start(folder / "data", path, seed=seed))


def prepare_long(folder: Path, *, seed: int = 0) -> None:
    """Create them with long passages, and a model for their length."""
    from examples.search_r1.make_data import make_data
    from examples.search_r1.warm_start import warm_start

    make_once(
        folder / "data",
        lambda path: make_data(path, seed=seed, filler_words=LONG_FILLER_WORDS),
    )
    make_once(
        folder / "model",
        lambda path: warm_start(folder / "data", path, seed=seed, max_length=LONG_MAX_LENGTH),
    )


@contextmanager
def serve(folder: Path) -> Iterator[list[str]]:
    """Serve the corpus on a free port; yield the setting with its address."""
    from examples.search_r1.retrieval.launch import retrieval_server

    # The environment's client must not use a proxy for this machine.
    os.environ["NO_PROXY"] = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1")))
    corpus, log_file = folder / "data/corpus.jsonl", folder / "retrieval.log"
    with retrieval_server(corpus, log_file=log_file) as url:
        print(f"retrieval server: {url}", flush=True)
        yield [f"environment.skyrl_gym.search.search_url={url}"]


RECIPES = {
    "short": Recipe(Path("runs/search_r1"), HERE / "offline.yaml", prepare, serve),
    "long": Recipe(Path("runs/search_r1_long"), HERE / "offline_long.yaml", prepare_long, serve),
}

if __name__ == "__main__":
    sys.exit(main(RECIPES, __doc__))
