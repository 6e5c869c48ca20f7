import os  # all this before PyTorch, whose threads read the setting when they begin

# Looks of a waiting thread before it sleeps, 0.1 ms. GNU's 300,000 triple a step where others use a core too; 0 adds a seventh.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
