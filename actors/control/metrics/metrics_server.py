"""`MetricsServer`: serves one text at /metrics over HTTP on loopback, for a Prometheus on this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from modelpool.actors.control.metrics.exposition import CONTENT_TYPE
from modelpool.pool.values.core.errors import UserError

LOOPBACK = "127.0.0.1"


class MetricsServer:
    """Answers GET /metrics with the text that `read` returns each time, and everything else with 404. When `read`
    raises, the answer is 503 with the reason: Prometheus then counts the pool as down."""

    def __init__(self, read: Callable[[], bytes], port: int) -> None:
        """Listen on `port` of loopback; 0 chooses a free one. Raises UserError if that is impossible."""

        class MetricsHandler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self._answer(HTTPStatus.NOT_FOUND, b"expected /metrics\n", "text/plain; charset=utf-8")
                    return
                try:
                    text = read()
                except Exception as failed:
                    reason = f"{type(failed).__name__}: {failed}\n".encode()
                    self._answer(HTTPStatus.SERVICE_UNAVAILABLE, reason, "text/plain; charset=utf-8")
                    return
                self._answer(HTTPStatus.OK, text, CONTENT_TYPE)

            def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Write nothing: there is one request every few seconds."""

        try:
            self._server = ThreadingHTTPServer((LOOPBACK, port), MetricsHandler)
        except OSError as error:
            raise UserError(f"port {port} of {LOOPBACK}: cannot be listened on ({error.strerror or error})") from None
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="serve metrics", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of the metrics."""
        return f"http://{LOOPBACK}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
