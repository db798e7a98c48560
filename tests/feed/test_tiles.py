"""Tiles of large images: where they lie, what a feeder process makes of them, and what its death costs."""

import os
import signal

import numpy as np
import pytest
import supervision
from hypothesis import given
from hypothesis import strategies as st

from pipeline.feed.fit import ModelInput, fit, fit_tile
from pipeline.feed.tiles import Tile, Tiles, cut_up
from tests.feed.feeding import BMP, LIMITS, encoded, feeding, in_hand

WH = 300, 200
TILES = Tiles(64, 12)
STRETCH = ModelInput((32, 48), "stretch", "darknet", 0, tiles=TILES)
LETTERBOX = ModelInput((48, 48), "letterbox", "ultralytics", 114, tiles=TILES)
OWN_SIZE = ModelInput((8, 8), "none", "darknet", 0, tiles=TILES)
PHOTO = encoded("PNG", WH)


@given(
    st.tuples(st.integers(1, 700), st.integers(1, 700)),
    st.integers(64, 300).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size * 4 // 5))),
)
def test_tiles_are_those_of_supervision_and_show_each_pixel(image_wh, size_and_overlap):
    size, overlap = size_and_overlap
    tiles = cut_up(image_wh, Tiles(size, overlap))
    corners = supervision.InferenceSlicer._generate_offset(image_wh, (size, size), (overlap, overlap))
    assert [(tile.left, tile.top, tile.left + tile.width, tile.top + tile.height) for tile in tiles] == [*map(tuple, corners)]
    shown = np.zeros(image_wh[::-1], bool)
    for tile in tiles:
        shown[tile.top : tile.top + tile.height, tile.left : tile.left + tile.width] = True
    assert shown.all()
    assert {tile.wh for tile in tiles} == {(min(size, image_wh[0]), min(size, image_wh[1]))}


def test_the_whole_image_is_one_more_tile_of_those_that_are_cut():
    assert cut_up((100, 64), Tiles(64, 12, whole=True)) == (Tile(0, 0, 64, 64), Tile(36, 0, 64, 64), Tile(0, 0, 100, 64))
    assert cut_up((64, 64), Tiles(64, 12, whole=True)) == (Tile(0, 0, 64, 64),)


@pytest.mark.parametrize(
    ("image_wh", "count"), [((48, 32), 1), ((49, 32), 1), ((65, 32), 2), ((65, 65), 4)], ids=lambda value: f"{value}"
)
def test_what_is_no_larger_than_the_input_or_a_tile_is_one_tile(image_wh, count):
    assert len(STRETCH.tiles_of(image_wh)) == count
    assert ModelInput((128, 128), "stretch", "darknet", 0, tiles=TILES).tiles_of((128, 90)) == (Tile(0, 0, 128, 90),)


def tiles_by_hand(to, content=PHOTO):
    pixels = fit(content, to, LIMITS.max_pixels)[1]
    wanted = []
    for tile in to.tiles_of(pixels.shape[1::-1]):
        wanted.append(np.zeros((*(tile.wh[::-1] if to.resize == "none" else to.input_hw), 3), np.uint8))
        fit_tile(pixels, tile, to, wanted[-1])
    return np.array(wanted)


@pytest.mark.parametrize("most_tiles", [1, 4, 7, 100])
@pytest.mark.parametrize("to", [STRETCH, LETTERBOX, OWN_SIZE], ids=lambda to: to.resize)
def test_portions_hold_all_tiles_in_their_order(to, most_tiles):
    """The image is decoded once. Another one comes after it, into the same slot."""
    with feeding() as feeder:
        for content in (PHOTO, BMP, PHOTO):
            wanted, got = tiles_by_hand(to, content), []
            first = feeder.start(in_hand(content), to, 0, most_tiles).result()
            for portion in first.portions():
                assert not portion.failures and len(portion.fitted) == len(portion.pixels) <= most_tiles
                got += [tile.copy() for tile in portion.pixels]
                plans = portion.transforms(0, len(portion.pixels))
                tiles = to.tiles_of(portion.fitted[0].image_wh)[len(got) - len(plans) : len(got)]
                assert [(plan.left, plan.top) for plan in plans] == [(tile.left, tile.top) for tile in tiles]
            assert np.array_equal(got, wanted)


def test_portions_wait_for_room_and_take_the_memory_of_two():
    """A process never writes tiles where the model still reads others, however long it reads."""
    with feeding(most_bytes=1e6) as feeder:
        most = feeder.tiles_at_once(STRETCH, 5)
        assert feeder.tiles_at_once(STRETCH, 10**6) == 1_000_000 // (4 * 32 * 48 * 3)
        wanted = tiles_by_hand(STRETCH)
        first = feeder.start(in_hand(PHOTO), STRETCH, 0, most).result()
        second = first.rest.result()
        with feeding() as other:  # which starts and cuts the whole image meanwhile
            other.start(in_hand(PHOTO), STRETCH, 0, most).result().discard()
        assert np.array_equal(first.pixels, wanted[:most]) and np.array_equal(second.pixels, wanted[most : 2 * most])
        first.release()
        third = second.rest.result()
        assert np.array_equal(third.pixels, wanted[2 * most : 3 * most])
        assert sum(feeder._held.values()) == 2 * most * 32 * 48 * 3
        first.discard()
        assert not feeder._busy


def test_a_process_that_dies_among_the_tiles_costs_the_image_once_and_no_other():
    """The image is not read again, as another version of it may be there: its row has the tiles of one version."""
    with feeding() as feeder:
        first = feeder.start(in_hand(PHOTO), STRETCH, 0, 2).result()
        later = feeder.start(in_hand(BMP), STRETCH, 0, 2)
        (process,) = feeder._running  # others may be of detectors that earlier tests share
        os.kill(process.pid, signal.SIGKILL)
        portions = list(first.portions())
        assert [place for portion in portions for place in portion.failures] == [0]
        assert portions[-1].failures[0].reason == "decoder_died"
        assert len(later.result().pixels) == 1
        later.result().release()
        assert not feeder._busy
