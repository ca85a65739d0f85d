"""Accounts: who takes part, who may begin to, and which key is whose.

Both protocols come here. A password is known only as BOINC's proof of it, the MD5 of password and
e-mail address that every BOINC client sends [WIRE 5], and of that proof only a slow hash is kept.
"""

import hashlib
import hmac
import ipaddress
import re
import threading
from dataclasses import dataclass

import minigrid
from minigrid import ClientError, User, prepared, project, setting

NOT_FOUND, NOT_UNIQUE, BAD_NAME, BAD_ADDRESS, BAD_PASSWORD, CREATION_DISABLED = (
    -136, -137, -188, -205, -206, -208)  # BOINC's error numbers [WIRE 5]
ERROR = -1  # what BOINC has no number for; its clients then show the sentence
TEXT_MAX = 200  # characters of a name, an address, a password, an invitation code
NAME_MAX = 60  # characters of a name that are kept
TRIES_FREE = 10  # wrong passwords for one account before the next one must wait
WAIT_SECONDS, WAIT_SECONDS_MAX = 60, 3600  # the first wait, doubled by each more; the longest
FORGET_SECONDS = 86400  # without a wrong password until all is forgiven
ACCOUNTS_WATCHED = 10_000  # bound on what is remembered of wrong passwords
JOINS_SECONDS = 3600  # for so long new accounts of one address are counted together
ADDRESSES_WATCHED = 10_000  # bound on what is remembered of new accounts


@dataclass(frozen=True)
class AccountSettings:
    """The [accounts] section of setup.cfg."""

    creation: str = setting("open", "who may join: open, invitation (who has a code), or closed")
    invitation_codes: str = setting("", "the codes, with blanks between; long ones are not guessed")
    min_passwd_length: int = setting(6, "shortest password, in characters")
    joins_per_hour: int = setting(100, "new accounts, and wrong codes, from one address; 0: any")


def routes(app, clock):
    """Read the settings; the protocols have the routes. Raises ClientError."""
    global settings, tries, joins
    settings = check_settings(minigrid.read_settings("setup.cfg", AccountSettings, "accounts"))
    tries, joins = Tries(), Joins()


def check_settings(given):
    """Return settings that somebody can join by, or that say that nobody can. Raises ClientError.

    A word that is none must not open, by mistake, what was meant to be closed.
    """
    if given.creation not in ("open", "invitation", "closed"):
        raise ClientError(f"setup.cfg: setting 'creation' of [accounts] must be open, invitation "
                          f"or closed; found '{given.creation[:50]}'")
    if given.creation == "invitation" and not given.invitation_codes.split():
        raise ClientError("setup.cfg: [accounts] has creation = invitation, but no "
                          "invitation_codes: nobody could join")
    return given


def account_creation():
    """Say who may join: "open", "invitation" or "closed"."""
    return settings.creation


def min_passwd_length():
    """Return how many characters a new password must have."""
    return settings.min_passwd_length


# ---- New and old accounts ------------------------------------------------------


def register(now, nickname="", email_addr="", password="", invitation="", caller=""):
    """Make a user by nickname alone, or an account with address and password; return the user.

    An account that exists is returned if the password is right, whoever may join. `caller` is the
    network address of who asks, "" for this process itself. Raises ClientError. Call it outside of
    the writer: the hash of a password is slow.
    """
    if not all(is_text(value) for value in (nickname, email_addr, password, invitation)):
        raise ClientError(f"nickname, email_addr, password and invitation must be texts of at "
                          f"most {TEXT_MAX} characters")
    name = tidy(nickname) or "anonymous"
    if not email_addr:
        check_invitation(now, invitation, caller)
        return project.write(lambda: User.create(
            create_time=now, name=name, authenticator=new_key()))
    address = check_address(email_addr.strip())
    if len(password) < settings.min_passwd_length:
        raise ClientError(f"the password must have at least {settings.min_passwd_length} "
                          f"characters")
    proof = hashlib.md5((password + address).encode()).hexdigest()
    return create_account(now, address, proof, name, invitation, caller)


