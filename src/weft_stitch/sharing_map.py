"""Files that say which channels models share, for users who know: ``read_sharing``, ``write_sharing``.

    {"format": 1,
     "spaces": {"conv1": [{"cats": [0, 2, 5], "dogs": [1, 0, 7], "birds": [3, 4, 0]},
                          {"cats": [1, 3], "dogs": [2, 3]}]}}

A space goes by the name of a value of the first model that carries it and no other; its blocks list, model by model,
the channels that are the same, in the same order. Channels in no block are a model's own. Of spaces that the file does
not name nothing is shared, but for the models' inputs, which are the same channel by channel if all have as many.
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
from weft_stitch.family import Family
from weft_stitch.sharing import Block, ChannelSpace, Sharing
from weft_stitch.spaces import Wiring, wire

FORMAT = 1


def read_sharing(path: str | Path, family: Family, *, tolerance: float = 0.0, check: bool = True) -> Sharing:
    """The sharing that the file states; weights that it calls the same may differ by *tolerance* unless not checked."""
    raw = read_json(path, StitchError)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT or not isinstance(raw.get("spaces"), dict):
        raise StitchError(f'{path}: not a sharing map; it is an object with "format": {FORMAT} and "spaces"')
    wiring = wire(family)
    given: dict[str, ChannelSpace] = {}
    for name, blocks in raw["spaces"].items():
        space = _space_name(wiring, name, f"{path}: ")
        if space in given:
            raise StitchError(f"{path}: {name} is space {space}, which the file has already; join the two")
        given[space] = _space(blocks, family, wiring.widths[space], f"{path}: space {name}")
    spaces = {name: given.get(name) or _unnamed(name, family, wiring) for name in wiring.widths}
    sharing = Sharing(spaces)
    if check:
        verify(family, sharing, tolerance)
    return sharing


def write_sharing(path: str | Path, sharing: Sharing, family: Family) -> None:
    """Write the blocks of several tasks, each on a line; ``read_sharing`` reads them back."""
    names = _names(family)
    spaces = []
    for name, space in sharing.spaces.items():
        blocks = (
            json.dumps({names[task]: np.asarray(channels).tolist() for task, channels in block.members.items()})
            for block in space.blocks
            if len(block.tasks) > 1
        )
        spaces.append(f"  {json.dumps(name)}: [{f',{chr(10)}   '.join(blocks)}]")
    listed = ",\n".join(spaces)
    write_text(path, f'{{"format": {FORMAT},\n "spaces": {{\n{listed}\n }}}}\n')


def _names(family: Family) -> list[str]:
    names = [net.name for net in family.nets]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise StitchError(f"two models are called {twice}; a sharing map needs a name for each")
    return names


def _space_name(wiring: Wiring, name: str, where: str) -> str:
    if name in wiring.widths:
        return name
    carried = wiring.carries.get(name, ())
    if len(carried) == 1:
        return carried[0]
    if carried:
        raise StitchError(f"{where}{name} carries several spaces; name one of {', '.join(carried)}")
    raise StitchError(where + unknown_name("space", name, wiring.widths))


def _unnamed(name: str, family: Family, wiring: Wiring) -> ChannelSpace:
    widths = wiring.widths[name]
    inputs = {space for value in family.inputs for space in wiring.carries[value]}
    return (
        ChannelSpace.common(widths[0], len(widths))
        if name in inputs and len(set(widths)) == 1
        else ChannelSpace.exclusive(widths)
    )


def _space(blocks: Any, family: Family, widths: tuple[int, ...], where: str) -> ChannelSpace:
    if not isinstance(blocks, list) or not all(isinstance(block, dict) and block for block in blocks):
        raise StitchError(f"{where} is not a list of blocks, each an object of models with their channels")
    left = [np.ones(width, bool) for width in widths]
    found = [_block(block, family, left, where) for block in blocks]
    own = [Block({task: np.flatnonzero(mine)}) for task, mine in enumerate(left) if mine.any()]
    found = [block for block in found if block.width]
    return ChannelSpace(widths, (*sorted(found, key=lambda block: -len(block.tasks)), *own))


def _block(raw: dict[str, Any], family: Family, left: list[Any], where: str) -> Block:
    """A block of the file; its channels are taken from those that are *left*."""
    names = _names(family)
    members = {}
    for name, channels in raw.items():
        if name not in names:
            raise StitchError(f"{where}: {unknown_name('model', name, names)}")
        task = names.index(name)
        if not isinstance(channels, list) or not all(type(each) is int for each in channels):
            raise StitchError(f"{where}: the channels of {name} are not a list of whole numbers")
        for channel in channels:
            if not 0 <= channel < len(left[task]):
                raise StitchError(f"{where}: {name} has channels 0 to {len(left[task]) - 1}, not {channel}")
            if not left[task][channel]:
                raise StitchError(f"{where}: channel {channel} of {name} is listed twice")
            left[task][channel] = False
        members[task] = np.array(channels, np.int64)
    if len({len(channels) for channels in members.values()}) > 1:
        sizes = ", ".join(f"{names[task]} {len(channels)}" for task, channels in members.items())
        raise StitchError(f"{where}: a block has as many channels in every model, but here {sizes}")
    return Block(dict(sorted(members.items())))
