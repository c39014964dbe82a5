"""Two clocks, one protocol."""

import time

from paxkv.engine.clock import VirtualClock, WallClock


def test_the_wall_clock_stands_still_while_compiling():
    clock = WallClock()
    time.sleep(0.02)
    clock.spend(duration_s=0.0, compile_s=0.01)
    assert 0.01 <= clock.now() < 10.0
    before = clock.now()
    clock.spend(duration_s=5.0, compile_s=0.0)  # the work has already passed on the wall
    assert clock.now() - before < 5.0


def test_the_wall_clock_waits_and_does_not_wait_for_the_past():
    clock = WallClock()
    clock.wait_until(0.02)
    assert clock.now() >= 0.02
    clock.wait_until(-1.0)


def test_the_virtual_clock_moves_by_steps_and_waits_only():
    clock = VirtualClock()
    time.sleep(0.01)
    assert clock.now() == 0.0
    clock.spend(duration_s=1.5, compile_s=9.0)
    clock.wait_until(4.0)
    clock.wait_until(2.0)
    assert clock.now() == 4.0
