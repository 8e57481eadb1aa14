"""The store of a group that torch_hbmcomm.reconfigure has formed: one of its members serves it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from harness import beyond_gloo
from harness.members import Members, assert_joined
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]

KIND = "again"


def store() -> Any:
    found: Store = distributed_c10d._get_default_store()
    return found


def raised(act: Callable[..., object], *arguments: object) -> str:
    try:
        act(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def use_keys(own: str) -> list[object]:
    keys = store()
    keys.set(own, "one")
    found: list[object] = [keys.get(own), keys.check([own]), keys.check([own, own + "absent"])]
    keys.append(own, " two")
    found += [keys.get(own), keys.multi_get([own, own])]
    keys.multi_set([own + "a", own + "b"], ["1", "2"])
    found += [
        keys.multi_get([own + "b", own + "a"]),
        keys.add(own + "n", 3),
        keys.add(own + "n", -5),
    ]
    found += [keys.compare_set(own + "c", "", "x"), keys.compare_set(own + "c", "", "y")]
    found += [keys.delete_key(own + "c"), keys.delete_key(own + "c"), keys.has_extended_api()]
    return found


def test_keys_have_values_on_every_member() -> None:
    with Members(KIND) as members:
        group = members.start("ab")
        assert_joined(group, 1)
        for member, own in zip(group, ("x", "y"), strict=True):
            assert member.call(use_keys, own) == [
                *(b"one", True, False, b"one two", [b"one two", b"one two"], [b"2", b"1"]),
                *(3, -2, b"x", b"x", True, False, True),
            ]


def wait_and_set() -> list[object]:
    """Wait for a key, while another thread uses the store and a clone of it, and then sets it."""
    keys = store()
    used = []

    def use() -> None:
        for number in range(20):
            clone = keys.clone()
            clone.set("number", str(number))
            used.append(keys.get("number"))
        keys.set("late", "value")

    thread = threading.Thread(target=use)
    thread.start()
    found: list[object] = [keys.get("late")]
    keys.wait(["late", "number"], timedelta(seconds=60))
    thread.join()
    return [*found, len(used)]


def test_a_wait_does_not_block_other_calls() -> None:
    with Members(KIND) as members:
        group = members.start("ab")
        assert_joined(group, 1)
        for member in group:
            assert member.call(wait_and_set) == [b"value", 20]
            member.call(remove_late)


def remove_late() -> None:
    store().delete_key("late")


def wrong_questions() -> list[str]:
    keys = store()
    keys.set("text", "many")
    errors = [
        raised(keys.add, "text", 1),
        raised(keys.wait, ["absent", "text"], timedelta(milliseconds=50)),
    ]
    keys.set_timeout(timedelta(milliseconds=50))
    errors.append(raised(keys.get, "absent"))
    keys.set_timeout(timedelta(0))  # no limit
    timer = threading.Timer(0.1, keys.set, ["absent", "value"])
    timer.start()
    errors.append(str(keys.get("absent")))
    timer.join()
    keys.delete_key("absent")
    keys.set_timeout(timedelta(seconds=60))
    return errors


def test_wrong_questions_raise() -> None:
    with Members(KIND) as members:
        group = members.start("ab")
        assert_joined(group, 1)
        for member in group:
            added, waited, got, late = member.call(wrong_questions)
            assert added.startswith("ValueError: the store of the handle of pid ")
            assert 'cannot add to "many"' in added
            for error in (waited, got):
                assert error.startswith("DistStoreError") and "absent" in error, error
            assert late == "b'value'"


def wait_for_absent() -> str:
    return raised(store().wait, ["absent"], timedelta(milliseconds=50))


def test_a_wait_names_its_keys_if_the_server_is_stopped() -> None:
    with Members(KIND) as members:
        group = members.start("ab")
        assert_joined(group, 1)
        os.kill(group[0].pid, signal.SIGSTOP)
        try:
            error = group[1].call(wait_for_absent)
        finally:
            os.kill(group[0].pid, signal.SIGCONT)
        assert error.startswith("DistStoreError: the store of the handle of pid "), error
        assert "it did not answer before the timeout, in a wait for these keys: " in error, error
        assert error.endswith("/absent"), error


def ask_until_it_fails() -> str:
    keys = store()
    deadline = time.monotonic() + 60
    while (error := raised(keys.set, "key", "value")) == "no error":
        assert time.monotonic() < deadline
    return error


def test_the_death_of_its_server_raises() -> None:
    with Members(KIND) as members:
        group = members.start("ab")
        assert_joined(group, 1)
        group[0].kill()
        error = group[1].call(ask_until_it_fails)
        assert error.startswith("DistNetworkError: the store of the handle of pid "), error
        assert f"pid {group[0].pid} on " in error
        assert "the connection was lost" in error
