"""CUDA code on a machine without a GPU, with fake tensors (tests/cuda/); graphs of the compiler.

CONTRIBUTING.md says what this checks.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import HANGS

from data import Collate, _one_ahead
from fast import build
from model import ModelConfig, SummedLoss, Translator

HERE = Path(__file__).parent / "cuda"
IDS = {"pad": 0, "bos": 1, "eos": 2}
SIZES = dict(
    d_model=32, nhead=4, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=64, dropout=0.0
)
MAY_WAIT = ("decode", "validation")


@pytest.fixture(scope="session")
def checked(tmp_path_factory) -> dict[str, dict]:
    """What tests/cuda/checks.py found, by name."""
    if torch.version.cuda or build.why_not():
        pytest.skip("needs a PyTorch built for CPUs, and g++")
    guard = tmp_path_factory.mktemp("guard") / "guard.so"
    folder = Path(torch.__file__).parent
    words = [*build.compiler(), "-std=c++20", "-shared", "-fPIC", HERE / "guard.cpp", "-o", guard]
    words += ["-isystem", folder / "include", f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu"]
    subprocess.run(words, check=True)
    environment = os.environ | {
        "CUDA_GUARD": str(guard),
        "PYTHONPATH": str(HERE.parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, HERE / "checks.py"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


def test_everything_on_the_gpu_and_no_waiting(checked):
    assert len(checked) > 12
    for name, line in checked.items():
        assert (line["error"], line["mixed"]) == ("", []), name
        if name.startswith("decode"):  # 9 tokens, and now and then the question whether all end
            assert 0 < len(line["waits"]) <= 3, name
        elif not name.startswith(MAY_WAIT):
            assert line["waits"] == [], name


# ---------------------------------------------------------------- data


def test_batches_come_in_order_from_the_thread(monkeypatch):
    def numbers():
        for number in range(10**6):
            pulled.append(number)
            yield number

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    pulled = []
    ahead = _one_ahead(numbers(), torch.device("cuda", 0))
    assert [next(ahead) for _ in range(5)] == list(range(5))
    ahead.close()  # the thread ends with it
    assert 5 <= len(pulled) <= 6


# ---------------------------------------------------------------- torch.compile


def test_the_loss_is_one_graph_for_all_shapes():
    """As in train.py --compile, but for the compiler itself."""
    torch.manual_seed(0)
    model = Translator(ModelConfig(60, 60, **SIZES)).train()
    collate = Collate(IDS, IDS)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(SummedLoss(model, 0.1), dynamic=True, backend=backend, fullgraph=True)
    for source, target in ((5, 7), (20, 3), (18, 40), (33, 20), (50, 50)):
        batch = collate([(list(range(3, 3 + source)), list(range(3, 3 + target)))] * source)
        compiled(*batch.inputs)[0].backward()
    assert 1 <= len(graphs) <= 2
