"""Chat templates from strangers, rendered in a process that can be killed.

`AsyncLLM` uses it for templates that a request brings. The sandbox bounds what a template does, but not how long a
single step of C code takes: here a template that overstays is ended with its process, and the next one gets a new
process. Run as a module, this file is the child: one JSON line in, one out.
"""

import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

import msgspec

from quire.errors import InvalidRequestError
from quire.text.template import ChatTemplate
from quire.utils.child import child_environment

SECONDS = 6.0  # a little more than the sandbox itself allows


class _Answer(msgspec.Struct):
    text: str | None = None
    error: str | None = None
    param: str | None = None


class TemplateProcess:
    """One child, started when first needed; calls from several threads take turns."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()

    def render(
        self, template: str, special_tokens: Mapping[str, str], messages: Any, options: Mapping[str, Any]
    ) -> str:
        """`ChatTemplate.render` of this template.

        Raises:
            InvalidRequestError: what the template or the messages are refused for, or too much time taken.
        """
        line = msgspec.json.encode([template, dict(special_tokens), messages, dict(options)]) + b"\n"
        with self._turn:
            answer = self._ask(line)
        if answer is None:
            raise InvalidRequestError("the chat template took too long or too much memory.", "chat_template")
        if answer.text is None:
            raise InvalidRequestError(answer.error or "the chat template failed.", answer.param)
        return answer.text

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()

    def _ask(self, line: bytes) -> _Answer | None:
        """The child's answer; None, and no child, when there was none in time."""
        if self._child is None or self._child.poll() is not None:
            command = [sys.executable, "-P", "-m", "quire.text.render_child"]
            pipe = subprocess.PIPE
            self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=child_environment())
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(line)
            child.stdin.flush()
            if select.select([child.stdout], [], [], SECONDS)[0] and (answer := child.stdout.readline()):
                return msgspec.json.decode(answer, type=_Answer)
        except BrokenPipeError:
            pass
        self.close()
        return None


def main() -> None:
    """The child: answer lines until the input ends."""
    for line in sys.stdin.buffer:
        template, special_tokens, messages, options = msgspec.json.decode(line)
        try:
            answer = _Answer(text=ChatTemplate(template, special_tokens).render(messages, **options))
        except InvalidRequestError as error:
            answer = _Answer(error=str(error), param=error.param)
        except Exception as error:
            answer = _Answer(error=f"the chat template failed ({type(error).__name__}).", param="chat_template")
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
