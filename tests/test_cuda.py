"""CUDA code on a machine without a GPU: fake tensors in a process of its own (tests/cuda/), kernels compiled for cards that are
not there. What this cannot show is in docs/cuda.md."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import HANGS

from data import BucketSampler, Collate, Rows, batches_of, one_ahead
from fast import build
from model import ModelConfig, SummedLoss, Translator

HERE, CPU = Path(__file__).parent / "cuda", torch.device("cpu")
IDS = {"pad": 0, "bos": 1, "eos": 2}
SIZES = dict(
    d_model=32, nhead=4, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=64, dropout=0.0
)
WRONG = ["wrong device", "question", "slow copy"]  # on purpose
MAY_WAIT = ("decode", "validation")


@pytest.fixture(scope="session")
def checked(tmp_path_factory) -> dict[str, dict]:
    """What tests/cuda/checks.py found, by name."""
    if torch.version.cuda or build.why_not():
        pytest.skip("needs a PyTorch built for CPUs, and g++")
    guard = tmp_path_factory.mktemp("guard") / "guard.so"
    folder = Path(torch.__file__).parent
    words = [
        *build.compiler(),
        "-std=c++20",
        "-shared",
        "-fPIC",
        "-isystem",
        folder / "include",
        HERE / "guard.cpp",
    ]
    words += [f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu", "-o", guard]
    subprocess.run(words, check=True)
    environment = {
        **os.environ,
        "CUDA_GUARD": str(guard),
        "PYTHONPATH": str(HERE.parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, HERE / "checks.py"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


# ---------------------------------------------------------------- fake tensors


def test_everything_on_the_gpu_and_no_waiting(checked):
    faults = {
        name: [line["error"], line["mixed"], [] if name.startswith(MAY_WAIT) else line["waits"]]
        for name, line in checked.items()
        if name not in WRONG
    }
    assert len(faults) == 23 and {name: found for name, found in faults.items() if any(found)} == {}
    assert all(
        len(line["waits"]) <= 3 for name, line in checked.items() if name.startswith("decode")
    )  # of 9 steps


def test_the_pretence_notices_what_is_wrong(checked):
    device, question, copy = (checked[name] for name in WRONG)
    assert device["error"].startswith("FakeTensorDeviceMismatchError")
    assert "_local_scalar_dense" in question["waits"][0] and "_to_copy" in copy["waits"][-1]


# ---------------------------------------------------------------- data


class Pairs:
    """As data.TokenizedPairs, with random tokens."""

    def __init__(self, count: int = 600, vocabulary: int = 50):
        random = np.random.default_rng(3)
        lengths = np.clip(random.lognormal(2, 0.6, (2, count)), 1, 40).astype(int)
        self.lengths = dict(zip(("source", "target"), lengths))
        self.tokens = {
            side: [random.integers(3, vocabulary, n) for n in self.lengths[side]]
            for side in self.lengths
        }

    def __getitems__(self, rows) -> tuple[Rows, Rows]:
        return tuple(
            Rows(np.concatenate([self.tokens[side][row] for row in rows]), self.lengths[side][rows])
            for side in ("source", "target")
        )


def set_up(**sizes) -> tuple[Translator, BucketSampler, Iterator]:
    """A small model without dropout, a sampler and batches of made-up pairs."""
    torch.manual_seed(0)
    model, pairs = Translator(ModelConfig(50, 50, **SIZES | sizes)).train(), Pairs()
    sampler = BucketSampler(pairs.lengths, 600, seed=1)
    return model, sampler, batches_of(pairs, sampler, Collate(IDS, IDS), 0, CPU)


def inputs_of(batch) -> tuple:
    return batch.src, batch.src_pad, batch.tgt_in, batch.real, batch.tgt_out


def test_batches_come_in_order_from_the_thread(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    pulled = []
    ahead = one_ahead((pulled.append(n) or n for n in range(10**6)), torch.device("cuda", 0))
    assert [next(ahead) for _ in range(5)] == list(range(5))
    ahead.close()  # the thread ends with it
    assert 5 <= len(pulled) <= 6


# ---------------------------------------------------------------- torch.compile


def test_the_loss_is_one_graph_for_all_shapes():
    """As train.py --compile has it, but for the compiler itself."""
    model, sampler, _ = set_up()
    batches = batches_of(Pairs(), sampler, Collate(IDS, IDS, pad_multiple=16), 0, CPU)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(SummedLoss(model, 0.1), dynamic=True, backend=backend, fullgraph=True)
    for number, batch in enumerate(next(batches) for _ in range(18)):
        model.set_dropout(0.1 * (number >= 12))
        compiled(*inputs_of(batch))[0].backward()
        assert 1 <= len(graphs) <= (2 if number < 12 else 3)  # one more where dropout begins
