"""The captured step on a CPU: as itself, and by a stand-in for a CUDA graph that repeats the operations recorded.

What only a GPU can show is `benchmarks.gpu`'s to check.
"""

import gc
import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from random_models import BOS, EOS, make_batch, make_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import decoding
from decoding import output_limit
from fast import captured
from fast.captured import CapturedSteps, Graphs, round_up


def lively_model(norm_first=False, dtype=torch.float64, seed=0, end=4.0):
    model = make_model(seed, scale=3.0, end=end, norm_first=norm_first, dropout=0.1)
    return model.to(dtype).eval().requires_grad_(False)


def outputs(model, batch, steps=None):
    """Greedy search; plain without `steps`."""
    limits = output_limit((~batch[1]).sum(1), model.config.max_length)
    return decoding.greedy(model, *batch, limits, BOS, EOS, steps and steps.start)


def same(model, batch, steps) -> bool:
    return torch.equal(outputs(model, batch, steps), outputs(model, batch))


class Recording(TorchDispatchMode):
    """The operations of a step, and their repetition on the same buffers: what a CUDA graph is, kernel by kernel.

    A number that Python computed is repeated as it was, and a tensor made outside the step is the same one each time.
    """

    def __init__(self, step):
        super().__init__()
        self.operations = []
        with self:
            step()

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        made = operation(*arguments, **(named or {}))
        self.operations.append((operation, arguments, named or {}, made))
        return made

    def replay(self) -> None:
        now = {}  # tensors of this time in the place of those recorded

        def current(tensor):
            return now.get(id(tensor), tensor)

        for operation, arguments, named, recorded in self.operations:
            arguments, named = tree_map_only(torch.Tensor, current, (arguments, named))
            now |= zip(map(id, tree_leaves(recorded)), tree_leaves(operation(*arguments, **named)))

    def described(self) -> list:
        """Operations with shapes and numbers; tensors that were there before the step by their addresses."""
        mine = {id(tensor) for *_, made in self.operations for tensor in tree_leaves(made)}

        def describe(tensor):
            kind = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
            return kind if id(tensor) in mine else (*kind, tensor.data_ptr())

        return [
            (str(operation), *tree_map_only(torch.Tensor, describe, rest))
            for operation, *rest in self.operations
        ]


class Rehearsal:
    """In the place of `Graphs`."""

    def __init__(self, steps: CapturedSteps):
        self.steps, self.captured = steps, 0

    @contextmanager
    def stream_of_its_own(self):
        yield

    def capture(self, step) -> Recording:
        self.captured += 1
        values = [
            value for buffers in self.steps.buffers.values() for value in vars(buffers).values()
        ]
        kept = [(value, value.clone()) for value in values if torch.is_tensor(value)]
        recording = Recording(step)
        for tensor, value in kept:  # to capture is not to run
            tensor.copy_(value)
        return recording


def rehearse(model) -> CapturedSteps:
    """With recordings where a GPU has graphs."""
    steps = CapturedSteps(model)
    steps.graphs = Rehearsal(steps)
    return steps


@pytest.mark.parametrize("make", [CapturedSteps, rehearse])
@pytest.mark.parametrize("norm_first", [False, True])
def test_equals_the_plain_step_in_float64(make, norm_first, monkeypatch):
    model, batch = lively_model(norm_first), make_batch(0, 70, 110)
    left, select = [], captured.CapturedCache.select
    monkeypatch.setattr(
        captured.CapturedCache, "select", lambda *arguments: (left.append(1), select(*arguments))
    )
    tokens = outputs(model, batch, make(model))
    assert torch.equal(tokens, outputs(model, batch))
    lengths = (tokens != EOS).sum(
        1
    )  # a test of rows that leave at many lengths, over several stretches of the cache
    assert left and tokens.size(1) > 128 and len(set(lengths.tolist())) > 10 and lengths.max() > 64


@pytest.mark.parametrize("rows", [1, 8, 9, 300])
def test_any_number_of_rows(rows):
    model = lively_model(end=6.0)
    assert same(model, make_batch(rows, rows, 12), rehearse(model))


