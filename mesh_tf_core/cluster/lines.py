"""A socket that carries one JSON object per line, in both directions."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping
from typing import Any

PATIENCE = 5.0
"""Seconds that a message may take to leave: a receiver that takes none in is gone."""
LONGEST = 1 << 26
"""Bytes of a message at most: whoever sends more is not one of us."""


class Lines:
    """One end of a connection. `send` may be called from several threads, `receive` from one."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._kept = b""
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, **message: Any) -> bool:
        """Whether it left; False if the other end is gone."""
        content = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self.socket.sendall(content)
        except OSError:
            return False
        return True

    def receive(self) -> list[Mapping[str, Any]] | None:
        """The messages that have arrived; None at the end of the connection, or of its sense."""
        try:
            content = self.socket.recv(1 << 16)
            *lines, self._kept = (self._kept + content).split(b"\n")
            found = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return None
        if not content or len(self._kept) > LONGEST or not all(isinstance(m, dict) for m in found):
            return None
        return found

    def close(self) -> None:
        self.socket.close()
