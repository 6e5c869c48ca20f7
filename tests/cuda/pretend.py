"""A GPU that is not there: fake tensors "on cuda" in a PyTorch built for CPUs. To be imported before torch.

    with GPU() as watched:
        model = make_model("cuda")          # shapes, formats and devices are computed, on the GPU nothing else
    print(watched.waits)                    # operations whose result the CPU would have waited for

Tensors on the CPU stay real, and so do their numbers. A question for a number of the GPU's is answered with `NUMBER`.
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
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily  # noqa: E402
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
ROOT = str(Path(__file__).resolve().parents[2])
CUDA = torch.device("cuda", 0)
NUMBER = 9
ASK = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "bincount",
)  # shape or number comes from the GPU


class Watch(TorchDispatchMode):
    """Notes operations that make the CPU wait, and those whose tensors are not where they should be."""

    newest = None

    def __init__(self):
        super().__init__()
        self.count, self.waits, self.mixed = 0, [], []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        to_gpu = any(isinstance(x, torch.device) and x.type == "cuda" for x in given)
        if not to_gpu and not any(isinstance(x, FakeTensor) for x in tensors):
            with unset_fake_temporarily():  # on the CPU: as ever
                return operation(*args, **kwargs)
        self.count += 1
        name, result = str(operation), operation(*args, **kwargs)
        places = {x.device.type for x in tensors if x.dim()}
        results = {
            x.device.type for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.dim()
        }
        copies = "copy" in name
        self.mixed += [name] * (len(places) > 1 and not copies)
        crosses = (
            copies
            and len(places | results) > 1
            and not (kwargs.get("non_blocking") or True in args)
        )
        if crosses or any(word in name for word in ASK):
            self.waits.append(f"{name} at {place()}")
        return result


def place() -> str:
    """The innermost line of the project that is running."""
    frames = [
        f
        for f in traceback.extract_stack()
        if f.filename.startswith(ROOT) and "pretend" not in f.filename
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "backward"


def new_tensors(module, change, recurse=True):
    """`nn.Module._apply`, which would change weights in place; fake ones refuse that."""
    for part in module.modules():
        weights = {
            name: torch.nn.Parameter(change(weight.detach()), weight.requires_grad)
            for name, weight in part._parameters.items()
            if weight is not None
        }
        part._parameters.update(weights)
    return module


@contextmanager
def GPU():
    """Inside, "cuda" is a place for tensors."""
    plain = {
        name: getattr(torch.Tensor, name)
        for name in ("__int__", "__bool__", "tolist", "pin_memory")
    }
    answers = {"__int__": NUMBER, "__bool__": False}

    def asked(name: str):
        def answer(tensor):
            if not isinstance(tensor, FakeTensor):
                return plain[name](tensor)
            Watch.newest.waits.append(f"{name} at {place()}")
            return answers[name]

        return answer

    def tolist(tensor):
        Watch.newest.waits.append(f"tolist at {place()}")
        return [NUMBER] * len(tensor)

    with ExitStack() as stack:
        for name in answers:
            stack.enter_context(patch.object(torch.Tensor, name, asked(name)))
        stack.enter_context(patch.object(FakeTensor, "tolist", tolist))
        stack.enter_context(patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor))
        stack.enter_context(patch.object(torch.nn.Module, "_apply", new_tensors))
        # Autocast and the loss scaler ask the build, which is one for CPUs.
        stack.enter_context(
            patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
        )
        stack.enter_context(patch("torch.cuda.is_bf16_supported", lambda *_, **__: True))
        mode = stack.enter_context(FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True))
        mode.allow_scalar_outputs = mode.allow_dynamic_output_shape_ops = True
        Watch.newest = stack.enter_context(Watch())
        yield Watch.newest


def forget() -> None:
    """What has been noted so far was preparation, which may take its time."""
    Watch.newest.waits.clear()
