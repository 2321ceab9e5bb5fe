"""The pages for a person: GET / is the playground with its view of the engine, GET /docs the API's description.

Each is one answer made of this package's files, with a policy under which a browser runs nothing else and talks to
nobody else: both work without internet. `build_app` includes the routes. Knows nothing of the engine.
"""

import base64
import hashlib
import re
from functools import cache
from html import escape
from importlib.resources import files

from fastapi import APIRouter, Request, Response

from quire.entrypoints.server.state import get_state

router = APIRouter(include_in_schema=False)
docs_router = APIRouter(include_in_schema=False)

# Named parts of a page, as an editor and a linter understand them: `<script src>` and `<link rel="stylesheet">`.
_PART = re.compile(r'<(?:(script) src|link rel="stylesheet" href)="([\w.]+)">(?:</script>)?')


@router.get("/")
async def playground() -> Response:
    """The playground."""
    return _response(_page("index.html"))


@docs_router.get("/docs")
async def docs(request: Request) -> Response:
    """What the OpenAPI description says, for people."""
    source = f"{get_state(request).args.root_path}/openapi.json"
    return _response(_page("docs.html").replace("{openapi}", escape(source)))


def _response(page: str) -> Response:
    headers = {
        "Content-Security-Policy": _policy(page),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(page, headers=headers, media_type="text/html")


@cache
def _page(name: str) -> str:
    """A page with the scripts and the style sheet that it names in place of their names: one answer under any path."""
    text = files("quire.entrypoints.server").joinpath(f"static/{name}").read_text(encoding="utf-8")
    return _PART.sub(lambda part: f"<{part[1] or 'style'}>\n{_page(part[2])}</{part[1] or 'style'}>", text)


@cache
def _policy(page: str) -> str:
    return (
        f"default-src 'none'; script-src {_hashes(page, 'script')}; style-src {_hashes(page, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(page: str, tag: str) -> str:
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" for body in bodies)
