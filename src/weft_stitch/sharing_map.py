"""Sharing maps, files that list which channels models share: ``read_sharing``, ``write_sharing``.

    {"format": 1,
     "spaces": {"conv1": [{"cats": [0, 2, 5], "dogs": [1, 0, 7], "birds": [3, 4, 0]},
                          {"cats": [1, 3], "dogs": [2, 3]}]}}

A space goes by the name of a value of the first model that carries it and no other; its blocks list, model by model,
the channels that are the same, in the same order. Channels in no block are a model's own. Nothing is shared of spaces
that the file does not name, except inputs, which all models share if they have equally many channels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from weft.base.errors import StitchError, unknown_name
from weft.base.files import write_text
from weft.base.jsonfile import read_json
from weft_stitch.discovery.comparison import verify
from weft_stitch.family import Block, ChannelCounts, ChannelSpace, Family, Sharing, Wiring, wire

FORMAT = 1
"""Version of the file format; files of another are refused."""


def read_sharing(path: str | Path, family: Family, *, tolerance: float = 0.0) -> Sharing:
    """Read the sharing in the file at *path*, and verify it with the weights of *family*.

    *tolerance*: the largest difference of weights that the file calls the same. Raises ``StitchError`` if the file
    is malformed or does not fit the models.
    """
    raw = read_json(path, StitchError)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT or not isinstance(raw.get("spaces"), dict):
        raise StitchError(f'{path}: not a sharing map; it is an object with "format": {FORMAT} and "spaces"')
    wiring = wire(family)
    spaces: dict[str, ChannelSpace] = {}
    for name, blocks in raw["spaces"].items():
        space = _space_name(wiring, name, f"{path}: ")
        if space in spaces:
            raise StitchError(f"{path}: {name} is space {space}, which the file has already; join the two")
        spaces[space] = _read_space(blocks, family, wiring.widths[space], f"{path}: space {name}")
    sharing = Sharing({name: spaces.get(name) or _unnamed_space(name, family, wiring) for name in wiring.widths})
    verify(family, sharing, tolerance)
    return sharing


def write_sharing(path: str | Path, sharing: Sharing, family: Family) -> None:
    """Write all blocks that several tasks share; ``read_sharing`` reads them back."""
    names = _names(family)
    spaces = []
    for name, space in sharing.spaces.items():
        blocks = (
            json.dumps({names[task]: np.asarray(channels).tolist() for task, channels in block.members.items()})
            for block in space.blocks
            if len(block.tasks) > 1
        )
        spaces.append(f"  {json.dumps(name)}: [{f',{chr(10)}   '.join(blocks)}]")
    entries = ",\n".join(spaces)
    write_text(path, f'{{"format": {FORMAT},\n "spaces": {{\n{entries}\n }}}}\n')


def _names(family: Family) -> list[str]:
    """The names of the models; ``StitchError`` if two are equal."""
    names = [net.name for net in family.nets]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise StitchError(f"two models are called {twice}; a sharing map needs a name for each")
    return names


def _space_name(wiring: Wiring, name: str, message_prefix: str) -> str:
    """The space called *name*, or the only one of the value *name*. *message_prefix* begins error messages."""
    if name in wiring.widths:
        return name
    carried = wiring.carries.get(name, ())
    if len(carried) == 1:
        return carried[0]
    if carried:
        raise StitchError(f"{message_prefix}{name} carries several spaces; name one of {', '.join(carried)}")
    raise StitchError(message_prefix + unknown_name("space", name, wiring.widths))


def _unnamed_space(name: str, family: Family, wiring: Wiring) -> ChannelSpace:
    """A space that the file does not name: shared by all models if it is an input of equal widths, else by none."""
    widths = wiring.widths[name]
    inputs = {space for value in family.inputs for space in wiring.carries[value]}
    is_shared = name in inputs and len(set(widths)) == 1
    return ChannelSpace.common(widths[0], len(widths)) if is_shared else ChannelSpace.completed(widths)


def _read_space(blocks: Any, family: Family, widths: ChannelCounts, message_prefix: str) -> ChannelSpace:
    """The space with the blocks of the file; ``StitchError`` if they are malformed."""
    if not isinstance(blocks, list) or not all(isinstance(block, dict) and block for block in blocks):
        raise StitchError(f"{message_prefix} is not a list of blocks, each an object of models with their channels")
    listed: list[set[int]] = [set() for _ in widths]
    shared = [_read_block(block, family, widths, listed, message_prefix) for block in blocks]
    shared.sort(key=lambda block: -len(block.tasks))
    return ChannelSpace.completed(widths, [block for block in shared if block.width])


def _read_block(
    raw: dict[str, Any], family: Family, widths: ChannelCounts, listed: list[set[int]], message_prefix: str
) -> Block:
    """A block of the file; its channels are added to *listed*: for each task, the channels in blocks so far."""
    names = _names(family)
    members = {}
    for name, channels in raw.items():
        if name not in names:
            raise StitchError(f"{message_prefix}: {unknown_name('model', name, names)}")
        task = names.index(name)
        if not isinstance(channels, list) or not all(type(channel) is int for channel in channels):
            raise StitchError(f"{message_prefix}: the channels of {name} are not a list of whole numbers")
        for channel in channels:
            if not 0 <= channel < widths[task]:
                raise StitchError(f"{message_prefix}: {name} has channels 0 to {widths[task] - 1}, not {channel}")
            if channel in listed[task]:
                raise StitchError(f"{message_prefix}: channel {channel} of {name} is listed twice")
            listed[task].add(channel)
        members[task] = np.array(channels, np.int64)
    if len({len(channels) for channels in members.values()}) > 1:
        sizes = ", ".join(f"{names[task]} {len(channels)}" for task, channels in members.items())
        raise StitchError(f"{message_prefix}: a block has as many channels in every model, but here {sizes}")
    return Block(dict(sorted(members.items())))
