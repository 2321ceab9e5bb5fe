"""The pages for a person: each is one file that runs itself, and nothing else."""

import re
from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient

PATHS = ["/", "/docs"]


@pytest.mark.parametrize("path", PATHS)
def test_a_page_may_run_itself_and_nothing_else(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert re.fullmatch(r"('sha256-[\w+/]{43}=' ?)+", policy["script-src"])
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy["style-src"])
    assert not re.search(r"unsafe|http", answer.headers["content-security-policy"])


@pytest.mark.parametrize("path", PATHS)
def test_a_page_is_self_contained_and_writes_text_only(client: TestClient, path: str) -> None:
    page = client.get(path).text
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", page)
    assert not re.search(r"<[^>]+\son\w+=|<[^>]+\sstyle=", page)  # the policy forbids both
    links = re.findall(r"https?://[^\s'\"]+", page)
    assert set(links) == {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_the_playground_may_lie_under_a_path(client: TestClient) -> None:
    assert not re.search(r"""(?:src|href|fetch\(|EventSource\()=?["']/""", client.get("/").text)


def test_the_docs_read_the_description_below_the_root_path(make_client: Callable[..., TestClient]) -> None:
    assert 'data-description="/openapi.json"' in make_client().get("/docs").text
    assert 'data-description="/a&quot;b/openapi.json"' in make_client(root_path='/a"b').get("/a%22b/docs").text


@pytest.mark.parametrize("path", PATHS)
def test_a_browser_is_asked_for_the_key(make_client: Callable[..., TestClient], path: str) -> None:
    answer = make_client(api_key=["sesame"]).get(path)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, 'Basic realm="Quire"')