def test_under_autocast_as_the_plain_step():
    """The same products in bf16, so that about the same rows differ from float32."""
    model, batch = lively_model(dtype=torch.float32, end=6.0), make_batch(0, 60, 30)
    with torch.autocast("cpu", torch.bfloat16):
        steps = CapturedSteps(model)
        tokens, plain = outputs(model, batch, steps), outputs(model, batch)
    layer = steps.model.transformer.decoder.layers[0]
    assert layer.linear1.weight.dtype == steps.dtype == torch.bfloat16
    assert layer.norm1.weight.dtype == steps.model.output.weight.dtype == torch.float32
    # Of 40 words two are within 2⁻⁸ of the best one's logit in a few of a hundred steps; before the first one all is alike.
    width = min(8, tokens.size(1), plain.size(1))
    assert (tokens[:, :width] == plain[:, :width]).double().mean() > 0.8


def test_batches_of_any_shape_one_after_the_other():
    model = lively_model()
    steps = rehearse(model)
    batches, made = [make_batch(*shape) for shape in ((0, 40, 90), (1, 9, 20), (2, 40, 88))], []
    for batch in batches:
        assert same(model, batch, steps)
        made.append(steps.graphs.captured)
    assert made[0] < made[1] and made[-1] <= 16
    for batch in batches:
        assert same(model, batch, steps)
    assert steps.graphs.captured - made[-1] <= 2  # the shapes are known


@pytest.mark.parametrize("make", [CapturedSteps, rehearse])
def test_shapes_are_thrown_away_all_at_once(make, monkeypatch):
    """Graphs share a work space that goes with any of them, and a pool that cannot be captured into once they are gone."""
    monkeypatch.setattr(captured, "MOST_SHAPES", 2)
    model, kept, graphs = lively_model(end=6.0), [], []
    steps = make(model)
    monkeypatch.setattr(captured, "Graphs", lambda device: Rehearsal(steps))
    for rows in (40, 20, 10, 20):
        assert same(model, make_batch(rows, rows, 20), steps)
        kept.append(len(steps.buffers))
        graphs.append(steps.graphs)
    assert kept == [1, 2, 1, 2]
    assert graphs[0] is graphs[1] and graphs[2] is graphs[3]
    assert (graphs[1] is graphs[2]) == (make is CapturedSteps)  # on a CPU: None, before and after
    assert [round_up(rows, 8) for rows in (1, 8, 9, 100, 256, 257)] == [8, 8, 16, 128, 256, 512]


@pytest.mark.parametrize(
    "free, crowded", [(20, False), (14, True)]
)  # of 100; 10 more are PyTorch's own
def test_buffers_go_when_little_memory_is_left(free, crowded, monkeypatch):
    steps = rehearse(lively_model())
    assert not steps.is_crowded()  # on a CPU
    steps.device = torch.device("cuda")
    for name, told in {
        "mem_get_info": (free, 100),
        "memory_reserved": 30,
        "memory_allocated": 20,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, told=told: told)
    assert steps.is_crowded() == crowded


def test_what_nan_left_behind_does_not_stay():
    model, batch = lively_model(), make_batch(0, 10, 20)
    steps = rehearse(model)
    plain = outputs(model, batch, steps)
    (buffers,) = steps.buffers.values()
    with torch.inference_mode():
        for tensor in (buffers.own, buffers.source):
            tensor.fill_(math.nan)
    assert torch.equal(outputs(model, batch, steps), plain)


# They ask the device something, make a tensor whose size it decides, or draw.
FORBIDDEN = "_local_scalar_dense item nonzero unique masked_select resize repeat_interleave rand dropout bernoulli"


