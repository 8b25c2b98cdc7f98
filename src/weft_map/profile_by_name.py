"""The profile that a name means: a file, one that ships with the package, or an estimate."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable

from weft.base.errors import ProfileError
from weft.devices import Soc
from weft_map.estimate import estimate
from weft_map.profiles import Origin, SocProfile, merge_groups, read_soc_profile

SHIPPED_ORIGINS: tuple[Origin, ...] = ("measured", "derived")
"""The kinds of profiles that ship with the package, in order of preference."""


def shipped_profiles(soc: str) -> dict[str, tuple[Origin, ...]]:
    """Model -> the origins of the profiles of it on *soc* that ship with the package, best first."""
    origins: dict[str, list[Origin]] = {}
    folder = next((child for child in _data().iterdir() if child.name == soc and child.is_dir()), None)
    names = [entry.name for entry in folder.iterdir()] if folder else []
    for origin in SHIPPED_ORIGINS:
        for name in sorted(names):
            if name.endswith(f".{origin}.json"):
                origins.setdefault(name.removesuffix(f".{origin}.json"), []).append(origin)
    return {model: tuple(origins[model]) for model in sorted(origins)}


def _data() -> Traversable:
    return resources.files("weft_map") / "data" / "profiles"


@lru_cache(maxsize=256)
def _shipped(soc: str, model: str, origin: Origin) -> SocProfile:
    path = _data() / soc / f"{model}.{origin}.json"
    with resources.as_file(path) as file:
        return read_soc_profile(file)


def find_profile(
    model: str,
    soc: Soc,
    *,
    origin: Origin | None = None,
    max_groups: int | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> SocProfile:
    """The best profile of *model* on *soc*: the .json file it names, a shipped one, else an estimate.

    origin: only such a profile. max_groups: neighbours are merged until there are no more. shapes: input -> shape,
    for a model that is estimated.
    """
    if max_groups is not None and max_groups < 1:
        raise ProfileError(f"max_groups = {max_groups} must be at least 1")
    if model.endswith(".json"):
        if shapes:
            raise ProfileError(f"{model}: a profile is for one size of input; leave its shapes out, or name the model")
        profile = _from_file(model, soc, origin)
    else:
        profile = _by_name(model, soc, origin, max_groups, shapes)
    return profile if max_groups is None else merge_groups(profile, max_groups)


def _from_file(path: str, soc: Soc, origin: Origin | None) -> SocProfile:
    profile = read_soc_profile(path)
    if profile.soc != soc.name:
        raise ProfileError(
            f"{path}: a profile for {profile.soc}, and models are mapped to {soc.name}; take that SoC, or set its soc "
            f"to {soc.name!r} if its numbers hold there"
        )
    if origin is not None and profile.origin != origin:
        raise ProfileError(f"{path}: the profile is {profile.origin}, not {origin}")
    return profile


def _by_name(
    model: str, soc: Soc, origin: Origin | None, max_groups: int | None, shapes: Mapping[str, tuple[int, ...]] | None
) -> SocProfile:
    origins = shipped_profiles(soc.name).get(model, ())
    # A profile is for one size of input; with shapes the caller asks for another.
    wanted = next((shipped for shipped in origins if shapes is None and origin in (None, shipped)), None)
    if wanted is not None:
        return _shipped(soc.name, model, wanted)
    if origin in SHIPPED_ORIGINS:
        there = ", ".join(f"{name} ({' and '.join(its)})" for name, its in shipped_profiles(soc.name).items())
        raise ProfileError(f"no {origin} profile of {model} on {soc.name} is shipped; there are: {there or 'none'}")
    return _estimated(model, soc, max_groups, shapes)


def _estimated(
    model: str, soc: Soc, max_groups: int | None, shapes: Mapping[str, tuple[int, ...]] | None
) -> SocProfile:
    # It reads ONNX; a profile from a file does not need that.
    from weft.models.sources import load_model

    return estimate(load_model(model, shapes=shapes), soc, max_groups=max_groups)
