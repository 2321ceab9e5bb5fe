"""The page in a real browser, fed by a real server: headless Chromium, driven by its DevTools protocol.

Skipped where there is no Chromium.
"""

import base64
import http.client
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.utils.hub import resolve_model_path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
PATIENCE = 60.0  # seconds; no test measures time


class Browser:
    """A tab of a browser of its own: commands out, answers and events in."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run"]
        command = [CHROMIUM, *flags, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.events: list[dict[str, Any]] = []
        self._number = 0
        try:
            self._socket = _open_websocket(_wait_for(lambda: _tab_address(profile), "Chromium"))
            self._socket.settimeout(PATIENCE)
            self._stream = self._socket.makefile("rb")
            while self._stream.readline() != b"\r\n":
                pass
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.process.kill()
            raise

    def close(self) -> None:
        self._socket.close()
        self.process.terminate()
        self.process.wait(PATIENCE)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        _send_frame(self._socket, {"id": self._number, "method": method, "params": parameters})
        while True:
            message = _receive_frame(self._stream)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def run(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> Any:
        """The value of an expression once it is true."""
        return _wait_for(lambda: self.run(condition), condition)

    def press(self, key: str) -> None:
        """A key, with its text if it has one."""
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def complaints(self) -> list[str]:
        """What the console says went wrong since the last call, and every address outside of the server asked for."""
        self.run("0")
        found = []
        for event in self.events:
            parameters = event["params"]
            if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                found.append(json.dumps(parameters))
            elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
                found.append(json.dumps(parameters["args"]))
            elif event["method"] == "Network.requestWillBeSent":
                address = urllib.parse.urlsplit(parameters["request"]["url"])
                if address.scheme != "data" and address.hostname != "127.0.0.1":
                    found.append(f"asked for {address.geturl()}")
        self.events.clear()
        return found


def _tab_address(profile: Path) -> str | None:
    """The WebSocket address of the browser's tab."""
    file = profile / "DevToolsActivePort"
    lines = file.read_text().splitlines() if file.exists() else []
    if len(lines) < 2:
        return None
    with urllib.request.urlopen(f"http://127.0.0.1:{lines[0]}/json") as answer:
        return next((tab["webSocketDebuggerUrl"] for tab in json.load(answer) if tab["type"] == "page"), None)


