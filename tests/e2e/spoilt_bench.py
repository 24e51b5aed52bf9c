"""A worker process of `kvferry bench` that does one thing wrong: KIND PARENT_PID."""

import os
import sys
import time

import numpy as np

from kvferry import KVReceiver
from kvferry.bench import child, fixed_pages, model_request, rooms_side, transfer_side
from kvferry.bench.pattern import fill
from kvferry.bench.strided import GUARD, Places
from kvferry.engines import find

ROUND = 3


def one_bit(words, round_number, first_word=0):
    fill(words, round_number, first_word)
    if round_number == ROUND:
        words[len(words) // 2] ^= np.uint64(1 << 40)


def bytes_of_the_round_before(words, round_number, first_word=0):
    fill(words, round_number - (round_number == ROUND), first_word)


def to_other_pages(receiver, pages):
    """Name the pages in another order: what arrives is all there, at the wrong place."""
    if receiver.bootstrap_room == ROUND + 1:
        pages = np.roll(pages, 1)
    KVReceiver.send_metadata(receiver, pages)


def die(*_, **__):
    os._exit(9)


def hang(*_, **__):
    time.sleep(600)


class Misplacing(KVReceiver):
    send_metadata = to_other_pages


class GuardWriting(transfer_side.DecodeSide):
    def check(self, round_number):
        if round_number == ROUND:
            rows = fixed_pages.rows_of(self.spec, self.arrays[0])
            rows[0, self.geometry.guards[-1], -1] += np.uint64(1)
        return super().check(round_number)


class ModelGuardWriting(transfer_side.DecodeSide):
    def check(self, round_number):
        if round_number == ROUND:
            words = self.arrays[-1].view(np.uint64)
            words[np.flatnonzero(words == GUARD)[0]] += np.uint64(1)
        return super().check(round_number)


class OneElement(Places):
    """Another word in the last element of each field and layer."""

    def write(self, round_number):
        super().write(round_number)
        if round_number == ROUND:
            self.view[self.page[-1], self.offset[-1], -1, 0] += np.uint64(1)


class BeforePlaces(Places):
    def write(self, round_number):
        super().write(round_number - (round_number == ROUND))


def spoil(kind):
    sides = (fixed_pages, rooms_side)
    if kind == "one bit":
        for side in sides:
            side.fill = one_bit
    elif kind == "the round before":
        fixed_pages.fill = bytes_of_the_round_before
    elif kind == "other pages":
        transfer_side.KVReceiver = Misplacing
    elif kind == "a guard":
        transfer_side.DecodeSide = GuardWriting
    elif kind == "a guard of the model's":
        transfer_side.DecodeSide = ModelGuardWriting
    elif kind in {"one element", "elements of the round before"}:
        wrong = OneElement if kind == "one element" else BeforePlaces
        model_request.places = spoilt_places(wrong, model_request.places)
    elif kind == "no stamp":
        rooms_side.PrefillSide._begin = unstamped
    elif kind == "death of prefill":
        transfer_side.PrefillSide.send = die
    elif kind == "death of decode":
        rooms_side.DecodeSide.many = die
    elif kind == "hang of decode":
        transfer_side.DecodeSide.check = hang
    elif kind == "a failing engine":
        find.register("local", "spoilt_bench:Failing")


def spoilt_places(wrong, right):
    def places(*arguments):
        for each in right(*arguments):
            yield wrong(**vars(each))

    return places


def unstamped(side, page, room):
    sender = rooms_side.KVSender(side.manager, None, room)
    sender.init(1)
    sender.send(np.array([page], np.int32))
    return sender


def Failing():
    from kvferry.testing.faulty import FaultyEmbedded

    engine = FaultyEmbedded()
    engine.fail(cause="the cable is cut")
    return engine


if __name__ == "__main__":
    spoil(sys.argv[1])
    sys.exit(child.main(sys.argv[2:]))
