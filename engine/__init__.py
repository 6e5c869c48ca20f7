import os  # this comes before PyTorch, whose threads read the setting when they begin

# A waiting thread looks 10,000 times (0.1 ms), then sleeps. GNU's 300,000 triple a step's time where others use a core too;
# 0 adds a seventh on a quiet machine.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
