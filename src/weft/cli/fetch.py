"""``weft models fetch``: the large networks and images that an installed weft leaves out."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.cli.printing import progress_bar, say


def command(
    source: Annotated[
        str,
        typer.Option("--from", help="A checkout of weft, or an address (https://...) that has one's files."),
    ],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="cifar-cnn, mlp-m, mlp-c, cuda-convnet or zipped; all if none."),
    ] = None,
) -> None:
    """Fetch networks of the project that are too large to come with weft, and their images, once and for all."""
    from weft.models.stored import FETCHED, fetch

    wanted = names or list(FETCHED)
    with progress_bar("fetching", sum(len(FETCHED.get(name, ())) for name in wanted)) as advance:
        for name in wanted:
            for path in fetch(name, source, lambda path: advance(f"fetching {path.name}")):
                say(f"have {path}", soft_wrap=True)
