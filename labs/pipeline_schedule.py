"""Who computes what when in a pipeline: recorded with a clock, foretold by simulation and formula, and drawn.

R ranks, V stages a rank, M micro-batches. An event is (rank, kind, stage, micro-batch, start, end) in seconds; kinds:
F forward, B backward, or its two halves: I gradients of the inputs, W gradients of the weights.
"""

import time
from collections import defaultdict
from contextlib import contextmanager
from typing import NamedTuple

import torch

COLOURS = {"F": "#4C78A8", "B": "#54A24B", "I": "#72B7B2", "W": "#F2A541"}
NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}


class Event(NamedTuple):
    """One piece of computing."""

    rank: int
    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


class Recorder:
    """Notes the time at which each stage of this rank begins and ends each piece of work, step after step."""

    def __init__(self, rank: int, device: torch.device):
        self.rank, self.device, self.events = rank, device, []

    def watch(self, stage) -> None:
        """Put the clock around what a schedule calls of a `PipelineStage`: every schedule calls these three."""
        stage.forward_one_chunk = self._timed(stage, stage.forward_one_chunk, lambda _: "F")
        stage.backward_one_chunk = self._timed(
            stage, stage.backward_one_chunk, lambda options: "B" if options.get("full_backward", True) else "I"
        )
        stage.backward_weight_one_chunk = self._timed(stage, stage.backward_weight_one_chunk, lambda _: "W")

    def watch_loss(self, loss, last_stage: int):
        """The loss is computed right after the last stage's forward pass, and its time belongs to it."""

        def timed(*arguments, **options):
            result = loss(*arguments, **options)
            event = self.events[-1] if self.events else None
            if event and event.kind == "F" and event.stage == last_stage:
                self.events[-1] = event._replace(end=self._now())
            return result

        return timed

    def take(self) -> list[Event]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    def _timed(self, stage, work, kind):
        def timed(micro_batch, *arguments, **options):
            start = self._now()
            result = work(micro_batch, *arguments, **options)
            event = Event(self.rank, kind(options), stage.stage_index, micro_batch, start, self._now())
            self.events.append(event)
            return result

        return timed

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the work is only queued until here
        return time.time()  # not perf_counter, whose zero is another on every machine


def bubble_share(events: list[Event], ranks: int) -> float:
    """The share of all ranks' time, from the first event to the last, in which they compute nothing."""
    span = max(event.end for event in events) - min(event.start for event in events)
    return 1 - sum(event.end - event.start for event in events) / (ranks * span)


def own_bubble_share(events: list[Event], ranks: int) -> float:
    """As `bubble_share`, each rank between its own first and last event: what Qi et al. call zero is this one."""
    spans = [[event for event in events if event.rank == rank] for rank in range(ranks)]
    return 1 - sum(event.end - event.start for event in events) / sum(
        max(event.end for event in span) - min(event.start for event in span) for span in spans
    )


def bubble_in_theory(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> float | None:
    """The share of idle time if all stages take equally long, communication nothing, and F = I = W, B = I + W.

    Huang et al. 2019 (GPipe), section 2.3: (R-1)/(M+R-1). Narayanan et al. 2021, section 2.2: 1F1B idles as long, and
    interleaved stages a V-th of that; they divide by the time without bubble, here it is the share of the whole time.
    Qi et al. 2023 (zero bubble), section 2, schedule ZB-H1: (R-1)(F+I-W) idle instead of 1F1B's (R-1)(F+I+W). Their ZB-V
    (section 6) idles only before a rank's first and after its last event, (R-1)F of one stage, if there are at least
    2R-1 micro-batches; None for fewer.
    """
    if schedule == "zbv" and micro_batches < 2 * ranks - 1:
        return None
    idle = (ranks - 1) * (1 if schedule in ("zb", "zbv") else 3)  # in units of F, of one stage
    return idle / (idle + 3 * stages_per_rank * micro_batches)


def order_of(events: list[Event]) -> dict[int, list[tuple[str, int, int]]]:
    """What each rank computed, one after another, as (kind, stage, micro-batch)."""
    order = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start):
        order[event.rank].append((event.kind, event.stage, event.micro_batch))
    return dict(order)


