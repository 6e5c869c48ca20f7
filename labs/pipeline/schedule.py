"""Who computes what when in a pipeline: recorded with a clock, foretold by simulation and formula.

R ranks, V stages a rank, M micro-batches. An event is (rank, kind, stage, micro-batch, start, end) in seconds; kinds:
F forward, B backward, or its two halves: I gradients of the inputs, W gradients of the weights.
"""

import time
from collections import defaultdict
from typing import NamedTuple

import torch


class Event(NamedTuple):
    """One piece of computing."""

    rank: int
    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


class Recorder:
    """Notes the time at which each stage of this rank begins and ends each piece of work, in steps with the clock `on`.

    A GPU has to be waited for at each look at the clock, so a step that is watched takes longer there.
    """

    def __init__(self, rank: int, device: torch.device):
        self.rank, self.device, self.events, self.on = rank, device, [], True

    def watch(self, stage) -> None:
        """Put the clock around what a schedule calls of a `PipelineStage`: every schedule calls these three."""
        stage.forward_one_chunk = self._timed(stage, stage.forward_one_chunk, lambda _: "F")
        stage.backward_one_chunk = self._timed(
            stage,
            stage.backward_one_chunk,
            lambda options: "B" if options.get("full_backward", True) else "I",
        )
        stage.backward_weight_one_chunk = self._timed(
            stage, stage.backward_weight_one_chunk, lambda _: "W"
        )

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
            if not self.on:
                return work(micro_batch, *arguments, **options)
            start = self._now()
            result = work(micro_batch, *arguments, **options)
            event = Event(
                self.rank, kind(options), stage.stage_index, micro_batch, start, self._now()
            )
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
    by_rank = [[event for event in events if event.rank == rank] for rank in range(ranks)]
    return 1 - sum(event.end - event.start for event in events) / sum(
        max(event.end for event in own) - min(event.start for event in own) for own in by_rank
    )


def bubble_in_theory(
    schedule: str, ranks: int, stages_per_rank: int, micro_batches: int
) -> float | None:
    """The share of idle time if all stages take equally long, communication nothing, and F = I = W, B = I + W.

    Huang et al. 2019 (GPipe), section 2.3: (R-1)/(M+R-1). Narayanan et al. 2021, section 2.2: 1F1B idles as long, and
    interleaved stages a V-th of that; they divide by the time without bubble, here it is the share of the whole time.
    Qi et al. 2023 (zero bubble), section 2, schedule ZB-H1: (R-1)(F+I-W) idle instead of 1F1B's (R-1)(F+I+W). Their ZB-V
    (section 6) idles only before a rank's first and after its last event, (R-1)F of one stage, if there are at least
    2R-1 micro-batches. Interleaved and ZB-H1 want R. None for fewer.
    """
    if micro_batches < {"zbv": 2 * ranks - 1, "zb": ranks, "interleaved": ranks}.get(schedule, 1):
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
    done, free, waiting = (
        {},
        defaultdict(float),
        {rank: list(actions) for rank, actions in order.items()},
    )

    def inputs(kind, stage, micro_batch):
        """F waits for the stage before; B and I for the one behind, in the last stage for its F; W for its own I."""
        if kind == "W":
            return [("I", stage, micro_batch)]
        if kind == "F":
            return [("F", stage - 1, micro_batch)] if stage else []
        return (
            [("I", stage + 1, micro_batch)] if stage < last_stage else [("F", stage, micro_batch)]
        )

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
