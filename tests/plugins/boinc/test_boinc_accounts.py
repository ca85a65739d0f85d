"""The account requests of BOINC clients, the page /join, and the real boinccmd at work."""

import hashlib
import os
import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from urllib.parse import quote, urlencode

import make
import pytest
import world
from hypothesis import given
from hypothesis import strategies as st
from web import ANYTHING, NOW, serving, state

import minigrid as m

ADDRESS, PASSWORD = "t@example.org", "open sesame"


@pytest.fixture
def web(folder):
    with serving(folder) as web:
        yield web


@pytest.fixture
def may_join(web, monkeypatch):
    """Set who may join."""
    accounts = sys.modules["minigrid_plugin_accounts"]

    def change(creation, **more):
        monkeypatch.setattr(accounts, "settings", accounts.AccountSettings(
            creation=creation, invitation_codes="otter", **more))
    return change


@pytest.fixture
def key(web):
    """The key of an account that exists."""
    asked = {"email_addr": ADDRESS, "password": PASSWORD, "nickname": "tess"}
    return web.answer("/register", asked)["authenticator"]


def proof_of(password, address=ADDRESS):
    return hashlib.md5((password + address).encode()).hexdigest()


def rpc(web, name, form=None, method="GET", **more):
    """Make an account request; return its answer as an element."""
    query = urlencode({**(form or {}), **more})
    got = web("GET", f"/{name}?{query}") if method == "GET" else \
        web("POST", f"/{name}", query.encode())
    assert got.status == 200, got.body
    assert got.headers["Content-Type"] == "text/xml"
    return ET.fromstring(got.body)


def key_in(answer):
    assert answer.tag == "account_out", ET.tostring(answer)
    return answer.findtext("authenticator")


def number_in(answer):
    """Return the error number; what is said of it is one plain sentence."""
    assert answer.tag == "error", ET.tostring(answer)
    assert 5 < len(answer.findtext("error_msg")) < 256
    return int(answer.findtext("error_num"))


# ---- 1. lookup_account.php and create_account.php [WIRE 5] -----------------------


def test_the_request_of_the_real_client(web):
    """As captured: every character that is no letter or digit is escaped."""
    query = "email_addr=new%40example%2Eorg&passwd_hash=ad5b9f640b250c19ccd027987877d76f"
    got = web("GET", f"/create_account.php?{query}&user_name=New%20User")
    assert got.status == 200 and got.headers["Cache-Control"] == "no-store"
    user = m.User.get()
    assert got.body.decode().split("\n", 1)[1] == \
        f"<account_out>\n<authenticator>{user.authenticator}</authenticator>\n</account_out>\n"
    assert (user.name, user.email_addr, user.create_time) == ("New User", "new@example.org", NOW)
    again = web("GET", f"/lookup_account.php?{query}")
    assert again.body == got.body
    assert web("GET", f"/create_account.php?{query}&user_name=x").body == got.body
    assert m.User.select().count() == 1


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_lookup(web, key, method):
    def ask(**form):
        return rpc(web, "lookup_account.php", form, method)

    before = state()
    proof = proof_of(PASSWORD)
    assert key_in(ask(email_addr=ADDRESS, passwd_hash=proof)) == key
    assert key_in(ask(email_addr="T@Example.ORG", passwd_hash=proof.upper())) == key
    assert number_in(ask(email_addr=ADDRESS, passwd_hash=proof_of("another"))) == -206
    assert number_in(ask(email_addr=ADDRESS, passwd_hash="x")) == -206
    assert number_in(ask(email_addr="b@example.org", passwd_hash=proof)) == -136
    assert number_in(ask()) == number_in(ask(email_addr="", passwd_hash="")) == -136
    assert state() == before


