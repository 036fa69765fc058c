"""What a process of pytest does before it imports torch."""

import atexit
import gc
import os

# A thread that waits for its part of a loop would take a core from another of pytest's processes:
# half of the time of the tests of ops. OpenMP reads it when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
gc.disable()  # until all modules are imported, see `pytest_collection`

is_worker = False  # of xdist


@atexit.register  # registered before torch and others do, so called last
def end_worker() -> None:
    """End it as it is: the interpreter would visit all modules again, 4 seconds in each."""
    if is_worker:
        os._exit(0)
