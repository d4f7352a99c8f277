"""The first node hears the others: one TCP connection each, without torch, on the port that training will use."""

from __future__ import annotations

import errno
import json
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

__all__ = ["Host", "attend"]

_PINGS = 5
_RETRY_S = 0.2
_LONGEST = 1 << 22  # bytes of one message
_PATIENCE_S = 5.0  # nodes speak at once; whoever connects and is silent must not keep the others waiting

Facts = dict[str, Any]


class _Line:
    """JSON objects over a socket, one a line."""

    def __init__(self, connection: socket.socket, limit_s: float) -> None:
        connection.settimeout(max(limit_s, 0.1))
        self.connection = connection
        self.stream: IO[bytes] = connection.makefile("rb")

    def send(self, message: Mapping[str, Any]) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Raises ValueError for anything that is no object on a line, an end of the stream included."""
        message = json.loads(self.stream.readline(_LONGEST) or b"null")
        if not isinstance(message, dict):
            raise ValueError("no message")
        return message

    def close(self) -> None:
        self.stream.close()
        self.connection.close()


def _skew(line: _Line) -> float:
    """Seconds by which the other's clock is ahead, from the quickest of a few questions."""
    best = (float("inf"), 0.0)
    for _ in range(_PINGS):
        asked = time.time()
        line.send({"ping": True})
        theirs = float(line.receive()["time"])
        answered = time.time()
        best = min(best, (answered - asked, theirs - (asked + answered) / 2))
    return best[1]


def _listen(port: int) -> socket.socket:
    """For IPv6 and IPv4 alike; a kernel without IPv6 refuses the first."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port), backlog=4096)


class Host:
    """The first node's side. Raises OSError when the port is taken."""

    def __init__(self, port: int, token: str, limit_s: float) -> None:
        self.token, self.deadline = token, time.monotonic() + limit_s
        self.listener = _listen(port)
        self.lines: dict[str, _Line] = {}

    def hear(self, others: Sequence[str]) -> dict[str, Facts]:
        """Facts of the other nodes with the skew of their clocks; those that do not answer in time are missing."""
        facts: dict[str, Facts] = {}
        while len(facts) < len(others) and (left := self.deadline - time.monotonic()) > 0:
            if not select.select([self.listener], [], [], left)[0]:
                break
            line = _Line(self.listener.accept()[0], _PATIENCE_S)
            try:
                theirs = line.receive()
                if theirs.get("token") != self.token or theirs.get("node") not in others:
                    raise ValueError("a stranger")
                theirs["skew_s"] = _skew(line)
            except (OSError, ValueError, KeyError):  # a port scanner, or a node that died: it counts as missing
                line.close()
                continue
            facts[theirs["node"]] = theirs
            self.lines[theirs["node"]] = line
        return facts

    def dismiss(self, code: int) -> None:
        """Tell everybody how it ended."""
        for line in self.lines.values():
            try:
                line.send({"code": code})
                line.receive()  # wait until it has closed first: the port must be free for training at once
            except (OSError, ValueError):
                pass
            line.close()
        self.listener.close()


def attend(address: str, port: int, token: str, facts: Facts, limit_s: float) -> int | None:
    """Report to the first node; its verdict as an exit code, None when it cannot be reached within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while (left := deadline - time.monotonic()) > 0:
        try:
            line = _Line(socket.create_connection((address, port), timeout=left), limit_s)
        except OSError:
            time.sleep(_RETRY_S)
            continue
        try:
            line.send({**facts, "token": token})
            while True:
                message = line.receive()
                if "code" in message:
                    return int(message["code"])
                line.send({"time": time.time()})
        except (OSError, ValueError):  # the first node ended without a word: it has said why
            return None
        finally:
            line.close()
    return None
