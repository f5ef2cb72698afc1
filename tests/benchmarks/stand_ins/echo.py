"""An object to be called in another process."""

import os


class Echo:
    """Says what it was told."""

    def __init__(self, name: str):
        self.name = name

    def say(self, text: str) -> str:
        return f"{self.name}: {text}"

    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise ValueError("on purpose")

    def leave(self) -> None:
        os._exit(3)

    def close(self) -> None:
        pass
