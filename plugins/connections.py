"""Connections: one thread for the network and for the volunteers' requests, others for the rest.

waitress gives each request to one of many threads, which would ask the writer's thread in turn.
That made three of four milliseconds of a scheduler request: the threads fight for the interpreter,
which each step of SQLite lets go. So small scheduler requests and uploads are answered where they
arrive, all that have come by then in one transaction, and their answers are sent when it is durable
[D4].

waitress gives a request to the application when all of it has come. That is too late for an upload
that is not wanted, and never for one whose connection breaks. So this looks at the address when the
headers are there, at the upload's own header when 8 KiB of the body are, and hands the application
what has come of a wanted upload when its connection ends [WIRE 10].

waitress also trusts its clients: many that ask and never read, or that only hold connections open,
would keep all others out. So one request of a connection is in work at a time, and where there are
too many connections the one that was silent for longest makes room.
"""

import functools
import gc
import io
import threading
from collections import deque

import waitress
from waitress import wasyncore
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser
from waitress.receiver import FixedStreamReceiver
from waitress.task import WSGITask

from minigrid import ClientError, db, log, plugged, project

BODY_BYTES = 1 << 16  # smaller bodies are read as always
HEAD_BYTES = 8192  # of an upload's body, which begins with its own header
CONNECTIONS_MAX = 800  # so that files and the store find numbers below the usual 1024, too
AT_ONCE_MAX = 32  # requests in one transaction: some ten milliseconds
POLLS_MAX = 16  # looks at the network for others, before those that are complete are answered


def listen(application, settings):
    """Return a Server that listens; it answers after start(). Raises ClientError."""
    try:
        return Server(application, settings)
    except (OSError, ValueError) as error:  # ValueError: waitress knows no such host.
        raise ClientError(f"cannot listen on {settings.host} port {settings.port}: "
                          f"{error}; try another --host or --port") from None


