"""A process that reads nothing can be ended, whoever waits to be read by it."""

from __future__ import annotations

import contextlib
import threading
import time

import contract_kit as kit


def test_who_reads_nothing_holds_up_who_sends_but_not_who_ends_it():
    def speak():
        with contextlib.suppress(EOFError):
            while True:
                pair.link.send(b"x" * 100_000)

    with kit.Pair("process", kit.ignore) as pair:
        speaker = threading.Thread(target=speak)
        speaker.start()
        time.sleep(0.3)
        assert speaker.is_alive()
        pair.link.interrupt()
        pair.link.send_last("stop")
        pair.link.close(0.5)
        speaker.join(20)
        assert not speaker.is_alive()