def test_is_there_such_an_account(web, key):
    """[WIRE 5] Without a passwd_hash that is the question."""
    for form in ({"email_addr": ADDRESS}, {"email_addr": ADDRESS, "passwd_hash": ""}):
        answer = rpc(web, "lookup_account.php", form)
        assert answer.tag == "account_out" and answer.find("success") is not None
        assert key not in ET.tostring(answer).decode()
    assert number_in(rpc(web, "lookup_account.php", email_addr="b@example.org")) == -136


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_create(web, key, method):
    def ask(address="new@example.org", password="secret", **form):
        return rpc(web, "create_account.php", {
            "email_addr": address, "passwd_hash": proof_of(password, address), **form}, method)

    before = state()
    assert key_in(ask(ADDRESS, PASSWORD, user_name="x")) == key
    assert number_in(ask(ADDRESS, "another", user_name="x")) == -137
    assert number_in(ask("no address")) == -205
    assert number_in(ask(user_name="a\0b")) == -188
    assert number_in(ask(passwd_hash="0" * 31)) == number_in(ask(passwd_hash="")) == -1
    assert number_in(rpc(web, "create_account.php", {}, method)) == -205
    assert state() == before
    new = key_in(ask(user_name="J\u00fcrgen \U0001f98a", team_name="a", consent_flag=1, source="b"))
    assert m.User.get(authenticator=new).name == "J\u00fcrgen \U0001f98a"


NAMES = {"": "new", "%3Cb%3E%26": "<b>&", "J%C3%BCrgen": "J\u00fcrgen", "a+b": "a b", "%2B": "+"}


@pytest.mark.parametrize("name", NAMES)
def test_names_as_they_come(web, name):
    proof = proof_of("x", "new@example.org")
    got = web("GET", f"/create_account.php?email_addr=new%40example%2Eorg&passwd_hash={proof}"
                     f"&user_name={name}")
    assert key_in(ET.fromstring(got.body)) == m.User.get().authenticator
    assert m.User.get().name == NAMES[name]


def test_who_may_not_join(web, key, may_join):
    def ask(**form):
        return rpc(web, "create_account.php", email_addr="n@example.org",
                   passwd_hash=proof_of("x"), user_name="n", **form)

    may_join("closed")
    before = state()
    assert number_in(ask()) == number_in(ask(invite_code="otter")) == -208
    may_join("invitation")
    assert number_in(ask()) == -208, "no BOINC client can send a code"
    assert "/join" in ask().findtext("error_msg")
    assert number_in(ask(invite_code="ott")) == -1
    assert state() == before
    for creation in ("closed", "invitation"):
        may_join(creation)
        assert key_in(rpc(web, "create_account.php", email_addr=ADDRESS,
                          passwd_hash=proof_of(PASSWORD))) == key
        assert key_in(rpc(web, "lookup_account.php", email_addr=ADDRESS,
                          passwd_hash=proof_of(PASSWORD))) == key
    assert key_in(ask(invite_code="otter"))


def test_too_many_wrong_passwords(web, key):
    form = {"email_addr": ADDRESS, "passwd_hash": proof_of("another")}
    for _ in range(10):
        assert number_in(rpc(web, "lookup_account.php", form)) == -206
    told = rpc(web, "lookup_account.php", email_addr=ADDRESS, passwd_hash=proof_of(PASSWORD))
    assert number_in(told) == -1 and "60 seconds" in told.findtext("error_msg")
    web.now += 60
    assert key_in(rpc(web, "lookup_account.php", email_addr=ADDRESS,
                      passwd_hash=proof_of(PASSWORD))) == key


def test_a_store_that_takes_no_change(web):
    """-183 is "project down": the client keeps trying."""
    m.db.execute_sql("PRAGMA query_only = ON")
    try:
        told = rpc(web, "create_account.php", email_addr="n@b", passwd_hash="0" * 32)
        page = post(web, email_addr="n@b", password="secret")
    finally:
        m.db.execute_sql("PRAGMA query_only = OFF")
    assert number_in(told) == -183 and "SQL" not in told.findtext("error_msg")
    assert page.status == 503 and "try again" in page.body.decode()


BAD = {
    "not UTF-8": "email_addr=%ff%40b", "many fields": "&".join("a=1" for _ in range(33)),
    "long": "email_addr=" + "x" * 8192, "a surrogate": "email_addr=%ed%a0%80",
}


@pytest.mark.parametrize("case", BAD)
def test_forms_that_are_none(web, case):
    before = state()
    for name in ("lookup_account.php", "create_account.php"):
        for got in (web("GET", f"/{name}?{BAD[case]}"),
                    web("POST", f"/{name}", BAD[case].encode())):
            assert got.status == 200 and number_in(ET.fromstring(got.body)) == -1
    assert state() == before


def test_a_body_that_says_it_is_long_is_not_read(web):
    class Endless:
        def read(self, *size):
            raise AssertionError("read")

    got = web("POST", "/create_account.php", Endless(), content_length=str(10**9))
    assert number_in(ET.fromstring(got.body)) == -1


FORMS = st.dictionaries(
    st.sampled_from(["email_addr", "passwd_hash", "user_name", "invite_code"]),
    st.text() | st.just(ADDRESS) | st.just("0" * 32))
QUERIES = FORMS.map(lambda form: urlencode(form, errors="surrogatepass").encode()) | st.binary(
    max_size=60) | st.text(max_size=60).map(quote).map(str.encode)


@ANYTHING
@given(query=QUERIES, name=st.sampled_from(
    ["lookup_account.php", "create_account.php", "get_project_config.php"]),
    method=st.sampled_from(["GET", "POST"]))
def test_any_form_gets_an_answer(web, key, query, name, method):
    text = query.decode("latin-1")
    got = web("GET", f"/{name}?{text}") if method == "GET" or name.startswith("get") else \
        web("POST", f"/{name}", query)
    assert got.status == 200
    assert ET.fromstring(got.body).tag in ("account_out", "error", "project_config")


# ---- 2. get_project_config.php ---------------------------------------------------


def test_the_project_as_boinc_manager_sees_it(web, may_join, monkeypatch):
    monkeypatch.setattr(m.project, "settings", m.dataclasses.replace(
        m.project.settings, name="Caf\u00e9\x07<&> " + "x" * 300))
    found = rpc(web, "get_project_config.php")
    assert found.tag == "project_config"
    name = found.findtext("name")
    assert name.startswith("Caf\u00e9 <&> x") and len(name.encode()) == 255
    base = "http://grid.example:8080/"
    assert found.findtext("master_url") == found.findtext("web_rpc_url_base") == base
    assert found.findtext("min_passwd_length") == "6"
    assert found.findtext("web_stopped") == found.findtext("sched_stopped") == "0"
    assert found.find("error_num") is None
    may_join("open", min_passwd_length=9)
    assert rpc(web, "get_project_config.php").findtext("min_passwd_length") == "9"


FLAGS = {
    "open": set(), "closed": {"account_creation_disabled"},
    "invitation": {"client_account_creation_disabled", "invite_code_required"},
}


@pytest.mark.parametrize("creation", FLAGS)
def test_boinc_manager_offers_no_account_it_cannot_make(web, may_join, creation):
    may_join(creation)
    tags = {element.tag for element in rpc(web, "get_project_config.php")}
    assert tags & set.union(*FLAGS.values()) == FLAGS[creation]


def test_platforms_and_pauses_come_from_the_plugins_that_know(web, monkeypatch):
    """Whatever plugins are loaded: those that say something are asked."""
    class Plugin:
        boinc_platforms = staticmethod(lambda: ["x86_64-pc-linux-gnu", "windows_x86_64"])
        stopped = staticmethod(lambda now: "back at noon" if now == NOW else "")

    monkeypatch.setattr(m, "plugins", [*m.plugins, Plugin])
    found = rpc(web, "get_project_config.php")
    assert [e.text for e in found.findall("platforms/platform/platform_name")] == [
        "x86_64-pc-linux-gnu", "windows_x86_64"]
    assert found.findtext("sched_stopped") == "1"
    web.now += 1
    assert rpc(web, "get_project_config.php").findtext("sched_stopped") == "0"


def test_an_address_that_is_none_is_not_told(web):
    got = web("GET", "/get_project_config.php", host="evil\"><x>")
    found = ET.fromstring(got.body)
    assert found.find("master_url") is None and b"evil" not in got.body


# ---- 3. The page -----------------------------------------------------------------


