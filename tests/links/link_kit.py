"""What tests let worker processes do; workers import this file."""

from __future__ import annotations

import os
import signal
import sys
import time

from wait_kit import alive as alive
from wait_kit import gone as gone

from swath.links import launch, pack, unpack


def answer(channel, payload):
    """Apply what comes to what comes with it, until the other side closes."""
    channel.send(("up", os.getpid(), payload))
    while True:
        (function, arguments), descriptors = channel.receive()
        channel.send(unpack(function)(*arguments, *descriptors))


def end(channel, payload):
    how = payload.decode()
    if how == "return":
        return
    if how == "raise":
        raise KeyError("as asked")
    if how == "exit":
        sys.exit(3)
    if how == "_exit":
        os._exit(4)
    if how == "message":
        sys.exit("some words")
    os.kill(os.getpid(), getattr(signal, how))


def nap(channel, payload):
    channel.send("up")
    time.sleep(3600)


def speak(channel, payload):
    sys.stdout.write("said " + payload.decode() + "\n")
    os.write(2, b"written " + payload + b"\n")


def surroundings(channel, payload):
    channel.send((os.getcwd(), os.environ.get("SWATH_TEST"), list(sys.path), list(sys.argv)))


def draw(channel, payload):
    import random

    import numpy as np
    import torch

    channel.send((random.random(), np.random.rand(), torch.rand(()).item()))


def nest(channel, payload):
    """Start a worker of this worker, and tell of it."""
    inner = launch(answer, b"inner")
    channel.send((os.getpid(), inner.pid, inner.channel.receive()[0]))
    inner.channel.send((pack(lambda: 6 * 7, "it"), ()))
    channel.send(inner.channel.receive()[0])
    channel.receive()
    inner.channel.close()
    channel.send(inner.exit_code(30))
    inner.close()


def nest_and_nap(channel, payload):
    inner = launch(nap, b"")
    inner.channel.receive()
    channel.send(inner.pid)
    time.sleep(3600)


def hang_up(channel, payload):
    """Close the connection and live on."""
    channel.send("bye")
    channel.close()
    time.sleep(3600)
