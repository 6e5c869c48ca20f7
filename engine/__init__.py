import os
import sys

from engine.errors import explain_failed_import

VERSION = "0.1.0"

# OpenMP reads this setting once, so it is made before PyTorch is imported. A thread that waits
# spins this often (0.1 ms) before it sleeps. With GNU's 300,000 a training step beside another busy
# process takes 2.3 times as long; with 0, a step alone takes a seventh longer.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# FAST_CPU=avx2 uses the processor as if it had AVX2 and nothing newer, to compare or to test. These
# are the settings of PyTorch, oneDNN and MKL; for our own code, cpuinfo() in devices.py hides the
# rest.
if os.environ.get("FAST_CPU") == "avx2":
    os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
    os.environ.setdefault("MKL_ENABLE_INSTRUCTIONS", "AVX2")

# Every script imports engine first, so this is set when it imports PyTorch.
sys.excepthook = explain_failed_import
