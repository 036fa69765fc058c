"""The trajectory store: every trajectory of a run on disk, as JSON lines with an index.

Format and design: docs/design/015-trajectory-store-and-viewer.md; rules: docs/spec.md, section 14.
"""

from skyrl_fast.trajectory_store.reader import (
    StoredStep,
    StoredTrajectory,
    read_index,
    read_trajectories,
)

__all__ = ["StoredStep", "StoredTrajectory", "read_index", "read_trajectories"]
