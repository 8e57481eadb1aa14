"""The thread that runs tasks of two stages: it begins tasks in order, and ends them in order."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from functools import partial

import pytest

from torch_hbmcomm.pipeline import TaskPipeline


def test_queued_tasks_begin_before_an_earlier_one_ends() -> None:
    order: list[str] = []
    queued = threading.Event()

    def begin(number: int) -> int:
        order.append(f"begin {number}")
        return number

    def end(number: int) -> None:
        order.append(f"end {number}")

    with TaskPipeline("test") as pipeline:
        pipeline.submit(queued.wait, lambda _: end(0))
        futures = [pipeline.submit(partial(begin, number), end) for number in (1, 2)]
        queued.set()
        for future in futures:
            future.result()
        assert order == ["begin 1", "begin 2", "end 0", "end 1", "end 2"]
        assert pipeline.call(lambda: 7) == 7
    pipeline.close()


def test_the_first_error_is_every_later_tasks() -> None:
    def fail() -> None:
        raise ValueError("the first")

    with TaskPipeline("test") as pipeline:
        failed = pipeline.submit(fail, lambda _: None)
        later = pipeline.submit(lambda: None, lambda _: None)
        for future in (failed, later):
            with pytest.raises(ValueError, match="the first"):
                future.result()


def test_a_forgotten_pipeline_ends_its_thread() -> None:
    pipeline = TaskPipeline("forgotten")
    (thread,) = (one for one in threading.enumerate() if one.name == "forgotten")
    gone = weakref.ref(pipeline)
    pipeline.call(lambda: None)
    del pipeline
    gc.collect()
    assert gone() is None
    thread.join()


AT_EXIT = """
import threading
from torch_hbmcomm.pipeline import TaskPipeline
pipeline = TaskPipeline("test")
queued = threading.Event()
pipeline.submit(queued.wait, lambda _: None)
pipeline.submit(lambda: None, lambda _: print("ended"))
queued.set()
"""


def test_the_end_of_the_interpreter_ends_queued_tasks() -> None:
    run = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "ended\n", "")
