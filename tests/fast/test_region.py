"""Tensors in one region: none lies on another, holes join, a forked process can go on, and the region stays as wide as a step."""

import pytest
import torch
from conftest import keep_tensors_together, run_code
from random_models import needs_compiler, unlimited

from fast import build

BEGIN = """
import os, random, threading, torch, fast
assert fast.keep_tensors_together(torch.device("cpu"))
random.seed(1)
first = torch.empty(2**16)
begin = first.data_ptr()
del first

def end(x):  # of this tensor, in bytes from the region's begin
    return x.data_ptr() + x.nbytes - begin
"""

WHOLE = """
held = []
for step in range(3000):
    if random.random() < 0.5 or not held:
        held.append((step, torch.full((random.randint(1, 2**16),), step)))  # of 8 bytes each: both sides of the 64 KiB
    else:
        step, x = held.pop(random.randrange(len(held)))
        assert (x == step).all()
        del x
assert all((x == step).all() for step, x in held)
held.clear()
assert torch.empty(2**28).data_ptr() == begin  # 1 GiB: all holes are one
"""

WIDTH = """
widest, place, kept, moments = 0, 0, [], []
for step in range(300):
    width = random.randint(1, 2**10)
    batch = []
    for layer in range(20):
        batch += [torch.empty(width, 256), torch.empty(width, 768), torch.empty(width, 1024)]
        kept.append(torch.empty(100))  # what is small and stays is elsewhere
        if step == 0:
            moments.append(torch.empty(2**18))  # what is large and stays lies between what dies
        del batch[random.randrange(len(batch))]
        place = max(place, *map(end, batch))
    widest = max(widest, 20 * width * (256 + 768 + 1024) * 4)
    random.shuffle(batch)
    while batch:
        batch.pop()
# A third of a layer is freed before the next one comes, so even with holes a step needs little more than all it ever asked for.
assert 0 < place <= 1.1 * (widest + 20 * 2**20), (place, widest)
"""

FORK = """
stop = threading.Event()
def work():
    while not stop.is_set():
        torch.empty(2**18)
thread = threading.Thread(target=work)
thread.start()
for child in range(50):
    if not (pid := os.fork()):
        x = torch.full((2**18,), child)
        os._exit(not (x == child).all())
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
thread.join()
"""


@needs_compiler
@unlimited
@pytest.mark.parametrize("script", [WHOLE, WIDTH, FORK], ids=["whole", "width", "fork"])
def test_the_region(script):
    run_code(BEGIN + script)


@needs_compiler
@unlimited
@pytest.mark.parametrize("mode", ["1", "2"])
def test_none_where_the_system_promises_no_more_memory_than_it_has(mode, tmp_path):
    """The region's addresses would count as memory in use there, even those that are never touched."""
    (tmp_path / "mode").write_text(f"{mode}\n")
    source = (
        (build.FOLDER / "memory.cpp")
        .read_text()
        .replace("/proc/sys/vm/overcommit_memory", str(tmp_path / "mode"))
    )
    (tmp_path / "memory.cpp").write_text(source)
    script = f"import pathlib, torch, fast; fast.build.FOLDER = pathlib.Path({str(tmp_path)!r})"
    script += "; print(fast.keep_tensors_together(torch.device('cpu')))"
    assert run_code(script, TORCH_EXTENSIONS_DIR=str(tmp_path)).strip() == str(mode == "1")


def test_none_for_a_gpu_or_without_a_compiler(monkeypatch):
    assert not keep_tensors_together(torch.device("cuda"))
    monkeypatch.setattr(build, "library", lambda source: None)
    assert not keep_tensors_together(torch.device("cpu"))
