"""Accounts: who may join, whose password is right, whose key it is; over /register and beneath."""

import dataclasses
import hashlib
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from web import ANYTHING, NOW, serving, sound, state

import minigrid as m

ADDRESS, PASSWORD = "anna@example.org", "open sesame"
ACCOUNT = {"email_addr": ADDRESS, "password": PASSWORD}


@pytest.fixture
def web(folder):
    with serving(folder) as web:
        yield web


@pytest.fixture
def accounts(web):
    """The plugin, of a project that serves."""
    return sys.modules["minigrid_plugin_accounts"]


@pytest.fixture
def may_join(accounts, monkeypatch):
    """Set who may join."""
    def change(creation, invitation_codes="blue-fox-42 otter"):
        monkeypatch.setattr(accounts, "settings", accounts.AccountSettings(
            creation=creation, invitation_codes=invitation_codes))
    return change


def refused(got, status, before, error_num=None):
    """Hold that an answer is one plain sentence with BOINC's number, and that nothing changed."""
    assert got.status == status, got.body
    assert set(got.json) <= {"error", "error_num", "retry_after"}
    assert error_num is None or got.json["error_num"] == error_num
    sentence = got.json["error"]
    assert 5 < len(sentence) < 500 and "Traceback" not in sentence and "\n" not in sentence
    assert state() == before
    return sentence


def proof_of(password, address=ADDRESS):
    """What a BOINC client sends."""
    return hashlib.md5((password + address).encode()).hexdigest()


def error_of(function, *arguments):
    """Call what must be refused; return the ClientError."""
    before = state()
    with pytest.raises(m.ClientError) as caught:
        function(*arguments)
    assert state() == before
    return caught.value


# ---- 1. Register ---------------------------------------------------------------


def test_a_nickname_is_enough(web):
    """[D-01]"""
    got = web.answer("/register", {"nickname": "  blue \t fox "})
    assert set(got) == {"authenticator", "userid", "name"}
    assert got["name"] == "blue fox" and len(got["authenticator"]) == 32
    again = web.answer("/register", {"nickname": "blue fox"})
    assert again["userid"] != got["userid"] and again["authenticator"] != got["authenticator"]
    assert web.answer("/register", {})["name"] == "anonymous"
    assert web.answer("/register", {"nickname": "x" * 200})["name"] == "x" * 60
    assert web.answer("/register", {"nickname": "a\x1b[2Jb\u202ec"})["name"] == "a [2Jb c"


def test_an_account_is_made_once_and_kept_by_its_password(web):
    asked = {"email_addr": "Anna@Example.org", "password": "secret", "nickname": "anna"}
    first = web.answer("/register", asked)
    again = web.answer("/register", {**asked, "nickname": "", "email_addr": "anna@example.org "})
    assert again == first
    before = state()
    wrong = web.post("/register", {**asked, "password": "Secret"})
    assert "wrong" in refused(wrong, 403, before, -137)
    refused(web.post("/register", {**asked, "password": ""}), 400, before)


def test_no_password_is_kept(web):
    web.answer("/register", {"email_addr": "a@example.org", "password": PASSWORD})
    web.answer("/register", {"email_addr": "b@example.org", "password": PASSWORD})
    one, two = (user.passwd_hash for user in m.User.select())
    assert one[16:] != two[16:] and "sesame" not in one + two
    assert proof_of(PASSWORD, "a@example.org") not in one


ODD = [1, True, None, 1.5, [], {}, ["anna"], "a\0b", "\ud800", "x" * 201]
REGISTER = {
    **{f"{key}: {value!r:.20}": {"email_addr": "a@b", "password": "secret", key: value}
       for key in ("nickname", "email_addr", "password", "invitation") for value in ODD},
    "no @": {"email_addr": "anna", "password": "secret"},
    "two @": {"email_addr": "a@b@c", "password": "secret"},
    "a blank in it": {"email_addr": "a b@c", "password": "secret"},
    "a short password": {"email_addr": "a@b", "password": "12345"},
    "a key nobody knows": {"nickname": "a", "admin": True},
    "the name of an argument": {"nickname": "a", "now": 1},
}


def test_register_refuses(web):
    before = state()
    for case in REGISTER:
        refused(web.post("/register", REGISTER[case]), 400, before)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(
        st.characters() | st.sampled_from("\0\ud800\udfff@.")) | st.just("a@b"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner,
                                                                max_size=4), max_leaves=8)
