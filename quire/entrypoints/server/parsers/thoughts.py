"""Thoughts between tags, before the answer: the way of most models that think, by the names vLLM's parsers have.

A template may have opened the tag already, or opened and closed it, which the prompt's end tells. Thoughts and answer
are handed on without the line breaks that stand between them and the tags.
"""

from msgspec import Struct

from quire.entrypoints.server.parsers.base import ReasoningDelta
from quire.entrypoints.server.parsers.reader import Reader, Reads, Script, WrongCallError


class ThoughtForm(Struct, frozen=True):
    """How thoughts are written.

    Attributes:
        opens, closes: tags that begin and end them; the first of each are those that a template writes.
        assumed: the model thinks first though no tag says so.
        around: tags around the answer, which are no part of it.
        answer: what begins an answer that is no call.
        parts: of these texts, that are tokens where the texts are none.
    """

    opens: tuple[str, ...] = ("<think>",)
    closes: tuple[str, ...] = ("</think>",)
    assumed: bool = False
    around: tuple[str, str] | None = None
    answer: str = ""
    parts: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """All that may be tokens of their own."""
        return self.opens + self.closes + self.parts

    def begun(self, prompt: str) -> bool | None:
        """Whether the answer to a prompt begins within a thought; None: the model opens one, or does not."""
        end = prompt.rstrip()
        if end.endswith(self.closes):
            return False
        return True if end.endswith(self.opens) else None

    def script(self, prompt: str, then: Reads = Reader.text) -> Reads:
        """What reads the answer to this prompt; `then`: what reads what follows the thought."""
        begun = self.begun(prompt)
        inside = self.assumed if begun is None else begun

        def script(read: Reader) -> Script[None]:
            thinks = inside
            if begun is not False:
                with read.attempt(None):
                    thinks = (yield from read.one_of(*self.opens, spaced=True)) is not None or inside
                    if not thinks:
                        raise WrongCallError
            if thinks:
                yield from read.space()
                if (yield from read.text(*self.closes, kind=ReasoningDelta)) is None:
                    return
                read.hold_spaces("")
                yield from read.space()
            if self.around and (yield from read.one_of(self.around[0])):
                yield from read.space()
                read.unsaid = self.around[1:]
            yield from then(read)

        return script


FORMS = {
    **dict.fromkeys(("think", "deepseek_v3", "qwen3", "glm45", "kimi_k2"), ThoughtForm()),
    **dict.fromkeys(("deepseek_r1", "minimax_m2"), ThoughtForm(assumed=True)),
    "hunyuan_a13b": ThoughtForm(around=("<answer>", "</answer>")),
    "mistral": ThoughtForm(("[THINK]",), ("[/THINK]",)),
    "seed_oss": ThoughtForm(("<seed:think>",), ("</seed:think>",)),
    "gemma4": ThoughtForm(("<|channel>thought", "<|channel>"), ("<channel|>",)),
    "granite": ThoughtForm(
        ("Here is my thought process:", "Here's my thought process:", "<think>"),
        ("Here is my response:", "Here's my response:", "</think>"),
        around=("<response>", "</response>"),
    ),
}
