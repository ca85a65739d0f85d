"""Who agrees with whom: groups of hosts that always side with each other and never with the rest.

Only workunits whose answers differ tell something: there each pair of hosts stood together or
apart. Hosts that lie together show as a small group, always of one mind and against all others.
"""

from collections import defaultdict
from types import SimpleNamespace

from peewee import BigIntegerField, IntegerField

from minigrid import Record, db

HOSTS_MAX = 10  # of one workunit that are counted in pairs
PAIRS_MAX = 50_000  # in the store; the oldest go
REMEMBERED = 90 * 86400  # s that a meeting is remembered
AGAINST_MIN = 3  # hosts outside that a group must have stood against
FRESH = 300  # s for which what was found is not looked for again


class Pair(Record):
    """Two hosts, a < b, that have answered the same workunits, where not all answers agreed."""

    a = IntegerField()
    b = IntegerField()
    together = IntegerField(default=0)
    apart = IntegerField(default=0)
    last = BigIntegerField(index=True)

    class Meta:
        indexes = ((("a", "b"), True),)


TABLES = (Pair,)
UPSERT = ("INSERT INTO pair (a, b, together, apart, last) VALUES (?, ?, ?, ?, ?) "
          "ON CONFLICT (a, b) DO UPDATE SET together = together + excluded.together, "
          "apart = apart + excluded.apart, last = excluded.last")


def note(verdict, hosts, now):
    """Count who stood with whom in a workunit that was just decided. Runs in the writer."""
    groups = [set(group) for group in verdict.groups]
    if not verdict.canonical or len(groups) < 2:
        return
    ids = sorted({rid for group in groups for rid in group if rid in hosts and hosts[rid][0]})
    rows = []
    for n, one in enumerate(ids[:HOSTS_MAX]):
        for other in ids[n + 1:HOSTS_MAX]:
            a, b = sorted((hosts[one][0].id, hosts[other][0].id))
            same = any(one in group and other in group for group in groups)
            if a != b:
                rows.append((a, b, int(same), int(not same), now))
    db.connection().executemany(UPSERT, rows)


def forget_old(now):
    """Bound what is remembered of pairs. Runs in the writer."""
    Pair.delete().where(Pair.last < now - REMEMBERED).execute()
    last = Pair.select(Pair.last).order_by(Pair.last.desc()).offset(PAIRS_MAX).limit(1).scalar()
    if last is not None:
        Pair.delete().where(Pair.last <= last).execute()


def find(pairs):
    """Find the suspects among pairs (a, b, together, apart); return their groups, largest first.

    Hosts that stood together and never apart are linked; what is linked is a group. The largest
    one is the honest majority, as far as anybody can tell; another one is suspect if none of its
    members ever stood with a host outside, though each met some, and together at least three.
    """
    leader = {}

    def lead(host):
        while leader.setdefault(host, host) != host:
            leader[host] = host = leader[leader[host]]
        return host

    for a, b, together, apart in pairs:
        first, second = sorted((lead(a), lead(b)))
        if together and not apart:
            leader[second] = first
    groups = defaultdict(lambda: SimpleNamespace(
        hosts=set(), together=0, inside=0, outside=0, apart=0, against=set(), met=set()))
    for host in leader:
        groups[lead(host)].hosts.add(host)
    for a, b, together, apart in pairs:
        one, other = groups[lead(a)], groups[lead(b)]
        if one is other:
            one.together, one.inside = one.together + together, one.inside + apart
            continue
        for group, own, foreign in ((one, a, b), (other, b, a)):
            group.outside, group.apart = group.outside + together, group.apart + apart
            group.against.add(foreign)
            group.met.add(own)
    ordered = sorted(groups.values(), key=lambda group: (-len(group.hosts), min(group.hosts)))
    most = len(ordered[0].hosts) if ordered else 0
    return [group for group in ordered if 1 < len(group.hosts) < most and not group.inside
            and not group.outside and group.met == group.hosts
            and len(group.against) >= AGAINST_MIN]


known = SimpleNamespace(at=0, groups=[])


def suspects(now):
    """Return the suspects, looked for anew after some minutes."""
    if not known.at <= now < known.at + FRESH:
        rows = Pair.select(Pair.a, Pair.b, Pair.together, Pair.apart).order_by(Pair.a, Pair.b)
        known.at, known.groups = now, find(list(rows.tuples()))
    return known.groups
