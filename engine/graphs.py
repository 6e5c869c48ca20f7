"""CUDA graphs with care: a capture that fails leaves the process as it was.

graphs = Graphs(device)
with graphs.stream_of_its_own():
    step()                            # once as it is: the kernels are loaded, the libraries have their work space
    graph = graphs.capture(step)      # what step asks of the GPU, written down; nothing runs
    graph.replay()                    # now it does, on the same addresses
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor


class Graphs:
    """A stream and memory for graphs that are never replayed at the same time and keep no result in memory of their own.

    Throw them away all at once: they share the work space of the stream's matrix products, which PyTorch frees with any.
    """

    failed: list = []  # noqa: RUF012  graphs whose capture failed: the allocator may still ask them

    def __init__(self, device: torch.device):
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    @contextmanager
    def stream_of_its_own(self) -> Iterator[None]:
        """Inside, the GPU's work goes to this stream: after all that the caller's has been given, before what it will be."""
        callers = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(callers)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            callers.wait_stream(self.stream)

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The kernels that `step` asks for, as a graph.

        `torch.cuda.graph` would empty the allocator's cache every time, and not put right what a failure leaves.
        """
        graph = torch.cuda.CUDAGraph()
        self.stream.synchronize()  # what went wrong before is not to look like a failure of the capture
        try:
            with no_collection(), random_state_kept(self.stream.device_index):
                # Other threads, of a data loader for instance, may do what they like meanwhile.
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        except BaseException:
            Graphs.failed.append(graph)
            with suppress(Exception):  # else the allocator thinks for ever that a capture is on
                torch._C._cuda_endAllocateToPool(self.stream.device_index, self.pool)
            raise
        return graph


@contextmanager
def no_collection() -> Iterator[None]:
    """Without Python's garbage collection, which might give back to CUDA what may not be given back during a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def random_state_kept(device_index: int) -> Iterator[None]:
    """With a copy of the random state: one that was in a failed capture is of no use, and no dropout works any more."""
    generator = torch.cuda.default_generators[device_index]
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(state)


class LateCount:
    """How many of a mask are True, known one look late: to wait for the newest answer would leave the GPU without work."""

    def __init__(self, device: torch.device):
        on_gpu = device.type == "cuda"
        self.count = torch.zeros((), dtype=torch.long, pin_memory=on_gpu)
        self.copied = torch.cuda.Event() if on_gpu else None
        self.asked = False

    def look(self, mask: Tensor) -> int | None:
        """What was asked the last time, None the first time; and ask for now."""
        if self.asked and self.copied:
            self.copied.synchronize()  # what was queued since then keeps the GPU busy
        found = int(self.count) if self.asked else None
        self.count.copy_(mask.sum(), non_blocking=True)
        if self.copied:
            self.copied.record()
        self.asked = True
        return found
