"""The way into ``weft``: an error is one line and an exit code, and so is Ctrl-C, from the first import on."""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself takes a while, and Ctrl-C may come then
    from collections.abc import Sequence

INTERRUPTED = 130
"""The exit code of what Ctrl-C ended."""

SELDOM = 50_000
"""Objects made between two looks for garbage: imports make many, none of it garbage, and a command is soon over."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors of ours are one line on standard error."""
    try:
        _run(arguments)
    except KeyboardInterrupt:
        _leave(arguments is None)
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone; there is nobody to tell
        sys.exit(1)


def _leave(at_once: bool) -> None:
    """Say so and end; *at_once*: an interpreter that winds up after Ctrl-C may kill itself, or say more."""
    from contextlib import suppress

    with suppress(OSError):  # a reader that has gone
        sys.stderr.write("weft: interrupted\n")
    if at_once:
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(INTERRUPTED)
    sys.exit(INTERRUPTED)


def _run(arguments: Sequence[str] | None) -> None:
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
