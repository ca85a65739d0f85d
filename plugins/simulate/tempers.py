"""What simulated hosts are like: honest, or in one of many ways not what a project hopes for."""

from dataclasses import dataclass

DAY, HOUR = 86400, 3600


@dataclass(frozen=True)
class Temper:
    """What a kind of host is like; shares are of its answers, unless said otherwise."""

    about: str
    wrong: float = 0
    lies: bool = False  # wrong as often as the plan says, instead
    together: bool = False  # wrong as all of its kind are, not on its own
    garbage: float = 0
    crash: float = 0
    quit: float = 0  # its user aborts the task
    forget: float = 0  # says that it has uploaded what it has not
    full: float = 0  # of its visits: its disk has no room, and its tasks have failed
    clock: bool = False  # tells times that cannot be
    detach: float = 0  # of its visits: comes back as new
    vanish: float = 0  # of its visits: stays away for days
    leave: float = 0  # of its visits: never comes back
    delay: int = 0  # s more for each task
    slow: float = 1  # times the usual time for a task
    asleep: bool = False  # off from 22 to 8 o'clock
    clone: bool = False  # has the client directory of an honest host before it
    honest: bool = True  # nobody may call it a liar


HONEST = "honest"  # whoever is nothing else
TEMPERS = {  # named as the options of the command
    HONEST: Temper("computes, and answers what is right"),
    "liars": Temper("give wrong answers, each on its own", lies=True, honest=False),
    "colluders": Temper("all give the same wrong answers", wrong=1, together=True, honest=False),
    "careless": Temper("one answer in five is wrong", wrong=0.2, honest=False),
    "crashers": Temper("seven tasks in ten fail", crash=0.7),
    "garblers": Temper("seven answers in ten cannot be read", garbage=0.7),
    "vanishers": Temper("after each visit one in four never comes back", leave=0.25),
    "hoarders": Temper("take tasks and never finish one", delay=1000 * DAY),
    "late": Temper("report nine hours too late", delay=9 * HOUR),
    "late-crashers": Temper("the same, and seven tasks in ten fail", delay=9 * HOUR, crash=0.7),
    "slow": Temper("take eight times as long", slow=8),
    "sleepers": Temper("are off from 22 to 8 o'clock", asleep=True),
    "flaky": Temper("stay away for days now and then, and fail now and then",
                    vanish=0.05, crash=0.05),
    "clones": Temper("run from a copy of another's client directory", clone=True),
    "wrong-clocks": Temper("tell times that cannot be", clock=True),
    "reattaching": Temper("come back as new on one visit in ten", detach=0.1),
    "full-disks": Temper("have no room on one visit in two", full=0.5),
    "quitters": Temper("their users abort seven tasks in ten", quit=0.7),
    "forgetters": Temper("report seven answers in ten without having uploaded them", forget=0.7),
}
USUAL = {"slow": 0.1, "flaky": 0.05, "clones": 0.02, "sleepers": 0.1}  # as in any crowd


def crowd(hosts, shares, rng):
    """Return the kinds of so many hosts, mixed like a real crowd; who is nothing else is honest."""
    kinds = [kind for kind, share in shares.items() for _ in range(round(share * hosts))]
    kinds = (kinds + [HONEST] * hosts)[:hosts]
    rng.shuffle(kinds)
    return kinds


def draw(shares, rng):
    """Draw the kind of one host that arrives."""
    x = rng.random()
    for kind, share in shares.items():
        x -= share
        if x < 0:
            return kind
    return HONEST
