"""Connections: uploads refused before their bodies have come, and nobody in anybody's way.

waitress gives a request to the application when all of it has come. That is too late for an upload
that is not wanted, and never for one whose connection breaks. So this looks at the address when the
headers are there, at the upload's own header when 8 KiB of the body are, and hands the application
what has come of a wanted upload when its connection ends [WIRE 10].

waitress also trusts its clients: many that ask and never read, or that only hold connections open,
would keep all others out. So one request of a connection is in work at a time, and where there are
too many connections the one that was silent for longest makes room.
"""

import functools
import io

from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser
from waitress.receiver import FixedStreamReceiver
from waitress.task import WSGITask

from minigrid import log

from . import uploads

BODY_BYTES = 1 << 16  # smaller bodies are read as always
CONNECTIONS_MAX = 800  # so that files and the store find numbers below the usual 1024, too


class Parser(HTTPRequestParser):
    """Reads one request; an upload is looked at twice before all of it is there.

    Of a refused one that comes all the same everything is read and forgotten: if the connection
    were cut instead, the client would take that for a fault of the network, and come again. One
    that asks first (Expect: 100-continue, bodies above 1 MiB [WIRE 2]) is answered at once.
    """

    looks = 0  # 1: the address was right, 2: the header of the upload, too, or it is refused

    def __init__(self, channel, adj):
        super().__init__(adj)
        self.channel = channel

    def received(self, data):
        """Take bytes from the network; return how many."""
        taken = super().received(data)
        if not self.looks and self.headers_finished and self.content_length > BODY_BYTES:
            self.look(b"")
        elif self.looks == 1 and self.body_bytes_received >= uploads.HEAD_BYTES:
            self.look(self.body_rcv.getbuf().get(uploads.HEAD_BYTES))
        if self.error:
            self.expect_continue = False  # waitress would still ask for the body
        if self.completed:  # The next request must wait until this one's answer has gone.
            self.channel.rest, taken = data[taken:], len(data)
            if self.chunked:  # There may be a length, too, which somebody else has believed.
                self.headers["CONNECTION"] = "close"
        return taken

    def look(self, head):
        """Ask whether the request is an upload that is not wanted; if so, note the answer."""
        self.looks += 1
        try:
            text = uploads.early_answer(self.command, self.path, self.content_length, head)
        except Exception:  # The route will meet the same, and say so.
            log.exception("early answer to %s", self.path[:80])
            return
        if text is None:
            return
        self.looks = 2
        if self.error or self.expect_continue:  # Too large for waitress, or it waits for our word.
            self.completed = True
        else:
            left = self.content_length - self.body_bytes_received
            self.body_rcv.getbuf().close()
            self.body_rcv, self.completed = FixedStreamReceiver(left, Nowhere()), left < 1
        self.error = EarlyAnswer(text)


class EarlyAnswer:
    """An answer in XML in the place of one of waitress's errors."""

    def __init__(self, text):
        self.text = text

    def to_response(self, ident=None):
        return "200 OK", [("Content-Type", "text/plain")], self.text.encode()


class Nowhere(io.BytesIO):
    """A buffer that forgets what it gets."""

    def append(self, data):
        pass

    def getfile(self):
        return self


class Channel(HTTPChannel):
    """A connection; what has come of an upload when it ends is kept."""

    rest = b""  # of the bytes that came, those of the next requests

    def __init__(self, server, *args, **kwargs):
        self.parser_class = functools.partial(Parser, self)
        super().__init__(server, *args, **kwargs)
        if len(server.active_channels) > CONNECTIONS_MAX:
            silent = min((channel for channel in server.active_channels.values()
                          if not channel.requests and not channel.will_close),
                         key=lambda channel: channel.last_activity, default=self)
            silent.will_close = True

    def readable(self):
        """Say whether more may come; begin with the next request once the last one is answered.

        Else a worker would wait for room for its answer, for as long as the client does not read.
        """
        while self.rest and super().readable():  # Again, after empty lines between two.
            data, self.rest = self.rest, b""
            self.received(data)
        return super().readable()

    def handle_close(self):
        """Give the beginning of a wanted upload to the application, which stores it."""
        request, self.request = self.request, None
        if request and request.looks == 2 and not request.error and not request.completed \
                and request.command == "POST" and uploads.ADDRESS.fullmatch(request.path):
            self.server.task_dispatcher.add_task(Cut(self, request))
        super().handle_close()


class Cut:
    """A task of waitress: a request whose body has ended early, and whose answer nobody gets."""

    def __init__(self, channel, request):
        self.channel, self.request = channel, request

    def service(self):
        """Give it to the application."""
        try:
            environ = WSGITask(self.channel, self.request).get_environment()
            for _ in self.channel.server.application(environ, lambda *_: None):
                pass
        finally:
            self.request.close()

    def cancel(self):
        self.request.close()
