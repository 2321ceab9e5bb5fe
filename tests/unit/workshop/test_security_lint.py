"""No code of the package can run what a file or a message holds: no pickle, eval or exec, no unsafe loading."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "quire"

UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_BUILTINS = {"eval", "exec", "compile", "__import__"}


def called_name(call: ast.Call) -> str:
    """`torch.load` for a call of it, "" where the callee is no dotted name."""
    parts: list[str] = []
    node: ast.expr = call.func
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def offences_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (f"import {a.name}" for a in node.names if a.name.split(".")[0] in UNSAFE_MODULES)
    elif isinstance(node, ast.ImportFrom):
        if node.level == 0 and (node.module or "").split(".")[0] in UNSAFE_MODULES | {"builtins"}:
            yield f"from {node.module} import"
    elif isinstance(node, ast.Call):
        name = called_name(node)
        keywords = {k.arg: k.value for k in node.keywords}
        if name.removeprefix("builtins.") in UNSAFE_BUILTINS:
            yield f"{name}()"
        if name.endswith("import_module") and {ast.unparse(a).strip("'") for a in node.args[:1]} & UNSAFE_MODULES:
            yield f"{name}() of an unsafe module"
        if name == "torch.load" and not is_true(keywords.get("weights_only")):
            yield "torch.load() without weights_only=True"
        if name.endswith(("np.load", "numpy.load")) and is_true(keywords.get("allow_pickle")):
            yield "numpy.load(allow_pickle=True)"
        for argument in ("trust_remote_code", "shell"):
            if is_true(keywords.get(argument)):
                yield f"{argument}=True"
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {
            t.id if isinstance(t, ast.Name) else t.attr for t in targets if isinstance(t, ast.Name | ast.Attribute)
        }
        if "trust_remote_code" in names and is_true(node.value):
            yield "trust_remote_code = True"
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "trust_remote_code" and is_true(value):
                yield '{"trust_remote_code": True}'
    elif isinstance(node, ast.arguments):
        defaults = zip(reversed([*node.posonlyargs, *node.args]), reversed(node.defaults), strict=False)
        for argument, default in [*defaults, *zip(node.kwonlyargs, node.kw_defaults, strict=True)]:
            if argument.arg == "trust_remote_code" and is_true(default):
                yield "trust_remote_code=True by default"


def offences(source: str) -> list[str]:
    """What is unsafe in a module."""
    return [f"line {getattr(n, 'lineno', '?')}: {o}" for n in ast.walk(ast.parse(source)) for o in offences_of(n)]


def test_the_package_is_clean() -> None:
    modules = sorted(PACKAGE.rglob("*.py"))
    assert len(modules) > 20
    found = {m.relative_to(PACKAGE).as_posix(): offences(m.read_text(encoding="utf-8")) for m in modules}
    assert {name: problems for name, problems in found.items() if problems} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    import os, dill as d",
        "from cloudpickle import loads",
        "import marshal.x",
        "from shelve import open",
        "import importlib\nimportlib.import_module('pickle')",
        "eval('1')",
        "exec(code)",
        "import builtins\nbuiltins.exec(code)",
        "from builtins import eval as e",
        "__import__(name)",
        "import torch\ntorch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "np.load(path, allow_pickle=True)",
        "f(trust_remote_code=True)",
        "subprocess.run(text, shell=True)",
        "trust_remote_code: bool = True",
        "self.trust_remote_code = True",
        "def f(a, trust_remote_code=True): ...",
        "def f(a, *, trust_remote_code=True): ...",
        "f({'trust_remote_code': True})",
    ],
)
def test_a_planted_offence_is_found(source: str) -> None:
    assert len(offences(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "import re\nre.compile('x')",
        "torch.load(path, weights_only=True)",
        "f(trust_remote_code=False)",
        "def f(a, trust_remote_code=False, *, b=True): ...",
        "regex.compile(pattern)",
        "from .pickle import x",
    ],
)
def test_what_is_safe_is_left_alone(source: str) -> None:
    assert offences(source) == []
