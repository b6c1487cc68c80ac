"""Lanes of a window in processes, which come and go and are killed."""

import multiprocessing
import os
import random
import signal
import time

import pytest

from lightning_echo.share.window import CHUNK, MOST_LANES, Closed, Lane, Window

FORK = multiprocessing.get_context("fork")


def content(item, size):
    return bytes([item % 251]) * size


def size_of(item):
    return 3000 if item % 61 == 5 else item * 37 % 300


def writes(window, number, connection):
    """A worker: gets chunks, and says when one is done."""
    lane = Lane(window, number, lambda: False)
    while (first := connection.recv()) is not None:
        lane.go_to(first)
        for item in range(first, first + CHUNK):
            if item % 97 == 3:
                time.sleep(0.002)
            try:
                lane.put(item, 0, [content(item, size_of(item))], size_of(item))
            except Closed:
                return
        connection.send(first)


class Lanes:
    """Lanes in processes. A lane that has done its chunk gets the next one."""

    def __init__(self, window):
        self.window, self.next, self.at_work = window, 0, {}

    def begin(self):
        number = next(each for each in range(MOST_LANES) if each not in self.at_work)
        self.window.begin_lane(number, self.next)
        here, there = FORK.Pipe()
        process = FORK.Process(target=writes, args=(self.window, number, there), daemon=True)
        process.start()
        self.at_work[number] = [process, here, False, 0]
        self.deal(number)

    def deal(self, number):
        self.at_work[number][1].send(self.next)
        self.at_work[number][3] = self.next
        self.next += CHUNK

    def serve(self):
        for number, (process, connection, is_ending, _) in list(self.at_work.items()):
            if not connection.poll():
                continue
            connection.recv()
            if not is_ending:
                self.deal(number)
                continue
            connection.send(None)
            process.join()
            self.window.end_lane(number)
            del self.at_work[number]

    def end_one(self, generator):
        at_work = [each for each in self.at_work.values() if not each[2]]
        if len(at_work) > 1:
            generator.choice(at_work)[2] = True


def takes(window, item):
    found = window.copy(item)
    assert found in (None, (0, bytearray(content(item, size_of(item)))))
    return found is not None


@pytest.mark.parametrize("seed", range(4))
def test_lanes_that_come_and_go_and_are_killed_leave_only_whole_examples_and_no_gap(seed):
    window, generator = Window.create(2 ** (12, 13, 15, 18)[seed], 0, 0), random.Random(seed)
    lanes, cursors, skipping = Lanes(window), [0, 0], 0
    lanes.begin()
    deadline = time.monotonic() + 60
    while min(cursors) < 3000:
        lanes.serve()
        if generator.random() < 0.02:
            lanes.begin() if len(lanes.at_work) < 5 else lanes.end_one(generator)
        for number in range(2):
            for _ in range(generator.randrange(50)):
                cursors[number] += takes(window, cursors[number])
        skipping = skipping + 1 if takes(window, skipping) else max(skipping, window.low)
        window.low = min(cursors)
        assert time.monotonic() < deadline, (cursors, [window.at(number) for number in lanes.at_work])
    number = generator.choice(list(lanes.at_work))
    victim, connection, _, chunk = lanes.at_work[number]
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    # If it had done its chunk, and was given no other one, nothing is missing of what was dealt.
    died_at, cursor = lanes.next if connection.poll() else max(window.at(number), chunk), min(cursors)
    end = time.monotonic() + 0.3
    while time.monotonic() < end:  # the others write what they have, and what is there is whole
        while takes(window, cursor):
            cursor += 1
        window.low = cursor
    assert cursor <= died_at
    window.close_for_writers()
    for process, *_ in lanes.at_work.values():
        process.kill()
        process.join()
    window.close()


def test_memory_that_nobody_needs_becomes_free_although_a_forked_process_has_it():
    window = Window.create(2**20, 1, 0)
    Lane(window, 0).put(0, 0, [bytes(2**19)], 2**19)
    here, there = FORK.Pipe()
    child = FORK.Process(target=here.recv, daemon=True)
    child.start()
    try:
        before = os.fstat(window._descriptor).st_blocks * 512
        assert before > 2**19
        window.close_for_writers()
        window.free()
        assert os.fstat(window._descriptor).st_blocks * 512 < before - 2**19
        assert os.stat(f"/proc/{child.pid}/fd/{window._descriptor}").st_ino == os.fstat(window._descriptor).st_ino
        assert (window.is_closed, window.has(0), window.begin) == (1, False, 0)
    finally:
        there.send(None)
        child.join(10)
        window.close()
