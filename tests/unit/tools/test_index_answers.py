"""Whether the set-up asks a package index in vain: one that answers, one without torch, and some that are none."""

import importlib.util
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location(
    "index_answers", Path(__file__).parents[3] / "tools" / "index_answers.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)
answers = _MODULE.answers


class _Index(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/whl/cpu/torch/" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Index) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_index_answers_or_not(url: str) -> None:
    assert answers(f"{url}/whl/cpu")
    assert answers(f"{url}/whl/cpu/")
    assert not answers(f"{url}/simple")
    assert not answers("http://127.0.0.1:1")
    assert not answers("no index")
