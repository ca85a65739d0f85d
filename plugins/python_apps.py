"""Applications that are one Python file: load and check them, enter their versions.

An application imports nothing of minigrid and runs on both sides [D6]. It is a module with a few
functions, checked here by name and parameters, so that a mistake shows at the start and not when
the first volunteer has worked an hour.
"""

import concurrent.futures
import functools
import hashlib
import importlib.util
import inspect
import json
import queue
import re
import sys
import threading
import traceback
from pathlib import Path

import minigrid
from minigrid import Application, AppVersion, PluginError, canonical_json, store_file

HOOKS = {  # hook -> its parameters; those after "?" are optional
    "workunit": ("i",),
    "compute": ("input", "?", "progress", "checkpoint"),
    "parse": ("output",),
    "compare": ("a", "b"),
    "check_set": ("answers",),
    "assimilate": ("workunit", "answer"),
}
REQUIRED = ("workunit", "compute")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")  # no dot, no slash: it becomes file names


def find(path):
    """Return the application files at a path: itself, or every *.py of a directory but _*.py."""
    return sorted(path.glob("[!_]*.py")) if path.is_dir() else [path] * (path.suffix == ".py")


def load(path):
    """Load and check one application file; return an Application.

    Raises PluginError naming file, hook and what was wanted.
    """
    path = Path(path).resolve()
    if not NAME.fullmatch(path.stem):
        raise PluginError(f"{path}: an application's file name must be letters, digits and _")
    spec = importlib.util.spec_from_file_location(f"minigrid_app_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        bounded(execute, path, module)
    except Exception as error:
        raise PluginError(f"{path}: {where_raised(error, path)}") from error
    hooks = {name: check_hook(path, module, name) for name in HOOKS}
    kinds = {name: getattr(module, name, "json") for name in ("takes", "returns")}
    for name, kind in kinds.items():
        if kind not in ("json", "bytes"):
            raise PluginError(f"{path}: {name} must be 'json' or 'bytes', found {kind!r}")
    given = {name: getattr(module, name) for name in minigrid.PARAMETERS if hasattr(module, name)}
    try:
        minigrid.check_parameters(given)
    except ValueError as error:
        raise PluginError(f"{path}: {error}") from None
    policies = {k: v for table in minigrid.plugged("VALIDATION") for k, v in table.items()}
    policy = getattr(module, "validation", "quorum")
    if not isinstance(policy, str) or policy not in policies:
        raise PluginError(f"{path}: validation must be one of {', '.join(map(repr, policies))}; "
                          f"found {policy!r}")
    about = getattr(module, "about", "") or (module.__doc__ or "").strip().split("\n")[0]
    return Application(path.stem, path, str(about), wrap(path, hooks, **kinds), given,
                       policies[policy])


def execute(path, module):
    """Run a file as it stands now; a cache of its bytecode may miss an edit within the second."""
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    exec(code, module.__dict__)


def check_hook(path, module, name):
    """Return a hook that takes what it will be given, or None where it may be left out."""
    required, optional = HOOKS[name], ()
    if "?" in required:
        cut = required.index("?")
        required, optional = required[:cut], required[cut + 1:]
    wanted = f"def {name}({', '.join(required)})"
    if optional:
        wanted += f", and if you like {' and '.join(optional)}"
    hook = getattr(module, name, None)
    if hook is None and name not in REQUIRED:
        return None
    if not inspect.isfunction(hook):
        raise PluginError(f"{path}: {name} is {'missing' if hook is None else 'not a function'}; "
                          f"wanted: {wanted}")
    parameters = list(inspect.signature(hook).parameters.values())
    plain = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    extra = [p.name for p in parameters[len(required):] if p.default is p.empty]
    if len(plain) < len(required) or not set(extra) <= set(optional):
        raise PluginError(f"{path}: {name}() has the wrong parameters; wanted: {wanted}; "
                          f"found: {name}{inspect.signature(hook)}")
    return hook


def enter(application, row, now):
    """Enter a new version of an application if its content is new. Runs in the writer.

    New content always gets a new file name: clients keep files by name [WIRE 17].
    """
    content = application.path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    last = (AppVersion.select().where(AppVersion.app == row, AppVersion.platform == "python")
            .order_by(AppVersion.version_num.desc()).first())
    if last is None or last.files[0]["sha256"] != sha256:
        number = last.version_num + 1 if last else 1
        name = f"{application.name}_{number}_{sha256[:8]}.py"
        file = dict(name=name, sha256=sha256, nbytes=len(content), main=True)
        last = AppVersion.create(app=row, create_time=now, platform="python", version_num=number,
                                 files=[file])
    store_file("download", last.files[0]["name"], content)
    application.versions["python"] = last


# ---- Calling hooks -----------------------------------------------------------


def wrap(path, hooks, takes, returns):
    """Return the hooks as the core calls them: bytes in, bytes out, bounded, errors explained."""
    def hook(name):
        return functools.partial(call, path, name, hooks[name])

    def workunit(i):
        given = hook("workunit")(i)
        if given is not None and (not isinstance(given, dict) or "input" not in given):
            raise PluginError(f"{path}: workunit({i}) must return a dict with 'input', or None; "
                              f"found {given!r:.80}")
        try:
            return given and {**given, "input": encode(given["input"], takes)}
        except (ValueError, TypeError, RecursionError) as error:
            raise PluginError(f"{path}: workunit({i}): input: {error}") from None

    def parse(content):
        value = decode(content, returns)
        return hook("parse")(value) if hooks["parse"] else value

    def compare(a, b):
        if hooks["compare"]:
            return bool(hook("compare")(a, b))
        return a == b if returns == "bytes" else canonical_json(a) == canonical_json(b)

    def check_set(answers):
        index = hook("check_set")(answers)
        if index is not None and (type(index) is not int or not 0 <= index < len(answers)):
            raise PluginError(f"{path}: check_set() must return the index of one of its "
                              f"{len(answers)} answers, or None; found {index!r:.80}")
        return index

    def assimilate(told, content):
        answer = None if content is None else parse(content)
        told.input = None if told.input is None else decode(told.input, takes)
        value = hook("assimilate")(told, answer) if hooks["assimilate"] else answer
        if hooks["assimilate"] and value == "defer" or value is None and not told.errors:
            return value
        kept = value.hex() if isinstance(value, bytes) else value
        try:
            line = dict(workunit=told.name, number=told.number, errors=told.errors, answer=kept)
            return encode(line, "json").decode()
        except (TypeError, ValueError, RecursionError):
            raise PluginError(f"{path}: assimilate() must return a JSON value, 'defer' or None; "
                              f"found {value!r:.80}") from None

    return dict(workunit=workunit, parse=parse, compare=compare, assimilate=assimilate,
                check_set=check_set if hooks["check_set"] else None)


def encode(value, kind):
    """Write an input or output value as the bytes of its file. Raises ValueError, TypeError."""
    if kind == "bytes":
        if not isinstance(value, (bytes, bytearray)):
            raise TypeError(f"must be bytes, as 'takes' says; found {value!r:.60}")
        return bytes(value)
    return canonical_json(value).encode()


def decode(content, kind):
    """Read what encode() wrote. Raises ValueError, RecursionError.

    What could not be written again is refused while it is still its volunteer's fault: NaN, 1e999,
    half a surrogate pair. Later it would stop the assimilation of everything.
    """
    if kind == "bytes":
        return content
    value = json.loads(content)
    encode(value, "json")
    return value


def call(path, name, hook, *args):
    """Call a hook of an application.

    Lets ValueError of parse() and compare() through, and OSError of any: they have a meaning.
    Raises PluginError with file, hook and line for all else.
    """
    meant = (ValueError, OSError) if name in ("parse", "compare") else ()
    try:
        return bounded(hook, *args)
    except Exception as error:
        if isinstance(error, meant) and not isinstance(error, TimeoutError):
            raise
        raise PluginError(f"{path}: {name}() failed: {where_raised(error, path)}") from error


def where_raised(error, path):
    """Say in one line what went wrong and at which line of the application's file."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{type(error).__name__}: {error.msg} (line {error.lineno})"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    place = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}{place}"


class HookThread:
    """Runs hooks with a bound on their time; a hook that hangs is left behind."""

    def __init__(self):
        self.tasks = None

    def __call__(self, function, *args):
        """Return function(*args). Raises what it raises, or TimeoutError after hook_seconds."""
        if self.tasks is None:
            self.tasks = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self.tasks,), daemon=True).start()
        future = concurrent.futures.Future()
        self.tasks.put((future, function, args))
        seconds = minigrid.project.settings.hook_seconds
        try:
            return future.result(seconds)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            self.tasks = None  # Nobody can stop a thread; the next hook gets a new one.
            raise TimeoutError(f"no answer within {seconds:g} s") from None

    @staticmethod
    def _run(tasks):
        while True:
            future, function, args = tasks.get()
            try:
                future.set_result(function(*args))
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # The hook's own SystemExit, nobody's wish to stop us.
                text = f"{type(error).__name__}: {error}"
                future.set_exception(RuntimeError(text).with_traceback(error.__traceback__))


bounded = HookThread()
