"""Options that were given and would come to nothing: refused in one line that names the way out.

A command that can be used in several ways says in a table which of its options each way takes; an option left at its
default is nobody's wish and is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import typer

from weft.base.errors import InputError

STATED = ("COMMANDLINE", "ENVIRONMENT")
"""Where a value comes from that somebody gave."""

PRICED = "a profile has its costs in it; make another with weft profile"
PROFILES_ONLY = {"batch": PRICED, "seq_len": PRICED, "tables": PRICED, "cost": PRICED, "shape": PRICED}
"""Option -> the way out, where there are profiles and no models to price."""


def is_given(context: typer.Context, name: str) -> bool:
    """Whether somebody gave the option of this parameter."""
    source = context.get_parameter_source(name)
    return source is not None and source.name in STATED


def given_options(context: typer.Context) -> dict[str, str]:
    """Parameter -> how its option is written, of all that were given."""
    return {each.name: max(each.opts, key=len) for each in context.command.params if is_given(context, each.name)}


def refuse_unused(context: typer.Context, way: str, instead: Mapping[str, str]) -> None:
    """Refuse options that a way of using the command has nothing to do with; *instead*: parameter -> the way out."""
    for name, option in given_options(context).items():
        if name in instead:
            raise InputError(f"{option} does not apply to {way}: {instead[name]}")


def refuse_parameters_of_others(context: typer.Context, models: Sequence[str]) -> None:
    """Refuse --seq-len and --tables where no model that was named has such a parameter."""
    from weft.models.zoo import ZOO

    known = {parameter for model in models if model in ZOO for parameter in ZOO[model].parameters}
    for name, option in given_options(context).items():
        if name in ("seq_len", "tables") and models and name not in known:
            takers = ", ".join(model for model, entry in ZOO.items() if name in entry.parameters)
            raise InputError(f"{option} does not apply to {', '.join(models)}: it is for {takers} of the zoo")
