"""The assimilator: gives answers, and failures, to the functions of their applications.

BOINC's projects link a handler of their own into a program of BOINC's; here it is a hook.
"""

import contextlib
import functools
from collections import defaultdict
from types import SimpleNamespace

from minigrid import (ASSIMILATED, DEFERRED, FAIL_NO_CANONICAL, TO_ASSIMILATE, AssimilateState,
                      ErrorMask, append_exactly, apps, change, fire, output_files, plugged,
                      project, work_off)


def assimilator(now):
    """Stage: give answers, and failures, to their applications, each once [S0-53..S0-55 S2-35]."""
    # What a handler returns is kept in the transaction that says DONE: exactly once [S4-31 C23].
    # What it does elsewhere may be repeated after a crash; the workunit's name tells it so.
    held = (hold(now) for hold in plugged("not_yet"))  # some want their answers in order
    work = functools.reduce(lambda work, f: f(work), plugged("around_assimilate"), assimilate)
    return work_off(TO_ASSIMILATE, work, keep, now, *filter(None, held))


def assimilate(wu, results, application):
    """Call the application's handler; return what it wants to keep, "defer" for later.

    Raises PluginError, OSError. The handler gets an answer and an error together where there are
    both, and must cope [S2-05 S2-06 S2-36].
    """
    if wu.number is None:
        return None  # No workunit of the application, but a policy's question [S3-30].
    canonical = next((r for r in results if r.id == wu.canonical_resultid), None)
    errors = [bit.name for bit in ErrorMask if bit and wu.error_mask & bit]
    if not canonical and not errors:
        errors = [ErrorMask.NO_CANONICAL_RESULT.name]
    told = Told(name=wu.name, number=wu.number, app=application.name, errors=errors,
                folder=whole_path(project.data / "results"), _input=wu.input_files[:1])
    content = None
    if canonical:
        content = plugged("file_content")[-1]("upload", output_files(canonical)[0]["name"])
    return application.hooks["assimilate"](told, content)


class Told(SimpleNamespace):
    """What a handler is told of a workunit; most never ask for its input."""

    @functools.cached_property
    def input(self):
        """The bytes of the input file; None if it is gone."""
        for file in self._input:
            with contextlib.suppress(OSError):
                return plugged("file_content")[-1]("download", file["name"])
        return None


@functools.lru_cache(1)
def whole_path(path):
    """Return a path from the root of the file system."""
    return path.resolve()


def keep(kept, now):
    """Say DONE, and write what applications keep, in one transaction [C23]. Runs in the writer."""
    lines = defaultdict(str)

    def finish(wu, results):
        if not wu.error_mask and not any(r.id == wu.canonical_resultid for r in results):
            fire(FAIL_NO_CANONICAL, wu)
        text = kept[wu.id]
        fire(DEFERRED if text == "defer" else ASSIMILATED, wu)
        wu.transition_time = now  # [S0-55]
        if text and text != "defer":
            lines[wu.app_id] += text + "\n"

    done = change(list(kept), lambda wu: wu.assimilate_state == AssimilateState.READY, finish, now)
    for app_id, text in lines.items():
        name = next(a.name for a in apps.values() if a.id == app_id)
        append_exactly(project.data / "results" / f"{name}.jsonl", text.encode())
    return done


STAGES = (assimilator,)
