"""What people command: `minigrid trust`, `minigrid ban`, `minigrid pardon`."""

import re

from minigrid import ClientError, Host, User, plugged, project, read_settings, wall_clock

from . import blacklist, pages


def commands(parsers):
    """Add the commands."""
    show = parsers.add_parser("trust", help="show the black list, suspects and error rates")
    ban = parsers.add_parser("ban", help="put a computer on the black list")
    ban.add_argument("host", metavar="HOST", help="its number, as pages and lists show it; several "
                     "are separated by commas; a volunteer's name stands for all computers of his")
    ban.add_argument("reason", metavar="REASON", nargs="+", help="why, in words; its owner sees it")
    ban.add_argument("--days", type=float, default=0, metavar="N",
                     help="for how long (default: until a pardon)")
    ban.add_argument("--refuse", action="store_true",
                     help="refuse its requests altogether, instead of giving it no work")
    free = parsers.add_parser("pardon", help="take computers off the black list")
    free.add_argument("host", metavar="HOST", nargs="+", help="as of 'minigrid ban'")
    for parser, run in ((show, run_trust), (ban, run_ban), (free, run_pardon)):
        parser.add_argument("--data", metavar="DIR", help="data directory of the project")
        parser.set_defaults(run=run)


def find_hosts(text):
    """Return the hosts of "7", "host 7", "7,8" or the name of their user. Raises ClientError."""
    found = {}
    for word in map(str.strip, text.split(",")):
        number = re.fullmatch(r"(?:host|computer)?[ -]?([0-9]{1,15})", word)
        rows = list(Host.select().where(Host.id == int(number[1])) if number else
                    Host.select().join(User).where(User.name == word).order_by(Host.id))
        if not rows:
            raise ClientError(f"there is no computer '{word[:50]}', nor a volunteer of that name "
                              f"who has one; nothing was changed. 'minigrid trust' and the pages "
                              f"of the project show the numbers of computers")
        if len({host.user_id for host in rows}) > 1:
            raise ClientError(f"several volunteers are called '{word[:50]}'; nothing was changed. "
                              f"Give the numbers of the computers you mean, of "
                              f"{', '.join(str(host.id) for host in rows[:20])}")
        found.update({host.id: host for host in rows})
    return list(found.values())


def run_trust(options):
    """Print what the page shows."""
    with plugged("store_only")[-1](options):
        blacklist.settings = read_settings("setup.cfg", blacklist.Settings, "trust")
        print("\n".join(pages.as_text(pages.sections(wall_clock()))))
    return 0


def run_ban(options):
    """Put hosts on the black list."""
    if not 0 <= options.days <= 36500:
        raise ClientError("--days must be between 0 (until a pardon) and 36500")
    level = blacklist.REFUSED if options.refuse else blacklist.NO_WORK
    reason = " ".join(" ".join(options.reason).split())[:300]
    with plugged("store_only")[-1](options):
        hosts = find_hosts(options.host)
        now = project.now = wall_clock()  # of the events that tell of it
        end = now + int(options.days * 86400) if options.days else 0

        def ban():
            for host in hosts:
                before = blacklist.open_entries([host.id], now)
                entry = blacklist.enter(host, None, level, "operator",
                                        reason or "the project says so", {}, now, end, wanted=0)
                for old in before:
                    blacklist.replace(old, entry, "replaced by an order of the operator", now)
                yield host.id, entry

        for host_id, entry in project.write(lambda: list(ban())):
            print(f"Computer {host_id}: {blacklist.says(entry)}")
        print(f"'minigrid pardon {' '.join(str(host.id) for host in hosts)}' ends it.")
    return 0


def run_pardon(options):
    """Take hosts off the black list."""
    with plugged("store_only")[-1](options):
        hosts = find_hosts(",".join(options.host))
        now = project.now = wall_clock()  # of the events that tell of it
        ended = project.write(lambda: [
            (host.id, blacklist.pardon(host.id, "pardoned by the project", now)) for host in hosts])
    for host_id, n in ended:
        print(f"Computer {host_id} is off the black list and gets work again." if n else
              f"Computer {host_id} is not on the black list.")
    return 0
