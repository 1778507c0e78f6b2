"""Tokens and rights: the file, who is let in for what, and what others are told."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from kvpool import ConfigError, IndexUnavailable
from kvpool.errors import AccessDenied
from kvpool.index.client.channel import check_token
from kvpool.index.serve.auth import EVERYTHING, TokenAuth, WrongToken, make_token
from tests.support.credentials import write_tokens

GOOD = "a" * 64


def auth_of(path: Path, text: str) -> TokenAuth:
    path.write_text(text)
    return TokenAuth(str(path))


def test_without_a_file_everybody_may_do_everything() -> None:
    opened = TokenAuth()
    assert opened.is_open
    assert opened.authenticate(None) == opened.authenticate("Bearer x") == EVERYTHING
    opened.reload()
    EVERYTHING.check("admin", "*")


def test_a_token_brings_its_rights_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    tokens = write_tokens(path, router=(["read"], ["a", "b"]), root=(["admin", "publish"], ["*"]))
    closed = TokenAuth(str(path))
    assert not closed.is_open
    router, root = (closed.authenticate(f"Bearer {tokens[name]}") for name in ("router", "root"))
    router.check("read", "a")
    router.check("read", "b")
    router.check("read", None)
    root.check("admin", "*")
    root.check("publish", "any")
    assert (router.sees("a"), router.sees("c"), root.sees("c")) == (True, False, True)
    for right, tenant, says in [
        ("read", "c", "this token is not for tenant 'c'"),
        ("read", "*", "this token is not for all tenants"),
        ("publish", "a", 'this token does not have the right "publish"'),
        ("admin", "a", 'this token does not have the right "admin"'),
    ]:
        with pytest.raises(AccessDenied, match=says) as caught:
            router.check(right, tenant)  # type: ignore[arg-type]
        assert not isinstance(caught.value, WrongToken)
    with pytest.raises(AccessDenied, match="does not have the right"):
        root.check("read", "a")
    assert issubclass(AccessDenied, IndexUnavailable), "a router goes on without an index that refuses it"


def test_other_words_are_no_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    token = write_tokens(path, w=(["read"], ["*"]))["w"]
    closed = TokenAuth(str(path))
    assert closed.authenticate(f"bearer {token}")
    for wrong in (
        None, "", "Bearer", "Bearer ", token, f"Basic {token}", f"Bearer {token} ", f"Bearer {token[:-1]}",
        f"Bearer  {token}", f"Bearer {token}{token}", "Bearer " + "x" * 100_000, "Bearer \ud800", "Bearer \0",
        f"Bearer {path.read_text().split(chr(34))[1]}",  # what the file holds opens nothing
    ):  # fmt: skip
        with pytest.raises(WrongToken) as caught:
            closed.authenticate(wrong)
        assert token not in str(caught.value)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has 0 tokens: write 1 to 1024"),
        ("[a", "not TOML"),
        ("\xff", "token"),
        ("a = 3", "write a table for each token"),
        (f'["a b"]\nsha256 = "{GOOD}"', "a name of letters, digits, _ and -"),
        ("[a]", "token a: sha256 is missing"),
        (f'[a]\nsha256 = "{GOOD}"\nrights = ["read"]', "token a: tenants is missing"),
        (f'[a]\nsha265 = "{GOOD}"', 'token a: unknown field "sha265"; did you mean "sha256"?'),
        ('[a]\nsha256 = "the-token-itself"\nrights = ["read"]\ntenants = "*"', "not the token"),
        (f'[a]\nsha256 = "{GOOD.upper()}"\nrights = ["read"]\ntenants = "*"', "64 hex digits"),
        (f'[a]\nsha256 = "{GOOD}"\nrights = "read"\ntenants = "*"', "rights is a list of read, publish, admin"),
        (f'[a]\nsha256 = "{GOOD}"\nrights = []\ntenants = "*"', "rights is a list of"),
        (f'[a]\nsha256 = "{GOOD}"\nrights = ["raed"]\ntenants = "*"', 'unknown right "raed"; did you mean "read"?'),
        (f'[a]\nsha256 = "{GOOD}"\nrights = ["read"]\ntenants = []', "tenants is a list of 1 to 1024"),
        (f'[a]\nsha256 = "{GOOD}"\nrights = ["read"]\ntenants = [3]', "tenants is a list of 1 to 1024"),
        (f'[a]\nsha256 = "{GOOD}"\nrights = ["read"]\ntenants = ["*"]', "is not allowed"),
        (f'[a]\nsha256 = "{GOOD}"\nrights = ["read"]\ntenants = ["a/b"]', "is not allowed"),
        ("".join(f'[{n}]\nsha256 = "{GOOD}"\nrights = ["read"]\ntenants = "*"\n' for n in "ab"),
         "two names have the same token"),
    ],
)  # fmt: skip
def test_a_file_that_makes_no_sense_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "tokens.toml"
    with pytest.raises(
        ConfigError, match=says.replace("[", r"\[").replace("*", r"\*").replace("?", r"\?")
    ) as caught:
        auth_of(path, text)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "the-token-itself" not in str(caught.value)


def test_no_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--tokens={tmp_path}/tokens: No such file"):
        TokenAuth(f"{tmp_path}/tokens")
    with pytest.raises(ConfigError, match="Is a directory"):
        TokenAuth(str(tmp_path))


def test_a_changed_file_counts_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvpool.index")
    path = tmp_path / "tokens.toml"
    old = write_tokens(path, a=(["read"], ["*"]))["a"]
    closed = TokenAuth(str(path))
    closed.reload()
    assert caplog.messages == []
    new = write_tokens(path, a=(["read"], ["*"]))["a"]
    closed.reload()
    assert closed.authenticate(f"Bearer {new}")
    with pytest.raises(WrongToken):
        closed.authenticate(f"Bearer {old}")
    path.write_text("[a]")
    for _ in range(3):
        closed.reload()
        assert closed.authenticate(f"Bearer {new}")
    path.unlink()
    for _ in range(3):
        closed.reload()
        assert closed.authenticate(f"Bearer {new}")
    last = write_tokens(path, a=(["read"], ["*"]))["a"]
    closed.reload()
    assert closed.authenticate(f"Bearer {last}")
    assert [message.split(":")[0] for message in caplog.messages] == [
        "the tokens were read again", "the tokens stay as they were", "the tokens stay as they were",
        "the tokens were read again",
    ]  # fmt: skip
    assert not any(token in caplog.text for token in (old, new, last))


def test_tokens_that_are_made_are_new_and_fit_the_file(tmp_path: Path) -> None:
    made = [make_token("a-1", ["read", "publish"], ["t", "u_v"]) for _ in range(50)]
    assert len({token for token, _ in made}) == 50
    for token, entry in made:
        assert check_token(token) == token
        assert len(token) >= 32
        assert token not in entry
        found = auth_of(tmp_path / "tokens", entry).authenticate(f"Bearer {token}")
        assert (found.rights, found.tenants) == ({"read", "publish"}, {"t", "u_v"})
    assert 'tenants = "*"' in make_token("a", ["read"], ["*"])[1]
    for wrong in (("a b", ["read"], ["t"]), ("a", ["x"], ["t"]), ("a", ["read"], ["/"]), ("a", [], ["t"])):
        with pytest.raises(ConfigError):
            make_token(*wrong)


@pytest.mark.parametrize("token", ["", "a b", "a\n", "ä", "x" * 1025, 3, b"x"])
def test_what_can_be_no_token_is_refused_and_not_shown(token: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        check_token(token)
    assert str(token) not in str(caught.value) or not token
    assert os.linesep not in str(caught.value)


@pytest.mark.parametrize(("removed", "right"), [("ask", "read"), ("administer", "admin")])
def test_a_removed_right_is_refused_with_its_successor(removed: str, right: str) -> None:
    with pytest.raises(ConfigError, match=f'write the right "{right}" for "{removed}"'):
        make_token("w", [removed], ["*"])