FORMS = st.dictionaries(st.sampled_from(["nickname", "email_addr", "password", "invitation"]),
                        VALUES)


@ANYTHING
@given(value=FORMS | VALUES)
def test_any_json_to_register(web, value):
    sound(web.post("/register", value))


# ---- 2. Who may join -----------------------------------------------------------

JOINING = {  # (creation, what is asked besides): BOINC's error number, 0 for an account
    ("open", ""): 0, ("open", "nonsense"): 0,
    ("closed", ""): -208, ("closed", "otter"): -208,
    ("invitation", ""): -208, ("invitation", "otter"): 0, ("invitation", "blue-fox-42"): 0,
    ("invitation", " otter\n"): 0, ("invitation", "Otter"): -1, ("invitation", "ott"): -1,
    ("invitation", "blue-fox-42 otter"): -1, ("invitation", " "): -1, ("invitation", "\u00f6"): -1,
}


@pytest.mark.parametrize("case", JOINING, ids=lambda case: f"{case[0]}: {case[1]!a}")
@pytest.mark.parametrize("asked", [{"nickname": "x"}, ACCOUNT], ids=["nickname", "account"])
def test_who_may_join(web, may_join, case, asked):
    creation, invitation = case
    may_join(creation)
    before = state()
    got = web.post("/register", {**asked, "invitation": invitation})
    if JOINING[case] == 0:
        assert got.status == 200 and m.User.select().count() == 1
    else:
        refused(got, 403, before, JOINING[case])


def test_a_code_with_letters_of_all_kinds(web, may_join):
    may_join("invitation", "grün-\U0001f98a")
    assert web.post("/register", {"invitation": "grün-\U0001f98a"}).status == 200
    assert web.post("/register", {"invitation": "grün"}).status == 403


@pytest.mark.parametrize("creation", ["closed", "invitation"])
def test_who_has_an_account_keeps_it(web, accounts, may_join, creation):
    """A client that has lost its key comes back, whoever may join."""
    first = web.answer("/register", ACCOUNT)
    may_join(creation)
    assert web.answer("/register", ACCOUNT) == first
    wrong = web.post("/register", {**ACCOUNT, "password": "another"})
    refused(wrong, 403, state(), -137)
    assert accounts.find_account(NOW, ADDRESS, proof_of(PASSWORD)).id == first["userid"]
    assert accounts.create_account(NOW, ADDRESS, proof_of(PASSWORD)).id == first["userid"]


SETTINGS = {  # the section: what is said, None if it is taken
    "": None, "creation = closed": None, "min_passwd_length = 12": None,
    "creation = invitation\ninvitation_codes = a b": None,
    "creation = shut": "open, invitation or closed; found 'shut'",
    "creation = Closed": "found 'Closed'", "creation =": "found ''",
    "creation = invitation": "nobody could join",
    "creation = invitation\ninvitation_codes =": "nobody could join",
    "min_passwd_length = none": "whole number", "colour = red": "unknown setting 'colour'",
}


@pytest.mark.parametrize("text", SETTINGS)
def test_settings(accounts, tmp_path, monkeypatch, text):
    (tmp_path / "setup.cfg").write_text(f"[accounts]\n{text}\n")
    monkeypatch.chdir(tmp_path)
    if SETTINGS[text] is None:
        accounts.routes(None, None)
        assert accounts.account_creation() in (text + "open")
        assert accounts.min_passwd_length() == (12 if "12" in text else 6)
    else:
        with pytest.raises(m.ClientError, match=SETTINGS[text]):
            accounts.routes(None, None)
    monkeypatch.undo()
    accounts.routes(None, None)


def test_a_longer_password_can_be_asked_for(web, accounts, monkeypatch):
    monkeypatch.setattr(accounts, "settings", accounts.AccountSettings(min_passwd_length=12))
    before = state()
    assert "12 characters" in refused(web.post("/register", ACCOUNT), 400, before)
    assert web.post("/register", {**ACCOUNT, "password": "x" * 12}).status == 200


# ---- 3. As BOINC clients do it -------------------------------------------------


