"""Work that is too large for the device's memory, done in parts."""

import torch


def fewest_parts(trial, most: int = 256) -> int:
    """The smallest power of two, at most `most`, so that `trial(parts)` does not run out of the device's memory.

    Raises what the last trial raised if none does.
    """
    parts = 1
    while True:
        try:
            trial(parts)
            return parts
        except torch.OutOfMemoryError:
            if parts >= most:
                raise
        # Out of the handler: while it runs, the error holds the failed trial's tensors by its traceback.
        parts *= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
