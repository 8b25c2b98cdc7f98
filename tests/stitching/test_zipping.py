"""Zipping: its arithmetic by hand, models that must come together without loss, and real tasks."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from training.multi_task_zipping.merging import (
    Filters,
    common,
    damped,
    difference,
    greedy,
    merge,
    pair,
)
from training.multi_task_zipping.networks import Examples, accuracy, forward, tables, train
from training.multi_task_zipping.zipping import Data, zip_nets

from tests.stitching.nets import TINY, images, run, tiny
from weft.base.errors import StitchError
from weft.models.trained import TRAINED
from weft_stitch.discovery import discover
from weft_stitch.making.generator import FamilyRecipe, save_nets
from weft_stitch.making.zipped import ZIPPED, read_card
from weft_stitch.reading.alignment import align
from weft_stitch.reading.onnx_reader import read_net
from weft_stitch.summary import count_kernels

torch.set_num_threads(1)

SIDE, CLASSES = 8, 6


def filters(vectors, moments):
    return Filters(np.asarray(vectors, float)[..., None], np.asarray(moments, float))


def positive(size, rng):
    root = rng.standard_normal((size, size))
    return root @ root.T + 0.1 * np.eye(size)


def shapes(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy pictures of six fixed patterns, and which pattern each shows."""
    patterns = np.random.default_rng(0).standard_normal((CLASSES, 1, SIDE, SIDE))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    return (patterns[labels] + 0.8 * rng.standard_normal((count, 1, SIDE, SIDE))).astype(np.float32), labels


def task(question) -> Data:
    parts = [shapes(480, 1), shapes(300, 2)]
    return Data(*(Examples(pictures, question(labels)) for pictures, labels in parts))


@pytest.fixture(scope="module")
def pupils():
    """Three networks that learned three questions about the same pictures, each from weights of its own."""
    data = [task(lambda labels: labels), task(lambda labels: labels % 2), task(lambda labels: labels // 2)]
    nets = []
    for number, mine in enumerate(data):
        classes = int(mine.train.labels.max()) + 1
        recipe = FamilyRecipe("tinynet", 1, widths=[0.5], channels=1, classes=classes, seed=number)
        nets.append(replace(train(recipe.net(0), mine.train, epochs=3, batch=32, seed=number), name=f"pupil-{number}"))
    return nets, data


def by_blocks(sharing, tasks):
    """A sharing as sets that do not depend on the order of blocks and channels."""
    everyone = frozenset(range(tasks))
    return {
        name: frozenset(
            tuple(int(block.members[task][at]) for task in range(tasks))
            for block in space.blocks
            if block.tasks == everyone
            for at in range(block.width)
        )
        for name, space in sharing.spaces.items()
    }


# The arithmetic


def test_the_difference_of_two_filters_is_what_their_best_common_filter_costs_both():
    rng = np.random.default_rng(3)
    ours, theirs = (Filters(rng.standard_normal((2, 3, 4)), positive(3, rng)) for _ in range(2))
    found = difference(ours, theirs)
    for one, two in itertools.product(range(2), range(2)):
        sides = ours.take(np.array([one])), theirs.take(np.array([two]))
        best = common(*sides).vectors
        price = sum(
            0.5 * np.einsum("nit,ij,njt->", best - side.vectors, side.moments, best - side.vectors) for side in sides
        )
        assert found[one, two] == pytest.approx(price)


def test_the_common_filter_is_the_mean_where_inputs_are_alike():
    moments = [[2.0, 0.5], [0.5, 1.0]]
    found = common(filters([[1.0, 3.0]], moments), filters([[3.0, 5.0]], moments))
    np.testing.assert_allclose(found.vectors[0, :, 0], [2.0, 4.0])
    np.testing.assert_allclose(found.moments, 2 * np.array(moments))


def test_who_uses_an_input_more_pulls_the_common_filter():
    found = common(filters([[0.0, 0.0]], np.diag([3.0, 1.0])), filters([[4.0, 4.0]], np.diag([1.0, 1.0])))
    np.testing.assert_allclose(found.vectors[0, :, 0], [1.0, 2.0])
    np.testing.assert_allclose(
        difference(filters([[0.0, 0.0]], np.diag([3.0, 1.0])), filters([[4.0, 4.0]], np.diag([1.0, 1.0]))),
        [[0.5 * (0.75 * 16 + 0.5 * 16)]],
    )


def test_depthwise_filters_weigh_by_their_own_channel():
    ours, theirs = filters([[1.0], [5.0]], [1.0, 2.0]), filters([[4.0], [5.0]], [2.0, 2.0])
    np.testing.assert_allclose(difference(ours, theirs), [[0.5 * 2 / 3 * 9, 0.5 * 2 / 3 * 16], [0.5, 0.0]])
    np.testing.assert_allclose(common(ours, theirs).vectors[:, 0, 0], [3.0, 5.0])


def test_the_cheapest_pairs_are_taken_first_and_nothing_twice():
    rows, columns = greedy(np.array([[1.0, 2.0, 9.0], [0.5, 9.0, 9.0], [9.0, 9.0, 3.0]]), 2)
    assert list(zip(rows, columns, strict=True)) == [(1, 0), (0, 1)]


def test_a_third_task_joins_the_pairs_of_the_first_two():
    base = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [7.0, 7.0]])
    moments = np.eye(2)
    layer = [filters(base, moments), filters(base[[2, 0, 3, 1]] + 0.1, moments), filters(base[[3, 1, 0]], moments)]
    first, second, third = pair([layer], 3)
    assert {tuple(each) for each in zip(first, second, third, strict=True)} <= {
        (0, 1, 2),
        (1, 3, 1),
        (3, 2, 0),
        (2, 0, 0),
    }
    assert len(first) == len(set(third)) == 3