def test_one_account_for_both_protocols(web, accounts):
    """[WIRE 5] passwd_hash is the MD5 of password and lower-case address."""
    mine = web.answer("/register", {"email_addr": "Anna@Example.ORG", "password": PASSWORD})
    found = accounts.find_account(NOW, ADDRESS, proof_of(PASSWORD))
    assert found.authenticator == mine["authenticator"]
    assert accounts.find_account(NOW, "ANNA@example.org", proof_of(PASSWORD).upper()) == found
    hers = accounts.create_account(NOW, "berta@example.org", proof_of("a secret",
                                                                      "berta@example.org"), "B.")
    again = web.answer("/register", {"email_addr": "Berta@Example.org", "password": "a secret"})
    assert again == {"authenticator": hers.authenticator, "userid": hers.id, "name": "B."}


def test_letters_that_clients_do_not_lower(web, accounts):
    """They lower ASCII before they hash; another letter is hashed as it is typed."""
    address = "\u00c9ric@Example.org"
    mine = web.answer("/register", {"email_addr": address, "password": PASSWORD})
    typed = "\u00c9ric@example.org"
    found = accounts.find_account(NOW, typed, proof_of(PASSWORD, typed))
    assert found.authenticator == mine["authenticator"]


def test_the_account_key_is_a_password(web, accounts):
    """As with BOINC's server: it helps who has forgotten theirs."""
    key = web.answer("/register", ACCOUNT)["authenticator"]
    assert accounts.find_account(NOW, ADDRESS, proof_of(key)).authenticator == key
    other = web.answer("/register", {"nickname": "x"})["authenticator"]
    assert error_of(accounts.find_account, NOW, ADDRESS, proof_of(other)).details[
        "error_num"] == -206


GIVEN = {  # address, proof, name: error numbers of find_account() and of create_account()
    "wrong password": ((ADDRESS, proof_of("another"), "a"), -206, -137),
    "no such account": (("b@example.org", proof_of("x"), "b"), -136, None),
    "no proof": (("anna@example.org", "", "a"), -206, -1),
    "a short proof": ((ADDRESS, proof_of(PASSWORD)[1:], "a"), -206, -1),
    "no hexadecimal": ((ADDRESS, "g" * 32, "a"), -206, -1),
    "other digits": ((ADDRESS, "\u0661" * 32, "a"), -206, -1),
    "a line end": ((ADDRESS, proof_of(PASSWORD) + "\n", "a"), -206, -1),
    "no address": (("", proof_of("x"), "a"), -136, -205),
    "not one": (("anna", proof_of("x"), "a"), -136, -205),
    "a blank": ((ADDRESS + " ", proof_of(PASSWORD), "a"), -136, -205),
    "no text": (("a\0@b", proof_of("x"), "a"), -136, -205),
    "a long one": (("a" * 101 + "@b", proof_of("x"), "a"), -136, -205),
    "a name that is no text": (("c@d", proof_of("x"), "\0"), -136, -188),
    "a long name": (("c@d", proof_of("x"), "x" * 201), -136, -188),
}


@pytest.mark.parametrize("case", GIVEN)
def test_errors_have_boincs_numbers(web, accounts, case):
    web.answer("/register", ACCOUNT)
    (address, proof, name), find, create = GIVEN[case]
    assert error_of(accounts.find_account, NOW, address, proof).details["error_num"] == find
    if create is not None:
        error = error_of(accounts.create_account, NOW, address, proof, name)
        assert error.details["error_num"] == create


NAMES = {"New User": "New User", "": "carl.m", "  \t": "carl.m", "<b>&": "<b>&", "x" * 99: "x" * 60}


@pytest.mark.parametrize("name", NAMES)
def test_names(accounts, name):
    """[WIRE 5] A client sends none where one has < > & in it."""
    user = accounts.create_account(NOW, "Carl.M@example.org", proof_of("x"), name)
    assert user.name == NAMES[name] and user.create_time == NOW


def test_twice_at_once(accounts, monkeypatch):
    """Both hash before either writes: one makes the account, the other must know its password."""
    hash_password = accounts.hash_password
    for password, works in (("one", True), ("two", False)):
        address = f"{password}@example.org"

        def overtaken(proof, salt):
            monkeypatch.setattr(accounts, "hash_password", hash_password)
            accounts.create_account(NOW, address, proof_of("one"), "first")
            return hash_password(proof, salt)

        monkeypatch.setattr(accounts, "hash_password", overtaken)
        if works:
            assert accounts.create_account(NOW, address, proof_of(password)).name == "first"
        else:
            with pytest.raises(m.ClientError) as caught:
                accounts.create_account(NOW, address, proof_of(password))
            assert caught.value.details["error_num"] == -137
        assert m.User.select().where(m.User.email_addr == address).count() == 1


