"""Training batches: ragged rows of steps, their construction and splitting."""

from skyrl_fast.batch.concatenation import concatenate
from skyrl_fast.batch.from_trajectories import batch_from_trajectories
from skyrl_fast.batch.padded import PaddedBatch
from skyrl_fast.batch.step_batch import StepBatch

__all__ = ["PaddedBatch", "StepBatch", "batch_from_trajectories", "concatenate"]
