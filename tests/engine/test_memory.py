"""Freed memory stays for the next step; the fewest micro-batches that fit, or the error itself."""

import platform
from unittest.mock import Mock

import pytest
import torch
from conftest import run_code
from hypothesis import given
from hypothesis import strategies as st

from engine.memory import fewest_micro_batches

CUDA = torch.device("cuda")


def device_of(size: int, work: int, seen: list):
    def trial(micro_batches: int) -> None:
        seen.append(micro_batches)
        if -(-work // micro_batches) > size:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return trial


@given(st.integers(1, 1000), st.integers(1, 5000))
def test_the_fewest_powers_of_two(size, work):
    seen = []
    micro_batches = fewest_micro_batches(device_of(size, work, seen), CUDA, largest=8192)
    assert -(-work // micro_batches) <= size and (
        micro_batches == 1 or -(-work // (micro_batches // 2)) > size
    )
    assert seen == [2**i for i in range(len(seen))] and seen[-1] == micro_batches


def test_what_never_fits_is_an_error():
    seen = []
    with pytest.raises(torch.OutOfMemoryError):
        fewest_micro_batches(device_of(0, 10, seen), CUDA, largest=8)
    assert seen == [1, 2, 4, 8]


@pytest.mark.parametrize(
    "words",
    [  # of errors that are no OutOfMemoryError
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_a_full_card_has_other_words_for_it(words):
    trial = Mock(side_effect=[RuntimeError(words), None])
    assert fewest_micro_batches(trial, CUDA) == 2


@pytest.mark.parametrize("error", [ZeroDivisionError(), RuntimeError("shapes (1, 2) and (3, 4)")])
def test_other_errors_are_not_taken_for_it(error):
    with pytest.raises(type(error)):
        fewest_micro_batches(Mock(side_effect=error), CUDA)


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