# ---- 4. Guessing ---------------------------------------------------------------


def test_the_writer_never_waits_for_a_password(web, accounts, monkeypatch):
    """A flood of wrong passwords cannot stall the project."""
    hash_password, hashed = accounts.hash_password, []

    def watched(proof, salt):
        assert m.project.write.working is None
        hashed.append(proof)
        return hash_password(proof, salt)

    monkeypatch.setattr(accounts, "hash_password", watched)
    web.answer("/register", ACCOUNT)
    web.answer("/register", ACCOUNT)
    assert web.post("/register", {**ACCOUNT, "password": "another"}).status == 403
    accounts.find_account(NOW, ADDRESS, proof_of(PASSWORD))
    assert len(hashed) == 4


def guess(accounts, now, password="another", address=ADDRESS):
    """Guess a password: 0 if it is right, the seconds to wait if it is too early, else None."""
    try:
        accounts.find_account(now, address, proof_of(password, address))
        return 0
    except m.ClientError as error:
        assert error.details["error_num"] in (-206, -1)
        assert (error.status == 429) == ("retry_after" in error.details)
        assert error.status != 429 or f"{error.details['retry_after']} seconds" in str(error)
        return error.details.get("retry_after")


def test_guessing_takes_longer_and_longer(web, accounts):
    web.answer("/register", ACCOUNT)
    web.answer("/register", {**ACCOUNT, "email_addr": "b@example.org"})
    assert [guess(accounts, NOW) for _ in range(10)] == [None] * 10
    now = NOW
    for wait in (60, 120, 240, 480, 960, 1920, 3600, 3600):
        assert guess(accounts, now) == wait
        assert guess(accounts, now + wait - 1) == 1
        assert guess(accounts, now + wait - 1, PASSWORD) == 1, "the right one must wait, too"
        now += wait
        assert guess(accounts, now) is None
    assert guess(accounts, now, PASSWORD, "b@example.org") == 0, "the others need not wait"
    assert guess(accounts, now + 3600, PASSWORD) == 0
    assert [guess(accounts, now + 3600) for _ in range(11)] == [None] * 10 + [60], "forgiven"


def test_a_day_later_all_is_forgotten(web, accounts):
    web.answer("/register", ACCOUNT)
    for later, forgotten in ((86399, False), (86400, True)):
        accounts.tries = accounts.Tries()
        for i in range(11):
            assert guess(accounts, NOW + 60 * i) is None
        last = NOW + 60 * 10
        found = [guess(accounts, last + later) for _ in range(2)]
        assert found == ([None, None] if forgotten else [None, 240])


def test_all_ways_to_try_a_password_count(web, accounts):
    web.answer("/register", ACCOUNT)
    for i in range(5):
        assert guess(accounts, NOW) is None
        with pytest.raises(m.ClientError):
            accounts.create_account(NOW, ADDRESS, proof_of("another"))
    got = web.post("/register", ACCOUNT)
    refused(got, 429, state(), -1)
    assert got.json["retry_after"] == 60


def test_tries_side_by_side_count(accounts):
    """Each counts when it begins: eight at once are not one."""
    tries = accounts.Tries()
    for _ in range(10):
        tries.begin(1, NOW)
    with pytest.raises(m.ClientError):
        tries.begin(1, NOW)
    tries.right(1)
    tries.begin(1, NOW)


def test_a_clock_set_back_locks_nobody_out(accounts):
    tries = accounts.Tries()
    for _ in range(10):
        tries.begin(1, NOW)
    with pytest.raises(m.ClientError, match="in 60 seconds"):
        tries.begin(1, NOW - 10**6)


def test_little_is_remembered(accounts, monkeypatch):
    monkeypatch.setattr(accounts, "ACCOUNTS_WATCHED", 3)
    tries = accounts.Tries()
    for userid in (1, 2, 3, 1, 4, 5):
        tries.begin(userid, NOW)
    assert list(tries.wrong) == [1, 4, 5], "those tried last"
    assert tries.wrong[1] == (2, NOW)