@pytest.mark.parametrize("rows, length", [(16, 64), (16, 128), (8, 192)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_steps_ask_for_the_same_operations_on_the_same_addresses(rows, length, dtype):
    """All that a capture requires: no number from Python that changes, no question to the device, no new buffer."""
    model = lively_model(dtype=torch.float32)
    # Not in inference mode, where attention and the like would be seen as one operation.
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        steps = CapturedSteps(model)
        buffers, recordings = steps.start(*make_batch(0, 16, 110), 192).buffers, []
        for position in range(3):
            buffers.position.fill_(position)
            recordings.append(Recording(lambda: steps.step(buffers, rows, length)))
    first, *others = recordings
    assert all(other.described() == first.described() for other in others)
    names = [str(operation) for operation, *_ in first.operations]
    assert len(names) > 100 and not [
        name for name in names if any(word in name for word in FORBIDDEN.split())
    ]


class Refuses(Rehearsal):
    def capture(self, step):
        raise RuntimeError("CUDA error: operation not permitted\nwhen stream is capturing")


class Confuses(Rehearsal):
    """A graph that chooses a wrong token, and leaves keys and values that are no numbers."""

    def capture(self, step):
        (buffers,) = self.steps.buffers.values()

        def replay():
            buffers.own[:, :, :, :, buffers.position] = math.nan
            buffers.chosen.fill_(7)

        return SimpleNamespace(replay=replay)


@pytest.mark.parametrize(
    "graphs, reason",
    [(Refuses, "operation not permitted when stream"), (Confuses, "chose other tokens")],
)
def test_a_failure_is_one_line_and_the_same_tokens(graphs, reason, capsys):
    model, batch = lively_model(), make_batch(0, 40, 50)
    steps = CapturedSteps(model)
    steps.graphs = graphs(steps)
    assert same(model, batch, steps)
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1
        and error.startswith("note: ")
        and reason in error
        and steps.graphs is None
    )
    assert same(model, batch, steps) and not capsys.readouterr().err


def test_the_weights_are_those_at_the_start():
    model, batch = lively_model(), make_batch(0, 10, 110)
    steps = CapturedSteps(model)
    before = outputs(model, batch, steps)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    assert torch.equal(outputs(model, batch, steps), before)
    assert not torch.equal(outputs(model, batch), before)


class FakeGenerator:
    """A random state that a failed capture spoils, as PyTorch's is."""

    def __init__(self):
        self.state = self

    def graphsafe_get_state(self):
        return self.state

    def clone_state(self):
        return FakeGenerator()

    def graphsafe_set_state(self, state):
        self.state = state


@pytest.mark.parametrize("fails", ["begin", "step", "end", "nothing"])
def test_a_failed_capture_is_put_right(fails, monkeypatch):
    """In the order of the calls; what they do is CUDA's."""
    calls, generator = [], FakeGenerator()

    def call(name):
        calls.append(name)
        if name == fails:
            raise RuntimeError(name)

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            assert (
                generator.state is generator
                and not gc.isenabled()
                and capture_error_mode == "thread_local"
            )
            call("begin")

        def capture_end(self):
            call("end")

        def reset(self):
            calls.append("reset")

    class Stream:
        device_index = 0

        def synchronize(self):
            calls.append("wait")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(
            torch._C,
            name,
            lambda *arguments, name=name: calls.append((name, *arguments)),
            raising=False,
        )
    monkeypatch.setattr(Graphs, "failed", [])
    ours = Graphs(torch.device("cuda"))
    if fails == "nothing":
        assert type(ours.capture(lambda: call("step"))) is Graph
        assert calls == ["wait", "begin", "step", "end"] and not Graphs.failed
    else:
        with pytest.raises(RuntimeError, match=fails):
            ours.capture(lambda: call("step"))
        pool = (0, (0, 1))
        assert calls[-3:] == [
            ("_cuda_endAllocateToPool", *pool),
            ("_cuda_releasePool", *pool),
            "reset",
        ]
        assert len(Graphs.failed) == 1
        assert ("end" in calls) == (fails != "begin")
    # A good graph draws from the state that seeds are given to; a failed capture has spoiled it.
    assert (generator.state is generator) == (fails == "nothing") and gc.isenabled()
