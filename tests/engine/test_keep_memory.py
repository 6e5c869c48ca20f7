"""Freed memory stays: a process that takes and frees a large tensor again and again asks the kernel once."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from engine.memory import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    print("no glibc"); raise SystemExit
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work():
    for _ in range(20):
        torch.ones(16 * 2**20)  # 64 MiB
work()
before = faults()
work()
print(faults() - before)
"""


def page_faults(setting: str) -> str:
    run = subprocess.run([sys.executable, "-c", SCRIPT, setting], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_freed_memory_is_used_again():
    kept = page_faults("keep")
    if kept == "no glibc":
        pytest.skip("the C library is not glibc")
    assert int(kept) < 200 < int(page_faults("default"))