def test_merging_three_weighs_all_alike():
    sides = [filters([[value]], [[1.0]]) for value in (0.0, 3.0, 9.0)]
    assert merge(sides)[0, 0, 0] == pytest.approx(4.0)


def test_dead_inputs_can_be_inverted():
    assert np.isfinite(np.linalg.inv(damped(np.zeros((3, 3))))).all()
    assert (damped(np.array([0.0, 2.0])) > 0).all()


# Torch's run of a net


@pytest.mark.parametrize("architecture", TINY)
def test_torch_runs_a_net_as_numpy_does(architecture):
    found = tiny(architecture, batches=3)
    for net, pictures in zip(found.nets, images(found.nets), strict=True):
        answers = forward(net, tables(net), torch.from_numpy(pictures)).numpy()
        np.testing.assert_allclose(answers, run(net, pictures)[0], atol=2e-5)


def test_training_teaches_and_its_normalisations_are_tables_after_it(pupils):
    nets, data = pupils
    for net, mine in zip(nets, data, strict=True):
        assert accuracy(net, mine.test) > 0.85
        answers = run(net, mine.test.images[:50])[0]
        plain = forward(net, tables(net), torch.from_numpy(mine.test.images[:50])).numpy()
        np.testing.assert_allclose(answers, plain, atol=1e-4)


# Zipping


@pytest.mark.parametrize("architecture", TINY)
def test_models_that_differ_only_in_order_come_together_without_loss(architecture):
    found = FamilyRecipe(architecture, 3, pruning=0.4, sharing=1.0, classes=[5, 4, 3], norm="shared", seed=2)
    nets, pictures = list(found.nets()), np.random.default_rng(5).standard_normal((32, 3, 8, 8), np.float32)
    data = [Data(*[Examples(pictures, np.zeros(32, int))] * 2) for _ in nets]
    zipped = zip_nets(nets, data, sharing=1.0, finetune_steps=0, last_steps=0)
    for before, after in zip(nets, zipped.nets, strict=True):
        np.testing.assert_allclose(run(after, pictures)[0], run(before, pictures)[0], atol=2e-3)
    assert by_blocks(zipped.planted, 3) == by_blocks(found.planted, 3)


@pytest.mark.parametrize("architecture", TINY)
def test_strangers_of_unequal_widths_share_exactly_too(architecture):
    nets = list(FamilyRecipe(architecture, 2, pruning=0.6, sharing=0.0, widths=[1, 1.3], classes=[3, 2]).nets())
    pictures = np.random.default_rng(5).standard_normal((16, 3, 8, 8), np.float32)
    data = [Data(*[Examples(pictures, np.arange(16) % 2)] * 2) for _ in nets]
    zipped = zip_nets(nets, data, sharing=0.6, finetune_steps=1, last_steps=1, batch=8)
    assert by_blocks(discover(align(zipped.nets)), 2) == by_blocks(zipped.planted, 2)
    for name, space in zipped.planted.spaces.items():
        if name not in ("image", "fc", "fc2"):
            assert space.shared_width == round(0.6 * min(space.widths)), name


