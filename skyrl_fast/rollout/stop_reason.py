"""What ended a trajectory; stored in the trajectory and in its last step."""

from __future__ import annotations

STOP = "stop"  # the environment was done, after a response that ended by itself
LENGTH = "length"  # a prompt over max_input_length, or the last response was truncated
MAX_TURNS = "max_turns"  # the environment was not done
TIMEOUT = "timeout"  # the trajectory's deadline
ENV_ERROR = "env_error"  # the environment raised, hung, or its messages fit no chat template
ENGINE_ERROR = "engine_error"  # the engine refused or failed a request
# Reason of one request, never of a trajectory: it ended for a weight update, and its response
# continues.
INTERRUPTED = "interrupted"
