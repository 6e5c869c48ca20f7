"""8-bit products are close to exact ones, the same from any thread, and refused where they cannot be had."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.errors import UserError
from engine.quantized import check_int8, pack_int8


def make_linear(inputs: int, outputs: int, seed: int = 0):
    """Rows of very different sizes: one scale for the whole matrix would lose the small ones."""
    torch.manual_seed(seed)
    weight = torch.randn(outputs, inputs) * torch.logspace(-3, 1, outputs)[:, None]
    return weight, torch.randn(outputs)


@pytest.mark.parametrize("inputs, outputs", [(32, 7), (256, 768), (1024, 256)])
def test_close_to_the_exact_product_in_every_output(inputs, outputs):
    weight, bias = make_linear(inputs, outputs)
    x = torch.randn(50, inputs)
    exact, found = x.double() @ weight.double().T, pack_int8(weight, torch.zeros(outputs))(x).double()
    error = (found - exact).norm(dim=0) / exact.norm(dim=0)  # of each output
    assert error.max() < 0.03  # 1/127 of rounding in each of two factors
    assert torch.allclose(pack_int8(weight, bias)(x), found.float() + bias, atol=1e-4)


def test_exact_where_eight_bits_are_enough():
    torch.manual_seed(0)
    weight, x = torch.randint(-127, 128, (16, 64)).float(), torch.randint(0, 256, (10, 64)).float()
    weight[:, 0], x[:, 0], x[0, 1] = 127, 255, 0  # scales of exactly 1
    if not torch.cpu._is_vnni_supported():
        pytest.skip("7-bit inputs on this CPU")
    assert torch.equal(pack_int8(weight, torch.zeros(16))(x), x @ weight.T)


def test_weights_of_nothing_and_a_bias_of_never():
    """The output projection is filled up with rows of zeros and a bias of -inf."""
    weight, bias = torch.zeros(64, 32), torch.full((64,), -torch.inf)
    bias[3] = 1.5
    found = pack_int8(weight, bias)(torch.randn(5, 32))
    assert (found[:, 3] == 1.5).all() and (found[:, 4:] == -torch.inf).all()


def test_threads_share_one_packed_weight():
    packed = pack_int8(*make_linear(64, 96))
    inputs = [torch.randn(rows, 64) * 10.0 ** (rows % 5) for rows in range(1, 60)]  # each its own shape and scale
    expected = [packed(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            assert all(map(torch.equal, pool.map(packed, inputs), expected))


def test_packing_leaves_the_chosen_engine_alone():
    chosen = torch.backends.quantized.engine
    pack_int8(*make_linear(8, 8))
    assert torch.backends.quantized.engine == chosen


def test_refused_on_a_gpu_and_with_beams():
    check_int8(torch.device("cpu"))
    with pytest.raises(UserError, match="cuda:0"):
        check_int8(torch.device("cuda", 0))
    with pytest.raises(UserError, match="--beam 4"):
        check_int8(torch.device("cpu"), beam=4)
