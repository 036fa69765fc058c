"""The search server's command line: Search-R1's API, POST /retrieve and GET /health.

python -m examples.search_r1.retrieval --corpus corpus.jsonl
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_fast.system.network_interface import LOOPBACK, http_url, listen_at
from skyrl_fast.system.parent_watch import watch_parent

if TYPE_CHECKING:
    import uvicorn

    from examples.search_r1.retrieval.corpus import Corpus
    from examples.search_r1.retrieval.index import Index

SHUTDOWN_SECONDS = 2
IDLE_SECONDS = 10  # of a connection between two requests
MAX_CONCURRENT = 1024  # connections and requests; further ones get 503
EXIT_USAGE = 2


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.search_r1.retrieval",
        description="Serve a corpus to search agents; BM25 by default.",
    )
    parser.add_argument(
        "--corpus", type=Path, required=True, help="JSON-lines file with id and contents"
    )
    parser.add_argument("--index", choices=("bm25", "faiss"), default="bm25", help="search method")
    parser.add_argument(
        "--index-path",
        type=Path,
        help="file or folder of the saved index; created if it is missing",
    )
    parser.add_argument(
        "--encoder", default="intfloat/e5-base-v2", help="text encoder for --index faiss"
    )
    parser.add_argument(
        "--host", default=LOOPBACK, help="address to listen on; there is no password"
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="port to listen on; 0: any free port"
    )
    parser.add_argument("--topk", type=int, default=3, help="default number of passages per query")
    parser.add_argument(
        "--max-body-bytes", type=int, default=1 << 20, help="size limit of a request's body"
    )
    parser.add_argument("--max-queries", type=int, default=256, help="limit of queries per request")
    parser.add_argument(
        "--max-query-characters", type=int, default=8192, help="length limit of a query"
    )
    parser.add_argument("--max-topk", type=int, default=100, help="limit of passages per query")
    # For `launch.py`: a socket that is already listening, and the parent process to exit with.
    parser.add_argument("--socket-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal ends it; return the exit code, 2 where it cannot begin."""
    options = argument_parser().parse_args(arguments)
    if options.parent is not None:
        watch_parent(options.parent)  # a killed parent cannot stop its server
    try:
        server, listening = _server(options)
    except (ImportError, OSError, ValueError) as error:
        sys.stderr.write(f"retrieval: {error}\n")
        return EXIT_USAGE
    server.run(sockets=[listening])
    return 0


def _server(options: argparse.Namespace) -> tuple[uvicorn.Server, socket.socket]:
    """Return the server with its index, and the socket at which it will listen."""
    import uvicorn

    from examples.search_r1.retrieval.corpus import Corpus
    from examples.search_r1.retrieval.server import Limits, make_app

    limits = Limits(
        body_bytes=options.max_body_bytes,
        queries=options.max_queries,
        query_characters=options.max_query_characters,
        topk=options.max_topk,
    )
    corpus = Corpus(options.corpus)
    app = make_app(corpus, _index(options, corpus), topk=options.topk, limits=limits)
    listening = _listen(options)
    host, port = listening.getsockname()[:2]
    sys.stderr.write(f"{len(corpus)} passages at {http_url(host, port)}/retrieve\n")
    config = uvicorn.Config(
        app,
        log_level="warning",
        ws="none",
        limit_concurrency=MAX_CONCURRENT,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    return uvicorn.Server(config), listening


def _index(options: argparse.Namespace, corpus: Corpus) -> Index:
    from examples.search_r1.retrieval.index import Bm25Index, FaissIndex, TransformersEncoder

    if options.index == "bm25":
        return Bm25Index(corpus, options.index_path)
    return FaissIndex(corpus, TransformersEncoder(options.encoder), options.index_path)


def _listen(options: argparse.Namespace) -> socket.socket:
    if options.socket_fd is not None:
        return socket.socket(fileno=options.socket_fd)
    try:
        return listen_at(options.host, options.port)
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot listen on {options.host}:{options.port}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
