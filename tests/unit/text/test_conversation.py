"""Conversation: which template is meant, what travels to it, and what is refused on the way."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from quire.errors import InvalidRequestError
from quire.text.conversation import Conversation, select_template
from quire.text.renderer import Job
from quire.text.template import ChatTemplate
from quire.text.tokenizer import load_tokenizer

FIXTURES = Path(__file__).parents[2] / "fixtures" / "tokenizers"
USER = {"role": "user", "content": "Hi"}
SEVERAL = {"default": "d", "tool_use": "t"}


def owner(chat_template: Any) -> Any:
    return SimpleNamespace(chat_template=chat_template, special_tokens_map={"eos_token": "</s>"})


def sent(**fields: Any) -> Job:
    return msgspec.msgpack.decode(Conversation(**fields).job(owner("own")), type=Job)


def refused(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        Conversation(**fields).job(owner("own"))
    return caught.value


def test_which_template() -> None:
    assert select_template(owner("own")) == "own"
    assert select_template(owner("own"), "given") == "given"
    assert select_template(owner(SEVERAL)) == "d"
    assert select_template(owner(SEVERAL), None, [{}]) == "t"
    assert select_template(owner(SEVERAL), "tool_use") == "t"
    assert select_template(owner(SEVERAL), "{{ text }}") == "{{ text }}"
    with pytest.raises(InvalidRequestError, match="no default.*'a', 'b'"):
        select_template(owner({"a": "", "b": ""}))
    for nothing in (None, "", {}):
        with pytest.raises(InvalidRequestError, match="give one .*--chat-template") as caught:
            select_template(owner(nothing))
        assert caught.value.param == "chat_template"


@pytest.mark.parametrize("given", [5, True, b"x", ["default"], {}])
@pytest.mark.parametrize("own", [None, "own", {"default": "own"}])
def test_a_template_is_text(own: Any, given: Any) -> None:
    with pytest.raises(InvalidRequestError, match="^chat_template must be Jinja text, or a template's name") as caught:
        select_template(owner(own), given)
    assert caught.value.param == "chat_template"


def test_a_tokenizer_renders() -> None:
    tokenizer = load_tokenizer(FIXTURES / "unigram")
    asked = Conversation(messages=[USER], chat_template="rag", documents=[{"a": 1}])
    assert tokenizer.render(asked).startswith('[{"a": 1}]')
    assert tokenizer.render(Conversation(messages=[USER], chat_template="{{ eos_token }}")) == "</s>"
    assert tokenizer.apply_chat_template([USER], chat_template="{{ x }}", tokenize=False, x="y") == "y"
    with pytest.raises(InvalidRequestError, match="give one .*--chat-template"):
        load_tokenizer(FIXTURES / "sp_bpe").render(Conversation(messages=[USER]))


def test_developers_are_systems_where_the_template_does_not_know_them() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, USER]
    names = "{% for m in messages %}{{ m.role }},{% endfor %}"
    assert ChatTemplate(names, {}).render(messages) == "system,user,"
    assert ChatTemplate(names + "{# developer #}", {}).render(messages) == "developer,user,"


class _Text(str):
    pass


class _Model:
    def model_dump(self) -> dict[str, Any]:
        return {"role": "user", "content": _Text("dumped")}


def test_what_travels() -> None:
    job = sent(messages=(USER, _Model()), tools=({"x": _Text("y")},), chat_template_kwargs={"n": 1.5})
    assert job.template == "own"
    assert job.special_tokens == {"eos_token": "</s>"}
    assert job.messages == [USER, {"role": "user", "content": "dumped"}]
    assert job.options["tools"] == [{"x": "y"}]
    assert job.options["chat_template_kwargs"] == {"n": 1.5}
    assert job.options["add_generation_prompt"] is True


def test_what_is_json_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = list[Any]()
    monkeypatch.setattr("quire.text.conversation.to_plain", lambda value, where: looked_at.append(where))
    for wrong in ("\ud800", 1 << 70):  # after millions of others, which an event loop has no time for
        refused(messages=[USER], chat_template_kwargs={"x": wrong})
    assert not looked_at


def test_what_can_not_travel() -> None:
    error = refused(messages=[USER, {"role": "user", "content": object()}])
    assert "messages[1] holds a object" in str(error)
    assert error.param == "messages"
    assert refused(messages=[USER], tools=[len]).param == "tools"
    assert "lone surrogate" in str(refused(messages=[{"role": "user", "content": "\ud800"}]))
    assert "64 bits" in str(refused(messages=[USER], documents=[{"x": 1 << 70}]))
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    assert "nested too deeply" in str(refused(messages=[USER], chat_template_kwargs={"deep": deep}))
