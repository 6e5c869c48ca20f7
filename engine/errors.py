"""A user's mistake ends in one line on stderr — what, where, what to do — and exit code 2; a bug keeps its traceback."""

import errno
import os
import sys


class UserError(Exception):
    """Something the user can mend. The message is one line: what is wrong, where, what to do."""


def run_script(main) -> None:
    """Call `main()`; turn a `UserError`, or a disk that is full or read-only, into one line and exit code 2."""
    try:
        main()
    except UserError as error:
        stop(str(error))
    except OSError as error:
        if error.errno is None and "requested and" in str(error):  # numpy's word for a full disk
            error.errno = errno.ENOSPC
        space = "free some space (`df -h` shows on which disk)"
        hints = {errno.ENOSPC: space, errno.EDQUOT: space, errno.EROFS: "choose another place"}
        if error.errno not in hints:
            raise
        where = error.filename or os.getcwd()
        stop(f"cannot write {where}: {os.strerror(error.errno)}; {hints[error.errno]} and run the same command again")
    except KeyboardInterrupt:
        stop("interrupted", code=130)


def stop(message: str, code: int = 2) -> None:
    """Print the one line and leave."""
    rank = os.environ.get("RANK")
    who = f" (rank {rank})" if rank and os.environ.get("WORLD_SIZE", "1") != "1" else ""
    sys.stdout.flush()
    print(f"error{who}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    # os._exit, not sys.exit: a rank that leaves with an error must not wait for the others in a destructor.
    os._exit(code) if who else sys.exit(code)
