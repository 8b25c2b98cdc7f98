"""The number formats of a machine, for weights and for activations: a small TOML file.

    name = "fpga"
    formats = ["FLOAT 16", "FLOAT 32", "FIXED 2..32", "EXP 2..9"]

``[weight]`` and ``[activation]`` may each have a list of their own. Biases are not listed: they are tuned.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from weft.base.errors import NumberError, TuneError, reason_of, unknown_name
from weft.base.jsonfile import first_problem, printable
from weft_tune.network import Role
from weft_tune.numbers.format import BIN, EXP, FIXED, FLOAT, Format, Kind

KINDS: tuple[Kind, ...] = ("FLOAT", "FIXED", "EXP", "BIN")
MOST_WIDTHS, MOST_DIGITS = 64, 9
"""Limits of the widths in a range and of the digits of a number in it; larger ones are mistakes."""
IEEE_BITS = 16
"""Floats of at least this width keep their usual bias, as their range is wide enough; narrower ones have it tuned."""


class Unbiased(NamedTuple):
    """A number format without its bias: type and width."""

    kind: Kind
    bits: int

    @property
    def biased(self) -> bool:
        """Whether there is a bias to tune."""
        return self.kind != "FLOAT" or self.bits < IEEE_BITS

    @property
    def power_topped(self) -> bool:
        """Whether the largest value is exactly a power of two, not just below one as in the other types."""
        return self.kind in ("EXP", "BIN") or self == ("FIXED", 2)

    def at(self, scale: int) -> Format:
        """The format whose largest value has the exponent *-scale*; wide floats ignore it."""
        match self.kind:
            case "FIXED":
                return FIXED(self.bits, scale)
            case "BIN":
                return BIN(scale)
            case "EXP":
                return EXP(self.bits, scale + (1 << self.bits - 1) - 1)
        usual = FLOAT(self.bits)
        return usual.with_bias(scale + usual.top_exponent) if self.biased else usual

    def __str__(self) -> str:
        return self.kind if self.kind == "BIN" else f"{self.kind} {self.bits}"


@dataclass(frozen=True, slots=True)
class Platform:
    """The formats in which weights and activations may be stored."""

    name: str
    weight: tuple[Unbiased, ...]
    activation: tuple[Unbiased, ...]
    source: str = ""

    def choices(self, role: Role) -> tuple[Unbiased, ...]:
        return self.weight if role == "weight" else self.activation


def as_wide(choices: tuple[Unbiased, ...], kind: Kind, bits: int) -> Unbiased:
    """The narrowest choice with at least *bits*, if possible of the type *kind*; the widest if all are narrower."""

    def kind_order(choice: Unbiased) -> tuple[bool, int]:
        """Sort key: the wanted type first, then the others in the order of ``KINDS``."""
        return choice.kind != kind, KINDS.index(choice.kind)

    wide_enough = [choice for choice in choices if choice.bits >= bits]
    if wide_enough:
        return min(wide_enough, key=lambda choice: (choice.bits, *kind_order(choice)))
    return min(choices, key=lambda choice: (-choice.bits, *kind_order(choice)))


def platforms() -> list[str]:
    """Names of the platforms that ship with the package."""
    folder = resources.files("weft_tune") / "platforms"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_platform(name_or_path: str) -> Platform:
    """Load a platform by name, or from a TOML file."""
    text = _read_text(name_or_path)
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of more than 4300 digits
        raise TuneError(f"{name_or_path}: not a TOML file: {error}") from error
    return parse_platform(raw, name_or_path)


class _Formats(BaseModel, extra="forbid", frozen=True, strict=True):
    formats: Annotated[list[str], Field(min_length=1)]


class _PlatformFile(BaseModel, extra="forbid", frozen=True, strict=True):
    name: Annotated[str, Field(min_length=1), AfterValidator(printable)]
    source: str = ""
    formats: Annotated[list[str], Field(min_length=1)] | None = None
    weight: _Formats | None = None
    activation: _Formats | None = None


def parse_platform(raw: dict[str, Any], where: str) -> Platform:
    """Check a mapping and make the platform of it; *where* opens the error message."""
    try:
        file = _PlatformFile.model_validate(raw)
    except ValidationError as error:
        raise TuneError(f"{where}: {first_problem(error, _PlatformFile, _Formats)}") from error
    formats_by_role: list[tuple[Unbiased, ...]] = []
    for role, section in (("weight", file.weight), ("activation", file.activation)):
        listed = file.formats if section is None else section.formats
        if listed is None:
            raise TuneError(f"{where}: no formats for {role}s; give [{role}] formats = [...], or formats for both")
        formats_by_role.append(_parse_formats(listed, where))
    return Platform(file.name, formats_by_role[0], formats_by_role[1], file.source)


def _parse_formats(texts: list[str], where: str) -> tuple[Unbiased, ...]:
    """Parse the entries of a list of formats, without duplicates, by type and width."""
    formats: set[Unbiased] = set()
    for text in texts:
        try:
            formats.update(_parse_entry(text))
        except NumberError as error:
            raise TuneError(f"{where}: {text!r}: {error}") from error
    return tuple(sorted(formats, key=lambda form: (KINDS.index(form.kind), form.bits)))


def _parse_entry(text: str) -> list[Unbiased]:
    """Parse an entry of a platform file: ``FIXED 2..32`` gives 31 formats, ``FLOAT 16`` and ``BIN`` one each."""
    kind, *rest = text.upper().split() or [""]
    if kind == "BIN" and not rest:
        return [Unbiased("BIN", 1)]
    makers = {"FLOAT": FLOAT, "FIXED": FIXED, "EXP": EXP}
    ends = rest[0].split("..") if len(rest) == 1 else []
    if kind not in makers or len(ends) not in (1, 2) or not all(end.isdecimal() for end in ends):
        raise NumberError("must be FLOAT, FIXED or EXP with a width or a range of widths (FIXED 2..32), or BIN")
    if any(len(end) > MOST_DIGITS for end in ends):
        raise NumberError("no type is so wide; 32 bits are the most")
    first, last = int(ends[0]), int(ends[-1])
    if last < first:
        raise NumberError(f"the range ends before it begins; write {kind} {last}..{first}")
    if last - first >= MOST_WIDTHS:
        raise NumberError("no type has so many widths; 32 bits are the most")
    # Formats are made with some bias to check their widths (NumberError); the result has none, because it is tuned.
    formats = [makers[kind](bits) for bits in range(first, last + 1)]
    return [Unbiased(form.kind, form.bits) for form in formats]


def _read_text(name_or_path: str) -> str:
    """The text of a shipped platform, or of a platform file."""
    if name_or_path in platforms():
        return (resources.files("weft_tune") / "platforms" / f"{name_or_path}.toml").read_text("utf-8")
    if not name_or_path.endswith(".toml"):
        raise TuneError(unknown_name("platform", name_or_path, platforms()) + " (a platform file ends in .toml)")
    try:
        return Path(name_or_path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a zero in it
        raise TuneError(f"{name_or_path}: cannot read the platform file: {reason_of(error)}") from error