@pytest.mark.parametrize(("sharing", "tasks"), [(0.9, 3), (0.6, 2)])
def test_zipped_models_share_exactly_and_still_know_their_tasks(pupils, sharing, tasks):
    nets, data = (each[:tasks] for each in pupils)
    heard = []
    zipped = zip_nets(
        nets, data, sharing=sharing, finetune_steps=3, last_steps=20, batch=32,
        on_progress=lambda space, done, total: heard.append((space, done, total)),
    )  # fmt: skip
    assert [done for _, done, _ in heard] == list(range(1, heard[0][2] + 1))
    for before, after in zip(zipped.before, zipped.after, strict=True):
        assert after > before - 0.1
    family = align(zipped.nets)
    assert by_blocks(discover(family), tasks) == by_blocks(zipped.planted, tasks)
    shared = {name: space.shared_width for name, space in zipped.planted.spaces.items()}
    narrow, wide = round(sharing * 10), round(sharing * 20)
    assert shared == {
        "image": 1, "stem.conv": narrow, "block1.1.conv": narrow, "block2.1.conv": wide, "block2.2.conv": wide, "fc": 0
    }  # fmt: skip
    alone = sum(op.weight.size for net in nets for op in net.ops if op.kind == "conv")
    assert count_kernels(family, zipped.planted).unique < (0.55 if sharing == 0.9 else 0.85) * alone


def test_tuning_repairs_what_merging_breaks(pupils):
    nets, data = pupils
    merged = zip_nets(nets[:2], data[:2], sharing=1.0, finetune_steps=0, last_steps=0)
    tuned = zip_nets(nets[:2], data[:2], sharing=1.0, finetune_steps=2, last_steps=20, batch=32)
    assert sum(tuned.after) > sum(merged.after)
    assert merged.before == tuned.before


def test_zipping_again_gives_the_same_bits(pupils):
    nets, data = pupils
    first, second = (zip_nets(nets[:2], data[:2], finetune_steps=1, last_steps=2, batch=16) for _ in range(2))
    for ours, theirs in zip(first.nets, second.nets, strict=True):
        for one, two in zip(ours.ops, theirs.ops, strict=True):
            assert one.weight is two.weight is None or (one.weight == two.weight).all()


@pytest.mark.parametrize(
    ("count", "settings", "words"),
    [
        (1, {}, "1 models and data for 1; zipping needs two models or more"),
        (2, {"sharing": 1.2}, "a sharing of 1.2 is not from 0 to 1"),
    ],
)
def test_what_cannot_be_zipped_is_refused_in_words(pupils, count, settings, words):
    nets, data = pupils
    with pytest.raises(StitchError, match=words):
        zip_nets(nets[:count], data[:count], **settings)


# The networks that are shipped


@pytest.mark.parametrize("name", ZIPPED)
def test_shipped_networks_share_what_their_card_says(name):
    found = read_card(name)
    nets = [read_net(task.path) for task in found.tasks]
    family = align(nets)
    sharing = discover(family)
    assert count_kernels(family, sharing).unique == found.at(found.shipped).unique_weights < found.weights
    inner = [space for space in sharing.spaces.values() if min(space.widths) >= 20]
    assert len(inner) == 4
    assert all(space.shared_width == round(found.shipped * min(space.widths)) for space in inner)
    for task in found.tasks:
        assert hashlib.sha256(task.path.read_bytes()).hexdigest() == task.sha256
        assert task.path.stat().st_size < 300_000


@pytest.mark.parametrize(("name", "samples"), [("mnist", "mnist-vit"), ("cifar", "cifar-cnn")])
def test_shipped_networks_are_as_good_as_their_card_says(name, samples):
    found, some = read_card(name), TRAINED[samples].samples()
    pixels = some.inputs()
    count, channels, side, _ = pixels.shape
    halved = pixels.reshape(count, channels, side // 2, 2, side // 2, 2).mean((3, 5))
    for task, expected in zip(found.tasks, found.at(found.shipped).accuracy, strict=True):
        labels = np.array(task.classes)[some.label]
        measured = accuracy(read_net(task.path, batch=count), Examples(halved, labels))
        assert measured == pytest.approx(expected, abs=4 * (expected * (1 - expected) / count) ** 0.5 + 0.01)
        assert expected > task.accuracy - 0.08


def test_saved_models_read_back_as_they_were(pupils, tmp_path):
    nets, _ = pupils
    for net, path in zip(nets, save_nets(nets, tmp_path, dynamic=True), strict=True):
        again = read_net(path)
        ours, theirs = ([op.weight for op in each.ops if op.kind == "conv"] for each in (net, again))
        assert all((one == two).all() for one, two in zip(ours, theirs, strict=True))
