"""What people command: `minigrid trust`, `minigrid ban`, `minigrid pardon`."""

import re

from minigrid import ClientError, Host, plugged, project, read_settings, wall_clock

from . import blacklist, pages


def commands(parsers):
    """Add the commands."""
    show = parsers.add_parser("trust", help="show the black list, suspects and error rates")
    ban = parsers.add_parser("ban", help="put a computer on the black list")
    ban.add_argument("host", metavar="HOST", help="its number, as pages and lists show it")
    ban.add_argument("reason", metavar="REASON", nargs="+", help="why, in words; its owner sees it")
    ban.add_argument("--days", type=float, default=0, metavar="N",
                     help="for how long (default: until a pardon)")
    ban.add_argument("--refuse", action="store_true",
                     help="refuse its requests altogether, instead of giving it no work")
    free = parsers.add_parser("pardon", help="take a computer off the black list")
    free.add_argument("host", metavar="HOST", help="its number")
    for parser, run in ((show, run_trust), (ban, run_ban), (free, run_pardon)):
        parser.add_argument("--data", metavar="DIR", help="data directory of the project")
        parser.set_defaults(run=run)


def find_host(text):
    """Return the host of a number, written "7" or "host 7". Raises ClientError."""
    number = re.fullmatch(r"(?:host|computer)?[ -]?([0-9]{1,15})", text.strip())
    host = Host.get_or_none(id=int(number[1])) if number else None
    if host is None:
        raise ClientError(f"there is no computer '{text[:50]}': give its number; 'minigrid trust' "
                          f"and the pages of the project show it")
    return host


def run_trust(options):
    """Print what the page shows."""
    with plugged("store_only")[-1](options):
        blacklist.settings = read_settings("setup.cfg", blacklist.Settings, "trust")
        print("\n".join(pages.as_text(pages.sections(wall_clock()))))
    return 0


def run_ban(options):
    """Put a host on the black list."""
    if not 0 <= options.days <= 36500:
        raise ClientError("--days must be between 0 (until a pardon) and 36500")
    level = blacklist.REFUSED if options.refuse else blacklist.NO_WORK
    reason = " ".join(" ".join(options.reason).split())[:300]
    with plugged("store_only")[-1](options):
        host, now = find_host(options.host), wall_clock()
        end = now + int(options.days * 86400) if options.days else 0

        def ban():
            blacklist.pardon(host.id, "replaced by an order of the operator", now)
            return blacklist.enter(host, None, level, "operator", reason or "the project says so",
                                   {}, now, end, wanted=0)

        print(f"Computer {host.id}: {blacklist.says(project.write(ban))}\n"
              f"'minigrid pardon {host.id}' ends it.")
    return 0


def run_pardon(options):
    """Take a host off the black list."""
    with plugged("store_only")[-1](options):
        host, now = find_host(options.host), wall_clock()
        n = project.write(lambda: blacklist.pardon(host.id, "pardoned by the project", now))
    print(f"Computer {host.id} is off the black list and gets work again." if n else
          f"Computer {host.id} is not on the black list.")
    return 0