class Fields(HTMLParser):
    """The input fields of a page: name -> attributes."""

    def __init__(self, body):
        super().__init__()
        self.found = {}
        self.feed(body)

    def handle_starttag(self, tag, attributes):
        if tag == "input":
            self.found[dict(attributes)["name"]] = dict(attributes)
        assert tag != "script"


def post(web, **form):
    got = web("POST", "/join", urlencode(form).encode())
    assert got.headers["Content-Type"].startswith("text/html")
    assert "form-action 'self'" in got.headers["Content-Security-Policy"]
    assert "default-src 'none'" in got.headers["Content-Security-Policy"]
    assert got.headers["Cache-Control"] == "no-store"
    return got


def fields(got):
    return Fields(got.body.decode()).found


def test_an_account_from_the_browser(web):
    form = web("GET", "/join")
    assert form.status == 200 and set(fields(form)) == {"email_addr", "password", "user_name"}
    got = post(web, email_addr=" N\u00e4me@Example.org", password=PASSWORD, user_name="<b>Nina</b>")
    user = m.User.get()
    assert got.status == 200 and user.email_addr == "n\u00e4me@example.org"
    page = got.body.decode()
    assert user.authenticator in page and "http://grid.example:8080/" in page
    assert "&lt;b&gt;Nina&lt;/b&gt;" in page and "<b>Nina" not in page
    assert PASSWORD not in page and user.passwd_hash not in page
    again = post(web, email_addr="N\u00e4me@example.org", password=PASSWORD)
    assert user.authenticator in again.body.decode() and m.User.select().count() == 1
    key = rpc(web, "lookup_account.php", email_addr="n\u00e4me@example.org",
              passwd_hash=proof_of(PASSWORD, "n\u00e4me@example.org"))
    assert key_in(key) == user.authenticator


WRONG = {  # what is typed: status and what is said
    "no address": (dict(password=PASSWORD), 400, "e-mail address is needed"),
    "none": (dict(email_addr="anna", password=PASSWORD), 400, "not an e-mail address"),
    "short": (dict(email_addr="a@b", password="12345"), 400, "at least 6"),
    "taken": (dict(email_addr=ADDRESS, password="another"), 403, "password is wrong"),
    "no code": (dict(email_addr="a@b", password=PASSWORD, invite_code=""), 403, "invitation code"),
    "wrong code": (dict(email_addr="a@b", password=PASSWORD, invite_code='"><i>'), 403, "no invit"),
    "long": (dict(email_addr="a@b", password="x" * 201), 400, "at most 200"),
}


@pytest.mark.parametrize("case", WRONG)
def test_nothing_that_was_typed_is_lost_but_the_password(web, key, may_join, case):
    typed, status, sentence = WRONG[case]
    typed = {"user_name": '<i>"Nina"', **typed}
    if "code" in case:
        may_join("invitation")
    before = state()
    got = post(web, **typed)
    page = got.body.decode()
    assert got.status == status and sentence in page and 'role="alert"' in page
    assert key not in page and "<i>" not in page and typed["password"] not in page
    for name, attributes in fields(got).items():
        assert attributes.get("value", "") == (typed.get(name, "") if name != "password" else "")
    assert state() == before


def test_an_invitation_can_be_a_link(web, may_join):
    may_join("invitation")
    form = web("GET", "/join?invite_code=otter")
    assert fields(form)["invite_code"]["value"] == "otter"
    assert b"invitation code" in form.body
    assert post(web, email_addr="a@b", password=PASSWORD, invite_code="otter").status == 200
    assert m.User.select().count() == 1


def test_a_closed_project_says_so_and_shows_old_accounts(web, key, may_join):
    may_join("closed")
    assert b"no new volunteers" in web("GET", "/join").body
    assert post(web, email_addr="a@b", password=PASSWORD).status == 403
    assert key in post(web, email_addr=ADDRESS, password=PASSWORD).body.decode()


LINKS = {"account_finish.php?auth=0123": "/", "get_passwd.php": "/join",
         "create_account_form.php": "/join", "signup.php": "/join"}


@pytest.mark.parametrize("link", LINKS)
def test_pages_that_boinc_manager_opens(web, link):
    """The account key in the address is not passed on."""
    got = web("GET", f"/{link}")
    assert got.status == 303
    assert re.sub("^http://[^/]*", "", got.headers["Location"]) == LINKS[link]


