"""Accounts for BOINC clients [WIRE 5], and the page on which a person makes one.

What an account is, and who may have one, is decided in plugins/accounts.py; here it is read from
and written for BOINC. A project's errors come with status 200: the number in the text counts.
"""

import html
import urllib.parse
from pathlib import Path

import bottle

from minigrid import ClientError, StoreError, base_url, plugged, project

FORM_BYTES_MAX = 8192  # of a form or a query; a name may be 200 letters of 9 bytes each
FIELDS_MAX = 32
TEXT_BYTES_MAX = 255  # a longer one would be ignored silently [WIRE 3.2]
ERROR, PROJECT_DOWN = -1, -183
HERE = Path(__file__).resolve().parent
ALLOW = {"img-src": "data:", "form-action": "'self'"}  # of the page


def routes(app, clock):
    """Add the account requests of BOINC clients, and the pages their users are sent to."""

    @app.get("/get_project_config.php")
    def _():
        return xml(project_config(clock()))

    @app.route("/lookup_account.php", ["GET", "POST"])
    def _():
        return answer(lookup, clock())

    @app.route("/create_account.php", ["GET", "POST"])
    def _():
        return answer(create, clock())

    @app.get("/join")
    def _():
        return page(clock(), given=read_form())

    @app.post("/join")
    def _():
        return join(clock())

    @app.get("/account_finish.php")  # BOINC Manager opens it once the account is made.
    def _():
        return moved("/")  # The account key shall not stay in the address line.

    for name in ("create_account_form.php", "signup.php", "get_passwd.php"):
        app.get(f"/{name}", callback=lambda: moved("/join"))


def moved(place):
    """Send a browser to another page here, by whatever name it has called this server."""
    return bottle.HTTPResponse(status=303, Location=place)


# ---- Requests of clients -------------------------------------------------------


def answer(work, now):
    """Answer an account request: what `work(form, now)` returns, or its error [WIRE 5]."""
    bottle.response.set_header("Cache-Control", "no-store")
    try:
        return xml(work(read_form(), now))
    except ClientError as error:
        project.counts["refused requests"] += 1
        number, text = error.details.get("error_num", ERROR), str(error)
    except StoreError:
        number, text = PROJECT_DOWN, "the project has a problem on its side; try again later"
    return xml(f"<error>\n<error_num>{number}</error_num>\n"
               f"<error_msg>{escape(text)}</error_msg>\n</error>\n")


def lookup(form, now):
    """Return the account key for an address and a password, or whether there is such an account.

    Raises ClientError (-136, -206).
    """
    address, proof = form.get("email_addr", ""), form.get("passwd_hash", "")
    if not proof and plugged("has_account")[-1](address):
        return "<account_out>\n<success/>\n</account_out>\n"
    return account_out(plugged("find_account")[-1](now, address, proof))


def create(form, now):
    """Make an account, or find the one with this password; return its key. Raises ClientError.

    `invite_code` is what BOINC's server calls it; its clients cannot send it, programs can. Teams
    there are none, and nothing that needs a consent: `team_name` and `consent_flag` are not read.
    """
    return account_out(plugged("create_account")[-1](
        now, form.get("email_addr", ""), form.get("passwd_hash", ""), form.get("user_name", ""),
        form.get("invite_code", ""), bottle.request.environ.get("REMOTE_ADDR", "")))


def account_out(user):
    """Write a user's key."""
    return f"<account_out>\n<authenticator>{escape(user.authenticator)}</authenticator>\n" \
           f"</account_out>\n"


