"""The format fits the device, fp32 products are exact, a broken gradient changes no weight."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from engine import precision as under_test
from engine.errors import UserError
from engine.precision import Precision, choose_precision

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def settings_as_before():
    before = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cuda.enable_cudnn_sdp(before[1])


# ---------------------------------------------------------------- which format


@pytest.mark.parametrize(
    "flags, asked, training, name, said",
    [
        ("avx2", "auto", True, "fp32", "this CPU has no bf16 instructions"),
        ("avx2", "auto", False, "fp32", "this CPU has no bf16 instructions"),
        (
            "avx512_bf16",
            "auto",
            True,
            "bf16",
            "this CPU has bf16 instructions; the loss agrees with fp32 to 1 %",
        ),
        (
            "amx_bf16",
            "auto",
            True,
            "bf16",
            "this CPU has bf16 instructions; the loss agrees with fp32 to 1 %",
        ),
        ("avx512_bf16", "auto", False, "fp32", "full precision"),
        ("avx2", "bf16", True, "bf16", "as asked"),
    ],
)
def test_on_a_cpu(monkeypatch, flags, asked, training, name, said):
    monkeypatch.setattr(under_test, "cpuinfo", lambda: flags)
    chosen, layer = choose_precision(CPU, asked, training), nn.Linear(4, 4)
    torch.set_num_threads(2)  # a fixture resets it
    assert chosen.describe() == f"device: cpu, 2 threads; {name} ({said})"
    torch.set_num_threads(1)
    assert chosen.describe() == f"device: cpu, 1 thread; {name} ({said})"
    with chosen.autocast():
        output = layer(torch.ones(1, 4))
    assert output.dtype is chosen.dtype is {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    chosen.backward(output.float().sum())
    assert layer.weight.grad.dtype is torch.float32


def test_refused():
    with pytest.raises(
        UserError, match="--precision fp16 needs a GPU; use fp32 or bf16 on the CPU"
    ):
        choose_precision(CPU, "fp16")


@pytest.mark.parametrize(
    "capability, name, said",
    [
        ((9, 0), "bf16", "bf16"),
        ((8, 0), "bf16", "fast bf16"),
        ((7, 5), "fp16", "no bf16; the loss is scaled"),
        ((7, 0), "fp16", "fp16"),
        ((6, 1), "fp32", "no tensor cores"),
    ],
)
def test_auto_on_a_gpu(monkeypatch, capability, name, said):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    # A real one would make a tensor on the GPU.
    def make(device, name, reason):
        return SimpleNamespace(device=device, name=name, reason=reason)

    monkeypatch.setattr(under_test, "Precision", make)
    torch.backends.cuda.enable_cudnn_sdp(True)
    gpu = torch.device("cuda", 1)
    chosen = choose_precision(gpu)
    assert chosen.name == name and said in chosen.reason and chosen.device == gpu
    assert (
        torch.get_float32_matmul_precision() == "high"
        and not torch.backends.cuda.cudnn_sdp_enabled()
    )
    for asked in ("fp32", "bf16", "fp16"):
        reason = (
            "as asked; its products are TF32"
            if asked == "fp32" and capability >= (8, 0)
            else "as asked"
        )
        assert choose_precision(gpu, asked) == SimpleNamespace(
            device=gpu, name=asked, reason=reason
        )
    formats = ["bf16", "fp16", "fp32"]
    for number, other in enumerate(
        formats
    ):  # of another rank's card: the ranks of a run have one format
        world = SimpleNamespace(maximum=lambda mine, other=number: [max(mine, other)])
        agreed = choose_precision(gpu, "auto", True, world)
        assert agreed.name == max(name, other, key=formats.index) and (said in agreed.reason) == (
            agreed.name == name
        )


# ---------------------------------------------------------------- products


def product_error(left, right) -> float:
    """Relative to the product in fp64."""
    exact = left.double() @ right.double()
    return float((left @ right - exact).norm() / exact.norm())


@pytest.mark.parametrize("rows, inner, columns", [(64, 64, 64), (300, 512, 700), (1, 2048, 300)])
def test_fp32_products_are_exact_to_fp32(rows, inner, columns):
    torch.manual_seed(0)
    left, right = torch.randn(rows, inner), torch.randn(inner, columns)
    torch.set_float32_matmul_precision("highest")
    exact = product_error(left, right)
    choose_precision(CPU)
    chosen = product_error(left, right)
    assert exact < 1e-6 and chosen < 1e-6 and chosen < 3 * exact
    assert (
        product_error(left.bfloat16(), right.bfloat16()) > 1e-4
    )  # what a rounded product would show


@pytest.mark.parametrize(
    "flags, setting",
    [
        ("avx512f", "medium"),
        ("avx512f amx_bf16", "highest"),
        ("", "medium"),
        ("avx512_bf16", "medium"),
        ("asimd bf16", "highest"),
    ],
)
def test_a_cpu_that_would_round_keeps_full_precision(monkeypatch, flags, setting):
    monkeypatch.setattr(under_test, "cpuinfo", lambda: flags)
    choose_precision(CPU)
    assert torch.get_float32_matmul_precision() == setting


# ---------------------------------------------------------------- updates


def small_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))
    return model, torch.optim.AdamW(
        model.parameters(), lr=0.01, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )


def loss_of(model: nn.Module, step: int, scale: float = 1.0) -> torch.Tensor:
    torch.manual_seed(100 + step)
    return scale * model(torch.randn(8, 6)).square().sum()


def everything(model, optimizer) -> dict[str, torch.Tensor]:
    """Weights, moments and step counters."""
    entries = optimizer.state_dict()["state"].items()
    state = {f"{index}.{name}": value for index, entry in entries for name, value in entry.items()}
    assert {name.split(".")[1] for name in state} == {"step", "exp_avg", "exp_avg_sq"}
    return copy.deepcopy({**model.state_dict(), **state})


def same_bits(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("clip", [0, 0.1, 1.0, 1e6])
def test_finite_steps_are_those_of_a_plain_loop(clip):
    model, optimizer = small_model()
    plain_model, plain_optimizer = small_model()
    precision, clipped = choose_precision(CPU, "fp32"), 0
    for step in range(1, 11):
        precision.backward(loss_of(model, step))
        parameters = list(model.parameters())
        norm = precision.step(optimizer, parameters, clip, step)
        assert all(parameter.grad is None for parameter in parameters)

        loss_of(plain_model, step).backward()
        plain = list(plain_model.parameters())
        plain_norm = torch.cat([parameter.grad.flatten() for parameter in plain]).norm()
        if clip:
            torch.nn.utils.clip_grad_norm_(plain, clip)
        plain_optimizer.step()
        plain_optimizer.zero_grad()

        assert norm.item() == pytest.approx(plain_norm.item(), rel=1e-5)  # before clipping
        clipped += norm.item() > clip > 0
        assert same_bits(everything(model, optimizer), everything(plain_model, plain_optimizer))
    precision.check_finite()
    assert clipped == (
        10 if clip in (0.1, 1.0) else 0
    )  # so that each case is what it is meant to be


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("clip", [0, 1.0])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_broken_gradient_changes_nothing_ever_after(bad, clip, name):
    model, optimizer = small_model()
    precision, parameters = choose_precision(CPU, name), list(model.parameters())
    for step in range(1, 4):
        precision.backward(loss_of(model, step))
        precision.step(optimizer, parameters, clip, step)
    precision.check_finite()
    before = everything(model, optimizer)

    precision.backward(loss_of(model, 4))
    parameters[0].grad[2, 3] = bad  # one number is enough
    norm = precision.step(optimizer, parameters, clip, 4)
    assert not torch.isfinite(norm) and same_bits(everything(model, optimizer), before)
    assert all(parameter.grad is None for parameter in parameters)

    for step in (5, 6):  # a finite one, and a second that is not
        precision.backward(loss_of(model, step))
        if step == 6:
            parameters[1].grad[0] = bad
        precision.step(optimizer, parameters, clip, step)
        assert same_bits(everything(model, optimizer), before)
    with pytest.raises(UserError, match=r"^step 4: the loss or its gradient is not finite"):
        precision.check_finite()


def test_fp16_skips_an_overflow_and_goes_on():
    # The CPU has a scaler too, so the path of a small GPU can be walked here.
    model, optimizer = small_model()
    precision, parameters = Precision(CPU, "fp16", ""), list(model.parameters())
    scale = precision.scaler.get_scale()
    loss = loss_of(model, 1)
    norm = torch.stack(
        [gradient.norm() for gradient in torch.autograd.grad(loss, parameters)]
    ).norm()
    precision.backward(loss_of(model, 1))
    assert parameters[-1].grad.abs().item() > 1000 * norm  # scaled for the backward pass
    assert precision.step(optimizer, parameters, 1.0, 1).item() == pytest.approx(
        norm.item(), rel=1e-5
    )  # and back
    assert precision.scaler.get_scale() == scale

    before = everything(model, optimizer)
    precision.backward(loss_of(model, 2))
    parameters[0].grad[0, 0] = float("inf")
    precision.step(optimizer, parameters, 1.0, 2)
    assert (
        same_bits(everything(model, optimizer), before)
        and precision.scaler.get_scale() == scale / 2
    )
    precision.check_finite()  # nothing to stop for

    precision.backward(loss_of(model, 3))
    precision.step(optimizer, parameters, 1.0, 3)
    assert not same_bits(everything(model, optimizer), before)


def test_fp16_that_overflows_at_every_scale_is_named(monkeypatch):
    precision = choose_precision(CPU)
    monkeypatch.setattr(precision.scaler, "is_enabled", lambda: True)
    monkeypatch.setattr(precision.scaler, "get_scale", lambda: 2.0**-11)
    with pytest.raises(UserError, match="overflows fp16 at every scale"):
        precision.check_finite()
    monkeypatch.setattr(precision.scaler, "get_scale", lambda: 1024.0)
    precision.check_finite()