class Server:
    """The HTTP server: `port`, start(), stop()."""

    def __init__(self, application, settings):
        self.sockets, self.requests, self.moved, self.stopping = {}, deque(), 0, False
        self.at_once = plugged("at_once")
        self.server = waitress.create_server(
            application, map=self.sockets, host=settings.host, port=settings.port,
            threads=16, ident=None, connection_limit=1000, channel_timeout=120,
            asyncore_use_poll=True, recv_bytes=1 << 16, max_request_header_size=1 << 15,
            outbuf_high_watermark=1 << 30,  # Who does not read must not hold a worker up.
            max_request_body_size=max(settings.upload_bytes_max + 9000, 16 << 20),
            outbuf_overflow=1 << 20, clear_untrusted_proxy_headers=True,
            trusted_proxy=settings.proxy or None, trusted_proxy_headers=(
                "x-forwarded-for x-forwarded-proto x-forwarded-host" if settings.proxy else ""))
        self.workers = self.server.task_dispatcher
        for socket in self.sockets.values():  # one for each address of the host
            vars(socket).update(channel_class=functools.partial(Channel, self),
                                add_task=self.add_task)
        self.port = getattr(self.server, "effective_port", settings.port)
        self.thread = threading.Thread(target=self.run, name="http", daemon=True)

    def start(self):
        """Answer requests from now on, in threads of its own."""
        gc.set_threshold(10_000)  # Requests make few cycles; looking for them took a thirtieth.
        self.wake = next(socket.pull_trigger for socket in self.sockets.values())
        self.thread.start()

    def stop(self):
        """Answer what is being answered, and nothing else."""
        self.stopping = True
        if self.thread.is_alive():
            self.wake()
            self.thread.join(5)
        self.workers.shutdown(timeout=5)
        if self.workers.threads or self.thread.is_alive():
            return  # One that still uses the number of a closed socket could write into the store.
        for socket in list(self.sockets.values()):
            socket.close()

    def run(self):
        """Be the thread of the network, and the writer."""
        project.write.lead(self.wake)
        self.wake()  # Something may have been handed in already.
        while not self.stopping:
            try:
                self.look()
                self.work()
            except Exception:  # Whatever it is, without this thread nothing would go on.
                log.exception("the thread of the network")
                threading.Event().wait(0.1)
        project.write.start()
        db.close()

    def look(self):
        """Read from and write to the network, once or until nothing more comes at once."""
        wasyncore.loop(0 if self.requests else 1, True, self.sockets, count=1)
        for _ in range(POLLS_MAX):  # Who else is there? One commit is as dear as many.
            before = self.moved
            if self.requests and len(self.requests) < AT_ONCE_MAX:
                wasyncore.loop(0, True, self.sockets, count=1)
            if before == self.moved:
                break

    def add_task(self, task):
        """Take a task of waitress: a connection with a complete request, or a Cut."""
        if isinstance(task, Channel) and self.is_small(task.requests[0]):
            self.requests.append(task)
        else:
            self.workers.add_task(task)

    def is_small(self, request):
        """Say whether a request is answered at once: no other one may wait long for it."""
        return not request.error and request.body_bytes_received <= BODY_BYTES \
            and "CONTENT_ENCODING" not in request.headers \
            and any(at_once(request) for at_once in self.at_once)

    def work(self):
        """Do what waits for the writer, and answer the requests that have come."""
        n = min(len(self.requests), AT_ONCE_MAX)
        channels = [self.requests.popleft() for _ in range(n)]
        try:
            project.write.work([channel.prepare for channel in channels])
        except Exception:  # Each gets an answer, whatever happens to one.
            log.exception("answering at once")
        for channel in channels:
            channel.service()


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
        elif self.looks == 1 and self.body_bytes_received >= HEAD_BYTES:
            self.look(self.body_rcv.getbuf().get(HEAD_BYTES))
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
            texts = [ask(self.command, self.path, self.content_length, head)
                     for ask in plugged("early_answer")]
        except Exception:  # The route will meet the same, and say so.
            log.exception("early answer to %s", self.path[:80])
            return
        text = next(filter(None, texts), None)
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
    prepared = None  # the Prepared of a request that is answered at once

    def __init__(self, listener, server, *args, **kwargs):
        self.listener, self.parser_class = listener, functools.partial(Parser, self)
        super().__init__(server, *args, **kwargs)
        listener.moved += 1
        if len(server.active_channels) > CONNECTIONS_MAX:
            silent = min((channel for channel in server.active_channels.values()
                          if not channel.requests and not channel.will_close),
                         key=lambda channel: channel.last_activity, default=self)
            silent.will_close = True

    def received(self, data):
        """Take bytes from the network."""
        self.listener.moved += 1
        return super().received(data)

    def readable(self):
        """Say whether more may come; begin with the next request once the last one is answered.

        Else a worker would wait for room for its answer, for as long as the client does not read.
        """
        while self.rest and super().readable():  # Again, after empty lines between two.
            data, self.rest = self.rest, b""
            self.received(data)
        return super().readable()

    def prepare(self):
        """Find the answer to the request, and keep it until the store has kept what it says."""
        self.prepared = Prepared(self, self.requests[0])

    def task_class(self, channel, request):
        """Return what waitress shall do about a request."""
        task, self.prepared = self.prepared, None
        return task or WSGITask(channel, request)

    def handle_close(self):
        """Give the beginning of a wanted upload to the application, which stores it."""
        request, self.request = self.request, None
        if request and request.looks == 2 and not request.error and not request.completed \
                and request.command == "POST" and any(
                    keeps(request.path) for keeps in plugged("keeps_beginnings")):
            self.server.add_task(Cut(self, request))
        super().handle_close()


class Prepared:
    """A task of waitress: an answer that was found before, and is sent now."""

    def __init__(self, channel, request):
        self.channel, self.request, self.data, self.error = channel, request, [], None
        self.server, self.adj, self.addr = channel.server, channel.adj, channel.addr  # for WSGITask
        self.creation_time = channel.creation_time
        self.check_client_disconnected = channel.check_client_disconnected
        request.get_body_stream().seek(0)  # It may be the second time, alone.
        task = WSGITask(self, request)
        try:
            task.service()
        except Exception as error:
            self.error = error  # waitress shall meet it where it knows what to do.
        self.wrote_header, self.close_on_finish = False, task.close_on_finish

    def write_soon(self, data):
        """Keep bytes of the answer."""
        self.data.append(bytes(data))
        return len(data)

    def service(self):
        """Send the answer."""
        if self.error:
            raise self.error
        self.channel.write_soon(b"".join(self.data))


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
