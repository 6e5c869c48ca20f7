"""What the lessons share: processes, collectives that may fail, and tables."""

import contextlib
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from engine.errors import prepare_process
from engine.tables import markdown_table


@contextlib.contextmanager
def processes(function: Callable, world_size: int, *arguments) -> Iterator[mp.ProcessContext]:
    """Start `function(*arguments)` on `world_size` ranks of a gloo group; give their handle.

    They end with the block, also if that is left by an error or by SIGTERM.
    """
    # One process imports PyTorch, the others are forked from it.
    mp.set_forkserver_preload(["labs.collectives.lessons"])
    with tempfile.TemporaryDirectory() as folder:
        # The ranks find each other through a file. Across machines they use a TCP port instead.
        options = (world_size, f"file://{folder}/store", function, arguments)
        context = mp.start_processes(
            _run_rank, options, world_size, join=False, start_method="forkserver"
        )
        # Left to itself, SIGTERM would end this process at once and leave the ranks running.
        before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
        try:
            yield context
        finally:
            for process in context.processes:
                process.terminate()
                process.join()
            signal.signal(signal.SIGTERM, before)


def _run_rank(
    rank: int, world_size: int, init_method: str, function: Callable, arguments: tuple
) -> None:
    prepare_process()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    function(*arguments)
    dist.destroy_process_group()


def all_gather_object(value) -> list:
    """Every rank's picklable value, on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def try_collective(call: Callable, seconds: float = 2) -> list[str]:
    """The result or the error of `call(group)` on every rank.

    The group is made for this call, because a failed collective leaves its group unusable. By
    default gloo would wait for half an hour.
    """
    dist.barrier()
    try:
        outcome = short_repr(call(dist.new_group(timeout=timedelta(seconds=seconds))))
    except (RuntimeError, ValueError) as error:
        outcome = short_repr(error)
    dist.barrier()  # no rank leaves while another one still waits
    return all_gather_object(outcome)


def short_repr(value) -> str:
    """One short line for a table: tensors as lists, errors without file names and addresses."""
    if value is None:
        return "-"
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return " ".join(map(short_repr, value))
    if isinstance(value, Exception):
        line = str(value).partition("\n")[0]
        line = re.sub(
            r"\[(enforce fail at )?/[^\]]*\] ?| <torch[^>]*>| This is typically.*", "", line
        )
        line = re.sub(r"\[[\d.:a-f]+\]:\d+", "(a peer)", line)
        return f"{type(value).__name__}: {line}"
    return str(value)


def print_table(caption: str, columns: str, rows: list[tuple]) -> None:
    """Rank 0 prints a Markdown table; `columns` are the names between |."""
    cells = [columns.split("|"), *([short_repr(cell) for cell in row] for row in rows)]
    print_text(f"{caption}:\n\n{markdown_table(cells, padded=True)}")


def print_text(text: str) -> None:
    """Rank 0 prints a paragraph."""
    if dist.get_rank() == 0:
        print(f"{text}\n", flush=True)