# ---- 5. How many may join ------------------------------------------------------


@pytest.fixture
def at(web, monkeypatch):
    """Ask from a network address: at(address, method, path, body)."""
    app = web.app

    def ask(address, method, path, body=b"", **headers):
        monkeypatch.setattr(web, "app", lambda environ, start: app(
            {**environ, "REMOTE_ADDR": address}, start))
        return web(method, path, body, **headers)
    return ask


def join(at, address="203.0.113.7", body=b"{}", **headers):
    return at(address, "POST", "/register", body, **headers)


def test_a_class_behind_one_address_joins_within_a_minute(web, at):
    for n in range(30):
        web.now = NOW + 2 * n
        assert join(at).status == 200


def test_the_next_after_a_hundred_must_wait_until_the_hour_is_over(web, at):
    assert [join(at).status for _ in range(100)] == [200] * 100
    web.now = NOW + 600
    before = state()
    got = join(at)
    sentence = refused(got, 429, before, -1)
    assert "3000 seconds" in sentence and "your network" in sentence
    assert got.json["retry_after"] == 3000 and got.headers["Retry-After"] == "3000"
    assert join(at, "203.0.113.8").status == 200, "the others need not wait"
    web.now = NOW + 3599
    assert join(at).json["retry_after"] == 1
    web.now = NOW + 3600
    assert [join(at).status for _ in range(101)] == [200] * 100 + [429]


def test_who_has_an_account_is_not_counted(web, accounts, at, monkeypatch):
    monkeypatch.setattr(accounts, "settings", accounts.AccountSettings(joins_per_hour=1))
    account = json.dumps(ACCOUNT).encode()
    assert [join(at, body=account).status for _ in range(5)] == [200] * 5
    assert join(at).status == 429


def test_wrong_invitations_are_counted(web, may_join, accounts, at, monkeypatch):
    may_join("invitation")
    monkeypatch.setattr(accounts, "settings", dataclasses.replace(
        accounts.settings, joins_per_hour=3))
    assert [join(at).status for _ in range(9)] == [403] * 9, "without a code nothing is guessed"
    guesses = [json.dumps({"invitation": f"fox-{n}"}).encode() for n in range(5)]
    assert [join(at, body=guess).status for guess in guesses] == [403] * 3 + [429] * 2
    right = json.dumps({"invitation": "otter"}).encode()
    assert join(at, body=right).status == 429, "else the refusals would tell which is right"
    web.now += 3600
    assert join(at, body=right).status == 200


def test_a_closed_project_counts_nothing(web, may_join, accounts, at):
    may_join("closed")
    assert [join(at).status for _ in range(150)] == [403] * 150
    assert not accounts.joins.begun


def test_all_ways_to_make_an_account_are_counted(web, accounts, at, monkeypatch):
    monkeypatch.setattr(accounts, "settings", accounts.AccountSettings(joins_per_hour=3))
    assert join(at).status == 200
    made = at("203.0.113.7", "GET", f"/create_account.php?email_addr=a%40b&passwd_hash={'0' * 32}")
    assert b"<authenticator>" in made.body
    made = at("203.0.113.7", "POST", "/join", b"email_addr=c%40d&password=secret")
    assert made.status == 200
    assert join(at).status == 429
    late = at("203.0.113.7", "GET", f"/create_account.php?email_addr=e%40f&passwd_hash={'0' * 32}")
    assert b"<error_num>-1<" in late.body and b"try again in" in late.body
    late = at("203.0.113.7", "POST", "/join", b"email_addr=g%40h&password=secret")
    assert late.status == 429 and b"try again in" in late.body
    assert m.User.select().count() == 3


COUNTED = {  # who asks: as whom they are counted, without a proxy
    "203.0.113.7": "203.0.113.7/32", "::ffff:203.0.113.7": "203.0.113.7/32",
    "2001:db8:1:2:3:4:5:6": "2001:db8:1:2::/64", "2001:db8:1:2::9": "2001:db8:1:2::/64",
    "fe80::1%eth0": "fe80::/64", "192.168.1.5": "192.168.1.5/32",
    "127.0.0.1": "", "127.8.8.8": "", "::1": "", "::ffff:127.0.0.1": "", "": "", "a name": "",
}


