"""Templates that would take for ever, or all memory, end with an error within bounds, and end nothing else."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from quire.errors import InvalidRequestError, RequestFailedError
from quire.text.conversation import Conversation
from quire.text.renderer import Renderer
from quire.text.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hi"}]
DOUBLING = "{{% set ns = namespace(x={0}) %}}{{% for i in range(60) %}}{{% set ns.x = {1} %}}{{% endfor %}}{2}"
BLOCK = "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
R = "{% set r = range(100000) %}{% for a in r %}"
KEEP = "{{% set ns = namespace(l=[]) %}}{{% for i in range(100000) %}}{{% set ns.l = ns.l + [{}] %}}{{% endfor %}}"
ENDLESS = {
    "loops": R + "{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
    "loop_with_condition": R + "{% for b in r if b < 0 %}{% endfor %}{% endfor %}",
    "macro_tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive_loop": "{% for x in [1, 1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 1]) }}{% endif %}"
    "{% endfor %}",
    "filters": "{% for a in range(100000) %}{% set x = range(100000) | map('string') | join %}{% endfor %}",
    "power": "{{ 10 ** 100000000 }}",
    "product": DOUBLING.format("3", "ns.x * ns.x", ""),
    "list_of_lists": DOUBLING.format("[1]", "[ns.x, ns.x]", "{{ ns.x }}"),
    "list_as_json": DOUBLING.format("[1]", "[ns.x, ns.x]", "{{ ns.x | tojson }}"),
    "list_as_string": DOUBLING.format("[1]", "[ns.x, ns.x]", "{{ ns.x | string }}"),
    "list_joined_by_tilde": DOUBLING.format("[1]", "[ns.x, ns.x]", "{{ ns.x ~ '' }}"),
    "slice": "{{ [1] | slice(10000000000) | list }}",
    "round": "{{ 1 | round(1000000000, 'ceil') }}",
    "kept_texts": KEEP.format("'x' * 10000000"),
    "wordwrap": "{{ ('x' * 1000000) | wordwrap(1) }}",
    "sum_of_lists": "{% set x = [[1]] * 100000 %}{{ (x | sum(start=[])) | length }}",
    "nested_format": DOUBLING.format("[1]", "[ns.x, ns.x]", "{{ '{}'.format(ns.x) }}"),
    "nested_exception": DOUBLING.format("[1]", "[ns.x, ns.x]", "{{ raise_exception(ns.x) }}"),
    "compared_lists": "{% set ns = namespace(a=[], b=[]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
}
# What takes time in Python and in one of its functions, and what takes memory, kept or shown; the others each night.
ALWAYS = ("loops", "power", "kept_texts", "nested_exception")
HUGE = {
    "deep_recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "multiplied_text": "{{ 'x' * 10000000000 }}",
    "multiplied_list": "{{ [0] * 10000000000 }}",
    "sum_of_text": DOUBLING.format("'x'", "ns.x + ns.x", ""),
    "tilde": DOUBLING.format("'x'", "ns.x ~ ns.x", ""),
    "block": BLOCK + "{% set ns.x = y %}{% endfor %}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent_star": "{{ '%*d' % (10000000000, 1) }}",
    "format_filter": "{{ '%10000000000d' | format(1) }}",
    "braces": "{{ '{:10000000000}'.format(1) }}",
    "nested_braces": "{{ '{:{}}'.format(1, 10000000000) }}",
    "center": "{{ 'x' | center(10000000000) }}",
    "ljust": "{{ 'x'.ljust(10000000000) }}",
    "zfill": "{{ 'x'.zfill(10000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(2000000000) }}",
    "indent": "{{ 'x\ny' | indent(10000000000) }}",
    "indent_named": "{{ 'x\ny' | indent(width=10000000000) }}",
    "tojson_indent": "{{ [1] | tojson(indent=10000000000) }}",
    "batch": "{{ [1] | batch(10000000000, 0) | list }}",
    "replace": "{% set x = 'x' * 1000000 %}{{ x.replace('', x) }}",
    "replace_filter": "{% set x = 'x' * 1000000 %}{{ x | replace('x', x) }}",
    "join": "{% set x = 'x' * 1000000 %}{{ x.join(x) }}",
    "join_filter": "{% set x = 'x' * 1000000 %}{{ x | list | join(x) }}",
    "join_generator": "{% set x = 'x' * 1000000 %}{{ ([x] * 100000) | select | join }}",
    "join_method_generator": "{% set x = 'x' * 1000000 %}{{ ''.join(([x] * 100000) | select) }}",
    "kept_lists": KEEP.format("range(100000) | list"),
    "kept_slices": "{% set x = 'x' * 10000000 %}" + KEEP.format("x[1:]"),
    "kept_filtered": "{% set x = 'x' * 10000000 %}" + KEEP.format("x | upper"),
    "kept_methods": "{% set x = 'x' * 200000 %}" + KEEP.format("x.split('x')"),
    "kept_maps": KEEP.format("range(1000) | map('string') | map('center', 100000) | list"),
    "output": "{% set x = 'x' * 1000000 %}{% for i in range(100000) %}{{ x }}{% endfor %}",
    "expandtabs_named": "{{ '\t'.expandtabs(tabsize=2000000000) }}",
    "range": "{{ range(10000000000) | list }}",
    "to_bytes": "{{ (1).to_bytes(10000000000) }}",
    "long_template": "x" * (1 << 21),
    "brackets": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    # Methods of marked text, formats of bytes, and products of sizes that are small each.
    "marked_ljust": "{{ ('a'|safe).ljust(4000000000) | length }}",
    "marked_center": "{{ ('a'|safe).center(2000000000) }}",
    "marked_replace": "{{ (('a' * 10000) | safe).replace('a', 'b' * 200000) }}",
    "marked_join": "{{ ('a' * 1000000) | safe | list | join('x' * 10000 | safe) }}",
    "many_tabs": "{{ ('\t' * 20000).expandtabs(100000) }}",
    "many_indents": "{{ ('a\n' * 20000) | indent(100000) }}",
    "wide_wraps": "{{ ('a' * 20000) | wordwrap(1, wrapstring='x' * 100000) }}",
    "percent_repeated": "{{ ('%(a)s' * 200) % {'a': 'x' * 10000000} }}",
    "percent_brackets": "{{ '%(a(b)c)2000000000d' % {'a(b)c': 1} }}",
    "percent_bytes": "{{ '%2000000000d'.encode() % 1 }}",
    "braces_repeated": "{{ ('{0}' * 200).format('x' * 10000000) }}",
    "format_filter_named": "{{ ('%(a)s' * 200) | format(a='x' * 10000000) }}",
    "urlize": "{{ ('http://a.com ' * 10000) | urlize(target='x' * 200000) | length }}",
    "nested_indents": "{% set ns = namespace(x=[1]) %}{% for i in range(900) %}{% set ns.x = [ns.x] %}{% endfor %}"
    "{{ ns.x | tojson(indent=100) * 200 }}",
}
# Further spellings of others, and further values that are kept until memory is used up: each night.
LIKE = {
    *("indent_named", "expandtabs_named", "replace_filter", "join_filter", "join_method_generator", "format_filter"),
    *("format_filter_named", "percent_star", "nested_braces", "tilde", "marked_ljust"),
    *("kept_slices", "kept_filtered", "kept_methods", "kept_maps"),
}
HARMLESS = {
    "striptags": "{{ ('<!---->' * 1000000) | striptags }}",
    "rfind": "{{ ('x' * 10000000).rfind('y' + 'x' * 5000000) }}",
    "strftime": "{{ strftime_now('%1000000000Y') }}",
}
MEGABYTES = 400


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    """One that waits on a busy machine until the processor time of its limit has been had."""
    renderer = Renderer(seconds=1, megabytes=MEGABYTES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.text.renderer._DEADLINE", 600.0)
        yield renderer
    renderer.close()


def pid_of(renderer: Renderer) -> int | None:
    return None if renderer._child is None else renderer._child.pid


def render(renderer: Renderer, template: str, messages: Any = MESSAGES, **options: Any) -> str:
    owner: Any = SimpleNamespace(chat_template=None, special_tokens_map={})
    return renderer.render(Conversation(messages=messages, chat_template=template, **options).job(owner))


def refuse(renderer: Renderer, template: str) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        render(renderer, template)
    assert render(renderer, "{{ messages[0].content }}") == "Hi", "the next one is as good as any"
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.nightly) for name in ENDLESS]
)
def test_endless_templates_end(renderer: Renderer, name: str) -> None:
    error = refuse(renderer, ENDLESS[name])
    assert "stopped: it ran for more than 1 s" in str(error) or "more memory" in str(error)
    assert error.param == "chat_template"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in LIKE else ()) for name in HUGE]
)
def test_huge_results_are_refused(renderer: Renderer, name: str) -> None:
    refuse(renderer, HUGE[name])


@pytest.mark.parametrize("name", HARMLESS)
def test_much_work_for_a_small_result_is_fine(renderer: Renderer, name: str) -> None:
    assert len(render(renderer, HARMLESS[name])) < 10


def test_a_long_honest_conversation_is_fine(renderer: Renderer) -> None:
    """200,000 characters in 2,000 messages with tool definitions: far from every bound."""
    template = (
        "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% for m in messages %}"
        "{{ '<|' ~ m.role ~ '|>\n' + m.content | trim ~ '\n' }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 20}] * 2000
    tools = [{"name": f"f{i}", "parameters": {"x": "y" * 100}} for i in range(100)]
    text = render(renderer, template, messages, tools=tools)
    assert len(text) > 200_000
    assert text == ChatTemplate(template, {}).render(messages, tools=tools)


def test_memory_is_the_systems_to_bound(renderer: Renderer) -> None:
    large = "{% set x = messages[0].content * 50000000 %}{{ x | length }}"
    assert render(renderer, large) == "100000000"
    refuse(renderer, large + "{% set y = x * 9 %}")
    with open(f"/proc/{pid_of(renderer)}/limits") as file:
        (line,) = [line for line in file if line.startswith("Max address space")]
    assert int(line.split()[3]) == MEGABYTES << 20


def test_megabytes_go_both_ways(renderer: Renderer) -> None:
    said = "é" * 3_000_000
    assert render(renderer, "{{ messages[0].content }}", [{"role": "user", "content": said}]) == said
    assert "16777216" in str(refuse(renderer, "{{ 'x' * 17000000 }}"))


def test_a_template_is_a_template_there_too(renderer: Renderer) -> None:
    error = refuse(renderer, "{{ raise_exception('Roles must alternate!') }}")
    assert str(error) == "the chat template refused the conversation: Roles must alternate!"
    assert error.param == "messages"
    assert "line 1" in str(refuse(renderer, "{% if %}"))
    assert "UnicodeEncodeError" in str(refuse(renderer, "{{ '\\ud800' }}"))
    assert (
        render(renderer, "{{ documents[0].a }}{{ x }}", documents=[{"a": 1}], chat_template_kwargs={"x": [2]}) == "1[2]"
    )


def test_a_killed_process_is_replaced() -> None:
    renderer = Renderer()
    assert pid_of(renderer) is None, "it is started when first needed"
    assert render(renderer, "a") == "a"
    first = pid_of(renderer)
    assert first is not None
    assert render(renderer, "b") == "b"
    assert pid_of(renderer) == first
    os.kill(first, signal.SIGSTOP)
    killer = threading.Timer(0.2, os.kill, (first, signal.SIGKILL))
    killer.start()
    with pytest.raises(InvalidRequestError, match="ended by SIGKILL"):
        render(renderer, "c")
    assert render(renderer, "d") == "d"
    second = pid_of(renderer)
    assert second not in (None, first)
    renderer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(second or 0, 0)
    renderer.close()


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.text.renderer._DEADLINE", 0.3)
    renderer = Renderer()
    os.kill(renderer._running().pid, signal.SIGSTOP)
    with pytest.raises(InvalidRequestError, match="more than 0.3 s"):
        render(renderer, "c", [{"role": "user", "content": "x" * 1_000_000}])
    monkeypatch.undo()
    assert render(renderer, "d") == "d"
    renderer.close()


def test_threads_take_turns(renderer: Renderer) -> None:
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda i: render(renderer, "{{ x }}", chat_template_kwargs={"x": i}), range(40)))
    assert texts == [str(i) for i in range(40)]


def test_descriptors_of_any_number() -> None:
    """select() knows those below 1024 only."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("needs 2000 open files")
    script = """
        import os, resource
        from quire.text.conversation import Conversation
        from quire.text.tokenizer import load_tokenizer
        resource.setrlimit(resource.RLIMIT_NOFILE, (2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
        messages = [{"role": "user", "content": "Hi"}]
        print(load_tokenizer(os.sys.argv[1]).render(Conversation(messages=messages, chat_template="ok")))
    """
    files = os.path.join(os.path.dirname(sys.modules["quire"].__file__ or ""), "demo")
    command = [sys.executable, "-c", textwrap.dedent(script), files]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "ok\n"


def test_it_has_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    renderer = Renderer()
    with open(f"/proc/{renderer._running().pid}/environ", "rb") as file:
        assert render(renderer, "a") == "a"
        environment = file.read()
    renderer.close()
    assert b"PYTHONPATH" in environment
    assert b"secret" not in environment


def test_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(RequestFailedError, match="can't be started .No such file"):
        render(Renderer(), "a")


def test_it_leaves_with_its_owner() -> None:
    renderer = Renderer()
    render(renderer, "a")
    pid = pid_of(renderer)
    del renderer
    with pytest.raises(ProcessLookupError):
        os.kill(pid or 0, 0)


def test_it_leaves_when_its_parent_is_killed() -> None:
    script = """
        import time
        from quire.text.renderer import Renderer
        renderer = Renderer()
        print(renderer._running().pid, flush=True)
        time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    for _ in range(1000):
        if _is_gone(pid):
            return
        threading.Event().wait(0.01)
    pytest.fail("the process outlived its parent")


def _is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
