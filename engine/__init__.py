import os  # all this before PyTorch, which reads the setting once

# Looks of a waiting thread before it sleeps, 0.1 ms. GNU's 300,000 triple a step where others use a core too; 0 adds a seventh.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
