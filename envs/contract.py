"""What every environment promises, checked by playing: it is repeatable, strict about answers, scores in [0, 1]."""

import functools
import logging
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pyspiel

import games
from config.reader import ConfigError
from envs.config import EnvConfig
from envs.openspiel import DISTINCT, OpenSpielEnv, known, most_moves, score, table
from envs.opponents import has_dead_ends
from envs.types import Env, Step, Task
from games.base import Game
from games.custom import place

log = logging.getLogger(__name__)
MANY_LEGAL = 30  # legal actions tried at a decision: a sample where there are more
LONGEST = 5000  # decisions of an episode of random play
PLAYOUTS = 30  # random games of a variant
VARIANTS = 100  # config ids searched for different parameters
LAST_ID = games.CONFIGS_PER_GAME - 1
WHOLE = 20  # characters of str(state) from which on a description that holds it must have been made of it
CHECKED_VARIANTS = 5

Answer = Callable[[Step, random.Random], str]


class ContractError(ConfigError):
    """A broken promise, in one line."""


def _promise(kept: bool, broken: str) -> None:
    if not kept:
        raise ContractError(broken)


def random_legal(step: Step, rng: random.Random) -> str:
    """Answer with a legal action, drawn uniformly."""
    return str(rng.choice(list(step.legal)))


def transcript(env: Env, task: Task, answer: Answer, noise: int | None = None) -> list[Step]:
    """Return all steps of an episode; ``noise`` reseeds the global generators. ContractError if it does not end."""
    steps: list[Step] = []
    rng = random.Random(0)
    while not steps or not steps[-1].done:
        _promise(len(steps) <= LONGEST, f"an episode does not end within {LONGEST} decisions")
        if noise is not None:
            random.seed(noise + len(steps))
            np.random.seed(noise + len(steps))
        steps.append(env.step(answer(steps[-1], rng)) if steps else env.reset(task))
    return steps