@pytest.mark.parametrize("caller", COUNTED)
def test_as_whom_a_caller_is_counted(web, accounts, caller, monkeypatch):
    assert accounts.counted_as(caller) == COUNTED[caller]


def test_this_machine_itself_is_not_counted_unless_a_proxy_is_there(web, accounts, at, monkeypatch):
    monkeypatch.setattr(accounts, "settings", accounts.AccountSettings(joins_per_hour=1))
    assert [join(at, "127.0.0.1").status for _ in range(3)] == [200] * 3
    monkeypatch.setattr(m.project, "settings", dataclasses.replace(
        m.project.settings, proxy="127.0.0.1"))
    assert [join(at, "127.0.0.1").status for _ in range(2)] == [200, 429]
    assert [join(at, "::1").status for _ in range(2)] == [200, 429]


def test_what_a_caller_says_of_its_address_is_not_believed(web, accounts, at, monkeypatch):
    """The server believes a proxy that the settings name, before this sees the request."""
    monkeypatch.setattr(accounts, "settings", accounts.AccountSettings(joins_per_hour=1))
    assert join(at, X_Forwarded_For="198.51.100.1").status == 200
    assert join(at, X_Forwarded_For="198.51.100.2").status == 429
    assert join(at, body=b'{"caller": "198.51.100.3"}').status == 400


def test_the_bound_can_be_lifted(web, accounts, at, monkeypatch):
    monkeypatch.setattr(accounts, "settings", accounts.AccountSettings(joins_per_hour=0))
    assert {join(at).status for _ in range(150)} == {200}


def test_a_clock_set_back_keeps_nobody_out_for_longer(accounts):
    joins = accounts.Joins()
    for _ in range(100):
        joins.begin("203.0.113.7", NOW)
    with pytest.raises(m.ClientError, match="in 3600 seconds"):
        joins.begin("203.0.113.7", NOW - 10**6)


def test_little_is_remembered_of_joins(accounts, monkeypatch):
    monkeypatch.setattr(accounts, "ADDRESSES_WATCHED", 3)
    joins = accounts.Joins()
    for n in (1, 2, 3, 1, 4, 5):
        joins.begin(f"203.0.113.{n}", NOW)
    assert list(joins.begun) == [f"203.0.113.{n}/32" for n in (1, 4, 5)], "those seen last"
    assert joins.begun["203.0.113.1/32"] == (2, NOW)


# ---- 6. Keys -------------------------------------------------------------------


def test_an_account_key_and_a_weak_key_are_its_users(web, accounts):
    """[WIRE 5] The weak one ends with the password."""
    for asked in (ACCOUNT, {"nickname": "x"}):
        user = m.User.get(authenticator=web.answer("/register", asked)["authenticator"])
        weak = accounts.weak_key(user)
        assert accounts.user_of_key(user.authenticator) == accounts.user_of_key(weak) == user
        secret = hashlib.md5((user.authenticator + user.passwd_hash).encode()).hexdigest()
        assert weak == f"{user.id}_{secret}"
        m.User.update(passwd_hash="another").where(m.User.id == user.id).execute()
        assert accounts.user_of_key(weak) is None
        assert accounts.user_of_key(user.authenticator) == user


def test_keys_that_are_nobodys(web, accounts):
    users = [m.User.get(authenticator=web.answer("/register", {})["authenticator"])
             for _ in range(2)]
    key, weak = users[0].authenticator, accounts.weak_key(users[0])
    assert weak.startswith("1_")
    for wrong in ("", "0" * 32, key.upper() + "x", key[:-1], key + " ", " " + key, weak[:-1],
                  weak + "0", "0" + weak, "2" + weak[1:], "3" + weak[1:], weak.upper() + "\n", "1_",
                  "1_" + key, "9" * 18 + weak[1:], "9" * 400 + weak[1:], "\u0661" + weak[1:],
                  "-" + weak, key + "\0", "\ud800", "x" * 10**6, None, 1, ["a"], b"a"):
        assert accounts.user_of_key(wrong) is None, wrong


@ANYTHING
@given(key=st.text() | st.from_regex(r"\d{1,25}_[0-9a-f]{32}", fullmatch=True))
def test_any_text_is_no_key(accounts, key):
    assert accounts.user_of_key(key) is None
