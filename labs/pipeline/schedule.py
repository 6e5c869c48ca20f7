"""When each stage computes what: recorded with a clock, simulated, and predicted by formulas.

R ranks, V stages per rank, M micro-batches. Kinds of work: F forward, B backward; or instead of B
its two halves: I gradients of the inputs, W gradients of the weights.
"""

import time
from collections import defaultdict
from typing import NamedTuple

import torch


class Event(NamedTuple):
    """One piece of work; start and end in seconds."""

    rank: int
    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


class Recorder:
    """Records when this rank's stages begin and end each piece of work, in steps where `on` is set.

    Reading the clock makes a GPU wait, so a recorded step takes longer there.
    """

    def __init__(self, rank: int, device: torch.device):
        self.rank = rank
        self.device = device
        self.events = []
        self.on = True

    def watch(self, stage) -> None:
        """Time the methods by which a schedule makes a `PipelineStage` work.

        Only the zero-bubble schedules call the third; for the others B is the whole backward pass.
        """
        stage.forward_one_chunk = self._timed(stage, stage.forward_one_chunk, "F")
        stage.backward_one_chunk = self._timed(stage, stage.backward_one_chunk, "B")
        stage.backward_weight_one_chunk = self._timed(stage, stage.backward_weight_one_chunk, "W")

    def watch_loss(self, loss, last_stage: int):
        """Count the time of the loss as part of the last stage's forward pass, which it follows."""

        def timed(*arguments, **options):
            """The loss; the forward pass before it ends only now."""
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

    def _timed(self, stage, work, kind: str):
        def timed(micro_batch, *arguments, **options):
            """The work, noted as an event."""
            if not self.on:
                return work(micro_batch, *arguments, **options)
            start = self._now()
            result = work(micro_batch, *arguments, **options)
            only_inputs = kind == "B" and not options.get("full_backward", True)
            event = Event(
                self.rank,
                "I" if only_inputs else kind,
                stage.stage_index,
                micro_batch,
                start,
                self._now(),
            )
            self.events.append(event)
            return result

        return timed

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the work was only queued until now
        return time.time()  # unlike perf_counter it has one zero for all machines


def bubble_share(events: list[Event], ranks: int) -> float:
    """The idle share of all ranks' time, from the first event to the last."""
    span = max(event.end for event in events) - min(event.start for event in events)
    busy = sum(event.end - event.start for event in events)
    return 1 - busy / (ranks * span)


def bubble_in_theory(
    schedule: str, ranks: int, stages_per_rank: int, micro_batches: int
) -> float | None:
    """The bubble's share if stages are equally fast, messages are free, F = I = W and B = I + W.

    Huang et al. 2019 (GPipe), section 2.3: (R-1)/(M+R-1). Narayanan et al. 2021, section 2.2: the
    same for 1F1B, a V-th of it for interleaved stages (they divide by the time without bubble; here
    it is a share of the whole time). Qi et al. 2023 (zero bubble), section 2, schedule ZB-H1: idle
    (R-1)(F+I-W) instead of 1F1B's (R-1)(F+I+W). Their ZB-V (section 6) is idle only before a rank's
    first and after its last event, (R-1)F of one stage, given 2R-1 micro-batches or more.
    Interleaved and ZB-H1 need R micro-batches. None for fewer, and for other schedules.
    """
    least = {"gpipe": 1, "1f1b": 1, "interleaved": ranks, "zb": ranks, "zbv": 2 * ranks - 1}
    if schedule not in least or micro_batches < least[schedule]:
        return None
    idle = (ranks - 1) * (1 if schedule in ("zb", "zbv") else 3)  # in units of one stage's F
    return idle / (idle + 3 * stages_per_rank * micro_batches)


def most_held(events: list[Event], rank: int) -> int:
    """The most forward passes of a rank that wait for their backward pass."""
    held = most = 0
    for event in sorted(events, key=lambda event: event.start):
        if event.rank != rank:
            continue
        if event.kind == "F":
            held += 1
        elif event.kind in ("B", "W"):  # after I the weights' gradients still need the activations
            held -= 1
        most = max(most, held)
    return most


def simulate(events: list[Event], seconds) -> list[Event]:
    """The same work, each piece as soon as its rank is free and its input has been computed.

    `seconds(kind, stage)` is the time it takes. Each rank keeps the order in which it worked.
    """
    last_stage = max(event.stage for event in events)
    free = defaultdict(float)  # rank → when it has finished its last piece of work
    done = {}  # (kind, stage, micro-batch) → when it was finished
    simulated = []
    # What a piece of work needs began before it, so in this order it is simulated already.
    for event in sorted(events, key=lambda event: event.start):
        rank, kind, stage, micro_batch = event[:4]
        needed = input_of(kind, stage, micro_batch, last_stage)
        start = max(free[rank], done.get(needed, 0.0))
        end = free[rank] = start + seconds(kind, stage)
        done[kind, stage, micro_batch] = end
        if kind == "B":  # a full backward pass also gives the gradients of the inputs
            done["I", stage, micro_batch] = end
        simulated.append(event._replace(start=start, end=end))
    return simulated


def input_of(kind: str, stage: int, micro_batch: int, last_stage: int):
    """The work whose result this work needs, as (kind, stage, micro-batch); None for tokens."""
    if kind == "W":
        return "I", stage, micro_batch
    if kind == "F":
        return ("F", stage - 1, micro_batch) if stage else None
    if stage == last_stage:
        return "F", stage, micro_batch
    return "I", stage + 1, micro_batch


def mean_seconds(events: list[Event]):
    """`seconds(kind, stage)` for `simulate`: the means of these events."""
    taken = defaultdict(list)
    for event in events:
        taken[event.kind, event.stage].append(event.end - event.start)
    means = {key: sum(times) / len(times) for key, times in taken.items()}
    return lambda kind, stage: means[kind, stage]
