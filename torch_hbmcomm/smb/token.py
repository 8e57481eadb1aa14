"""Finds the token of a box. The token is never in a command line, because every user can list
command lines.

The order is: the argument, HBMCOMM_TOKEN, the file HBMCOMM_TOKEN_FILE, and
~/.config/hbmcomm/token. The argument "" means no token; an empty variable counts as unset.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path
from typing import NamedTuple

_BYTES = 32  # of randomness


class Token(NamedTuple):
    """The secret that clients of a box must prove; an empty text is no token."""

    text: str
    source: str
    """The source of the token, as text."""


_NONE = Token("", "none was found")


def default_file() -> Path:
    """Return ~/.config/hbmcomm/token. Raises RuntimeError when the user has no home directory."""
    return Path.home() / ".config" / "hbmcomm" / "token"


def find(token: str | None) -> Token:
    """Find a client's token. Raises FileNotFoundError if HBMCOMM_TOKEN_FILE names no file, and
    ValueError if a token file is empty."""
    given = _given(token)
    if given is not None:
        return given
    file = _named_file()
    if file is not None:
        return read(file)
    try:
        file = default_file()
    except RuntimeError:  # this user has no home directory
        return _NONE
    # Without permission to look into the directory, exists() is false, and there is no token.
    return read(file) if os.path.exists(file) else _NONE


def find_or_create(token: str | None) -> Token:
    """Find a server's token. If there is none, write a random one to HBMCOMM_TOKEN_FILE, or to the
    default file. Raises OSError if that fails."""
    given = _given(token)
    if given is not None:
        return given
    file = _named_file()
    if file is not None:
        return read_or_create(file)
    try:
        return read_or_create(default_file())
    except (OSError, RuntimeError) as error:
        raise OSError(
            f"no token was given, and none can be kept in the home directory ({error}): set "
            "HBMCOMM_TOKEN, or HBMCOMM_TOKEN_FILE to the name of a file that can be made"
        ) from error


def read_or_create(file: Path) -> Token:
    """Read the token in the file; if the file is missing, create it with a random token."""
    if file.exists():
        return read(file)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Write a temporary file, and link it to the name `file` once it is complete. If another process
    # was faster, use its file.
    descriptor, temporary = tempfile.mkstemp(dir=file.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(secrets.token_hex(_BYTES) + "\n")
        os.link(temporary, file)
    except FileExistsError:
        return read(file)
    finally:
        os.unlink(temporary)
    return Token(read(file).text, f"{file} (made now)")


def read(file: Path) -> Token:
    """Read the token in the file. Raises ValueError if it is empty or has several lines."""
    text = file.read_text().strip()
    if not text:
        raise ValueError(f"the token file {file} is empty; remove it, and the box makes a new one")
    if (lines := len(text.splitlines())) > 1:
        raise ValueError(f"the token file {file} has {lines} lines; a token is one line")
    return Token(text, str(file))


def _given(token: str | None) -> Token | None:
    if token is not None:
        return Token(token, "given by the program")
    if text := os.environ.get("HBMCOMM_TOKEN", ""):
        return Token(text, "HBMCOMM_TOKEN")
    return None


def _named_file() -> Path | None:
    name = os.environ.get("HBMCOMM_TOKEN_FILE", "")
    return Path(name) if name else None
