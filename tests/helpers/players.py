"""Players for the tests: scripted, random, and one that remembers what it was asked."""

import random

from env_wrapper import Action


def scripted_index(task_id, seed, t):
    """The golden trajectories' policy: decision t plays ``legal[index % len(legal)]``."""
    x = (task_id * 1000003 + seed * 7919 + t * 104729 + 12345) % 2**31
    return ((1103515245 * x + 12345) % 2**31) >> 8


class FunctionPlayer:
    """Answers each query with ``choose(query)``, and keeps all queries and the size of each call."""

    def __init__(self, choose):
        self.choose = choose
        self.queries, self.calls, self.released = [], [], []

    def act(self, queries):
        self.queries += queries
        self.calls.append([query.episode for query in queries])
        answers = [self.choose(query) for query in queries]
        return [answer if isinstance(answer, Action) else Action(str(answer)) for answer in answers]

    def release(self, episodes):
        self.released += episodes


def scripted_player(tasks):
    def choose(query):
        task, legal = tasks[query.episode], list(query.legal)
        return legal[scripted_index(task.task_id, task.seed, query.rng_key[2]) % len(legal)]

    return FunctionPlayer(choose)


def random_player(seed=0):
    """Every choice depends on the query's own key alone."""
    return FunctionPlayer(lambda query: random.Random(f"{seed} {query.rng_key}").choice(list(query.legal)))