def simulate(order: dict[int, list[tuple[str, int, int]]], seconds) -> list[Event]:
    """The events if each began as soon as its rank and its inputs are there; `seconds(kind, stage)` is what it takes."""
    last_stage = max(stage for actions in order.values() for _, stage, _ in actions)
    done, free, waiting = {}, defaultdict(float), {rank: list(actions) for rank, actions in order.items()}

    def inputs(kind, stage, micro_batch):
        if kind == "W":
            return [("I", stage, micro_batch)]
        if kind == "F":
            return [("F", stage - 1, micro_batch)] if stage else []
        return [("I", stage + 1, micro_batch)] if stage < last_stage else [("F", stage, micro_batch)]

    def moment(key):
        """When `key` is done, or None; a whole backward pass gives the inputs' gradients as well."""
        return done.get(key, done.get(("B", *key[1:])) if key[0] == "I" else None)

    events = []
    while any(waiting.values()):
        before = len(events)
        for rank, actions in waiting.items():
            while actions and None not in (ready := [moment(key) for key in inputs(*actions[0])]):
                kind, stage, micro_batch = actions.pop(0)
                start = max([free[rank], *ready])
                done[kind, stage, micro_batch] = free[rank] = start + seconds(kind, stage)
                events.append(Event(rank, kind, stage, micro_batch, start, free[rank]))
        if len(events) == before:
            raise ValueError("this order waits for itself")
    return events


def mean_seconds(events: list[Event]):
    """→ `seconds(kind, stage)` for `simulate`: the mean of what was measured."""
    taken = defaultdict(list)
    for event in events:
        taken[event.kind, event.stage].append(event.end - event.start)
    return lambda kind, stage: sum(taken[kind, stage]) / len(taken[kind, stage])


class HeldBytes:
    """Counts the bytes of the tensors that autograd keeps for the backward pass; `peak` is the most at one time.

    with held.counting():  forward and backward passes
    Weights are not counted (they are there anyway), and a tensor that several operations keep counts once.
    """

    def __init__(self, parameters):
        self.parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self.now = self.peak = 0
        self.uses = defaultdict(int)  # by storage

    @contextmanager
    def counting(self):
        """Whatever is computed here is counted, until the graph lets go of it."""
        self.peak = self.now
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Kept(tensor, self), lambda kept: kept.tensor):
            yield

    def _change(self, storage: torch.UntypedStorage, by: int) -> None:
        address = storage.data_ptr()
        if address in self.parameters:
            return
        self.uses[address] += by
        if self.uses[address] == (1 if by > 0 else 0):  # the first use, or the last
            self.now += by * storage.nbytes()
            self.peak = max(self.peak, self.now)


class _Kept:
    """A saved tensor; autograd drops it with the node of the graph that saved it."""

    def __init__(self, tensor, counter):
        # Detached: an operation that saves its own result would otherwise hold itself, through what holds that result.
        self.tensor, self.counter = tensor.detach(), counter
        counter._change(tensor.untyped_storage(), +1)

    def __del__(self):
        self.counter._change(self.tensor.untyped_storage(), -1)


def draw(events: list[Event], ranks: int, title: str):
    """One row a rank, time in milliseconds, micro-batches numbered from 1; a rank's later stages are darker. → figure"""
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    zero = min(event.start for event in events)
    span = max(event.end for event in events) - zero
    stages = {rank: sorted({event.stage for event in events if event.rank == rank}) for rank in range(ranks)}
    figure = Figure(figsize=(12, 1.4 + 0.62 * ranks), layout="constrained")
    axes = figure.subplots()
    for event in events:
        shade = 1 - 0.25 * stages[event.rank].index(event.stage) / max(1, len(stages[event.rank]) - 1)
        colour = [shade * part for part in to_rgb(COLOURS[event.kind])]
        width = event.end - event.start
        axes.barh(event.rank, 1000 * width, left=1000 * (event.start - zero), height=0.86, color=colour, edgecolor="white",
                  linewidth=0.6)  # fmt: skip
        if width > 0.011 * span:
            axes.text(1000 * (event.start - zero + width / 2), event.rank, str(event.micro_batch + 1),
                      ha="center", va="center", color="white", fontsize=8, clip_on=True)  # fmt: skip
    kinds = [kind for kind in COLOURS if any(event.kind == kind for event in events)]
    figure.legend(handles=[Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds], ncols=len(kinds),
                  loc="outside lower center", frameon=False)  # fmt: skip
    axes.set_yticks(range(ranks), [f"rank {r}\nstage {', '.join(map(str, stages[r]))}" for r in range(ranks)])
    axes.set_ylim(ranks - 0.45, -0.55)
    axes.set_xlim(0, 1000 * span)
    darker = ", darker: a rank's later stage" if max(map(len, stages.values())) > 1 else ""
    axes.set_xlabel(f"milliseconds; numbers: micro-batches, white: bubble{darker}")
    axes.set_title(title, loc="left", fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure
