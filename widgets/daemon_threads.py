"""Threads of views, which may end with the interpreter at any moment.

Owns: starting one, also while the interpreter shuts down. Refuses: what runs on it.
"""

from __future__ import annotations

from threading import Thread


def start_thread(thread: Thread) -> bool:
    """Start `thread` as a daemon; return False if the interpreter shuts down.

    From Python 3.12 on no thread can start from then on, while the threads that run already still get what the end of
    the ranks brings: an update of a view that nobody sees any more.
    """
    thread.daemon = True
    try:
        thread.start()
    except RuntimeError as error:
        if "interpreter shutdown" not in str(error):
            raise
        return False
    return True
