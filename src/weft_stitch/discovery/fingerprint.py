"""64-bit fingerprints of the rows and columns of convolution weights: ``rows``, ``columns``, ``filters``.

A fingerprint is a sum over weights, each scrambled and multiplied by a random odd number that belongs to the *label* of
its channel and its tap. Channels of two models that have the same label count the same wherever they lie, so that equal
fingerprints mean equal weights under the matching of channels that the labels stand for (but for a chance of about
2**-60). Sums are exact (modulo 2**64) and come apart by blocks of channels. Minus zero counts as zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from weft_stitch.net import Array

Keys = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CHUNK = 1 << 17
"""Weights scrambled at a time: 1 MB."""


def rows(weight: Array, labels: Array, blocks: Array, count: int) -> Keys:
    """For each output of *weight* [out, in, taps] and each of *count* blocks, the fingerprint over the block's inputs.

    labels: [in]; blocks: [in], the block of each input, or -1 for inputs that count nothing.
    """
    taps = weight.shape[2]
    factors = multipliers(labels, taps)
    factors[blocks < 0] = 0
    result = np.zeros((len(weight), count), np.uint64)
    for chunk in _chunks(weight):
        words = scramble(weight[chunk])
        if count == 1:
            result[chunk, 0] = np.einsum("oit,it->o", words, factors)
        elif count > 1:
            result[chunk] = _by_block(np.einsum("oit,it->oi", words, factors), blocks, count)
    return result


def columns(weight: Array, labels: Array, blocks: Array, count: int) -> Keys:
    """The fingerprints of ``rows`` for each input of *weight*, over the outputs; labels and blocks: [out]."""
    factors = multipliers(labels, weight.shape[2])
    factors[blocks < 0] = 0
    result = np.zeros((weight.shape[1], count), np.uint64)
    for chunk in _chunks(weight):
        products = scramble(weight[chunk])
        if count == 1:
            result[:, 0] += np.einsum("oit,ot->i", products, factors[chunk])
        elif count > 1:
            result += _by_block(np.einsum("oit,ot->io", products, factors[chunk]), blocks[chunk], count)
    return result


def filters(weight: Array) -> Keys:
    """For each channel of a depthwise *weight* [channels, 1, taps], the fingerprint of its filter."""
    return np.asarray(np.einsum("oit,it->o", scramble(weight), multipliers(np.zeros(1, np.int64), weight.shape[2])))


def multipliers(labels: Array, taps: int) -> Keys:
    """A random odd number for each label and tap: [labels, taps]."""
    return mix(numbered(labels, taps)) | np.uint64(1)


def numbered(labels: Array, each: int) -> Keys:
    """*each* numbers for each label, none of them twice: [labels, each]."""
    return np.asarray(labels[:, None] * each + np.arange(each), np.uint64)


def mix(number: Keys) -> Keys:
    """A well-spread number for each (the finaliser of splitmix64, by Steele, Lea and Flood)."""
    number = (number + np.uint64(1)) * _GOLDEN
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(number ^ (number >> np.uint64(31)))


def scramble(weight: Array) -> Keys:
    """The bits of each weight as a number whose low bits depend on all of them; 0 for zero.

    Without it, weights that differ in their signs only would differ by multiples of 2**31. The multiplication by the
    golden ratio keeps different words of 32 bits apart even after the shift.
    """
    words: Keys = (weight + weight.dtype.type(0)).view(f"u{weight.dtype.itemsize}").astype(np.uint64)
    if weight.dtype.itemsize > 4:
        words ^= words >> np.uint64(29)
        return words * _GOLDEN
    words *= _GOLDEN
    words >>= np.uint64(30)
    return words


def _by_block(products: Keys, blocks: Array, count: int) -> Keys:
    """Sums of the columns of *products* that belong to each block."""
    order = np.argsort(blocks, kind="stable")
    present, starts = np.unique(blocks[order], return_index=True)
    sums = np.add.reduceat(products[:, order], starts, axis=1)
    result = np.zeros((len(products), count), np.uint64)
    shared = present >= 0
    result[:, present[shared]] = sums[:, shared]
    return result


def _chunks(weight: Array) -> Iterator[slice]:
    step = max(1, _CHUNK // max(1, weight[0].size)) if len(weight) else 1
    return (slice(start, start + step) for start in range(0, len(weight), step))