def create_account(now, email_addr, passwd_hash, name="", invitation="", caller=""):
    """Make an account as a BOINC client asks for it, or find the one with this password [WIRE 5].

    `passwd_hash` is hex MD5 of password and lower-case address. Raises ClientError, with BOINC's
    `error_num`: -188, -205, -1 for a proof that is none, -137 for another password, -208 and -1 for
    who may not join. Call it outside of the writer.
    """
    if not is_text(name):
        raise ClientError(f"the name must be a text of at most {TEXT_MAX} characters",
                          error_num=BAD_NAME)
    address, proof = check_address(email_addr), check_proof(passwd_hash)
    user = User.get_or_none(email_addr=address)
    if user is None:
        check_invitation(now, invitation, caller)
        # A client leaves out a name with < > & [WIRE 5]; the reference would turn it away.
        name = tidy(name) or tidy(address.split("@")[0])
        kept = hash_password(proof, f"{project.rng.getrandbits(64):016x}")
        user = project.write(lambda: User.get_or_none(email_addr=address) or User.create(
            create_time=now, name=name, email_addr=address, authenticator=new_key(),
            passwd_hash=kept))
        if user.passwd_hash == kept:
            return user  # Else somebody has made it while this was hashing.
    if not is_right(user, proof, now):
        raise ClientError("there is an account with this address, and the password is wrong", 403,
                          error_num=NOT_UNIQUE)
    return user


def find_account(now, email_addr, passwd_hash):
    """Return the user with this address and password [WIRE 5]; outside of the writer.

    Raises ClientError with `error_num` -136 for an unknown address, -206 for a wrong password.
    """
    user = look_up(email_addr)
    if user is None:
        raise ClientError("there is no account with this e-mail address", 404, error_num=NOT_FOUND)
    try:
        proof = check_proof(passwd_hash)
    except ClientError as error:
        raise ClientError(str(error), error_num=BAD_PASSWORD) from None
    if not is_right(user, proof, now):
        raise ClientError("the password is wrong", 403, error_num=BAD_PASSWORD)
    return user


def has_account(email_addr):
    """Say whether there is an account with this address: BOINC lets anybody ask [WIRE 5]."""
    return look_up(email_addr) is not None


def look_up(email_addr):
    """Return the user with an address, or None."""
    return User.get_or_none(email_addr=lower(email_addr)) if is_text(email_addr) else None


# ---- What is given -------------------------------------------------------------


def is_text(value):
    """Say whether a value is a text that the store can hold, of a bearable length."""
    return isinstance(value, str) and len(value) <= TEXT_MAX and "\0" not in value \
        and not any("\ud800" <= c <= "\udfff" for c in value)


def tidy(name):
    """Make one line of a name, without what only confuses a screen."""
    return " ".join("".join(c if c.isprintable() else " " for c in name).split())[:NAME_MAX]


def lower(address):
    """Lower the letters that BOINC clients lower before they hash: ASCII, no others."""
    return re.sub("[A-Z]+", lambda match: match.group().lower(), address)


def check_address(email_addr):
    """Return an e-mail address as it is kept. Raises ClientError [WIRE 5: -205]."""
    if not is_text(email_addr) or not re.fullmatch(r"[^@\s]{1,100}@[^@\s]{1,100}", email_addr):
        raise ClientError("that is not an e-mail address", error_num=BAD_ADDRESS)
    return lower(email_addr)


def check_proof(passwd_hash):
    """Return BOINC's proof of a password as it is hashed. Raises ClientError."""
    if not is_text(passwd_hash) or not re.fullmatch("[0-9a-fA-F]{32}", passwd_hash):
        raise ClientError("passwd_hash must be 32 hexadecimal digits", error_num=ERROR)
    return passwd_hash.lower()


def check_invitation(now, invitation, caller):
    """Hold that a new user may join now, with this invitation code, from this network address.

    Raises ClientError (403, 429).
    """
    if settings.creation == "closed":
        raise ClientError("this project takes no new volunteers at present", 403,
                          error_num=CREATION_DISABLED)
    if settings.creation == "invitation" and not invitation:
        # No BOINC client can send one: its user must go to the page for it.
        raise ClientError("this project is open to those who have an invitation code: create your "
                          "account on its page /join", 403, error_num=CREATION_DISABLED)
    joins.begin(caller, now)  # Before the code is looked at: wrong ones shall count.
    if settings.creation == "open":
        return
    given = invitation.strip().encode() if is_text(invitation) else b""
    # All are compared, and in constant time: the time taken says nothing about them.
    if not any([hmac.compare_digest(code.encode(), given)
                for code in settings.invitation_codes.split()]):
        raise ClientError("that is no invitation code of this project", 403, error_num=ERROR)


# ---- How many may join ---------------------------------------------------------


class Joins:
    """New accounts, and wrong invitation codes, of each network address, in memory.

    A class behind one address must be able to join within a minute; a script that fills the store,
    or guesses codes, must not go on for long.
    """

    def __init__(self):
        self.lock, self.begun = threading.Lock(), {}  # address -> (how many, since when)

    def begin(self, caller, now):
        """Count one more from a caller's address. Raises ClientError (429) if it is too many."""
        address = counted_as(caller)
        if not address or not settings.joins_per_hour:
            return
        with self.lock:
            n, since = self.begun.pop(address, (0, now))  # Put in again at the end: the newest.
            since = min(since, now)  # A clock that was set back locks nobody out.
            n, since = (n, since) if now < since + JOINS_SECONDS else (0, now)
            self.begun[address] = (n + 1, since)
            if len(self.begun) > ADDRESSES_WATCHED:
                del self.begun[next(iter(self.begun))]
        if n >= settings.joins_per_hour:
            wait = since + JOINS_SECONDS - now
            raise ClientError(f"too many have joined from your network within an hour: try again "
                              f"in {wait} seconds", 429, error_num=ERROR, retry_after=wait)


def counted_as(caller):
    """Return what a network address counts as: "" for this machine itself, which is not counted.

    An IPv6 address counts as its network of 64 bits, of which everybody has a whole one. Behind a
    proxy this machine's own address may be that of all the world: then it counts like any other.
    """
    try:
        address = ipaddress.ip_address(caller.partition("%")[0])
    except ValueError:  # None at all: a call within this process, or a socket without addresses.
        return ""
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback and not project.settings.proxy:
        return ""
    return str(ipaddress.ip_network((address, 64 if address.version == 6 else 32), strict=False))


# ---- Passwords -----------------------------------------------------------------


class Tries:
    """Wrong passwords of each account, in memory: they make the next try wait, longer and longer.

    For that time its owner cannot log in either, which costs little: computers that have joined use
    the account key. Who it is that guesses is not looked at: guessers have many addresses.
    """

    def __init__(self):
        self.lock, self.wrong = threading.Lock(), {}  # user id -> (how many, when the last)

    def begin(self, userid, now):
        """Count a try as wrong until it has proved right: those side by side count, too.

        Raises ClientError (429) with the seconds to wait.
        """
        with self.lock:
            n, last = self.wrong.pop(userid, (0, 0))  # Put in again at the end: the newest.
            last = min(last, now)  # A clock that was set back locks nobody out.
            n = n if now < last + FORGET_SECONDS else 0
            wait = last + wait_after(n) - now
            self.wrong[userid] = (n, last) if wait > 0 else (n + 1, now)
            if len(self.wrong) > ACCOUNTS_WATCHED:
                del self.wrong[next(iter(self.wrong))]
        if wait > 0:
            raise ClientError(f"too many wrong passwords for this account: try again in {wait} "
                              f"seconds", 429, error_num=ERROR, retry_after=wait)

    def right(self, userid):
        """Forget the tries of somebody who knew the password."""
        with self.lock:
            self.wrong.pop(userid, None)


def wait_after(n):
    """Return the seconds to wait after so many wrong passwords."""
    return 0 if n < TRIES_FREE else min(WAIT_SECONDS << min(n - TRIES_FREE, 20), WAIT_SECONDS_MAX)


def is_right(user, proof, now):
    """Say whether a proof is that of a user's password. Slow; raises ClientError after too many.

    The account key in place of the password is right, too, as with BOINC's server.
    """
    key_proof = hashlib.md5((user.authenticator + user.email_addr).encode()).hexdigest()
    if hmac.compare_digest(key_proof, proof):
        return True
    tries.begin(user.id, now)
    if not hmac.compare_digest(hash_password(proof, user.passwd_hash[:16]), user.passwd_hash):
        return False
    tries.right(user.id)
    return True


def hash_password(proof, salt):
    """Hash slowly what proves a password, so that a stolen store does not give it away."""
    return salt + hashlib.scrypt(proof.encode(), salt=salt.encode(), n=4096, r=8, p=1).hex()


# ---- Keys ----------------------------------------------------------------------


def new_key():
    """Draw an account key."""
    return f"{project.rng.getrandbits(128):032x}"


def weak_key(user):
    """Return the key that lets computers work for a user and ends with the password [WIRE 5].

    BOINC's form of it, so that it can stand wherever an account key does.
    """
    secret = hashlib.md5((user.authenticator + user.passwd_hash).encode()).hexdigest()
    return f"{user.id}_{secret}"


def user_of_key(key):
    """Return the user of an account key or a weak key, or None."""
    if not is_text(key):
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,17})_[0-9a-f]{32}", key)
    if not match:
        return by_authenticator.first(key)
    user = User.get_or_none(id=int(match.group(1)))
    return user if user and hmac.compare_digest(weak_key(user), key) else None


@prepared
def by_authenticator(key):
    """Find a user by account key."""
    return User.select().where(User.authenticator == key)


settings, tries, joins = AccountSettings(), Tries(), Joins()
