"""A GPU that does not exist: fake tensors on "cuda" in a PyTorch built for CPUs.

    with GPU() as watch:
        model = make_model("cuda")          # shapes, formats and devices are computed, no values
    print(watch.waits)                      # operations for whose result the CPU would have waited

Import this before torch. Tensors on the CPU stay real. A value on the GPU is always `NUMBER`.
"""

import ctypes
import importlib.util
import os
import traceback
import warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

libraries = Path(importlib.util.find_spec("torch").origin).parent / "lib"
ctypes.CDLL(str(libraries / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
ctypes.CDLL(os.environ["CUDA_GUARD"])  # guard.cpp, compiled by test_cuda.py

import torch  # noqa: E402
from torch._subclasses.fake_tensor import (  # noqa: E402
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
ROOT = str(Path(__file__).resolve().parents[2])
CUDA = torch.device("cuda", 0)
NUMBER = 9
# Operations whose value or shape has to come from the GPU.
QUESTIONS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount")


class Watch(TorchDispatchMode):
    """Records operations that make the CPU wait, and those whose tensors are on two devices."""

    newest = None

    def __init__(self):
        super().__init__()
        self.waits = []
        self.mixed = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        to_gpu = any(isinstance(x, torch.device) and x.type == "cuda" for x in leaves)
        if not to_gpu and not any(isinstance(x, FakeTensor) for x in tensors):
            with unset_fake_temporarily():  # on the CPU, with values
                return operation(*args, **kwargs)
        result = operation(*args, **kwargs)
        name = str(operation)
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        devices = {x.device.type for x in tensors if x.dim()}
        crossed = devices | {x.device.type for x in made if x.dim()}
        is_copy = "copy" in name
        if len(devices) > 1 and not is_copy:
            self.mixed.append(name)
        blocks = is_copy and len(crossed) > 1
        # `True in args` would ask other operations' tensors for their values.
        if blocks and (kwargs.get("non_blocking") or True in args):
            blocks = False
        if blocks or any(word in name for word in QUESTIONS):
            self.waits.append(f"{name} at {place()}")
        return result


def place() -> str:
    """The innermost line of this project that is running."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(ROOT) and "pretend" not in frame.filename:
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return "backward"


def new_tensors(module, change, recurse=True):
    """`nn.Module._apply`, which changes weights in place, a thing that fake tensors refuse."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                changed = change(weight.detach())
                part._parameters[name] = torch.nn.Parameter(changed, weight.requires_grad)
    return module


@contextmanager
def GPU():
    """Inside, tensors can be on "cuda"."""
    answers = {"__int__": NUMBER, "__bool__": False}

    def answer_to(name: str):
        real = getattr(torch.Tensor, name)

        def answer(tensor):
            if not isinstance(tensor, FakeTensor):
                return real(tensor)
            Watch.newest.waits.append(f"{name} at {place()}")
            return answers[name]

        return answer

    def tolist(tensor):
        Watch.newest.waits.append(f"tolist at {place()}")
        return [NUMBER] * len(tensor)

    with ExitStack() as stack:
        for name in answers:
            stack.enter_context(patch.object(torch.Tensor, name, answer_to(name)))
        stack.enter_context(patch.object(FakeTensor, "tolist", tolist))
        stack.enter_context(patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor))
        stack.enter_context(patch.object(torch.nn.Module, "_apply", new_tensors))
        # Autocast and the loss scaler ask whether this build supports CUDA.
        unavailable = "torch.cuda.amp.common.amp_definitely_not_available"
        stack.enter_context(patch(unavailable, lambda: False))
        stack.enter_context(patch("torch.cuda.is_bf16_supported", lambda *_, **__: True))
        mode = stack.enter_context(FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True))
        mode.allow_scalar_outputs = mode.allow_dynamic_output_shape_ops = True
        Watch.newest = stack.enter_context(Watch())
        yield Watch.newest


def forget() -> None:
    """Drop the waits recorded so far: they belong to the preparation."""
    Watch.newest.waits.clear()