def check_contract(new_env: Callable[[], Env], task: Task, answer: Answer = random_legal) -> list[Step]:
    """Check an environment on one task and return the steps of an episode; ContractError: a promise is broken.

    ``answer`` gives a raw text for a decision; it may draw from the generator it is given. What the environment itself
    raises passes through.
    """
    steps = transcript(new_env(), task, answer)
    env = new_env()
    _promise(transcript(env, task, answer, noise=1) == steps, "a second environment plays the task differently")
    _promise(transcript(env, task, answer, noise=2) == steps, "a second reset plays the task differently")
    _check_end(env, new_env(), task, steps[-1])
    for position in {0, len(steps) // 2} if len(steps) > 1 else ():
        _check_answers(new_env, task, steps, position, answer)
    return steps


def _refuses(env: Env) -> bool:
    try:
        env.step("0")
    except RuntimeError:
        return True
    return False


def _check_end(finished: Env, fresh: Env, task: Task, last: Step) -> None:
    _promise(last.legal == {} and last.info["outcome"] == "finished", "an episode of legal play is not finished")
    for value in (last.score, *last.info["scores"].values()):
        _promise(0 <= value <= 1, f"the score {value} is not in [0, 1]")
    _promise(_refuses(finished), "a finished episode accepts a step")
    _promise(_refuses(fresh), "an environment without an episode accepts a step")
    fresh.reset(task)
    fresh.close()
    fresh.close()
    _promise(_refuses(fresh), "a closed episode accepts a step")


def _check_answers(new_env: Callable[[], Env], task: Task, steps: list[Step], position: int, answer: Answer) -> None:
    """Check that at one decision every legal id is accepted, and an illegal one leaves the position as it was."""
    asked = steps[position]
    for action in random.Random(1).sample(list(asked.legal), min(len(asked.legal), MANY_LEGAL)):
        after = _answered(new_env(), task, answer, position, str(action))
        _promise(after.done or after.info["attempt"] == 1, f"the legal action {action} is refused")
    if asked.legal:
        illegal = max(asked.legal) + 1
        after = _answered(new_env(), task, answer, position, str(illegal))
        _promise(not after.done and after.info["attempt"] == 2, f"the illegal action {illegal} is accepted")
        same = (after.legal, after.info["seat"], after.info["history"])
        _promise(same == (asked.legal, asked.info["seat"], asked.info["history"]), "an illegal action changes the game")


def _answered(env: Env, task: Task, answer: Answer, position: int, text: str) -> Step:
    rng = random.Random(0)
    step = env.reset(task)
    for _ in range(position):
        step = env.step(answer(step, rng))
    return env.step(text)


@functools.cache
def check_own_games() -> None:
    """Check the user's own games, once per process; ContractError names the file, its line and what is wrong."""
    table.cache_clear()  # may hold built-in games that the user's replace
    for name, file in games.OWN.items():
        try:
            check_game(name)
        except ContractError as error:
            raise ContractError(f"{place(file, error.__cause__)}: {error}") from error


def check_game(name: str) -> None:
    """Check a game of ``games.GAMES``: it loads, both prompts show it, its episodes keep the contract.

    Up to ``CHECKED_VARIANTS`` different sets of parameters are played, from both of the first two seats. A
    ContractError names the task and what is wrong.
    """
    index = games.NAMES.index(name)
    params, seen = games.GAMES[index].params, set[str]()
    for config_id in (*range(VARIANTS), LAST_ID):
        task_id = index * games.CONFIGS_PER_GAME + config_id
        try:
            given, again = (str(params(config_id)) for _ in range(2))
            _promise(given == again, f"params gives {given}, and then {again}")
            if given not in seen:
                _promise(config_id < DISTINCT, f"params gives {given:.200}: let them repeat within {DISTINCT} ids")
                seen.add(given)
                if len(seen) <= CHECKED_VARIANTS:
                    _check_variant(games.GAMES[index], task_id)
        except ConfigError as error:
            raise ContractError(f"task {task_id}: {error}") from error
        except (Exception, SystemExit) as error:  # a user's game may raise anything
            raise ContractError(f"task {task_id}: {type(error).__name__}: {' '.join(str(error).split())}") from error


def _check_variant(game: Game, task_id: int) -> None:
    params = game.params(task_id % games.CONFIGS_PER_GAME)
    _promise(isinstance(params, dict), f"params must return a dict, not {params!r}")
    low, high = table(task_id).spiel.min_utility(), table(task_id).spiel.max_utility()
    _promise(math.isfinite(high - low) and low < high, "min_utility and max_utility must be finite and differ")
    for prompt, seed in (("full", 0), ("compact", 1)):
        new_env = functools.partial(OpenSpielEnv, EnvConfig(prompt=prompt))
        rules = game.rules(params)
        deals = (Task(task_id, seed + 2 * deal) for deal in range(PLAYOUTS))  # some may end before a decision
        task = next((deal for deal in deals if not new_env().reset(deal).done), Task(task_id, seed))
        _check_texts(check_contract(new_env, task), prompt, rules)
    _check_random_games(task_id)


def _check_chance(game: Game, outcomes: list[tuple[int, float]]) -> None:
    total = sum(p for _, p in outcomes)
    kept = all(p >= 0 for _, p in outcomes) and abs(total - 1) < 1e-6
    _promise(kept, f"chance_outcomes are no probabilities: their sum is {total:g}")
    for outcome, _ in outcomes:
        _promise(game.dealt is None or isinstance(game.dealt(outcome), str), f"dealt gives no text for {outcome}")


def _check_seen(task_id: int, state: Any, seat: int) -> tuple[str, str]:
    """What a seat is shown of a position, full and compact."""
    shared, kind = table(task_id), state.get_game().get_type()
    before = whole, _ = str(state), state.history()
    texts = shared.game.describe(state, seat), shared.game.compact(state, seat)
    odd = [text for text in texts if not isinstance(text, str)]  # a prompt would say "None"
    _promise(not odd, f"describe and compact must return text, not {odd}")
    _promise((str(state), state.history()) == before, "describe or compact changes the state")
    if shared.hides and len(whole) >= WHOLE and any(whole in text for text in texts):
        safe = (state.information_state_string(seat) if kind.provides_information_state_string else "",
                state.observation_string(seat) if kind.provides_observation_string else "")  # fmt: skip
        told = any(whole in text for text in safe)
        _promise(told, f"the description shows seat {seat} what the game hides from it")
    known(state, seat)  # raises where a tensor is declared and not there
    legal = state.legal_actions(seat)
    _promise(len({*legal}) == len(legal), f"legal_actions gives {legal[:MANY_LEGAL]}: an action twice")
    for action in legal[:MANY_LEGAL]:
        name = state.action_to_string(seat, action)
        _promise(name.isprintable() and bool(name), f"the action {action} is called {name!r}: expected a line")
    return texts


def _check_returns(spiel: Any, returns: list[float]) -> None:
    count, players = len(returns), spiel.num_players()
    _promise(count == players, f"returns gives {count} numbers for {players} seats")
    if spiel.get_type().utility.name == "ZERO_SUM":
        _promise(abs(sum(returns)) < 1e-6, f"the game is declared ZERO_SUM, and its returns are {returns}: "
                 "CONSTANT_SUM and GENERAL_SUM need not sum to 0")  # fmt: skip


def _check_texts(steps: list[Step], prompt: str, rules: Any) -> None:
    _promise(len(steps) > 1, "the game ends before the first decision")
    _promise(isinstance(rules, str), f"rules are {rules!r}: expected text")
    _promise("# Current Game State" not in rules, "rules hold '# Current Game State', where those of a server end")
    for text in (rules, *(step.text for step in steps)):
        text.encode()  # raises on lone surrogates
    for step in steps[:-1]:
        shown = step.text.partition("\n\nYou are Player ")[0].removeprefix("Current State:\n")
        _promise(bool(shown.strip()), f"a position has an empty description ({prompt} prompt)")


def _check_random_games(task_id: int) -> None:
    """Check that positions are as the engine wants them, moves exist until the end, and scores are in [0, 1]."""
    game, spiel = table(task_id).game, table(task_id).spiel
    hides = table(task_id).hides and spiel.get_type().provides_information_state_string
    seen: dict[tuple[int, str], tuple[str, str]] = {}
    rng, scores, compact = random.Random(0), set[float](), set[str]()
    for playout in range(PLAYOUTS):
        state = spiel.new_initial_state()
        while not state.is_terminal() and state.move_number() < min(most_moves(spiel), LONGEST):
            everyone, mover = range(spiel.num_players()), state.current_player()
            _promise(mover < len(everyone), f"current_player is {mover} of {len(everyone)} seats, counted from 0")
            if state.is_chance_node():
                _check_chance(game, state.chance_outcomes())
            movers = everyone if state.is_simultaneous_node() else [mover] if mover >= 0 else []
            for player in movers if hides or not playout else []:
                texts = _check_seen(task_id, state, player)
                compact.add(texts[1].strip())
                # Equal information states must have equal descriptions.
                first = seen.setdefault((player, state.information_state_string(player)), texts) if hides else texts
                _promise(first == texts, f"the description shows seat {player} what the game hides from it")
            if state.is_simultaneous_node():
                choices = [state.legal_actions(p) for p in everyone]
                state.apply_actions([rng.choice(actions or [pyspiel.INVALID_ACTION]) for actions in choices])
            elif legal := state.legal_actions():
                state.apply_action(rng.choice(legal))
            else:
                _promise(has_dead_ends(spiel), "a position that is not terminal has no legal actions")
                break
        if state.is_terminal():
            _check_returns(spiel, state.returns())
        for value in (score(spiel, state.returns(), p) for p in range(spiel.num_players()) if state.is_terminal()):
            _promise(0 <= round(value, 6) <= 1, f"the score {value} is not in [0, 1]: see min_utility, max_utility")
            scores.add(value)
    _promise(compact != {""}, "compact is empty in every position: the compact prompt shows none")
    if spiel.num_players() > 1 and spiel.get_type().utility.name == "GENERAL_SUM" and len(scores) == 1:
        log.warning("task %d: in %d random games all got the same, and a general-sum game is scored by comparison: it "
                    "teaches nothing unless it is declared IDENTICAL", task_id, PLAYOUTS)  # fmt: skip
