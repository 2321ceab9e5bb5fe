"""Templates that would take for ever, or all memory, end with an error in a few seconds and little memory."""

import resource
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.errors import InvalidRequestError
from quire.text import sandbox as template_sandbox
from quire.text.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hi"}]
DOUBLING = "{{% set ns = namespace(x={0}) %}}{{% for i in range(60) %}}{{% set ns.x = {1} %}}{{% endfor %}}{2}"
BLOCK = "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
R = "{% set r = range(100000) %}{% for a in r %}"
ENDLESS = {
    "loops": R + "{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
    "loop_with_condition": R + "{% for b in r if b < 0 %}{% endfor %}{% endfor %}",
    "macro_tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive_loop": "{% for x in [1, 1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 1]) }}{% endif %}"
    "{% endfor %}",
    "filters": "{% for a in range(100000) %}{% set x = range(100000) | map('string') | join %}{% endfor %}",
    "deep_recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}
KEEP = "{{% set ns = namespace(l=[]) %}}{{% for i in range(100000) %}}{{% set ns.l = ns.l + [{}] %}}{{% endfor %}}"
HUGE = {
    "multiplied_text": "{{ 'x' * 10000000000 }}",
    "multiplied_list": "{{ [0] * 10000000000 }}",
    "power": "{{ 10 ** 100000000 }}",
    "product": DOUBLING.format("3", "ns.x * ns.x", ""),
    "sum_of_text": DOUBLING.format("'x'", "ns.x + ns.x", ""),
    "tilde": DOUBLING.format("'x'", "ns.x ~ ns.x", ""),
    "block": BLOCK + "{% set ns.x = y %}{% endfor %}",
    "list_of_lists": DOUBLING.format("[1]", "[ns.x, ns.x]", "{{ ns.x }}"),
    "list_as_json": DOUBLING.format("[1]", "[ns.x, ns.x]", "{{ ns.x | tojson }}"),
    "list_as_string": DOUBLING.format("[1]", "[ns.x, ns.x]", "{{ ns.x | string }}"),
    "list_joined_by_tilde": DOUBLING.format("[1]", "[ns.x, ns.x]", "{{ ns.x ~ '' }}"),
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
    "slice": "{{ [1] | slice(10000000000) | list }}",
    "round": "{{ 1 | round(1000000000, 'ceil') }}",
    "replace": "{% set x = 'x' * 1000000 %}{{ x.replace('', x) }}",
    "replace_filter": "{% set x = 'x' * 1000000 %}{{ x | replace('x', x) }}",
    "join": "{% set x = 'x' * 1000000 %}{{ x.join(x) }}",
    "join_filter": "{% set x = 'x' * 1000000 %}{{ x | list | join(x) }}",
    "join_generator": "{% set x = 'x' * 1000000 %}{{ ([x] * 100000) | select | join }}",
    "join_method_generator": "{% set x = 'x' * 1000000 %}{{ ''.join(([x] * 100000) | select) }}",
    "kept_texts": KEEP.format("'x' * 10000000"),
    "kept_lists": KEEP.format("range(100000) | list"),
    "kept_slices": "{% set x = 'x' * 10000000 %}" + KEEP.format("x[1:]"),
    "kept_filtered": "{% set x = 'x' * 10000000 %}" + KEEP.format("x | upper"),
    "kept_methods": "{% set x = 'x' * 200000 %}" + KEEP.format("x.split('x')"),
    "kept_maps": KEEP.format("range(1000) | map('string') | map('center', 100000) | list"),
    "output": "{% set x = 'x' * 1000000 %}{% for i in range(100000) %}{{ x }}{% endfor %}",
    "striptags": "{{ ('<!---->' * 1000000) | striptags }}",
    "wordwrap": "{{ ('x' * 1000000) | wordwrap(1) }}",
    "sum_of_lists": "{% set x = [[1]] * 100000 %}{{ (x | sum(start=[])) | length }}",
    "rfind": "{{ ('x' * 10000000).rfind('y' + 'x' * 5000000) }}",
    "expandtabs_named": "{{ '\t'.expandtabs(tabsize=2000000000) }}",
    "strftime": "{{ strftime_now('%1000000000Y') }}",
    "range": "{{ range(10000000000) | list }}",
    "to_bytes": "{{ (1).to_bytes(10000000000) }}",
    "long_template": "x" * (1 << 21),
    "brackets": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
}


def refuse(template: str) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(template, {}).render(MESSAGES)
    return str(caught.value)


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_templates_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    start = time.process_time()
    message = refuse(ENDLESS[name])
    assert time.process_time() - start < 2.0
    assert "stopped" in message or "RecursionError" in message


@pytest.mark.parametrize("name", HUGE)
def test_huge_results_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_MADE", 1 << 26)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    start = time.process_time()
    refuse(HUGE[name])
    assert time.process_time() - start < 3.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_200_000, (
        "MAX_MADE and what it takes to get there"
    )


def test_a_long_honest_conversation_is_fine() -> None:
    """200,000 characters in 2,000 messages with tool definitions: far from every bound."""
    template = (
        "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% for m in messages %}"
        "{{ '<|' ~ m.role ~ '|>\n' + m.content | trim ~ '\n' }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 20}] * 2000
    tools = [{"name": f"f{i}", "parameters": {"x": "y" * 100}} for i in range(100)]
    start = time.process_time()
    text = ChatTemplate(template, {}).render(messages, tools=tools)
    assert len(text) > 200_000
    assert time.process_time() - start < 1.0


def test_threads_have_clocks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.3)

    def good(_: int) -> str:
        return ChatTemplate("{% for i in range(3000) %}{{ i }}{% endfor %}", {}).render(MESSAGES)

    with ThreadPoolExecutor(4) as pool:
        bad = pool.submit(refuse, ENDLESS["loops"])
        assert len(set(pool.map(good, range(40)))) == 1
        assert "stopped" in bad.result()
