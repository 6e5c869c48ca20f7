"""The captured step on a CPU: as itself, and by a stand-in for a CUDA graph that repeats the operations recorded.

What only a GPU can show is `benchmarks.gpu`'s to check.
"""

import gc
import math
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from conftest import TINY
from test_decoding import BOS, COLLATE, EOS, make_sources
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.gpu_parity import widest_gap
from decoding import default_rows, greedy, output_limit, plan_batches, search
from engine import graphs
from engine.graphs import LateCount
from fast import captured
from fast.captured import Buffers, CapturedTranslator, round_rows, stretch
from model import ModelConfig, Translator

SIZES = TINY | dict(max_length=256)


@pytest.fixture(autouse=True)
def _as_before():
    yield
    CapturedTranslator.enabled = True


def make_model(norm_first=False, dtype=torch.float64, seed=0, end=4.0) -> Translator:
    """Random weights, blown up so that its choices are lively; the higher `end`, the sooner its sentences end."""
    torch.manual_seed(seed)
    model = Translator(ModelConfig(40, 40, **SIZES, dropout=0.1, norm_first=norm_first)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
        model.output.bias[EOS] += end
    return model


def make_batch(count: int, seed=0, longest=110):
    """(src, src_pad, limits), longest first."""
    src, src_pad = COLLATE.pad_sources(sorted(make_sources(count, seed, longest), key=len, reverse=True))
    return src, src_pad, output_limit((~src_pad).sum(1), SIZES["max_length"])


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

        def current(one):
            return now.get(id(one), one)

        for operation, arguments, named, recorded in self.operations:
            arguments, named = tree_map_only(torch.Tensor, current, (arguments, named))
            now |= zip(map(id, tree_leaves(recorded)), tree_leaves(operation(*arguments, **named)))

    def described(self) -> list:
        """Operations with shapes and numbers; tensors that were there before the step by their addresses."""
        mine = {id(one) for *_, made in self.operations for one in tree_leaves(made)}

        def describe(one):
            kind = (tuple(one.shape), one.stride(), one.dtype, one.device)
            return kind if id(one) in mine else (*kind, one.data_ptr())

        return [(str(one), *tree_map_only(torch.Tensor, describe, rest)) for one, *rest in self.operations]


class Rehearsal:
    """In the place of `engine.graphs.Graphs`."""

    def __init__(self, translator: CapturedTranslator):
        self.translator, self.captured = translator, 0

    @contextmanager
    def stream_of_its_own(self):
        yield

    def capture(self, step) -> Recording:
        self.captured += 1
        values = [value for buffers in self.translator.buffers.values() for value in vars(buffers).values()]
        kept = [(value, value.clone()) for value in values if torch.is_tensor(value)]
        recording = Recording(step)
        for tensor, value in kept:  # to capture is not to run
            tensor.copy_(value)
        return recording


def rehearse(model: Translator) -> CapturedTranslator:
    """With recordings where a GPU has graphs."""
    translator = CapturedTranslator(model)
    translator.graphs = Rehearsal(translator)
    translator.most_rows = lambda source, longest: 10**6
    return translator


@pytest.mark.parametrize("make", [CapturedTranslator, rehearse])
@pytest.mark.parametrize("norm_first", [False, True])
def test_equals_the_plain_step_in_float64(make, norm_first):
    model, batch = make_model(norm_first), make_batch(70)
    with patch.object(Buffers, "shrink", autospec=True, side_effect=Buffers.shrink) as shrink:
        found = make(model).greedy(*batch, BOS, EOS)
    assert torch.equal(found, greedy(model, *batch, BOS, EOS))
    assert shrink.called and found.size(1) > 128  # rows left, and three stretches of the cache were used
    lengths = (found != EOS).sum(1)
    assert len(set(lengths.tolist())) > 10 and lengths.max() > 64


@pytest.mark.parametrize("rows", [1, 8, 9, 300])
def test_any_number_of_rows(rows):
    model, batch = make_model(end=6.0), make_batch(rows, longest=12)
    translator = rehearse(model)
    assert torch.equal(translator.greedy(*batch, BOS, EOS), greedy(model, *batch, BOS, EOS))


@pytest.mark.parametrize("norm_first", [False, True])
def test_in_float32_only_near_ties_differ(norm_first):
    model, batch = make_model(norm_first, torch.float32), make_batch(60)
    found, plain = CapturedTranslator(model).greedy(*batch, BOS, EOS), greedy(model, *batch, BOS, EOS)
    assert (found == plain).all(1).double().mean() > 0.8
    assert widest_gap(model.double(), *batch[:2], found, plain, BOS) < 1e-3


def test_under_autocast_as_the_plain_step():
    """The same products in bf16, so that about the same rows differ from float32."""
    model, batch = make_model(dtype=torch.float32, end=6.0), make_batch(60, longest=30)
    with torch.autocast("cpu", torch.bfloat16):
        translator = CapturedTranslator(model)
        found, plain = translator.greedy(*batch, BOS, EOS), greedy(model, *batch, BOS, EOS)
    layer = translator.model.transformer.decoder.layers[0]
    assert layer.linear1.weight.dtype == translator.room.dtype == torch.bfloat16
    assert layer.norm1.weight.dtype == translator.model.output.weight.dtype == torch.float32
    assert (found[:, :8] == plain[:, :8]).double().mean() > 0.8
    assert translator.greedy(*batch, BOS, EOS) is None  # outside: these are not its formats
    assert CapturedTranslator.enabled


@pytest.mark.parametrize("end, tokens", [(1e9, 0), (-1e9, 256)])
def test_all_end_at_once_and_none_ends(end, tokens):
    model, batch = make_model(end=end), make_batch(20, longest=250)
    found = rehearse(model).greedy(*batch, BOS, EOS)
    assert torch.equal(found, greedy(model, *batch, BOS, EOS))
    assert (found != EOS).sum(1).max() == tokens


def test_one_translator_for_batches_of_any_shape():
    model = make_model()
    translator, made, batches = (
        rehearse(model),
        [],
        [make_batch(*shape) for shape in ((40, 0, 90), (9, 1, 20), (40, 2, 88))],
    )
    for batch in batches:
        assert torch.equal(translator.greedy(*batch, BOS, EOS), greedy(model, *batch, BOS, EOS))
        made.append(translator.graphs.captured)
    address = translator.room.data_ptr()
    for batch in batches:
        assert torch.equal(translator.greedy(*batch, BOS, EOS), greedy(model, *batch, BOS, EOS))
    assert made[0] < made[1] and made[-1] <= 16
    assert translator.graphs.captured - made[-1] <= 2 and translator.room.data_ptr() == address


def test_shapes_are_thrown_away_all_at_once(monkeypatch):
    """Graphs share a work space that goes with any of them."""
    monkeypatch.setattr(captured, "MOST_SHAPES", 2)
    model = make_model(end=6.0)
    translator, kept = CapturedTranslator(model), []
    for rows in (40, 20, 10, 20):
        batch = make_batch(rows, longest=20)
        assert torch.equal(translator.greedy(*batch, BOS, EOS), greedy(model, *batch, BOS, EOS))
        kept.append(len(translator.buffers))
    assert kept == [1, 2, 1, 2]


def test_what_nan_left_behind_does_not_stay():
    model, batch = make_model(), make_batch(10, longest=20)
    translator = rehearse(model)
    plain = translator.greedy(*batch, BOS, EOS).clone()
    with torch.inference_mode():
        translator.room.fill_(math.nan)
    assert torch.equal(translator.greedy(*batch, BOS, EOS), plain)


# They ask the device something, make a tensor whose size it decides, or draw.
FORBIDDEN = (
    "_local_scalar_dense item nonzero unique masked_select resize repeat_interleave rand dropout bernoulli".split()
)


@pytest.mark.parametrize("rows, length", [(16, 64), (16, 128), (8, 192)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_steps_ask_for_the_same_operations_on_the_same_addresses(rows, length, dtype):
    """All that a capture requires: no number from Python that changes, no question to the device, no new buffer."""
    model, (src, src_pad, limits) = make_model(dtype=torch.float32), make_batch(16)
    # Not in inference mode, where attention and the like would be seen as one operation.
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        translator = CapturedTranslator(model)
        buffers = translator.buffers_for(16, 128, 192)
        buffers.begin(src_pad, limits, BOS, EOS)
        translator.encode(src, src_pad, buffers)
        first, *others = (Recording(lambda: translator.step(buffers, rows, length)) for _ in range(3))
    assert all(other.described() == first.described() for other in others) and buffers.position.item() == 3
    names = [str(operation) for operation, *_ in first.operations]
    assert len(names) > 150 and not [name for name in names if any(word in name for word in FORBIDDEN)]


def test_a_step_needs_nothing_from_another_device(monkeypatch):
    """A tensor made on the CPU would be one: here all are on PyTorch's device without memory, which answers no question."""
    model = make_model(dtype=torch.float32).to("meta")
    monkeypatch.setattr(CapturedTranslator, "wanted_dtype", lambda self: torch.float32)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # it does not know such a device
    with torch.no_grad():
        translator = CapturedTranslator(model)
        buffers = translator.buffers_for(16, 32, 64)
        recording = Recording(lambda: translator.step(buffers, 8, 64))
    assert len(recording.operations) > 150
    assert {one.device.type for one in tree_leaves(recording.operations) if torch.is_tensor(one)} == {"meta"}


def test_a_number_from_python_would_be_noticed():
    """The test above and the stand-in both fail for a step that is not static."""
    model, batch = make_model(), make_batch(10)
    translator, steps = rehearse(model), []
    right = translator.step

    def wrong(buffers, rows, length):
        steps.append(None)
        right(buffers, rows, length)
        buffers.output[:, len(steps) % 64] = 7

    translator.step = wrong
    found = translator.greedy(*batch, BOS, EOS)
    assert found is None or not torch.equal(found, greedy(model, *batch, BOS, EOS))
    count = iter(range(9))
    both = [Recording(lambda: torch.ones(9)[next(count)]).described() for _ in range(2)]
    assert both[0] != both[1]


class Refuses(Rehearsal):
    def capture(self, step):
        raise RuntimeError("CUDA error: operation not permitted\nwhen stream is capturing")


class Confuses(Rehearsal):
    def capture(self, step):
        recording = super().capture(step)
        recording.operations = [one for one in recording.operations if "where" not in str(one[0])]
        return recording


@pytest.mark.parametrize(
    "graphs, reason", [(Refuses, "operation not permitted when stream"), (Confuses, "other tokens")]
)
def test_a_failure_is_one_line_and_the_plain_way(graphs, reason, capsys):
    model, sources = make_model().requires_grad_(False), make_sources(140)  # more than the plain way takes at once
    plain = search(model, sources, COLLATE)
    translator = rehearse(model)
    translator.graphs = graphs(translator)
    assert search(model, sources, COLLATE, rows_per_batch=140, packed=translator) == plain
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("note: ") and reason in error
    assert not CapturedTranslator.enabled and translator.room is None and not translator.buffers
    assert search(model, sources, COLLATE, packed=translator) == plain and not capsys.readouterr().err


def test_search_takes_it_where_it_suits(monkeypatch):
    model, sources = make_model().requires_grad_(False), [[], *make_sources(50), []]
    plain = search(model, sources, COLLATE)
    assert not CapturedTranslator.suits(model)  # a CPU
    monkeypatch.setattr(CapturedTranslator, "suits", lambda model: True)
    with patch.object(CapturedTranslator, "decode", autospec=True, side_effect=CapturedTranslator.decode) as decode:
        assert search(model, sources, COLLATE, rows_per_batch=20) == plain
    assert decode.call_count == 3


def test_taken_if_wanted_and_not_for_weights_in_training(monkeypatch):
    weights = [SimpleNamespace(is_cuda=True, requires_grad=False) for _ in range(3)]
    model = SimpleNamespace(parameters=lambda: weights)
    assert not CapturedTranslator.suits(model)
    monkeypatch.setattr(CapturedTranslator, "wanted", True)
    assert CapturedTranslator.suits(model)
    weights[2].requires_grad = True
    assert not CapturedTranslator.suits(model)
    assert default_rows(torch.device("cuda"), 1) == 512 and default_rows(torch.device("cuda"), 1, captured=True) == 2048
    assert default_rows(torch.device("cuda"), 4) == default_rows(torch.device("cuda"), 4, captured=True) == 128


def test_the_weights_are_those_at_the_start():
    model, batch = make_model(), make_batch(10)
    translator = CapturedTranslator(model)
    before = translator.greedy(*batch, BOS, EOS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    assert torch.equal(translator.greedy(*batch, BOS, EOS), before)
    assert not torch.equal(greedy(model, *batch, BOS, EOS), before)


def test_memory_is_what_is_said(monkeypatch):
    """Once the weights, 2·layers·D·(L + S) numbers a row, and what the free memory allows of rows."""
    model, batch = make_model(dtype=torch.float32), make_batch(40, longest=50)
    translator = CapturedTranslator(model)
    translator.greedy(*batch, BOS, EOS)
    (shape,) = translator.buffers
    assert shape == (64, 64, 128) and translator.room.numel() == 2 * 2 * 32 * (128 + 64) * 64
    caches = translator.buffers[shape].own, translator.buffers[shape].source
    assert {one.untyped_storage().data_ptr() for one in caches} == {translator.room.data_ptr()}
    translator.graphs = Rehearsal(translator)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * 2**20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2**20)
    rows = []
    for free in (2**20, 2**25, 2**27, 2**30, 2**34):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 2**40))
        rows.append(translator.most_rows(40, 70))
        cache = translator.numbers(rows[-1], 64, 128) * 4
        assert rows[-1] == round_rows(rows[-1]) and (rows[-1] == 8 or cache < free)
    assert rows[0] == 8 < rows[1] < rows[2] < rows[3] < rows[4]


def test_more_rows_than_fit_are_done_in_parts(monkeypatch):
    model, batch = make_model(), make_batch(50, longest=60)
    translator = CapturedTranslator(model)
    monkeypatch.setattr(translator, "most_rows", lambda source, longest: 16)
    with patch.object(translator, "decode", wraps=translator.decode) as decode:
        found = translator.greedy(*batch, BOS, EOS)
    assert torch.equal(found, greedy(model, *batch, BOS, EOS)) and decode.call_count == 4


def test_shapes_are_few():
    assert [round_rows(rows) for rows in (1, 8, 9, 100, 256, 257, 2001)] == [8, 8, 16, 128, 256, 512, 2048]
    assert [stretch(places) for places in (1, 64, 65, 128, 129, 512)] == [64, 64, 128, 128, 256, 512]


def test_the_count_is_that_of_the_look_before():
    count = LateCount(torch.device("cpu"))
    masks = [torch.arange(9) < number for number in (7, 4, 0)]
    assert [count.look(mask) for mask in masks] == [None, 7, 4]


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
            assert generator.state is not generator and not gc.isenabled() and capture_error_mode == "thread_local"
            call("begin")

        def capture_end(self):
            call("end")

    class Stream:
        device_index = 0

        def synchronize(self):
            calls.append("wait")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(graphs.Graphs, "failed", [])
    ours = graphs.Graphs(torch.device("cuda"))
    if fails == "nothing":
        assert isinstance(ours.capture(lambda: call("step")), Graph)
        assert calls == ["wait", "begin", "step", "end"] and not graphs.Graphs.failed
    else:
        with pytest.raises(RuntimeError, match=fails):
            ours.capture(lambda: call("step"))
        assert calls[-1] == (0, (0, 1)) and ("end" in calls) == (fails != "begin") and len(graphs.Graphs.failed) == 1
    assert generator.state is generator and gc.isenabled()


def test_batches_on_a_gpu_are_bounded_by_tokens():
    lengths = [500] * 300 + [100] * 3000 + [5] * 5000
    batches = plan_batches(lengths, 2048)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert max(map(len, batches)) == 2048
    assert max(len(batch) * (max(lengths[row] for row in batch) + 1) for batch in batches) <= 2**18
