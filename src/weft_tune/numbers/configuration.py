"""Configurations: the number format of each object of a network, and their plain text files.

    conv1.weight EXP 8 127
    conv1.input  FIXED 15 -3

An object that is not named is FLOAT 32. The third field, the bias, may be left out; ``CUSTOM 1 4 3 7`` gives the
four fields of a format that is none of the three types (with ``IEEE`` behind them if its top exponent stands for
infinities and NaN), ``TWOS 8 5`` two's complement with five fraction bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from weft.base.errors import NumberError, reason_of
from weft.base.files import write_text
from weft_tune.numbers.format import FLOAT32, Format, TwosComplement, label, parse_format, spell

AnyFormat = Format | TwosComplement


class Configuration(Mapping[str, AnyFormat]):
    """An immutable mapping: object -> format. Configurations with the same formats are equal."""

    __slots__ = ("_formats", "_text")

    def __init__(self, formats: Mapping[str, AnyFormat]) -> None:
        self._formats = {name: formats[name] for name in sorted(formats) if formats[name] != FLOAT32}
        self._text = "".join(f"{name} {spell(form)}\n" for name, form in self._formats.items())

    def __getitem__(self, name: str) -> AnyFormat:
        """The format of an object; FLOAT 32 for any other name."""
        return self._formats.get(name, FLOAT32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._formats)

    def __len__(self) -> int:
        return len(self._formats)

    def __contains__(self, name: object) -> bool:
        return name in self._formats

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Configuration) and self._text == other._text

    @property
    def text(self) -> str:
        """The content of the file, objects in alphabetical order."""
        return self._text

    def __repr__(self) -> str:
        return f"Configuration({'; '.join(self._text.splitlines())})"


def parse_configuration(text: str, source: str = "configuration") -> Configuration:
    """Parse the text of a file; blank lines and what follows # or // are ignored. *source* opens error messages."""
    formats: dict[str, AnyFormat] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split("//")[0].split()
        if not words:
            continue
        try:
            if words[0] in formats:
                raise NumberError(f"{words[0]!r} has a format already")
            formats[words[0]] = parse_format(" ".join(words[1:]))
        except NumberError as error:
            raise NumberError(f"{source}:{number}: {error}") from error
    return Configuration(formats)


def read_configuration(path: str | Path) -> Configuration:
    """Read a configuration from a file."""
    try:
        return parse_configuration(Path(path).read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise NumberError(f"{path}: cannot read the configuration: {reason_of(error)}") from error


def write_configuration(path: str | Path, configuration: Configuration) -> None:
    """Write a configuration as a file."""
    write_text(path, configuration.text, NumberError)


def describe_change(before: Configuration, after: Configuration) -> str:
    """Text of the change from one configuration to another, such as "conv1.weight I8 → I7"; empty without a change."""
    changed = [name for name in sorted({*before, *after}) if before[name] != after[name]]
    if not changed:
        return ""
    texts = {_format_change(before, after, name) for name in changed}
    change = texts.pop() if len(texts) == 1 else f"to {'/'.join(sorted({label(after[name]) for name in changed}))}"
    roles = {name.rpartition(".")[2] for name in changed}
    # "conv1.weight", "3 weights", or "all"
    objects = changed[0] if len(changed) == 1 else f"{len(changed)} {roles.pop()}s" if len(roles) == 1 else "all"
    return f"{objects} {change}"


def _format_change(before: Configuration, after: Configuration, name: str) -> str:
    old, new = before[name], after[name]
    if label(old) == label(new):
        return f"{label(old, bias=True)} \N{RIGHTWARDS ARROW} {label(new, bias=True).removeprefix(label(new))}"
    return f"{label(old)} \N{RIGHTWARDS ARROW} {label(new)}"
