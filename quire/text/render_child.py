"""The process in which chat templates are rendered: one job after the other, within limits that the system keeps.

`renderer.Renderer` starts it and talks to it. A template is a program, and no list of what it must not do is complete;
so the process has no keys in its environment, writes no file, gets no more memory and processor time than a prompt is
worth, and whatever ends it ends nothing else.
"""

import math
import os
import resource
import sys
import time

import msgspec

from quire.errors import InvalidRequestError
from quire.text.renderer import FRAME, MAX_CHARS, Answer, Job
from quire.text.template import ChatTemplate
from quire.utils.child import leave_ends_to_parent

# Share of the memory limit; one that still holds so much after its answer makes way for a fresh one.
_RETIRES_AT = 1 / 4


def answer(job: Job) -> Answer:
    """Render; everything that a template can raise becomes an answer."""
    try:
        text = ChatTemplate(job.template, job.special_tokens).render(job.messages, **job.options)
    except InvalidRequestError as error:
        return Answer(None, str(error), error.param)
    except RecursionError:
        return Answer(None, "the conversation, or the chat template, is nested too deeply.", "messages")
    if len(text) > MAX_CHARS:
        return Answer(None, f"the chat template wrote {len(text)} characters; the limit is {MAX_CHARS}.", "messages")
    return Answer(text)


def main(seconds: int, megabytes: int) -> None:
    """Answer jobs until the input ends.

    Args:
        seconds: of processor time that a job may take; past it, SIGXCPU ends the process, whatever it is in.
        megabytes: of address space; past it, an allocation fails.
    """
    leave_ends_to_parent()
    for limit, most in ((resource.RLIMIT_AS, megabytes << 20), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    decode, encode = msgspec.msgpack.Decoder(Job).decode, msgspec.msgpack.Encoder().encode
    while len(header := source.read(FRAME.size)) == FRAME.size:
        try:
            end = math.ceil(time.process_time()) + seconds
            resource.setrlimit(resource.RLIMIT_CPU, (end if hard == resource.RLIM_INFINITY else min(end, hard), hard))
            data = encode(answer(decode(source.read(*FRAME.unpack(header)))))
        except MemoryError:
            data = encode(Answer(None, "the conversation needs too much memory.", "messages"))
        except Exception as error:  # no data that msgpack can hold, such as half a surrogate pair
            data = encode(Answer(None, f"the chat template failed ({type(error).__name__}).", "messages"))
        sink.write(FRAME.pack(len(data)) + data)
        sink.flush()
        if _resident_bytes() > (megabytes << 20) * _RETIRES_AT:
            return


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:  # getrusage's maximum has the parent's in it
        return int(file.read().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    os._exit(0)  # at once: nothing is left to save
