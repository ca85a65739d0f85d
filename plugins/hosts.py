"""Which host is asking: a new one, a known one, one that came back, or a copy of another [D-09].

A host is a client's directory, not a computer: two clients on one computer are two hosts.
"""

from minigrid import DETACH, HOST_FIELDS, Host, fire, held_by, hosts_of, prepared

FIELDS = {*HOST_FIELDS, "client_version", "host_cpid"}


def identify(request, user, now):
    """Find or make the host of a request; return it and the rows its detaching changed [C14]."""
    # A host whose count of requests went back is a copied directory, and gets a host of its own
    # [D-09]. An id that is not this user's says nothing: as if it came without one.
    host, detached = hosts_of.first([request.hostid]) if request.hostid else None, []
    known = host is not None and host.user_id == user.id
    if not known or request.rpc_seqno < host.rpc_seqno:
        host = None
    if not known and request.host_cpid:
        host = with_cpid.first(user.id, request.host_cpid)
        if host and not request.other_results and not request.allow_multiple_clients:
            detached = detach(host, {report.name for report in request.reports}, now)
    if host is None:
        host = Host.create(user=user, create_time=now, host_cpid=request.host_cpid)
    host.rpc_seqno = request.rpc_seqno if host.id == request.hostid else 0
    told = {**request.host, "client_version": request.client_version,
            "host_cpid": request.host_cpid or host.host_cpid}  # It changes with a new host id.
    for name, value in told.items():
        if name in FIELDS and getattr(host, name) != value:
            setattr(host, name, value)
    return host, detached


@prepared
def with_cpid(user_id, cpid):
    """Find the last host of a user with an id that its client has made."""
    return Host.select().where(Host.user == user_id, Host.host_cpid == cpid).order_by(
        Host.id.desc()).limit(1)


def detach(host, reported, now):
    """End what a host held and does not report, coming back as new; return the rows [S4-37]."""
    changed = []
    for r in sorted(held_by(host.id), key=lambda r: r.id):
        if r.name in reported:
            continue
        fire(DETACH, r)
        r.received_time = now  # As BOINC does; a report that comes later is a duplicate [C11].
        r.workunit.transition_time = now
        changed += [r, r.workunit]
    return changed
