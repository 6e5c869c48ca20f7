"""A training that is asked to stop finishes its step and saves first."""

import contextlib
import signal
import sys

from engine.errors import several_processes

# The scheduler ends the job, Ctrl-C, the terminal was closed.
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@contextlib.contextmanager
def caught_signals():
    """Let a signal set a flag instead of stopping the process; a second of its kind stops it.

    Of its kind, because torchrun sends SIGTERM to processes that have already received Ctrl-C.

    Yields a function that tells whether the flag is set.
    """
    received = []

    def remember(number, _frame):
        """Note the signal; the next one of its kind ends the process at once."""
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    # `nohup python train.py` ignores SIGHUP, so that the run outlives the terminal: leave it so.
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = [number for number in SIGNALS if not (number == signal.SIGHUP and ignored)]
    handlers = {number: signal.signal(number, remember) for number in numbers}
    try:
        yield lambda: bool(received)
    finally:
        # torchrun stops all ranks once the first has failed. A rank that is failing itself keeps
        # ignoring that request, or its own error message would be lost.
        failing = sys.exc_info()[0] is not None
        if not (failing and several_processes()):
            for number, handler in handlers.items():
                signal.signal(number, handler)


def leave_signals_to_main(_worker: int) -> None:
    """Ignore the signals in a DataLoader's processes: the main process ends them."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
