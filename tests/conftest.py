"""Settings of the whole test run."""

import os

# Small matrices gain nothing from threads, and threads that spin for each other are many times slower where another job
# shares the cores. Set before torch is imported, and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
