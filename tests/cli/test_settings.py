"""Options that are made from the fields of settings classes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import BaseModel

from tests.support.commands import LEAVES
from weft.base.settings import OptionPanel, how, settings_of, what
from weft.cli import common
from weft.cli.settings import From, Typed, with_settings
from weft.serving.config import GROUPS, ServerConfig

scores = OptionPanel("Scores")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Settings of every kind."""

    model: str
    """Without an option: a command has an argument for it."""
    rounds: Annotated[int, how("-n")] = 3
    """How often it is
    ``repeated``.

    Only the documentation shows this.
    """
    limit_bytes: Annotated[int, how()] = 2 << 20
    """As 64m."""
    wait_s: Annotated[float, scores()] = 30.0
    factor: Annotated[float | None, what(shown="1/255", text=True)] = None
    spare: Annotated[bool, how()] = False
    check: Annotated[bool, how()] = True
    kind: Annotated[Literal["a", "b"], how(metavar="KIND")] = "a"
    hosts: Annotated[Sequence[str], what("--host")] = ()
    options: Annotated[Mapping[str, str], what("--option")] = field(default_factory=dict)
    path: Annotated[str | Path | None, what()] = None


class Modelled(BaseModel):
    """Settings that pydantic checks."""

    seed: Annotated[int, how()] = 7
    """Of the search."""
    task: Annotated[str, how()]


CONVERTERS = {"factor": float, "options": lambda texts: dict(text.split("=") for text in texts)}


def typed(*arguments: str) -> Typed:
    """What a command gets of ``Sample`` when these are typed."""
    seen: list[Typed] = []

    @with_settings
    def command(context: typer.Context, before: str, given: Annotated[Typed, From(Sample, **CONVERTERS)]) -> None:
        assert before == "x"
        seen.append(given)

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    app(["x", *arguments], standalone_mode=False)
    return seen[0]


def options(kind: type[Any]) -> dict[str, Any]:
    """The options of a class, by field, as a command has them."""

    def command(context: typer.Context, given: Annotated[Typed, From(kind)]) -> None: ...

    command.__annotations__ = {"context": typer.Context, "given": Annotated[Typed, From(kind)]}
    app = typer.Typer()
    app.command()(with_settings(command))
    return {param.name: param for param in typer.main.get_command(app).params}


def test_a_command_gets_what_was_typed_as_the_fields_hold_it() -> None:
    words = (
        "-n 5 --limit 3k --wait-s 2 --factor 0.5 --spare --no-check --kind b --host u --host v --option a=1 --path p"
    )
    assert typed(*words.split()) == {
        "rounds": 5, "limit_bytes": 3072, "wait_s": 2.0, "factor": 0.5, "spare": True, "check": False, "kind": "b",
        "hosts": ("u", "v"), "options": {"a": "1"}, "path": "p",
    }  # fmt: skip


def test_what_was_not_typed_is_left_to_the_class() -> None:
    assert typed() == {}
    assert typed("--rounds", "3") == {"rounds": 3}


def test_the_first_paragraph_below_a_field_is_the_help_of_its_option() -> None:
    rounds = options(Sample)["rounds"]
    assert (rounds.help, rounds.rich_help_panel, rounds.opts) == (
        "How often it is repeated.",
        "How",
        ["--rounds", "-n"],
    )
    assert settings_of(Sample)[1].description.endswith("Only the documentation shows this.")


def test_a_field_without_an_option_has_none() -> None:
    assert "model" not in options(Sample)


def test_defaults_are_shown_as_they_are_typed() -> None:
    shown = {name: param.default for name, param in options(Sample).items()}
    assert (shown["rounds"], shown["limit_bytes"], shown["wait_s"], shown["kind"]) == (3, "2m", 30, "a")
    assert options(Sample)["factor"].show_default == "1/255"


def test_a_flag_that_may_be_on_by_itself_can_be_turned_off() -> None:
    found = options(Sample)
    assert (found["check"].secondary_opts, found["spare"].secondary_opts) == (["--no-check"], [])


def test_pydantic_models_declare_options_too() -> None:
    found = options(Modelled)
    assert (found["seed"].default, found["seed"].help) == (7, "Of the search.")
    assert (found["task"].default, found["task"].required) == (None, False)


@pytest.mark.parametrize("size", [1, 1000, 1024, 1536, 256 << 20, 1 << 40])
def test_a_size_is_written_as_it_is_read(size: int) -> None:
    assert common.parse_bytes("--size", common.written_bytes(size)) == size


def test_the_defaults_that_serve_shows_are_those_of_its_settings() -> None:
    usual, params = ServerConfig(), {param.name: param for param in LEAVES["serve"].params}
    declared = [setting for kind in GROUPS.values() for setting in settings_of(kind) if setting.option]
    assert len(declared) > 30
    for setting in declared:
        shown = params[setting.name].default
        if setting.name.endswith("_bytes"):
            shown = common.parse_bytes(setting.name, shown)
        if shown is not None:
            assert usual.value_of(setting.name) == shown, setting.name


def test_every_setting_of_the_server_is_described() -> None:
    assert [s.name for kind in GROUPS.values() for s in settings_of(kind) if not s.description] == []


@pytest.mark.parametrize("module", ["weft.cli.serve", "weft_tune.cli"])
def test_declared_options_import_no_library_for_numbers(module: str) -> None:
    code = f"import sys, {module}; print(*{{'numpy', 'onnx', 'numba'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
