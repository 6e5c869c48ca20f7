"""Freed memory stays for the next step."""

import platform

import pytest
from conftest import run_code

SCRIPT = """
import resource, torch
from engine.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(16 * 2**20)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.ones(1)
by_default = faults()
keep_freed_memory()
faults()
print(by_default, faults())
"""


def test_freed_memory_is_used_again():
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("the C library is not glibc")
    # glibc before 2.38 keeps aligned blocks that were freed in its tcache, and then it is chance
    # whether they are found again.
    by_default, kept = run_code(SCRIPT, GLIBC_TUNABLES="glibc.malloc.tcache_count=0").split()
    assert int(by_default) >= 8 * 64 // 2  # pages, if all are huge ones of 2 MiB
    assert int(kept) < int(by_default) / 8  # less than the pages of one tensor