@pytest.mark.parametrize("listens", ["0.0.0.0", "127.0.0.1"])
@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1:8080"])
def test_the_address_to_paste_has_a_dot(web, host, listens):
    """[WIRE 4] BOINC refuses http://localhost/."""
    make.settings(host=listens)
    body = urlencode({"email_addr": "a@b", "password": PASSWORD}).encode()
    page = web("POST", "/join", body, host=host).body.decode()
    (url,) = re.findall(r"<code>(http://[^<]+/)</code>", page)
    assert re.fullmatch(r"http://\d+\.\d+\.\d+\.\d+:\d+/", url)


@ANYTHING
@given(body=QUERIES)
def test_any_form_gets_a_page(web, body):
    got = web("POST", "/join", body)
    assert got.status < 500 and got.body.startswith(b"<!DOCTYPE html>")


# ---- 4. The real client ----------------------------------------------------------

POST = ("import sys, urllib.request as u\n"
        "sys.stdout.buffer.write(u.urlopen(sys.argv[1], sys.argv[2].encode(), timeout=20).read())")
SAID = {  # what boinccmd prints for BOINC's numbers
    -136: "no database rows found", -137: "database lookup not unique", -205: "bad email address",
    -206: "bad password", -208: "account creation disabled",
}


def outcome(client, *arguments):
    """Give the client an account command; return the key it got, or what it said instead."""
    status, text = client.command(*arguments)
    assert status == 0 and "status: Success" in text, text
    return re.search(r"(?:account key: |poll status: (?!operation in))(.*)", text)[1].strip()


@pytest.mark.boinc
@pytest.mark.skipif(bool(world.missing()) and not os.environ.get("CI"),
                    reason=f"needs {', '.join(world.missing())}")
def test_the_real_client_makes_and_finds_accounts(tmp_path):
    """[issue 3, item 1] All of it, then a closed project, then one that asks for invitations."""
    (tmp_path / "count.py").write_text("""
def workunit(i):
    return None


def compute(input):
    return input
""")
    url = world.URL

    def create(address, password, name="Anna B."):
        return outcome(client, "--create_account", url, address, password, name)

    def look_up(address, password):
        return outcome(client, "--lookup_account", url, address, password)

    with world.World(tmp_path) as closed:
        closed.serve(tmp_path / "count.py")
        client = world.Client(closed, "anna", key="none")
        closed.clients.append(client)
        client.start()
        key = create("Anna@Example.org", PASSWORD)
        assert closed.rows("SELECT name, email_addr, authenticator FROM user") == [
            ("Anna B.", "anna@example.org", key)]
        assert look_up("anna@example.org", PASSWORD) == key
        assert create("anna@example.org", PASSWORD, "x") == key
        assert SAID[-206] in look_up("anna@example.org", "wrong")
        assert SAID[-136] in look_up("nobody@example.org", PASSWORD)
        assert SAID[-137] in create("anna@example.org", "wrong")
        assert SAID[-205] in create("anna", PASSWORD)
        assert create("b@example.org", PASSWORD, "<b>") in closed.rows(
            "SELECT authenticator FROM user WHERE name = 'b'")
        closed.stop()

        closed.serve(settings="[accounts]\ncreation = closed\n")
        assert SAID[-208] in create("c@example.org", PASSWORD)
        assert look_up("anna@example.org", PASSWORD) == key
        closed.stop()

        closed.serve(settings="[accounts]\ncreation = invitation\ninvitation_codes = otter\n")
        assert SAID[-208] in create("c@example.org", PASSWORD)
        form = urlencode({"email_addr": "C@example.org", "password": PASSWORD,
                          "invite_code": "otter"})
        status, page = closed.run([sys.executable, "-c", POST, f"{url}join", form])
        assert status == 0, page
        assert look_up("c@example.org", PASSWORD) in page
        client.key = key
        client.attach()
        world.until(lambda: key in closed.rows(
            "SELECT u.authenticator FROM user u JOIN host h ON h.user_id = u.id"), 60,
            "the client joins with the key", closed.tell)
