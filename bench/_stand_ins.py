"""Stand-ins for the other ranks and for engines: processes without torch, which compute nothing.

    python -m bench._stand_ins ranks SIZE PORT
    python -m bench._stand_ins engines NUMBER ANSWER_FILE

They exchange with rank 0 what ranks and engines do. A call goes down gloo's binomial tree, its
length first; rows and results go directly, the lengths of results around a ring before. An engine
answers each request by HTTP. All end with their standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

LOOPBACK = "127.0.0.1"
LENGTH = struct.Struct("<q")
HELLO = struct.Struct("<cq")  # of a connection: its kind, and the rank that made it
TREE, DIRECT, RING = b"t", b"d", b"r"
NOTHING, ANSWER, SHARE, QUIT = b"-", b"a", b"+", b"q"  # the first byte of a call
BACKLOG = 4096
PIECE = 1 << 20  # bytes of rows that are received at a time


def children_of(rank: int, size: int) -> list[int]:
    """Return those to which a rank of a binomial tree hands on what it has got.

    Example:
        >>> children_of(0, 8), children_of(4, 8), children_of(6, 8)
        ([4, 2, 1], [6, 5], [7])
    """
    lowest_bit = rank & -rank if rank else 1 << (size - 1).bit_length()
    steps = [1 << n for n in range(lowest_bit.bit_length() - 1)]
    return [rank + step for step in reversed(steps) if rank + step < size]


def parent_of(rank: int) -> int:
    """Return the rank from which another one gets it."""
    return rank & (rank - 1)


def receive(connection: socket.socket, count: int) -> bytearray:
    """Return exactly so many bytes."""
    data = bytearray(count)
    view = memoryview(data)
    while view:
        number = connection.recv_into(view)
        if not number:
            raise ConnectionError("the other end has closed the connection")
        view = view[number:]
    return data


def connect(port: int, kind: bytes, rank: int) -> socket.socket:
    """Return a connection that says what it is for and who made it."""
    connection = socket.create_connection((LOOPBACK, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(HELLO.pack(kind, rank))
    return connection


def accept(listener: socket.socket, count: int) -> dict[tuple[bytes, int], socket.socket]:
    """Return so many connections, by what they are for and who made them."""
    accepted = {}
    for _ in range(count):
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kind, rank = HELLO.unpack(receive(connection, HELLO.size))
        accepted[kind, rank] = connection
    return accepted


def gather_lengths(own: int, size: int, before: socket.socket, after: socket.socket) -> list[int]:
    """Return the lengths of all ranks' results, which go around a ring, the latest one first."""
    lengths = [own]
    for _ in range(size - 1):
        after.sendall(LENGTH.pack(lengths[-1]))
        lengths += LENGTH.unpack(receive(before, LENGTH.size))
    return lengths


def follow(rank: int, ports: Sequence[int], listener: socket.socket) -> None:
    """Do what rank 0 calls, until it quits or is gone."""
    size = len(ports)
    up = connect(ports[parent_of(rank)], TREE, rank)
    direct = connect(ports[0], DIRECT, rank)
    after = connect(ports[(rank + 1) % size], RING, rank)
    below = children_of(rank, size)
    accepted = accept(listener, len(below) + 1)
    children = [accepted[TREE, child] for child in below]
    before = accepted[RING, rank - 1]
    answer = b""
    what = NOTHING
    while what != QUIT:
        length = receive(up, LENGTH.size)
        for child in children:
            child.sendall(length)
        call = receive(up, *LENGTH.unpack(length))
        for child in children:
            child.sendall(call)
        what = bytes(call[:1])
        if what == ANSWER:
            answer = bytes(call[1:])
        if what == SHARE:
            (left,) = LENGTH.unpack(receive(direct, LENGTH.size))
            while left:
                left -= len(receive(direct, min(left, PIECE)))
            gather_lengths(len(answer), size, before, after)
            direct.sendall(answer)


def listen() -> socket.socket:
    """Return a socket that listens at a free port."""
    return socket.create_server((LOOPBACK, 0), backlog=BACKLOG)


def start_ranks(size: int, port: int) -> list[int]:
    """Start ranks 1 to size - 1, and print the port of rank 1; return their process ids."""
    listeners = [listen() for _ in range(1, size)]
    ports = [port, *(listener.getsockname()[1] for listener in listeners)]
    print(ports[1], flush=True)
    children = []
    for rank, listener in enumerate(listeners, 1):
        child = os.fork()
        if not child:
            try:
                follow(rank, ports, listener)
            finally:
                os._exit(0)
        children.append(child)
    return children


class StandInEngine:
    """Answers a server's calls: tokens for a request of them, else nothing."""

    def __init__(self, answer: bytes) -> None:
        self._answers = {
            "/v1/models": json.dumps({"data": [{"id": "m"}]}).encode(),
            "/v1/completions": answer,
        }

    def _answer(self, path: str) -> bytes:
        _, _, size = path.partition("/bytes/")
        if size:
            return b'"' + b"a" * int(size) + b'"'
        return self._answers.get(path, b"{}")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                path = head.split()[1].partition("?")[0]
                _, _, length = head.partition("content-length: ")
                if length:
                    await reader.readexactly(int(length.split("\r\n", 1)[0]))
                body = self._answer(path)
                status = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n"
                writer.write(status.encode() + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


async def serve_engine(listener: socket.socket, answer: bytes) -> None:
    """Answer requests until the process is ended."""
    server = await asyncio.start_server(StandInEngine(answer).serve, sock=listener)
    await server.serve_forever()


def start_engines(number: int, answer: bytes) -> list[int]:
    """Start so many engines, and print their ports; return their process ids."""
    listeners = [listen() for _ in range(number)]
    print(*(listener.getsockname()[1] for listener in listeners), flush=True)
    children = []
    for listener in listeners:
        child = os.fork()
        if not child:
            try:
                asyncio.run(serve_engine(listener, answer))
            finally:
                os._exit(0)
        children.append(child)
    return children


def main() -> None:
    """Start what the command line names, and end it when the input ends."""
    kind, number, other = sys.argv[1:]
    if kind == "ranks":
        children = start_ranks(int(number), int(other))
    else:
        children = start_engines(int(number), Path(other).read_bytes())
    sys.stdin.read()
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
