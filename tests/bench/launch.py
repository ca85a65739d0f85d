"""Start minigrid as its command line does, changed for a measurement.

    python tests/bench/launch.py [--profile FILE] [--no-passes] [--empty] serve ...

--profile looks at the stacks of all threads again and again, weighs them with the processor time
that each thread has taken in between, and adds to FILE where it went when the server stops;
--no-passes leaves the scheduler alone with the requests; --empty answers them all by a route that
does nothing, on the very same HTTP server: what any route at all would cost.
"""

import sys
import threading
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import bottle  # noqa: E402

import minigrid as m  # noqa: E402

INTERVAL = 0.005  # s between two looks
LINES = 40  # of each table


def empty_app(clock):
    """Return an application that answers whatever is asked, and does nothing for it."""
    app = bottle.Bottle()
    app.route("/<path:path>", ["GET", "POST", "PUT"], lambda path: "")
    return app


class Sampler(threading.Thread):
    """Finds out which functions take processor time, in all threads."""

    def __init__(self):
        super().__init__(name="sampler", daemon=True)
        self.stop, self.taken = threading.Event(), {}
        self.threads, self.own, self.within = Counter(), Counter(), Counter()

    def run(self):
        while not self.stop.wait(INTERVAL):
            frames = sys._current_frames()
            for thread in threading.enumerate():
                if thread is not self and thread.ident in frames:
                    self.look(thread, frames[thread.ident])

    def look(self, thread, frame):
        """Charge the stack of a thread with what it has taken since the last look."""
        try:
            path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
            total = int(path.read_text().split()[0])  # nanoseconds
        except OSError:
            return  # It has just ended.
        taken = total - self.taken.get(thread.native_id, 0)
        self.taken[thread.native_id] = total
        name = thread.name.split("-")[0].split("_")[0]
        self.threads[name] += taken
        self.own[name, where(frame)] += taken
        places = set()
        while frame:
            places.add((name, where(frame)))
            frame = frame.f_back
        for place in places:
            self.within[place] += taken

    def table(self):
        """Return what took longest, as shares of the processor time of all threads."""
        total = max(sum(self.threads.values()), 1)
        lines = [f"{total / 1e9:.2f} s of processor time", *(
            f"{100 * n / total:6.1f} %  thread {name}" for name, n in self.threads.most_common(9))]
        for title, counts in (("in the function itself", self.own),
                              ("in the function and all it calls", self.within)):
            lines += ["", title] + [f"{100 * n / total:6.1f} %  {thread:<18} {place}"
                                    for (thread, place), n in counts.most_common(LINES)]
        return "\n".join(lines) + "\n\n"


def where(frame):
    """Name the function of a frame, with its file and first line."""
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_code.co_firstlineno} {frame.f_code.co_name}"


def main(words):
    """Take the options of this file, and give what follows to minigrid; return its status."""
    mine, others = words[:words.index("serve")], words[words.index("serve"):]
    if "--no-passes" in mine or "--empty" in mine:
        m.run_pass = lambda now, stages=None: {}
    if "--empty" in mine:
        m.make_app = empty_app
    if "--profile" not in mine:
        return m.main(others)
    sampler = Sampler()
    sampler.start()
    try:
        return m.main(others)
    finally:
        sampler.stop.set()
        with open(mine[mine.index("--profile") + 1], "a", encoding="utf-8") as file:
            file.write(sampler.table())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
