"""A thread that runs tasks of two halves. The first half begins something, and the second half
waits for its end."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch_hbmcomm.smb.closeable import Closeable, close_at_exit

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class _Task:
    begin: Callable[[], Any]
    end: Callable[[Any], Any]
    future: Future[Any] = field(default_factory=Future)
    begun: Any = None


class TaskPipeline(Closeable):
    """Begins tasks in order, and ends them in order, on one thread. All queued tasks begin before
    the thread waits for the end of an earlier one.

    After the first error every task that has not ended fails with that error.

    close() completes the queued tasks, and ends the thread. The end of the interpreter calls
    close(), too. If this object is garbage-collected, the thread ends by itself.

    Threads: any.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        # The thread must not hold this object. Otherwise this object would never be freed, and the
        # thread would never end.
        worker = _Worker(self._tasks)
        self._thread = threading.Thread(target=worker.run, name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._tasks.put, None)
        close_at_exit(self)

    def submit(self, begin: Callable[[], T], end: Callable[[T], R]) -> Future[R]:
        """Run end(begin()), both in the thread, which also runs the future's callbacks."""
        task = _Task(begin, end)
        self._tasks.put(task)
        return task.future

    def call(self, function: Callable[[], R]) -> R:
        """Run function() after all tasks submitted so far, and return its result. Waits."""
        return self.submit(lambda: None, lambda _: function()).result()

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join()


class _Worker:
    """The thread of a pipeline."""

    def __init__(self, tasks: queue.SimpleQueue[_Task | None]) -> None:
        self._tasks = tasks
        self._failure: BaseException | None = None

    def run(self) -> None:
        begun: deque[_Task] = deque()
        while True:
            try:
                task = self._tasks.get(block=not begun)
            except queue.Empty:
                self._end(begun.popleft())
                continue
            if task is None:
                break
            if self._begin(task):
                begun.append(task)
            del task  # may hold a reference to the pipeline
        for task in begun:
            self._end(task)

    def _begin(self, task: _Task) -> bool:
        def run() -> None:
            task.begun = task.begin()

        return self._attempt(task, run)

    def _end(self, task: _Task) -> None:
        def run() -> None:
            task.future.set_result(task.end(task.begun))

        self._attempt(task, run)

    def _attempt(self, task: _Task, run: Callable[[], None]) -> bool:
        if self._failure is None:
            try:
                run()
                return True
            except BaseException as error:
                self._failure = error
        task.future.set_exception(self._failure)
        return False
