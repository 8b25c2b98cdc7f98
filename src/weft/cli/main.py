"""Entry point of ``weft``: an error, or Ctrl-C, is one line and an exit code, from the first import on."""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes a while, in which Ctrl-C would not be handled
    from collections.abc import Sequence

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 plus the number of SIGINT, as in shells."""

SELDOM = 50_000
"""Objects between two garbage collections: imports make many objects and no garbage, and most commands are short."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a WeftError is one line on standard error."""
    try:
        _run(arguments)
    except KeyboardInterrupt:
        _exit_interrupted(arguments is None)
    except BrokenPipeError:
        sys.stderr.close()  # Python would report the broken pipe again, to a reader that is gone
        sys.exit(1)


def _exit_interrupted(at_once: bool) -> None:
    """Print that the command was interrupted, and exit.

    at_once: exit without Python's cleanup, which may crash or print messages after Ctrl-C.
    """
    from contextlib import suppress

    with suppress(OSError):  # the reader of the pipe is gone
        sys.stderr.write("weft: interrupted\n")
    if at_once:
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(INTERRUPTED)
    sys.exit(INTERRUPTED)


def _run(arguments: Sequence[str] | None) -> None:
    """Run a command; None: that of this process's command line, which the context's ``obj`` tells the command."""
    if arguments is None:
        gc.set_threshold(SELDOM)
    from weft.base.errors import WeftError
    from weft.cli.app import Interrupted, app

    try:
        app(args=list(arguments) if arguments is not None else None, prog_name="weft", obj=arguments is None)
    except Interrupted:
        raise KeyboardInterrupt from None
    except WeftError as error:
        sys.stderr.write(f"weft: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
