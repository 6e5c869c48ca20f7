"""Large tensors in one region: none overlap, holes join, children work, and it stays small."""

import torch
from conftest import forked, keep_tensors_together
from random_models import needs_compiler, unlimited

from fast import build

BEGIN = """
import os, random, threading, torch, fast
assert fast.keep_tensors_together(torch.device("cpu"))
random.seed(1)
first = torch.empty(2**16)
begin = first.data_ptr()
del first
"""

NO_OVERLAP = """
held = []
for step in range(3000):
    if random.random() < 0.5 or not held:
        # Up to 512 KiB: tensors above 64 KiB are in the region, others are not.
        held.append((step, torch.full((random.randint(1, 2**16),), step)))
    else:
        step, x = held.pop(random.randrange(len(held)))
        assert (x == step).all()
        del x
assert all((x == step).all() for step, x in held)
held.clear()
assert torch.empty(2**28).data_ptr() == begin  # 1 GiB: all holes have become one
"""

SMALL = """
def end(x):
    return x.data_ptr() + x.nbytes - begin  # bytes

widest, place, kept, moments = 0, 0, [], []
for step in range(150):
    width = random.randint(1, 2**10)
    batch = []
    for layer in range(20):
        batch += [torch.empty(width, 256), torch.empty(width, 768), torch.empty(width, 1024)]
        kept.append(torch.empty(100))  # small tensors that stay are elsewhere
        if step == 0:
            moments.append(torch.empty(2**18))  # large ones that stay lie between those that die
        del batch[random.randrange(len(batch))]
        place = max(place, *map(end, batch))
    widest = max(widest, 20 * width * (256 + 768 + 1024) * 4)
    random.shuffle(batch)
    while batch:
        batch.pop()
# A third of a layer is freed before the next is made: even with holes, a step needs little more
# than all that it ever asked for.
assert 0 < place <= 1.1 * (widest + 20 * 2**20), (place, widest)
moments.clear()
"""

FORK = """
stop = threading.Event()
def work():
    while not stop.is_set():
        torch.empty(2**18)
thread = threading.Thread(target=work)
thread.start()
for child in range(30):
    if not (pid := os.fork()):
        x = torch.full((2**18,), child)
        os._exit(not (x == child).all())
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
thread.join()
"""


@needs_compiler
@unlimited
def test_the_region(tmp_path):
    (tmp_path / "script.py").write_text(BEGIN + NO_OVERLAP + SMALL + FORK)
    forked(tmp_path / "script.py", cwd=tmp_path)


OVERCOMMIT = """
import pathlib, sys, torch, fast
for mode in "21":
    fast.build.FOLDER = pathlib.Path(mode)
    print(fast.keep_tensors_together(torch.device("cpu")))
"""


@needs_compiler
@unlimited
def test_none_where_the_system_promises_no_more_memory_than_it_has(tmp_path):
    """With overcommit_memory = 2 all addresses of the region would count as memory in use."""
    code = (build.FOLDER / "memory.cpp").read_text()
    for mode in "12":
        folder = tmp_path / mode
        folder.mkdir()
        (folder / "mode").write_text(f"{mode}\n")
        changed = code.replace("/proc/sys/vm/overcommit_memory", str(folder / "mode"))
        (folder / "memory.cpp").write_text(changed)
    (tmp_path / "script.py").write_text(OVERCOMMIT)
    output = forked(tmp_path / "script.py", cwd=tmp_path, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert output.split() == ["False", "True"]


def test_none_for_a_gpu_or_without_a_compiler(monkeypatch):
    assert not keep_tensors_together(torch.device("cuda"))
    monkeypatch.setattr(build, "library", lambda source: None)
    assert not keep_tensors_together(torch.device("cpu"))