def project_config(now):
    """Write what BOINC Manager wants to know before it asks its user for an account [WIRE 5].

    The flags make it offer no new account where it could make none; its user is told to go to the
    project's page where an invitation code is wanted.
    """
    creation = plugged("account_creation")[-1]()
    shortest = plugged("min_passwd_length")[-1]()
    base = escape(base_url() and base_url() + "/")
    addresses = f"<master_url>{base}</master_url>\n" \
                f"<web_rpc_url_base>{base}</web_rpc_url_base>\n" if base else ""
    flags = {"open": "", "closed": "<account_creation_disabled/>\n", "invitation":
             "<client_account_creation_disabled/>\n<invite_code_required/>\n"}[creation]
    stopped = any([text(now) for text in plugged("stopped")])
    platforms = "".join(f"<platform><platform_name>{escape(name)}</platform_name></platform>\n"
                        for names in plugged("boinc_platforms")[-1:] for name in names())
    return (f"<project_config>\n<name>{escape(project.settings.name)}</name>\n{addresses}"
            f"{flags}<min_passwd_length>{shortest}</min_passwd_length>\n"
            f"<web_stopped>0</web_stopped>\n<sched_stopped>{stopped:d}</sched_stopped>\n"
            f"<platforms>\n{platforms}</platforms>\n</project_config>\n")


def read_form():
    """Return the fields of a request: of the address, or of the form that is posted.

    A password does not belong into addresses, which are logged on the way; BOINC clients put its
    hash there all the same. Raises ClientError.
    """
    request = bottle.request
    if request.method == "POST":
        if request.content_length > FORM_BYTES_MAX:
            raise ClientError(f"too long: at most {FORM_BYTES_MAX} bytes are read here", 413)
        raw = request.body.read(FORM_BYTES_MAX)
    else:
        raw = request.query_string.encode("latin-1", "replace")
    try:
        if len(raw) > FORM_BYTES_MAX:
            raise ValueError
        return dict(urllib.parse.parse_qsl(
            raw.decode(), keep_blank_values=True, errors="strict", max_num_fields=FIELDS_MAX))
    except ValueError:  # Too long, too many, or not UTF-8.
        raise ClientError(f"the request is no form of at most {FIELDS_MAX} texts and "
                          f"{FORM_BYTES_MAX} bytes") from None


def escape(text):
    """Write a text so that a client reads it: not longer than its room [WIRE 3.2], escaped."""
    text = "".join(c if c.isprintable() else " " for c in text)
    return html.escape(text.encode()[:TEXT_BYTES_MAX].decode(errors="ignore"), quote=False)


def xml(text):
    """Return an answer of a few elements, as bytes."""
    bottle.response.content_type = "text/xml"
    return b'<?xml version="1.0" encoding="UTF-8"?>\n' + text.encode()


# ---- The page ------------------------------------------------------------------


def join(now):
    """Make an account for a person in front of a browser, or show again the one there is.

    A form on somebody else's page may post here, too; all it can do is make an account, which is
    nobody's, and there is no session it could use. Hence no token against it.
    """
    given = {}
    try:
        given = read_form()
        if not given.get("email_addr", "").strip():
            raise ClientError("an e-mail address is needed: with it and the password BOINC finds "
                              "the account again")
        user = plugged("register")[-1](
            now, given.get("user_name", ""), given["email_addr"], given.get("password", ""),
            given.get("invite_code", ""), bottle.request.environ.get("REMOTE_ADDR", ""))
    except ClientError as error:
        project.counts["refused requests"] += 1
        return page(now, given, error.status, str(error))
    except StoreError:
        return page(now, given, 503, "the project has a problem on its side; try again later")
    return page(now, given, user=user)


def page(now, given, status=200, error="", user=None):
    """Answer with the page: the form with what was typed but the password, or the account."""
    typed = {name: given.get(name, "") for name in ("email_addr", "user_name", "invite_code")}
    name, title = project.settings.name, "Your account" if user else "Create an account"
    body = plugged("fill_in")[-1](
        HERE / "join.html", title=title, name=name, creation=plugged("account_creation")[-1](),
        error=error, shortest=plugged("min_passwd_length")[-1](), typed=typed, user=user,
        url=public_url(now), private=bottle.request.urlparts.scheme == "https")
    return plugged("html_page")[-1](f"{title} - {name}", body, status, cache="no-store",
                                    allow=ALLOW, style=HERE / "join.css")


def public_url(now):
    """Return the address to paste into BOINC, which refuses one without a dot [WIRE 4]."""
    for invitation in plugged("invitation"):
        return invitation(now)["url"].replace("//localhost", "//127.0.0.1") + "/"
    return base_url().replace("//localhost", "//127.0.0.1") + "/"
