"""What the lessons of `labs.collectives` stand on: processes, calls that may fail, and tables for a report."""

import inspect
import os
import re
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from engine.distributed import World, start
from engine.errors import UserError, prepare_process


def launch(work, size: int, *arguments, port: int = 0):
    """Start `work(*arguments)` in `size` processes with the variables that torchrun sets; → (their handle, a store).

    The store (a small server of names and addresses) lives here, as torchrun's lives in torchrun. Keep it until all have
    ended. Raises `UserError` if `port` is taken.
    """
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise UserError(
            f"--port {port}: {os.strerror(error.errno)}; give another, or leave the flag out"
        ) from None
    port = listener.getsockname()[1]
    # The store takes the listening socket over, so nobody can take the port in between.
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    variables = dict(
        WORLD_SIZE=size,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        TORCHELASTIC_USE_AGENT_STORE=True,
    )
    rest = (variables, work, arguments)
    mp.set_forkserver_preload(
        ["labs.collectives.training"]
    )  # one process imports torch, the others are its copies
    return mp.start_processes(_rank, rest, size, join=False, start_method="forkserver"), store


def _rank(rank: int, variables: dict, work, arguments: tuple) -> None:
    prepare_process()  # here nobody has made the streams safe
    os.environ.update(
        {name: str(value) for name, value in dict(variables, RANK=rank, LOCAL_RANK=rank).items()}
    )
    work(*arguments)


def join_world() -> World:
    """This process's world on the CPU, with a process group in any case: engine's World has none for one process."""
    torch.set_num_threads(1)
    world = start("cpu")
    if world.size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return world


def one_process(world: World, consequence: str) -> list[str]:
    """What a single process cannot show."""
    return (
        [f"With one process {consequence}; start more to see the difference."]
        if world.size == 1
        else []
    )


def everyone(value) -> list:
    """Every rank's picklable value, on every rank."""
    boxes = [None] * dist.get_world_size()
    dist.all_gather_object(boxes, value)
    return boxes


def attempt(call, seconds: float = 2) -> list[str]:
    """What `call(group)` comes to on every rank, its result or its error. It spoils a group of its own, not the run's."""
    dist.barrier()
    try:
        outcome = words(call(dist.new_group(timeout=timedelta(seconds=seconds))))
    except (RuntimeError, ValueError) as error:
        outcome = words(error)
    dist.barrier()  # nobody leaves while another still waits
    return everyone(outcome)


def words(value) -> str:
    """One short line for a table: tensors as lists, errors without source paths, addresses and advice."""
    if isinstance(value, Exception):
        text = (str(value).splitlines() or [""])[0]
        text = re.sub(
            r"\[(enforce fail at )?/[^\]]*\] ?| <torch[^>]*>| (This is typically|Is there a dist).*",
            "",
            text,
        )
        text = re.sub(r"\[[\d.:a-f]+\]:\d+", "(a peer)", text)
        return f"{type(value).__name__}: {text}"
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return " ".join(words(part) for part in value)
    return "-" if value is None else str(value)


@dataclass
class Table:
    """A caption, column names between |, and rows of anything `words` can write."""

    caption: str
    columns: str
    rows: list[tuple]

    def cells(self) -> list[list[str]]:
        """All cells as text, the column names first."""
        return [self.columns.split("|"), *([words(cell) for cell in row] for row in self.rows)]

    def plain(self) -> str:
        """Aligned columns."""
        widths = [max(map(len, column)) for column in zip(*self.cells())]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in self.cells()
        ]
        return "\n".join([f"{self.caption}:", *("  " + line.rstrip() for line in lines)])

    def markdown(self) -> str:
        """A Markdown table."""
        lines = [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
            for row in self.cells()
        ]
        lines.insert(1, "|" + "---|" * len(self.cells()[0]))
        return "\n".join([f"**{self.caption}**", "", *lines])


@dataclass
class Picture:
    """Curves of (x, y) points by name, y on a logarithmic scale; only in the Markdown file."""

    caption: str
    x: str
    y: str
    curves: dict[str, list[tuple[float, float]]]

    def save(self, path: Path) -> None:
        """Write a PNG."""
        from matplotlib.figure import Figure  # here, because few lessons have a picture

        figure = Figure(figsize=(6, 3.5), layout="constrained")
        axes = figure.subplots()
        for name, points in self.curves.items():
            axes.plot(*zip(*points), label=name)
        axes.set(xlabel=self.x, ylabel=self.y, yscale="log", title=self.caption)
        axes.legend()
        figure.savefig(path, dpi=110)


def plain(blocks: list) -> str:
    """Tables and paragraphs for a terminal."""
    shown = [block for block in blocks if not isinstance(block, Picture)]
    return "\n\n".join(block.plain() if isinstance(block, Table) else block for block in shown)


def markdown(blocks: list, picture: Path) -> str:
    """The same as Markdown, with the picture saved at `picture`."""
    parts = []
    for block in blocks:
        if isinstance(block, Picture):
            block.save(picture)
            parts.append(f"![{block.caption}]({picture.name})")
        else:
            parts.append(block.markdown() if isinstance(block, Table) else block)
    return "\n\n".join(parts)


def make_writable(file: Path) -> None:
    """The report's folder, before the work. Raises `UserError` where nothing can be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    except OSError as error:
        raise UserError(f"--out {file}: {error.strerror}; choose another file") from None


def teach(lessons: dict, out: Path) -> None:
    """The lessons (by name) on this rank; rank 0 prints them and writes them to `out`."""
    world = join_world()
    chapters = [
        f"# Collectives: {world.size} process(es), torch {torch.__version__}; gloo on the CPU where no GPU is named"
    ]
    for name, lesson in lessons.items():
        blocks = lesson(world)
        title, _, text = inspect.getdoc(getattr(lesson, "func", lesson)).partition("\n\n")
        if world.is_main:
            print(
                "\n\n".join([f"=== {name}: {title}", *([text] if text else []), plain(blocks)]),
                "\n\n",
                flush=True,
            )
            picture = out.with_name(f"{out.stem}-{name}.png")
            chapters.append(f"## {name}: {title}\n\n{text}\n\n{markdown(blocks, picture)}")
    if world.is_main:
        out.write_text("\n\n".join(chapters) + "\n", encoding="utf-8")
        print(f"written as Markdown: {out}")
    world.stop()
