import os  # before PyTorch is imported: its OpenMP reads the setting once

# By default GNU's threads look 300,000 times before they sleep: beside a busy process a step took
# 2.3 times as long.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault(
        "GOMP_SPINCOUNT", "10000"
    )  # looks, 0.1 ms; 0: steps a seventh longer (docs/performance.md)