def _open_websocket(address: str) -> socket.socket:
    parts = urllib.parse.urlsplit(address)
    opened = socket.create_connection((parts.hostname or "", parts.port or 0))
    key = base64.b64encode(os.urandom(16)).decode()
    opened.sendall(
        f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    return opened


def _send_frame(opened: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    opened.sendall(b"\x81\xff" + struct.pack(">Q", len(data)) + bytes(4) + data)  # one text frame; the mask is zero


def _receive_frame(stream: Any) -> dict[str, Any]:
    data, last = b"", False
    while not last:
        first, second = stream.read(2)
        size = second & 0x7F
        if size >= 126:
            size = int.from_bytes(stream.read(2 if size == 126 else 8))
        data, last = data + stream.read(size), bool(first & 0x80)
    return json.loads(data)


def _wait_for(find: Any, what: str) -> Any:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := find():
            return found
        time.sleep(0.05)
    pytest.fail(f"{what}: not within {PATIENCE:g} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(port: int, *flags: str) -> Iterator[None]:
    """`quire serve demo`, and what else the flags say, in a process of its own, ready."""
    command = [sys.executable, "-m", "quire", "serve", "demo", "--host", "127.0.0.1", "--port", str(port), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def healthy() -> bool:
        assert process.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                return True
        except OSError:
            return False

    try:
        _wait_for(healthy, "the server")
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server that all tests but one share."""
    port = free_port()
    with serving(port):
        yield f"http://127.0.0.1:{port}/"


@pytest.fixture(scope="module")
def shared_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def browser(shared_browser: Browser) -> Browser:
    """The browser with a wide window, and without complaints."""
    show(shared_browser, 1600, 1000)
    shared_browser.call("Page.navigate", url="about:blank")
    shared_browser.complaints()
    return shared_browser


@pytest.fixture
def page(browser: Browser, server: str) -> Browser:
    """The page, loaded and live, in a browser that has kept nothing."""
    browser.call("Storage.clearDataForOrigin", origin=server.rstrip("/"), storageTypes="local_storage")
    load(browser, server)
    return browser


def load(browser: Browser, address: str) -> None:
    """Open the page, until it is live."""
    browser.call("Page.navigate", url=address)
    browser.wait("document.readyState === 'complete' && $('status').dataset.state === 'live' && $('p-model').value")


def show(browser: Browser, width: int, height: int) -> None:
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)


def ask(page: Browser, text: str) -> None:
    """Type a text, and send it by the keyboard."""
    page.run("$('input').focus()")
    page.call("Input.insertText", text=text)
    page.press("Enter")


def answer(page: Browser) -> str:
    """The last answer, as it came, once it is complete."""
    page.wait("!asking && document.querySelector('.turn:not(.busy)') !== null")
    return page.run("turns[mode].at(-1).answer")


def test_the_page_is_quiet(page: Browser) -> None:
    assert page.run("document.title") == "demo · Quire"
    assert page.run("$('facts').textContent") == "demo, context of 512 tokens"
    page.wait("!$('idle').hidden && $('num-free').textContent !== '0'")
    assert page.run("$('num-used').textContent") == "0"
    page.wait("seconds.length > 1")
    assert page.complaints() == []


def test_a_chat_answer_comes(page: Browser) -> None:
    ask(page, "Tell me a story.")
    first = answer(page)
    assert first
    assert "to the first" in page.run("document.querySelector('.foot').textContent")
    # Where all of an answer comes at once, it has no speed.
    page.run("""{
        const { figures } = turns.chat[0];
        Object.assign(figures, { last: figures.first + 500, usage: { ...figures.usage, completion_tokens: 6 } });
        showFigures(turns.chat[0]);
    }""")
    assert "6 tokens" in page.run("document.querySelector('.foot').textContent")
    assert "10.0 tokens/s" in page.run("document.querySelector('.foot').textContent")
    ask(page, "<img src=x onerror='document.title=1'> And then?")
    answer(page)
    assert page.run("[...document.querySelectorAll('.said')].at(-1).textContent").startswith("<img src=x")
    assert page.run("document.querySelectorAll('.log img').length") == 0
    sent = page.run("turns.chat.at(-1).request.body.messages")
    assert [message["role"] for message in sent] == ["user", "assistant", "user"]
    assert sent[1]["content"] == first
    assert page.complaints() == []


def test_a_completion_streams_into_the_page(page: Browser) -> None:
    page.run("$('tab-completion').click()")
    page.run("""{
        globalThis.parts = 0;
        const note = (changes) => { for (const change of changes) parts += change.target.className === "text"; };
        new MutationObserver(note).observe($("log-completion"), { childList: true, subtree: true });
        $("p-seed").value = "1";
    }""")
    ask(page, "Once upon a time")
    first = answer(page)
    assert page.run("parts") > 1
    assert page.run("turns.completion[0].figures.usage.completion_tokens") > 1
    page.run("turns.completion[0].again.click()")
    assert answer(page) == first  # regenerated with the same seed
    assert page.run("document.querySelectorAll('#log-completion .turn').length") == 1
    command = page.run("curl(turns.completion[0].request)")
    assert command.startswith("curl -N 'http://127.0.0.1:")
    assert '"seed": 1' in command
    assert "Authorization" not in command
    assert page.complaints() == []


def test_escape_stops_an_answer(page: Browser) -> None:
    page.run("$('tab-completion').click()")
    page.run("""{
        const escape = () => document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
        const stop = () => { if (turns.completion[0]?.answer) escape(); };
        new MutationObserver(stop).observe($("log-completion"), { childList: true, subtree: true });
        $("p-max_tokens").value = "480";
    }""")
    ask(page, "Once upon a time")
    assert answer(page)
    assert "stopped" in page.run("document.querySelector('.foot').textContent")
    page.wait("latest.num_sequences === 0 && latest.blocks.num_used === 0")
    assert page.complaints() == []


def test_an_error_is_shown_in_words(page: Browser) -> None:
    page.run("$('p-temperature').value = '3'")
    ask(page, "Hello")
    answer(page)
    shown = page.run("document.querySelector('.error').textContent")
    assert "temperature" in shown
    assert "3" in shown
    assert all('"status of 400' in text or "status of 400" in text for text in page.complaints())
    page.run("$('p-temperature').value = ''; turns.chat[0].again.click()")
    assert answer(page)
    assert page.run("document.querySelector('.error')") is None


def test_the_live_view_shows_what_runs(page: Browser, server: str) -> None:
    stop = threading.Event()

    def work() -> None:
        body = json.dumps({"model": "demo", "prompt": "Once", "max_tokens": 480, "ignore_eos": True, "n": 2}).encode()
        while not stop.is_set():
            connection = http.client.HTTPConnection(urllib.parse.urlsplit(server).netloc)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            assert connection.getresponse().read()
            connection.close()

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    try:
        row = page.wait("""[...document.querySelectorAll("#requests tr.running")].map(
            (row) => [...row.cells].map((cell) => cell.textContent))[0]""")
        page.wait("latest.blocks.num_used > 0 && $('num-used').textContent !== '0'")
        page.wait("Number(charts[0].values[0].textContent.replace(',', '')) > 0")
        page.wait("charts[2].values[0].textContent !== '–'")
        assert "fork" in page.wait("$('tiers').textContent")
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    assert row[1] == "running"
    assert int(row[6]) > 0  # output tokens
    page.wait("!$('idle').hidden && $('num-used').textContent === '0'")
    assert "answers" in page.run("$('totals').textContent")
    assert page.complaints() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_sticks_out_of_a_window(page: Browser, scheme: str) -> None:
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    show(page, 390, 844)
    ask(page, "x" * 200)
    answer(page)
    import_talk(page, "x" * 200, _ANSWER + "y" * 300 + "\n\n| a |\n|---|\n| " + "z" * 300 + " |")
    page.run("turns.chat[0].foot.querySelector('.acts button').click()")  # being edited
    page.run("$('talks').click()")
    assert page.run("$('history').getBoundingClientRect().right <= innerWidth")
    page.run("$('history').hidePopover()")
    for view, width in ((view, width) for width in (360, 390, 1400) for view in ("#playground", "#engine")):
        show(page, width, 844)
        page.run(f"location.hash = '{view}'; $('params').open = true; new Promise(requestAnimationFrame)")
        assert page.run("document.documentElement.scrollWidth") == width
        beyond = """[...document.querySelectorAll("main *")].filter((node) => node.offsetParent
            && !node.closest(".sr, thead, pre, .table") && node.getBoundingClientRect().right > innerWidth + 1)
            .map((node) => node.outerHTML.slice(0, 80))"""
        assert page.run(beyond) == []
    assert page.run("$('blocks').width > 0 && getComputedStyle(document.body).colorScheme") is not None
    assert page.complaints() == []


def test_the_page_survives_its_server(browser: Browser) -> None:
    port = free_port()
    with serving(port, "--api-key", "sesame"):
        browser.call("Page.navigate", url=f"http://user:sesame@127.0.0.1:{port}/")
        browser.wait("document.readyState === 'complete' && $('status').dataset.state === 'live' && $('p-model').value")
        ask(browser, "Hello")
        assert answer(browser)
        assert "$QUIRE_API_KEY" in browser.run("curl(turns.chat[0].request)")
    browser.wait("$('status').dataset.state === 'gone'")
    ask(browser, "Hello again")
    answer(browser)
    assert "can't be reached" in browser.run("[...document.querySelectorAll('.error')].at(-1).textContent")
    with serving(port, "--api-key", "sesame"):
        browser.wait("$('status').dataset.state === 'live'")
        browser.run("turns.chat.at(-1).again.click()")
        assert answer(browser)


def test_an_engine_that_rests_is_not_called_live(browser: Browser) -> None:
    port = free_port()

    def change(path: str) -> None:
        given = {"Authorization": "Bearer sesame"}
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/{path}", b"", given)).close()

    with serving(port, "--api-key", "sesame"):
        load(browser, f"http://user:sesame@127.0.0.1:{port}/")
        for rest, text, end in (("pause", "Paused", "resume"), ("sleep", "Asleep", "wake_up")):
            change(rest)
            browser.wait(f"$('status').textContent === '{text}'")
            change(end)
            browser.wait("$('status').textContent === 'Live'")


def test_the_models_of_a_server_are_a_table(browser: Browser, tmp_path: Path) -> None:
    """With state, sizes and what went wrong; the one that is chosen there is asked, and its engine shown."""
    demo = resolve_model_path("demo")
    for name in ("other", "<b>torn"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo / file, tmp_path / name)
    os.link(demo / "model.safetensors", tmp_path / "other" / "model.safetensors")
    rows = "[...$('models-rows').rows].map((row) => [...row.cells].map((cell) => cell.textContent))"
    port = free_port()
    with serving(port, "--models-dir", str(tmp_path)):
        browser.call("Page.navigate", url=f"http://127.0.0.1:{port}/")
        browser.wait("document.readyState === 'complete' && $('p-model').value === 'demo' && !$('models').hidden")
        first, torn, other = browser.run(rows)
        assert [first[0], torn[0], other[0]] == ["demo", "<b>torn", "other"]
        assert [row[1] for row in (first, torn, other)] == ["unloaded"] * 3
        assert (first[2], first[4]) == ("0", "–")
        assert first[3].endswith("B")
        assert "safetensors" in torn[5]
        browser.run("document.querySelector('[data-model=other]').click()")
        assert browser.run("$('p-model').value") == "other"
        pressed = "[...document.querySelectorAll('#models-rows [aria-pressed=true]')].map((one) => one.textContent)"
        assert browser.run(pressed) == ["other"]
        ask(browser, "Hello")
        assert answer(browser)
        browser.wait(f"{rows}[2][1] === 'ready' && {rows}[2][4].endsWith('B')")
        assert browser.run(rows)[0][1] == "unloaded"
        assert browser.run("turns.chat[0].request.body.model") == "other"
        browser.wait("document.title === 'other · Quire' && $('status').dataset.state === 'live'")
        show(browser, 360, 740)
        assert browser.run("document.documentElement.scrollWidth") == 360
    browser.complaints()  # the server is gone


def test_a_server_that_comes_back_with_another_model_is_asked_for_that_one(browser: Browser) -> None:
    port = free_port()
    with serving(port, "--served-model-name", "first"):
        load(browser, f"http://127.0.0.1:{port}/")
    browser.wait("$('status').dataset.state === 'gone'")
    with serving(port, "--served-model-name", "second"):
        browser.wait("document.title === 'second · Quire' && $('p-model').value === 'second'")
        ask(browser, "Hello")
        assert answer(browser)
    browser.complaints()  # the server was gone


def test_a_reload_shows_the_engine_of_the_model_that_was_chosen(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(resolve_model_path("demo"))
    port = free_port()
    with serving(port, "--models-dir", str(tmp_path)):
        is_loaded = "document.readyState === 'complete' && $('p-model').value && !$('models').hidden"
        browser.call("Page.navigate", url=f"http://127.0.0.1:{port}/")
        browser.wait(is_loaded)
        for model in ("demo", "other"):  # both are loaded
            browser.run(f"chooseModel('{model}'); keepChoices()")
            count = browser.run("turns.chat.length")
            ask(browser, "Hello")
            browser.wait(f"turns.chat.length > {count}")
            assert answer(browser)
        browser.call("Page.reload")
        browser.wait(is_loaded)
        assert browser.run("$('p-model').value") == "other"
        browser.wait("stream.url.endsWith('?model=other') && $('status').dataset.state === 'live'")
    browser.complaints()  # the server is gone


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_docs_show_every_route(browser: Browser, server: str, scheme: str) -> None:
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.call("Page.navigate", url=f"{server}docs")
    browser.wait("document.querySelectorAll('section').length")
    with urllib.request.urlopen(f"{server}openapi.json") as answer:
        paths = json.load(answer)["paths"]
    shown = browser.run("[...document.querySelectorAll('section .path')].map((one) => one.textContent)")
    assert sorted(shown) == sorted(path for path, item in paths.items() for _ in item)
    fields = browser.run(
        "[...document.getElementById('post/v1/completions').querySelectorAll('li > code')].map((c) => c.textContent)"
    )
    assert {"prompt", "temperature", "200", "503"} <= set(fields)
    browser.run("globalThis.tried = document.getElementById('post/v1/completions')")
    browser.run("tried.querySelector('button.main').click()")
    browser.wait("tried.querySelector('.state').textContent.startsWith('200')")
    show(browser, 390, 844)
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.complaints() == []
    browser.call("Emulation.setEmulatedMedia", features=[])


def test_the_docs_work_with_a_key_below_a_path(browser: Browser) -> None:
    port = free_port()
    with serving(port, "--api-key", "sesame", "--root-path", "/llm"):
        browser.call("Page.navigate", url=f"http://user:sesame@127.0.0.1:{port}/llm/docs")
        browser.wait("document.querySelectorAll('section').length")
        browser.run("globalThis.tried = document.getElementById('post/v1/completions')")
        browser.run("tried.querySelector('button.main').click()")
        browser.wait("tried.querySelector('.state').textContent.startsWith('200')")
        bearer = '-H "Authorization: Bearer $QUIRE_API_KEY"'
        url = f"curl http://127.0.0.1:{port}/llm/v1"
        assert browser.run("curl('get', '/v1/models', '')") == f"{url}/models {bearer}"
        assert f"{url}/completions {bearer}" in browser.run("curl('post', '/v1/completions', '{}')")
        assert browser.run("curl('get', '/health', '')") == f"curl http://127.0.0.1:{port}/llm/health"
        assert browser.complaints() == []


def test_thoughts_are_folded_and_calls_get_results(page: Browser) -> None:
    """A server of the page's own making, so that the model says just this."""
    page.run("""{
        globalThis.bodies = [];
        const look = { name: "look", arguments: '{"where": "box"}' };
        const call = { index: 0, id: "c1", type: "function", function: look };
        const deltas = [{ reasoning_content: "Hm." }, { content: "I look." }, { tool_calls: [call] }];
        const event = (delta) => `data: ${JSON.stringify({ choices: [{ delta }] })}\\n\\n`;
        const chunks = (list) => list.map(event).join("");
        globalThis.fetch = async (address, { body } = {}) => {
            bodies.push(JSON.parse(body));
            const list = bodies.length === 1 ? deltas : [{ content: "A cat." }];
            return new Response(chunks(list) + "data: [DONE]\\n\\n");
        };
        $("tab-tools").click();
        $("tools-example").click();
        $("p-schema").value = '{"type": "object"}';
    }""")
    ask(page, "Look!")
    assert answer(page) == "I look."
    assert page.run("mode") == "chat"
    assert page.run("[$('p-schema').value && bodies[0].response_format.type, bodies[0].tools[0].function.name]") == [
        "json_schema",
        "get_weather",
    ]
    assert page.run(
        "[document.querySelector('.thought').open, document.querySelector('.thought div').textContent]"
    ) == [
        False,
        "Hm.",
    ]
    assert page.run("document.querySelector('.call code').textContent") == 'look({"where": "box"})'
    page.run("document.querySelector('.call input').value = 'a cat'")
    page.run("document.querySelector('.calls').requestSubmit()")
    assert answer(page) == "A cat."
    roles = page.run("bodies[1].messages.map((message) => message.role)")
    assert roles == ["user", "assistant", "tool"]
    assert page.run("bodies[1].messages[2]") == {"role": "tool", "tool_call_id": "c1", "content": "a cat"}
    page.run("$('p-schema').value = '{'")
    ask(page, "Again")
    page.wait("document.querySelector('.error') !== null")
    assert "No JSON" in page.run("document.querySelector('.error').textContent")
    assert page.complaints() == []


_SAMPLE = """# Title ##
A *word*, a **strong _and soft_** one, `code`, \\*none\\*, 2 * 3, snake_case_name, ***both***, ~~gone~~ and **open.

- one
  - within
    1. deep
- two

  goes on
- [x] done

3. three
10. ten

> said
> > before

| a | b |
|:-:|--:|
| 1 | `2` |

```python
for i in range(3):  # so often
    print("i")

```
[a](https://a.example/b_(c) "t"), <https://b.example>, https://c.example/x_y. \\(a_b*c\\) and $x_1 + y_2$, not $5 or $6
~~~
open
"""


def test_markdown_is_rendered(page: Browser) -> None:
    page.run(f"globalThis.made = markdown({json.dumps(_SAMPLE)})")
    shape = "(node) => [...node.childNodes].map((n) => (n.children ? n.tagName + shape(n) : n.data)).join('|')"
    page.run(f"globalThis.shape = {shape}")
    parts = page.run("[...made.children].map((child) => child.className || child.tagName)")
    assert parts == ["H1", "P", "UL", "OL", "BLOCKQUOTE", "table", "code", "P", "code"]
    assert page.run("made.children[0].textContent") == "Title"
    assert page.run("shape(made.children[1])") == (
        "A |EMword|, a |STRONGstrong |EMand soft| one, |CODEcode|, |*none|*, 2 |*| 3, snake|_|case|_|name, "
        "|STRONGEMboth|, |DELgone| and |**|open."
    )
    assert page.run("made.querySelector('ul ul ol').textContent") == "deep"
    assert page.run("made.querySelector('li.task').textContent") == "☑ done"
    assert page.run("made.children[3].start") == 3
    assert page.run("[...made.querySelectorAll('td')].map((cell) => cell.className + cell.textContent)") == [
        "centre1",
        "right2",
    ]
    code = "made.querySelector('.code')"
    assert page.run(f"{code}.querySelector('.code-head').textContent") == "pythonCopy"
    assert page.run(f"{code}.querySelector('code').textContent") == ('for i in range(3):  # so often\n    print("i")\n')
    assert page.run("[...made.querySelectorAll('a')].map((link) => [link.textContent, link.href])") == [
        ["a", "https://a.example/b_(c)"],
        ["https://b.example", "https://b.example/"],
        ["https://c.example/x_y", "https://c.example/x_y"],
    ]
    assert page.run("[...made.querySelectorAll('.math')].map((one) => one.textContent)") == [
        "\\(a_b*c\\)",
        "$x_1 + y_2$",
    ]
    page.run("navigator.clipboard.writeText = async (text) => { globalThis.copied = text; }")
    page.run("made.querySelector('.code button').click()")
    assert page.wait("globalThis.copied").startswith("for i in")
    assert page.complaints() == []


def test_markdown_that_streams_becomes_what_it_is_at_once(page: Browser) -> None:
    script = """((text) => [1, 2, 3, 7].filter((step) => {
        const node = make("div"), grows = new Markdown(node);
        for (let at = 0; at < text.length; at += step) { grows.push(text.slice(at, at + step)); grows.draw(); }
        grows.draw(true);
        return node.innerHTML !== markdown(text).innerHTML;
    }))"""
    assert page.run(f"{script}({json.dumps(_SAMPLE)})") == []
    kept = """(() => {
        globalThis.grows = new Markdown(make("div"));
        grows.push("One.\\n\\n".repeat(50) + "Two"); grows.draw();
        const first = [...grows.node.childNodes];
        grows.push(" more."); grows.draw();
        return first.filter((node, index) => node !== grows.node.childNodes[index]).length;
    })()"""
    assert page.run(kept) == 1  # the last block alone was made anew
    assert page.run("grows.node.lastChild.textContent") == "Two more."


def test_hostile_markdown_is_text(page: Browser) -> None:
    texts = [
        "<img src=x onerror=\"document.title='hit'\"> <script>document.title = 'hit'</script>",
        "[a](javascript:document.title='hit') [b](JaVaScRiPt:1) <javascript:1> [c](data:text/html,x) [d](/v1/models)",
        "![i](x onerror=1) ![j](javascript:1)\n\n| <img src=x> |\n|---|\n| [x](vbscript:1) |",
        "```<img src=x>\n</code><img src=x onerror=1>",
    ]
    for text in texts:
        page.run(f"document.body.append(globalThis.made = markdown({json.dumps(text)}))")
        assert page.run("made.querySelectorAll('img, script, a, iframe').length") == 0
        page.run("made.remove()")
    assert page.run("document.title") == "demo · Quire"
    # 100 kB that a careless parser would take minutes for.
    units = [
        "*a ",
        "**a *b ",
        "[",
        "![",
        '[](a "',
        "[a]",
        "\\[",
        "$a ",
        "_a_b",
        ">",
        "- ",
        "1. a\n",
        "- a\n\n",
        "|",
        "a|b\n",
    ]
    units += ["<http://", "~~a ", " #", "x", " ", "` `` ", "https://a.b/"]
    for text in [
        *(unit * (100_000 // len(unit)) for unit in units),
        "```" + " " * 100_000 + "`",
        "- a" + "\n" * 100_000,
    ]:
        page.run(f"globalThis.made = markdown({json.dumps(text)})")
    assert page.run("made.textContent") == "a"
    assert page.complaints() == []


_ANSWER = "# Files\n\nThree ways:\n\n" + f"{_SAMPLE}~~~\n" * 6


def import_talk(page: Browser, *texts: str) -> None:
    """A conversation of these messages, the user's and the assistant's by turns, as `quire chat` saves it."""
    messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]
    page.run(f"importTalks({json.dumps(json.dumps(messages))})")


def shown(page: Browser) -> list[str]:
    """What was said, as the page shows it."""
    return page.run("[...document.querySelectorAll('#log-chat .said')].map((node) => node.textContent)")


def test_conversations_and_parameters_outlive_a_reload(page: Browser, server: str) -> None:
    assert page.run("document.activeElement.id") == "input"
    assert page.run("$('params').open") is False
    import_talk(page, "How do I read a file?", _ANSWER)
    page.run("$('p-temperature').value = '0.3'; $('p-system_prompt').value = 'Be <b>brief</b>.'; noteParameters()")
    page.run("startNew()")
    ask(page, "Hello")
    first = answer(page)
    load(page, server)
    assert shown(page) == ["Hello"]
    assert page.run("turns.chat[0].answer") == first
    assert "to the first" in page.run("document.querySelector('.foot').textContent")
    assert page.run("parameters()") == {"temperature": 0.3}
    assert page.run("$('p-system_prompt').value") == "Be <b>brief</b>."
    page.run("$('talks').click()")
    titles = "[...document.querySelectorAll('#talks-list b')].map((node) => node.textContent)"
    assert page.run(titles) == ["Hello", "How do I read a file?"]
    page.run("document.querySelectorAll('#talks-list .open')[1].click()")
    assert shown(page) == ["How do I read a file?"]
    assert page.run("turns.chat[0].answer") == _ANSWER
    assert page.run("$('log-chat').scrollTop > 0 && isAtEnd($('log-chat'))")  # where it was left
    assert page.run("document.querySelectorAll('#log-chat .md .code').length") == 12
    page.run("listTalks(); document.querySelector('[aria-label=\"Rename How do I read a file?\"]').click()")
    page.run("document.querySelector('#talks-list input').value = 'Files'")
    page.run("document.querySelector('#talks-list form').requestSubmit()")
    assert sorted(page.run(titles)) == ["Files", "Hello"]
    exported = page.run("JSON.stringify({ quire: 1, conversations: listTalks().map(saved) })")
    page.run("globalThis.confirm = () => true")
    page.run("document.querySelector('[aria-label=\"Delete Files\"]').click()")
    assert page.run(titles) == ["Hello"]
    assert shown(page) == []  # it was the one on show
    page.run(f"importTalks({json.dumps(exported)})")
    assert sorted(page.run("listTalks().map(titleOf)")) == ["Files", "Hello", "Hello"]  # one of them a copy
    assert page.complaints() == []


def test_a_conversation_goes_out_as_a_file_and_comes_in_again(page: Browser, tmp_path: Path) -> None:
    page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    import_talk(page, "A/B: <i>", _ANSWER, "Two", "Second.")
    page.run("listTalks(); document.querySelector('#talks-list [aria-label^=Export]').click()")
    (file,) = _wait_for(lambda: list(tmp_path.glob("*.json")), "the file")
    assert file.name == "AB i.json"
    (talk,) = json.loads(file.read_text())["conversations"]
    assert [turn["answer"] for turn in talk["turns"]] == [_ANSWER, "Second."]
    page.run("globalThis.confirm = () => true; remove(current.chat)")
    assert shown(page) == []
    root = page.call("DOM.getDocument")["root"]["nodeId"]
    node = page.call("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
    page.call("DOM.setFileInputFiles", nodeId=node, files=[str(file)])
    page.wait("turns.chat.length === 2")
    assert shown(page) == ["A/B: <i>", "Two"]
    assert page.complaints() == []


def test_an_answer_goes_on_while_another_conversation_is_shown(page: Browser, server: str) -> None:
    page.run("$('p-max_tokens').value = '300'; $('tab-completion').click()")
    ask(page, "Once upon a time")
    page.run("startNew()")
    assert page.run("asking !== null && turns.completion.length") == 0
    page.run("listTalks(); document.querySelector('#talks-list .open').click()")
    assert page.run("turns.completion[0] === asked")
    load(page, server)  # in the middle of it, or just after
    assert page.run("turns.completion[0].said") == "Once upon a time"
    assert page.run("mode") == "completion"
    assert page.complaints() == []


def test_a_file_that_is_no_conversation_is_refused(page: Browser) -> None:
    for text in (
        "",
        "[]",
        "{}",
        '{"conversations": [3, null, {"kind": "chat", "turns": [null, {"id": 3}]}]}',
        "[1, null]",
    ):
        page.run(f"$('note').hidden = true; importTalks({json.dumps(text)})")
        assert "No conversation" in page.run("$('note').hidden ? '' : $('note').textContent")
    assert page.run("listTalks().length") == 0
    # One with a loop, and with figures that are none.
    turns = [
        {"id": "a", "parent": "", "said": "One", "answer": "<b>1</b>", "figures": {"usage": "x"}, "calls": [None]},
        {"id": "b", "parent": "b", "said": "Two"},
        {"id": "a", "parent": "a", "said": "Three"},
    ]
    page.run(f"importTalks({json.dumps(json.dumps({'kind': 'chat', 'turns': turns, 'chosen': {'': 'zzz'}}))})")
    assert shown(page) == ["One"]
    assert page.run("document.querySelector('#log-chat b') === null")
    assert page.complaints() == []


def test_a_full_store_is_told_and_nothing_is_lost_on_the_page(page: Browser) -> None:
    page.run("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }")
    ask(page, "Hello")
    assert answer(page)
    assert "storage is full" in page.run("$('note').textContent")
    ask(page, "And then?")
    assert answer(page)
    assert shown(page) == ["Hello", "And then?"]
    assert page.complaints() == []


def test_messages_are_edited_and_answers_made_anew_in_branches(page: Browser, server: str) -> None:
    import_talk(page, "One", "First.", "Two", "Second.")
    page.run("document.querySelector('#log-chat .acts button').click()")
    assert page.run("document.activeElement.value") == "One"
    page.run("document.activeElement.value = 'Uno\\n'.repeat(30)")
    page.run("document.activeElement.dispatchEvent(new Event('input'))")
    assert page.run("document.activeElement.clientHeight") > 200  # all of it is seen, within half a screen or so
    page.run("document.activeElement.value = 'Uno'")
    page.press("Enter")
    uno = answer(page)
    assert shown(page) == ["Uno"]
    assert page.run("turns.chat[0].request.body.messages.map((message) => message.content)") == ["Uno"]
    assert page.run("document.querySelector('.branches span').textContent") == "2/2"
    page.run("turns.chat[0].again.click()")
    answer(page)
    assert page.run("document.querySelector('.branches span').textContent") == "3/3"
    page.run("document.querySelector('[aria-label=\"Earlier branch\"]').click()")
    assert page.run("turns.chat[0].answer") == uno
    assert page.run("document.activeElement.getAttribute('aria-label')") == "Earlier branch"
    page.press("Enter")
    assert shown(page) == ["One", "Two"]
    load(page, server)
    assert shown(page) == ["One", "Two"]  # the branch that was chosen, and what follows there
    assert page.run("document.querySelector('.branches span').textContent") == "1/3"
    page.run("turns.chat[1].again.click()")
    answer(page)
    contents = page.run("turns.chat[1].request.body.messages.map((message) => message.content)")
    assert contents == ["One", "First.", "Two"]
    assert page.run("turns.chat[0].talk.turns.length") == 5
    assert page.complaints() == []


def test_a_full_context_is_told_and_the_oldest_turns_forgotten(page: Browser) -> None:
    page.run("$('p-max_tokens').value = '20'")
    import_talk(page, "word " * 250, "word " * 200, "word " * 100, "End.")
    ask(page, "Go on")
    answer(page)
    assert "no longer fits in the model's context of 512 tokens" in page.run("turns.chat[2].problem")
    page.complaints()  # a status of 400
    page.run("document.querySelector('.error button').click()")
    assert answer(page)
    assert page.run("document.querySelector('.error')") is None
    sent = page.run("turns.chat[2].request.body.messages.map((message) => message.content.slice(0, 4))")
    assert sent == ["word", "End.", "Go o"]
    assert page.run("[...document.querySelectorAll('.turn')].map((turn) => turn.matches('.forgotten'))") == [
        False,
        True,
        False,
    ]
    ask(page, "word " * 200)
    assert answer(page)  # forgotten without another word
    assert page.run("document.querySelector('.error')") is None
    ask(page, "word " * 600)
    answer(page)
    assert "This message alone" in page.run("turns.chat.at(-1).problem")
    assert all("status of 400" in text for text in page.complaints())


def test_more_tokens_than_the_context_has_left_are_no_reason_to_forget(page: Browser) -> None:
    """max_tokens is the most of an answer: where the context has less, it gives what it has."""
    page.run("$('p-max_tokens').value = '500'")
    import_talk(page, "word " * 50, "Yes.")
    ask(page, "Go on")
    assert answer(page)
    assert page.run("document.querySelector('.error')?.textContent ?? ''") in (
        "",
        "The model's context is full, and the answer was cut off. Forget the oldest turns from now on",
    )
    assert page.run("turns.chat.at(-1).skip") == 0
    assert all("status of 400" in text for text in page.complaints())


def test_probabilities_are_told_token_by_token(page: Browser) -> None:
    ask(page, "Hello")
    answer(page)
    assert page.run("turns.chat[0].request.body.logprobs") is None
    for tab in ("chat", "completion"):
        page.run(f"$('tab-{tab}').click(); $('p-probabilities').checked = true")
        ask(page, "Once upon a time")
        text = answer(page)
        assert page.run("document.querySelector('.log:not([hidden]) .tokens').textContent").startswith(text)
        page.run("document.querySelector('.log:not([hidden]) .tokens').focus()")
        page.press("ArrowRight")
        told = page.run("$('tip').hidden ? '' : $('tip').innerText")
        assert told.count("%") >= 6  # its own, and five of the likeliest
        page.run("document.activeElement.blur()")
        assert page.run("$('tip').hidden")
        page.run("document.querySelector('.log:not([hidden]) [aria-pressed]').click()")
        assert page.run("document.querySelector('.log:not([hidden]) .tokens')") is None
    assert page.complaints() == []


@contextmanager
def crowd(port: int, number: int) -> Iterator[None]:
    """So many requests that nobody reads the answers of; they end when their connections do."""
    body = json.dumps(
        {"model": "demo", "prompt": "Once", "max_tokens": 480, "ignore_eos": True, "stream": True}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(number)]
    try:
        for opened in sockets:
            opened.sendall(f"{head}\r\n\r\n".encode() + body)
        yield
    finally:
        for opened in sockets:
            opened.close()


def test_the_own_request_stands_first_and_tells_its_place(browser: Browser) -> None:
    """However many wait before it; and what the charts say of now is what the table says."""
    port = free_port()
    with serving(port, "--max-num-seqs", "1"), crowd(port, 240):
        load(browser, f"http://127.0.0.1:{port}/")
        browser.wait("latest.num_sequences > 210")
        ask(browser, "Hello")
        waits = browser.wait("document.querySelector('.queued')?.textContent")
        assert int(waits.split()[1]) > 200
        assert waits.startswith("Place ")
        assert " in the queue: capacity: 1 of at most 1 sequences run" in waits
        first = "$('requests').tBodies[0].rows[0].cells"
        assert browser.wait(f"{first}[0].classList.contains('own') && {first}[1].textContent") == "waiting"
        assert browser.run("$('requests').tBodies[0].rows.length") == 201
        # A chart has no value before its first second is over.
        figures = browser.wait("""(() => {
            const shown = charts.find((one) => one.title === "Requests").values.map((node) => node.textContent);
            return !shown.includes("–") && [shown, $("requests-note").textContent];
        })()""")
        assert figures[1].startswith("{} running, {} waiting".format(*figures[0]))
        browser.run("asking.abort()")
        answer(browser)
        # What queued for longer than a second is in the charts, as is what came to its first token.
        browser.wait("seconds.some((row) => row[TTFT50] !== null) && seconds.some((row) => row[QUEUE99] !== null)")
    assert browser.complaints() == []


def test_two_tabs_of_one_conversation_lose_no_turn(page: Browser) -> None:
    import_talk(page, "One", "First.")
    page.run("""{
        const other = revive(saved(current.chat));
        const turn = addTurn(other, other.turns[0].id, "Two");
        turn.answer = "From the other tab.";
        other.title = "Both";
        addTurn(current.chat, current.chat.turns[0].id, "Three");
        store.write(TALK + other.id, saved(other));
        mergeFromTab({ key: TALK + other.id, newValue: "some" });
    }""")
    assert shown(page) == ["One", "Two"]
    assert page.run("current.chat.turns.map((turn) => turn.said)") == ["One", "Three", "Two"]
    assert page.run("[$('talks').textContent, document.querySelector('.branches').textContent]") == ["Both", "‹2/2›"]
    assert page.complaints() == []
