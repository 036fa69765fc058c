"""A cluster run tells its own checkpoint from one of the same step that was set aside."""

from pathlib import Path

from skyrl_fast.train.checkpoint.local import STATE
from skyrl_fast.train.cluster import identity_of


def test_a_step_that_is_written_again_is_another_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step_000003"
    checkpoint.mkdir()
    (checkpoint / STATE).write_text('{"step": 3, "of": "before"}')
    before = identity_of(checkpoint)
    assert identity_of(checkpoint) == before
    checkpoint.rename(tmp_path / "step_000003.later")
    checkpoint.mkdir()
    (checkpoint / STATE).write_text('{"step": 3, "of": "now"}')
    assert identity_of(checkpoint) != before
