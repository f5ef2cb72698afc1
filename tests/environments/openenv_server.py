"""A server of OpenEnv 0.10, made with its own classes: `python openenv_server.py`. Find a number from 1 to
8. It prints its port when it listens."""

import random
import socket

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    guess: str


class Hint(Observation):
    hint: str = ""


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **more):
        self.number, self.left = random.Random(seed).randint(1, 8), 4
        self._state = State(episode_id=episode_id, step_count=0)
        return Hint(hint="from 1 to 8")

    def step(self, action, timeout_s=None, **more):
        self._state.step_count += 1
        self.left -= 1
        if not action.guess.strip().isdigit():
            return Hint(hint="lower", reward=0.0, done=not self.left)
        guess = int(action.guess)
        hint = "right" if guess == self.number else "higher" if guess < self.number else "lower"
        return Hint(hint=hint, reward=float(hint == "right"), done=hint == "right" or not self.left)

    @property
    def state(self):
        return self._state


app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=1000)

if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
